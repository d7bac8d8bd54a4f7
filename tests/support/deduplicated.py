"""What the tests of `storages.Deduplicated` share: a trial that keeps every row it gave, and contents of all kinds."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fbuf
from fbuf._buffer.state import COUNTERS
from fbuf._core.pytree import named_leaves
from fbuf.storages import Deduplicated, _block_rows
from tests.support.store import same as same_bits

KEY = jax.random.key(11)
Fields = dict[str, np.ndarray]


def check(state: fbuf.BufferState) -> None:
    """References, distinct blocks and fingerprints are those counted again from the ids."""
    rows = jax.device_get(state.rows)
    arrays = named_leaves(rows.tree)
    whole = {cut.name: arrays[cut.name] != 0 for cut in rows.cuts}
    for name, there in whole.items():
        assert (there.all(axis=1) | ~there.any(axis=1)).all(), f"'{name}': part of a row is there"
    for i, table in enumerate(rows.tables):
        places = len(table.count)
        references = np.zeros(places, np.int64)
        for cut in rows.cuts:
            if cut.table == i:
                ids = arrays[cut.name]
                assert ids.dtype == next(t for t in (np.uint8, np.uint16, np.uint32) if places <= np.iinfo(t).max + 1)
                references += np.bincount(ids.reshape(-1), minlength=places)
        references[0] = 1
        np.testing.assert_array_equal(table.count, references)
        live = np.flatnonzero(references[1:]) + 1
        assert table.tally[0] == len(live)
        words = np.ascontiguousarray(table.words[live])
        assert len(np.unique(words.view(f"V{4 * words.shape[1]}"))) == len(live), "a block has two places"
        assert not table.words[0].any() and table.prints[0] == table.names[0] == 0
        slots = np.flatnonzero(table.names)
        assert len(np.unique(table.names)) == len(slots) + 1 and np.isin(live, table.names).all()
        np.testing.assert_array_equal(table.home[table.names[slots]], slots)


@functools.cache
def methods_of(buffer: fbuf.Buffer) -> SimpleNamespace:
    """Return the methods of a buffer, compiled once for all who use it; the state is donated."""

    def extend(state: Any, rows: Any, mask: Any, priority: Any) -> Any:
        return buffer.extend(state, rows, mask=mask, priority=priority)

    methods = {"extend": extend, "update": buffer.update_rows, "clear": buffer.clear}
    methods = {name: jax.jit(method, donate_argnums=0) for name, method in methods.items()}
    sample = jax.jit(buffer.sample, static_argnums=2, donate_argnums=0)
    return SimpleNamespace(**methods, sample=sample, get=jax.jit(buffer.get))


class Trial:
    """A buffer and every row it was given; `leaves` are the shape and dtype of each leaf, without the number."""

    def __init__(self, buffer: fbuf.Buffer, leaves: dict[str, tuple[tuple[int, ...], Any]]):
        self.buffer, self.methods = buffer, methods_of(buffer)
        self.lanes = buffer.lanes or 1
        self.length = buffer.capacity // self.lanes
        example = {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in leaves.items()}
        self.example = example | {"number": jax.ShapeDtypeStruct((), jnp.int32)}
        self.state = buffer.init(self.example)
        self.arrived: list[list[int]] = [[] for _ in range(self.lanes)]  # numbers by lane, not those retired or cleared
        self.content: dict[int, Fields] = {}
        self.refused: set[int] = set()
        self.indices: dict[int, tuple[Any, Any]] = {}
        self.next = 1
        self.compared = 0

    def sizes(self) -> np.ndarray:
        return np.asarray(self.state.ring.size).astype(np.int64)

    def counters(self) -> np.ndarray:
        return np.asarray(self.state.counters)[[COUNTERS.index("refused_rows"), COUNTERS.index("retired_rows")]]

    def number_rows(self, rows: Fields) -> tuple[dict[str, Any], np.ndarray]:
        """Rows `[N, E, ...]` as `extend` takes them, with numbers; and the numbers [N, E]."""
        steps = next(iter(rows.values())).shape[0]
        number = np.arange(self.next, self.next + steps * self.lanes, dtype=np.int32).reshape(steps, self.lanes)
        self.next += number.size
        for i in range(steps):
            for e in range(self.lanes):
                self.content[int(number[i, e])] = {name: x[i, e] for name, x in rows.items()}
        given = rows | {"number": number}
        return (given if self.buffer.lanes else {name: x[:, 0] for name, x in given.items()}), number

    def extend(self, rows: Fields, mask: np.ndarray | None = None, priority: np.ndarray | None = None) -> None:
        """Adds rows `[N, E, ...]`; afterwards every row is held, overwritten, retired or refused."""
        given, number = self.number_rows(rows)
        size, counted = self.sizes(), self.counters()
        first = np.asarray(self.state.ring.cursor) - size
        one = slice(None) if self.buffer.lanes else 0
        options = (None if x is None else x[:, one] for x in (mask, priority))
        self.state = self.methods.extend(self.state, given, *options)
        kept = np.ones(number.shape, bool) if mask is None else mask
        refused, retired = (self.counters() - counted).tolist()
        # A lane retires twice what it brings, but not the newest that the view reads, nor so that its oldest is in slot 0.
        spare = np.maximum(size - self.buffer.view.rule.rows, 0)
        given_up = np.minimum(np.minimum(2 * kept.sum(axis=0), self.length), spare)
        given_up -= ((first + given_up) % self.length == 0) & (given_up > 0)
        assert retired in (0, given_up.sum())
        left = size - (given_up if retired else 0)
        np.testing.assert_array_equal(self.sizes(), np.minimum(self.length, left + kept.sum(axis=0)))
        absent, lost = self.absent(), 0
        for e in range(self.lanes):
            came = number[kept[:, e], e].tolist()
            self.arrived[e] = (self.arrived[e][len(self.arrived[e]) - int(left[e]) :] + came)[-self.length :]
            gone = {n for n, missing in zip(self.arrived[e], absent[e], strict=True) if missing}
            lost += len(gone & set(came))
            self.refused |= gone & set(came)
            assert gone <= self.refused, "a row that was held is gone"
        assert lost == refused

    def absent(self) -> list[np.ndarray]:
        """bool[size] of each lane, oldest first: rows of which nothing is stored."""
        ring = jax.device_get(self.state.ring)
        name = self.state.rows.cuts[0].name
        ids = np.asarray(named_leaves(self.state.rows.tree)[name])[:, 0]
        lanes = []
        for e in range(self.lanes):
            position = (ring.cursor[e] - ring.size[e] + np.arange(ring.size[e])) % self.length
            lanes.append(ids[position * self.lanes + e] == 0)
        return lanes

    def compare(self) -> None:
        """Every row of the ring, to the bit; zeros where a row was refused or none lies."""
        rows = jax.device_get(self.buffer.rows(self.state))
        mask = rows.mask.reshape(self.length, self.lanes)
        data = {name: x.reshape(self.length, self.lanes, *x.shape[rows.mask.ndim :]) for name, x in rows.data.items()}
        for e in range(self.lanes):
            numbers = self.arrived[e]
            there = np.array([n not in self.refused for n in numbers] + [False] * (self.length - len(numbers)))
            np.testing.assert_array_equal(mask[:, e], there)
            found = [n for n in numbers if n not in self.refused]
            assert data["number"][there, e].tolist() == found
            for name, got in data.items():
                assert not got[~there, e].any()
                if name != "number" and found:
                    want = np.stack([self.content[n][name] for n in found])
                    assert same_bits(got[there, e], want), name
            self.compared += len(found)
        check(self.state)

    def index_of(self, numbers: list[int], indices: Any = None) -> fbuf.Index:
        indices = indices or self._indices()
        return fbuf.Index(*(jnp.asarray(np.array(x)) for x in zip(*(indices[n] for n in numbers), strict=True)))

    def update(self, numbers: list[int], fields: Fields) -> None:
        """Replaces leaves `[B, ...]` of different rows; those refused stay as they were."""
        index, counted = self.index_of(numbers), self.counters()
        self.state = self.methods.update(self.state, index, fields)
        got = jax.device_get(self.buffer.get(self.state, index))
        assert got.mask.all() and got.data["number"].tolist() == numbers
        taken = 0
        for i, number in enumerate(numbers):
            new = {name: x[i] for name, x in fields.items()}
            if all(same_bits(got.data[name][i], x) for name, x in new.items()):
                taken += 1
                self.content[number] = self.content[number] | new
        refused, retired = (self.counters() - counted).tolist()
        assert (refused, retired) == (len(numbers) - taken, 0)

    def get(self, rng: np.random.Generator, number: int) -> int:
        """Reads rows by indices from any time: those held are returned, others are masked. Returns how many were."""
        self.indices |= self._indices()
        chosen = rng.choice(sorted(self.indices), number).tolist()
        index = self.index_of(chosen, self.indices)
        got = jax.device_get(self.methods.get(self.state, index))
        held = {n for lane in self.arrived for n in lane} - self.refused
        assert got.mask.tolist() == [n in held for n in chosen]
        assert got.data["number"].tolist() == [n if n in held else 0 for n in chosen]
        return int(np.sum(~got.mask))

    def _indices(self) -> dict[int, tuple[Any, Any]]:
        rows = jax.device_get(self.buffer.rows(self.state))
        columns = (rows.data["number"], rows.index.slot, rows.index.generation)
        return {int(n): (s, t) for n, s, t in zip(*(x.reshape(-1) for x in columns), strict=True) if n}

    def clear(self) -> None:
        self.state = self.methods.clear(self.state)
        assert not np.any(self.state.rows.live), "cleared rows keep their blocks"
        self.arrived, self.refused = [[] for _ in range(self.lanes)], set()

    def sample(self, seed: int, batch_size: int) -> Any:
        which = COUNTERS.index("draws_refused")
        expired = int(self.state.counters[which])
        self.state, batch = self.methods.sample(self.state, jax.random.key(seed), batch_size)
        batch = jax.device_get(batch)
        held = {n for lane in self.arrived for n in lane}
        for i, number in enumerate(batch.data["number"].tolist()):
            if batch.mask[i]:
                assert number in held - self.refused
                for name, x in self.content[number].items():
                    assert same_bits(batch.data[name][i], x)
            else:
                assert not held or held & self.refused
                assert not any(x[i].any() for x in (*batch.data.values(), batch.weight, batch.probability))
                assert (batch.index.slot[i], batch.index.generation[i]) == (self.buffer.capacity, 0)
        if held:
            assert int(self.state.counters[which]) - expired == np.sum(~batch.mask)
        return batch


def values(rng: np.random.Generator, axes: tuple[int, ...], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any bits, NaN and negative zero among the floats, many rows alike, in part like the row before."""
    dtype = jnp.dtype(dtype)
    count = int(np.prod(axes))
    pool = rng.integers(0, 256, (1 + count // 3, *shape, dtype.itemsize), np.uint8)
    raw = pool[rng.integers(0, len(pool), count)]
    flat = raw.reshape(count, -1)
    half = flat.shape[1] // 2
    for i in range(1, count):
        if rng.random() < 0.5:
            flat[i, :half] = flat[i - 1, :half]
    if dtype == np.bool_:
        made = raw[..., 0] % 2 == 1
    elif dtype.name.endswith(("int4", "int2")):
        low = 3 if dtype.name.endswith("4") else 1
        made = (raw[..., 0].astype(np.int64) % (low + 1)).astype(dtype)
    else:
        made = raw.reshape(count, -1).view(dtype).reshape(count, *shape)
        if jnp.issubdtype(dtype, jnp.floating) and count > 2 and made[0].size:
            made[0].reshape(-1)[:] = np.array(-0.0).astype(dtype)
            made[1].reshape(-1)[:] = np.array(np.nan).astype(dtype)
        if dtype.name == "bfloat16":  # XLA's select makes all its NaNs one on CPU, whatever the storage
            made[np.isnan(made.astype(np.float32))] = np.array(np.nan).astype(dtype)
    return np.ascontiguousarray(made).reshape(*axes, *shape)


LEAVES = {  # shape and dtype of each leaf, and settings of the storage
    "frames, colour, stacks": ("13 9 uint8, 10 9 3 uint8, 4 12 20 uint8, 12 20 4 uint8", {}),
    "floats, booleans, int32": ("5 7 float32, 30 bool, 6 5 int32, float32", {}),
    "one table": ("8 8 uint8, 8 8 uint8, 4 4 int16", {"block": (4, 4)}),
    "blocks of three sizes": (
        "8 12 uint8, 8 8 float16, 9 3 int8",
        {"block": {"a": (4, 4), "b": (8, 2), "c": (20, 12)}, "blocks": {"a": 512, "b": 1024, "c": 256}},
    ),
    "narrow": ("7 5 bfloat16, 9 3 uint16, 6 6 int4, 5 5 float8_e4m3fn", {}),
}


def check_leaves(kind: str, lanes: int | None) -> None:
    text, settings = LEAVES[kind]
    split = [leaf.split() for leaf in text.split(",")]
    leaves = {n: (tuple(map(int, shape)), jnp.dtype(dtype)) for n, (*shape, dtype) in zip("abcd", split, strict=False)}
    storage = Deduplicated(**{"keys": tuple(leaves), "blocks": 4096} | settings)
    buffer = fbuf.Buffer(8 * (lanes or 1), lanes=lanes, storage=storage)
    trial, rng = Trial(buffer, leaves), np.random.default_rng(len(kind))
    for turn in range(6):
        if turn == 3:
            trial.clear()
            trial.compare()
        mask = rng.random((9, lanes or 1)) < (0.5 if turn % 3 else 1.0)  # unmasked it is more than the ring holds
        trial.extend({name: values(rng, mask.shape, *leaf) for name, leaf in leaves.items()}, mask)
        trial.compare()
        if turn in (0, 4):
            chosen = rng.permutation([n for lane in trial.arrived for n in lane])[:4].tolist()
            fields = {name: values(rng, (4,), *leaf) for name, leaf in list(leaves.items())[:2]}
            trial.update(chosen, fields | {"number": np.array(chosen, np.int32)})
            trial.compare()
    assert trial.counters().tolist() == [0, 0]


SMALL = {"a": ((8, 8), np.uint8), "b": ((4, 12), np.uint8)}


def small(on_full: str, **more: Any) -> fbuf.Buffer:
    storage = Deduplicated(keys=("a", "b"), block=(4, 4), blocks=96, on_full=on_full)
    return fbuf.Buffer(**{"capacity": 36, "lanes": 3, "storage": storage} | more)


def from_pool(rng: np.random.Generator, axes: tuple[int, ...]) -> Fields:
    """Rows of blocks that come back and few that do not; blocks of one leaf are those of the other too."""
    pool = np.random.default_rng(0).integers(0, 256, (int(rng.choice([3, 40, 400])), 4, 4), np.uint8)
    pool[0] = 0

    def picture(down: int, across: int) -> np.ndarray:
        tiles = pool[rng.integers(0, len(pool), (*axes, down, across))]
        return np.moveaxis(tiles, -3, -2).reshape(*axes, 4 * down, 4 * across)

    return {"a": picture(2, 2), "b": picture(1, 3)}


STEPS = ("all",) * 3 + ("some",) * 6 + ("few",) * 3 + ("update", "sample", "get", "clear")
PROGRAMS = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2**16)), min_size=3, max_size=14)


def run_program(trial: Trial, program: list[tuple[str, int]]) -> dict[str, int]:
    """Calls in any order on a `small` buffer; returns how often rows were refused, retired and stale."""
    stale = 0
    for name, seed in program:
        rng = np.random.default_rng(seed)
        if name == "clear":
            trial.clear()
        elif name == "sample":
            trial.sample(seed, 16)
        elif name == "get":
            if any(trial.arrived):
                stale += trial.get(rng, 16)
        elif name == "update":
            readable = [n for lane in trial.arrived for n in lane if n not in trial.refused]
            if len(readable) < 4:
                continue
            chosen = rng.permutation(readable)[:4].tolist()
            trial.update(chosen, from_pool(rng, (4,)) | {"number": np.array(chosen, np.int32)})
        else:  # one shape of writes, so one program; a lane holds fewer rows than the 16 steps of "all"
            mask = rng.random((16, 3)) < {"all": 1.1, "some": 0.3, "few": 0.05}[name]
            trial.extend(from_pool(rng, mask.shape), mask)
        trial.compare()
    refused, retired = trial.counters().tolist()
    return {"refused": refused, "retired": retired, "stale": stale}


def check_programs(on_full: str, chunk: int, capacity: int) -> None:
    """Calls in any order, writes in chunks of so many blocks; no other buffer has this capacity, as chunks are traced."""
    buffer, chunk_before = small(on_full, capacity=capacity), _block_rows._CHUNK_BLOCKS
    met = {"refused": 0, "retired": 0, "stale": 0}
    full = [("all", seed) for seed in range(1, 9)]

    @settings(max_examples=max(settings.default.max_examples // 3, 1))
    @given(PROGRAMS)
    @example([("some", seed) for seed in range(40)])
    @example([*full, ("get", 0), ("update", 1), ("some", 2), ("sample", 3), ("clear", 0), *full[:2], ("get", 4)])
    def run(program: list[tuple[str, int]]) -> None:
        for name, count in run_program(Trial(buffer, SMALL), program).items():
            met[name] += count

    _block_rows._CHUNK_BLOCKS = chunk
    try:
        run()
    finally:
        _block_rows._CHUNK_BLOCKS = chunk_before
    assert met["stale"] and met["refused"] and (met["retired"] or on_full == "refuse"), met
