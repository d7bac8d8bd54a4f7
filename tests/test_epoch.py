"""`samplers.Epoch`: everyone once, whoever comes and goes meanwhile.

The oracle knows sets only: who was there when the epoch began, who of them was drawn, who is there now. It follows what is
drawn without knowing any order (but for `shuffle=False`), and says how long each batch must be and from whom it may be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf import _anchors, _permutation
from fbuf.samplers import Epoch
from fbuf.testing import assert_inplace
from fbuf.views import Row, Transition
from tests.model import Model
from tests.test_flags import flags
from tests.test_uniformity import chi_square_z

FIELDS = {
    "action": ((), np.int32),  # numbers the rows
    "obs": ((2,), np.uint8),
    "reward": ((), np.float32),
    "terminated": ((), np.bool_),
    "truncated": ((), np.bool_),
}
VIEWS = {"row": Row(), "steps": Transition(n_step=3)}
sample = jax.jit(fbuf.Buffer.sample, static_argnums=(0, 3))
extend = jax.jit(fbuf.Buffer.extend, static_argnums=0)
SMALL, LARGE = (fbuf.Buffer(capacity=n, sampler=Epoch()) for n in (10, 3000))  # few, so that little is compiled


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


class Oracle:
    """Epochs of any things with names."""

    def __init__(self, sampler: Epoch):
        self.sampler = sampler
        self.members: list[Hashable] = []  # of the epoch, lane after lane in order of arrival
        self.drawn: set[Hashable] = set()
        self.begun = 0

    def clear(self) -> None:
        self.members, self.drawn = [], set()

    def left(self, live: Sequence[Hashable]) -> list[Hashable]:
        """Who is still to come."""
        here = set(live)
        return [m for m in self.members if m in here and m not in self.drawn]

    def sample(self, live: Sequence[Hashable], batch_size: int, got: Sequence[Hashable]) -> None:
        """`got` was drawn while `live` could be."""
        least = batch_size if self.sampler.drop_last else 1
        if len(live) < least:
            assert not got
            return
        left = self.left(live)
        if len(left) < least:
            self.members, self.drawn = list(live), set()
            self.begun += 1
            left = list(live)
        assert len(got) == len(set(got)) == min(batch_size, len(left))
        assert set(got) <= set(left)
        if not self.sampler.shuffle:
            assert list(got) == left[: len(got)]
        self.drawn |= set(got)

    def check_stats(self, live: Sequence[Hashable], stats: dict[str, Any]) -> None:
        """What is left may include those who left unnoticed."""
        assert int(stats["epoch"]) == self.begun
        left = len(self.left(live))
        if left:
            assert left <= int(stats["epoch_left"]) <= len(self.members) - len(self.drawn)
        assert 0 <= int(stats["epoch_left"]) <= len(self.members)


def is_draw(batch: Any, number: int, begun_with: int) -> None:
    """Draws first, the rest masked; the same chance for all."""
    mask = np.asarray(batch.mask)
    assert mask.tolist() == [True] * number + [False] * (len(mask) - number)
    chance = np.float32(1) / np.float32(max(begun_with, 1))
    np.testing.assert_array_equal(batch.probability, np.where(mask, chance, np.float32(0)))
    np.testing.assert_array_equal(batch.weight, mask.astype(np.float32))


def same(a: Any, b: Any) -> None:
    """Bit for bit."""
    one, two = jax.tree_util.tree_flatten_with_path(a)[0], jax.tree_util.tree_flatten_with_path(b)[0]
    for (path, x), (_, y) in zip(one, two, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)


# ------------------------------------------------------------------------------------------------ random programs


def buffer_of(sampler: Epoch, view: str = "row", lanes: int | None = None, length: int = 11) -> fbuf.Buffer:
    return fbuf.Buffer(capacity=length * (lanes or 1), sampler=sampler, view=VIEWS[view], lanes=lanes)


class Trial:
    """A buffer, its model and the oracle, in step."""

    def __init__(self, buffer: fbuf.Buffer, seed: int):
        self.buffer, self.model, self.oracle = buffer, Model(buffer, FIELDS), Oracle(buffer.sampler)  # type: ignore[arg-type]
        self.state = buffer.init({n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})
        self.rng = np.random.default_rng(seed)
        self.arrived = 0
        self.share = np.ones(self.model.lane_count)

    def extend(self, count: int) -> None:
        """`count` rows a lane, some of them masked; lanes fall out of step."""
        shape = (count, self.model.lane_count)
        if self.rng.random() < 0.2:
            self.share = self.rng.uniform(0.1, 1.0, shape[1])
        rows = {
            "action": np.arange(shape[0] * shape[1]).reshape(shape) + self.arrived,
            "obs": self.rng.integers(0, 256, (*shape, 2)),
            "reward": self.rng.normal(size=shape),
            "terminated": self.rng.random(shape) < 0.1,
            "truncated": self.rng.random(shape) < 0.1,
        }
        self.arrived += shape[0] * shape[1]
        rows = {n: x.astype(FIELDS[n][1]) for n, x in rows.items()}
        mask = self.rng.random(shape) < self.share
        self.model.extend(rows, None, mask)
        one = slice(None) if self.buffer.lanes else 0
        given = {n: jnp.asarray(x[:, one]) for n, x in rows.items()}
        self.state = extend(self.buffer, self.state, given, mask=jnp.asarray(mask[:, one]))

    def sample(self, batch_size: int) -> None:
        self.state, batch = sample(self.buffer, self.state, jax.random.key(int(self.rng.integers(2**31))), batch_size)
        live = sorted(self.model.anchors(), key=lambda row: (row.lane, row.number))
        by_action = {int(row.fields["action"]): row for row in live}
        data = jax.device_get(batch.data)
        got = [by_action[int(a)] for a in data["action"][np.asarray(batch.mask)]]  # fails for rows that are not live
        assert np.asarray(batch.index.slot)[: len(got)].tolist() == [row.slot for row in got]
        assert (np.asarray(batch.index.slot)[len(got) :] == self.buffer.capacity).all()
        for name, leaf in data.items():
            assert not leaf[len(got) :].any(), name
        names = [row.name for row in live]
        self.oracle.sample(names, batch_size, [row.name for row in got])
        is_draw(batch, len(got), len(self.oracle.members))
        self.oracle.check_stats(names, self.buffer.stats(self.state))

    def clear(self) -> None:
        self.model.clear()
        self.oracle.clear()
        self.state = self.buffer.clear(self.state)
        assert int(self.buffer.stats(self.state)["epoch_left"]) == 0

    def step(self, sizes: tuple[int, ...]) -> None:
        kind = self.rng.choice(["some", "some", "some", "flood", "clear", *["sample"] * 9])
        if kind == "sample":
            self.sample(int(self.rng.choice(sizes)))
        elif kind == "clear":
            if self.rng.random() < 0.3:
                self.clear()
        else:
            self.extend({"some": 3, "flood": 2 * self.model.length + 3}[kind])

    def run(self, steps: int, sizes: tuple[int, ...]) -> None:
        for _ in range(steps):
            self.step(sizes)
        assert self.oracle.begun >= 3


@pytest.mark.parametrize(("sampler", "view", "lanes"), [(Epoch(), "steps", 3), (Epoch(shuffle=False), "row", 3)])
def test_programs(sampler, view, lanes):
    """Extends of any size, clears, batches of any size; lanes out of step."""
    for seed in range(3):
        Trial(buffer_of(sampler, view, lanes), seed).run(80, (5, 13))


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_more_programs(shuffle, drop_last, view, lanes):
    for seed in range(3, 9):
        Trial(buffer_of(Epoch(shuffle, drop_last), view, lanes), seed).run(80, (1, 5, 40))


@pytest.mark.parametrize(
    ("sampler", "view", "lanes"), [(Epoch(drop_last=True), "row", None), slow(Epoch(), "steps", 3)]
)
def test_programs_with_keyed_orders(monkeypatch, sampler, view, lanes):
    """As if true shuffles ended at 5 anchors: small buffers then cross over again and again."""
    monkeypatch.setattr(_permutation, "SHUFFLED", 5)
    for seed in range(3):
        # A length that no other test has: verbs compiled for it know the other line.
        Trial(buffer_of(sampler, view, lanes, length=12), seed).run(80, (5, 13))


# -------------------------------------------------------------------------------------------------- exactly once


def arrive(buffer: fbuf.Buffer, state: Any, first: int, count: int) -> Any:
    """Rows `first`, `first + 1`, ...; of one shape however many, so that it compiles once."""
    number = jnp.arange(buffer.capacity, dtype=jnp.int32)
    shape = (-1,) if buffer.lanes is None else (-1, buffer.lanes)
    return extend(buffer, state, (first + number).reshape(shape), mask=(number < count).reshape(shape))


def filled(buffer: fbuf.Buffer, count: int) -> Any:
    return arrive(buffer, buffer.init(jnp.int32(0)), 0, count)


@functools.partial(jax.jit, static_argnums=0)
def twelve(buffer: fbuf.Buffer, state: Any, key: jax.Array) -> Any:
    """Batches of 256 in one scan."""
    return lax.scan(lambda s, k: buffer.sample(s, k, 256), state, jax.random.split(key, 12))


@pytest.mark.parametrize("held", [1, 1000, 1024, 1025, 3000])
def test_one_epoch_is_everyone_once(held):
    """On both sides of the line between shuffles and keyed orders."""
    state, oracle, drawn = filled(LARGE, held), Oracle(Epoch()), []
    for key in range(2):
        state, batch = twelve(LARGE, state, jax.random.key(key))
        for data, mask in zip(np.asarray(batch.data), np.asarray(batch.mask), strict=True):
            oracle.sample(range(held), 256, data[mask].tolist())
            drawn += data[mask].tolist()
    first, second = drawn[:held], drawn[held : 2 * held]
    assert sorted(first) == sorted(second) == list(range(held))
    assert oracle.begun == -(-24 // -(-held // 256))
    assert held == 1 or first != second != sorted(second)
    oracle.check_stats(range(held), LARGE.stats(state))


@pytest.mark.parametrize("shuffle", [True, slow(False)])
def test_an_epoch_while_rows_arrive_in_one_scan(shuffle):
    """Everyone drawn who was still there at his turn, nobody twice, in both epochs that the run holds."""
    capacity, batch_size, steps = 3000, 64, 90
    buffer = fbuf.Buffer(capacity=capacity, lanes=2, sampler=Epoch(shuffle=shuffle))
    state = filled(buffer, capacity)

    def step(state: Any, given: Any) -> Any:
        key, rows = given
        state = buffer.extend(state, rows)
        state, batch = buffer.sample(state, key, batch_size)
        return state, (batch.data, batch.mask, buffer.stats(state)["epoch"])

    arriving = jnp.arange(capacity, capacity + steps * 8, dtype=jnp.int32).reshape(steps, 4, 2)
    keys = jax.random.split(jax.random.key(0), steps)
    _, (data, mask, epoch) = jax.jit(lambda s: lax.scan(step, s, (keys, arriving)))(state)
    oracle = Oracle(buffer.sampler)  # type: ignore[arg-type]
    for i in range(steps):
        held = range(8 * (i + 1), 8 * (i + 1) + capacity)
        live = [n for lane in (0, 1) for n in held if n % 2 == lane]
        oracle.sample(live, batch_size, np.asarray(data[i])[np.asarray(mask[i])].tolist())
        assert oracle.begun == int(epoch[i])
    assert oracle.begun >= 2


def test_many_closed_in_a_row_are_passed_over():
    """Of 3,000 only 20 are left when the epoch goes on: one batch finds them all; when none is, a new epoch begins."""
    state, batch = sample(LARGE, filled(LARGE, 3000), jax.random.key(0), 4)
    first = set(np.asarray(batch.data).tolist())
    state = arrive(LARGE, state, 3000, 2980)
    after, batch = sample(LARGE, state, jax.random.key(1), 100)
    wanted = set(range(2980, 3000)) - first
    assert set(np.asarray(batch.data)[np.asarray(batch.mask)].tolist()) == wanted
    is_draw(batch, len(wanted), 3000)
    assert (int(LARGE.stats(after)["epoch"]), int(LARGE.stats(after)["epoch_left"])) == (1, 0)
    state = arrive(LARGE, state, 5980, 20)
    after, batch = sample(LARGE, state, jax.random.key(1), 100)
    is_draw(batch, 100, 3000)
    assert (int(LARGE.stats(after)["epoch"]), int(LARGE.stats(after)["epoch_left"])) == (2, 2900)


def test_drop_last_leaves_out_what_fills_no_batch():
    buffer = fbuf.Buffer(capacity=10, sampler=Epoch(drop_last=True))
    state = filled(buffer, 10)
    for epoch in (1, 1, 2, 2, 3):
        state, batch = sample(buffer, state, jax.random.key(epoch), 4)
        is_draw(batch, 4, 10)
        assert int(buffer.stats(state)["epoch"]) == epoch
    state, batch = sample(buffer, state, jax.random.key(9), 11)
    is_draw(batch, 0, 10)
    assert int(buffer.stats(state)["epoch"]) == 3


def test_nothing_to_draw():
    state, batch = sample(SMALL, SMALL.init(jnp.int32(0)), jax.random.key(0), 4)
    is_draw(batch, 0, 0)
    stats = jax.device_get(SMALL.stats(state))
    assert (stats["epoch"], stats["epoch_left"], stats["empty_samples"]) == (0, 0, 1)
    assert stats["epoch"].dtype == np.uint32 and stats["epoch_left"].dtype == np.int32


def test_peek_leaves_the_epoch_where_it_is():
    state, _ = sample(SMALL, filled(SMALL, 10), jax.random.key(0), 4)
    seen = SMALL.peek(state, jax.random.key(1), 4)
    after, batch = sample(SMALL, state, jax.random.key(2), 4)  # in the middle of an epoch keys make no difference
    same(seen, batch)
    assert int(SMALL.stats(after)["epoch_left"]) == 2


@pytest.mark.slow
def test_rows_of_another_sampler():
    """`convert` tells the sampler of rows that arrived before it."""
    view = Transition(n_step=3)
    uniform = fbuf.Buffer(capacity=12, view=view)
    trial = Trial(dataclasses.replace(uniform, sampler=Epoch()), 0)
    trial.buffer, trial.state = uniform, uniform.init({n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})
    for _ in range(3):
        trial.extend(7)
    trial.buffer = dataclasses.replace(uniform, sampler=Epoch())
    trial.state = uniform.convert(trial.buffer, trial.state)
    trial.model = trial.model.convert(trial.buffer)
    trial.sample(4)
    trial.extend(1)
    trial.sample(40)


# ------------------------------------------------------------------------------------------- forms, states, storages


def rows_of(seed: int, *shape: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        "action": jnp.asarray(rng.integers(0, 1000, shape), jnp.int32),
        "obs": jnp.asarray(rng.integers(0, 256, (*shape, 2)), jnp.uint8),
        "reward": jnp.asarray(rng.normal(size=shape), jnp.float32),
        "terminated": jnp.asarray(rng.random(shape) < 0.1),
        "truncated": jnp.asarray(rng.random(shape) < 0.1),
    }


def empty(buffer: fbuf.Buffer) -> Any:
    return buffer.init({n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})


@functools.cache
def run(buffer: fbuf.Buffer, form: str, steps: int = 12) -> Any:
    """A state and all its batches, after steps of three rows a lane and a batch."""

    def step(state: Any, given: Any) -> Any:
        rows, key = given
        return buffer.sample(buffer.extend(state, rows), key, 7)

    given = (rows_of(0, steps, 3, buffer.lanes or 1), jax.random.split(jax.random.key(1), steps))
    state = empty(buffer)
    if form == "scan":
        return jax.jit(lambda s: lax.scan(step, s, given))(state)
    one = step if form == "eager" else jax.jit(step, donate_argnums=0 if form == "donated" else ())
    batches = []
    for i in range(steps):
        state, batch = one(state, jax.tree.map(lambda x, i=i: x[i], given))
        batches.append(batch)
    return state, jax.tree.map(lambda *x: jnp.stack(x), *batches)


@pytest.mark.parametrize(("view", "forms"), [("row", ("scan", "donated")), slow("steps", ("jit", "scan", "donated"))])
def test_every_form_gives_the_same(view, forms):
    buffer = buffer_of(Epoch(), view, lanes=2)
    for form in forms:
        same(run(buffer, form), run(buffer, "eager"))


@pytest.mark.parametrize("view", ["row", slow("steps")])
def test_every_storage_gives_the_same(view):
    buffer = buffer_of(Epoch(), view, lanes=2)
    compressed = dataclasses.replace(buffer, storage=fbuf.storages.Compressed(keys=("obs",)))
    same(run(compressed, "donated")[1], run(buffer, "donated")[1])


@pytest.mark.parametrize("sampler", [Epoch(), slow(Epoch(shuffle=False, drop_last=True))])
def test_vmap_over_states(sampler):
    """None, few (shuffled), many (a keyed order), and all overwritten: each as if alone."""
    buffer = dataclasses.replace(LARGE, sampler=sampler)
    counts = (0, 5, 700, 3000)
    alone = [filled(buffer, count) for count in counts]
    for i in (1, 2, 3):
        alone[i] = sample(buffer, alone[i], jax.random.key(i), 4)[0]
    alone[3] = arrive(buffer, alone[3], 0, 2980)
    together = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    some = jnp.arange(2, dtype=jnp.int32)

    def step(state: Any, key: jax.Array) -> Any:
        state, batch = buffer.sample(state, key, 300)
        return buffer.extend(state, some), batch

    many, one = jax.jit(jax.vmap(step)), jax.jit(step)
    for turn in range(4):
        keys = jax.random.split(jax.random.key(turn), len(counts))
        together, batches = many(together, keys)
        for i, key in enumerate(keys):
            alone[i], batch = one(alone[i], key)
            same(jax.tree.map(lambda x, i=i: x[i], batches), batch)
    same(together, jax.tree.map(lambda *x: jnp.stack(x), *alone))


@pytest.mark.parametrize("held", [50, 3000])
def test_a_saved_state_goes_on(held):
    """Everything is in the state: also the order, which later keys have no part in."""
    state, _ = sample(LARGE, filled(LARGE, held), jax.random.key(0), 4)
    saved = jax.device_get(state)
    later = jax.device_put(jax.tree.map(np.copy, saved))
    for i in range(4):
        state, here = sample(LARGE, state, jax.random.key(1), 4)
        later, there = sample(LARGE, later, jax.random.key(1 if i == 0 else 2), 4)
        same(there, here)


def test_typed_and_raw_keys_give_the_same():
    state = filled(SMALL, 9)
    same(sample(SMALL, state, jax.random.key(3), 4), sample(SMALL, state, jax.random.PRNGKey(3), 4))


@pytest.mark.slow
def test_any_kind_of_key_will_do():
    state = filled(SMALL, 9)
    other, batch = sample(SMALL, state, jax.random.key(3, impl="rbg"), 4)
    is_draw(batch, 4, 9)
    same(jax.tree.map(jnp.zeros_like, other), jax.tree.map(jnp.zeros_like, state))


@pytest.mark.parametrize(
    "names", [("x64", "strict dtype promotion", "rank promotion", "debug_nans"), slow(("debug_infs", "tracer leaks"))]
)
def test_clean_under_strict_modes(names):
    results, keys = [], [jax.random.key(0), jax.random.key(1)]
    empty_state = LARGE.init(jnp.int32(0))
    for context in (contextlib.nullcontext(), flags(*names)):
        with context:
            state, none = sample(LARGE, empty_state, keys[0], 4)
            state, some = sample(LARGE, arrive(LARGE, state, 0, 1500), keys[1], 4)
            results.append((LARGE.clear(state), none, some, LARGE.stats(state)))
    same(results[1], results[0])


# ---------------------------------------------------------------------------------------------------- uniformity


@functools.cache
def first_batches(held: int, batch_size: int, number: int) -> np.ndarray:
    """Slots of the first batch for `number` keys."""
    buffer = fbuf.Buffer(capacity=held, sampler=Epoch())
    state = filled(buffer, held)
    keys = jax.random.split(jax.random.key(held), number)
    return np.asarray(jax.jit(jax.vmap(lambda key: buffer.peek(state, key, batch_size).data))(keys))


@pytest.mark.parametrize(("held", "number"), [(7, 8_000), slow(2000, 20_000)])
def test_everyone_is_as_likely_at_every_place(held, number):
    for column in first_batches(held, 7, number).T:
        assert abs(chi_square_z(np.bincount(column, minlength=held), np.full(held, 1 / held))) < 4


def test_every_pair_is_as_likely():
    got = first_batches(7, 7, 8_000)
    for i, j in ((0, 1), (2, 6), (5, 3)):
        counts = np.bincount(got[:, i] * 7 + got[:, j], minlength=49)
        chances = (1 - np.eye(7)).reshape(-1) / 42
        assert abs(chi_square_z(counts, chances)) < 4


# ------------------------------------------------------------------------------------------------- costs and limits


@pytest.mark.parametrize("view", [slow("row"), "steps"])
@pytest.mark.parametrize("order", ["es", slow("ses")])
def test_in_place(view, order):
    """A donated scan needs next to no memory of its own: a byte a row would be 400,000."""
    buffer = buffer_of(Epoch(), view, lanes=2, length=200_000)

    def step(state: Any, given: Any) -> Any:
        out = []
        for verb in order:
            if verb == "e":
                state = buffer.extend(state, given[0])
            else:
                state, batch = buffer.sample(state, given[1], 8)
                out.append(batch)
        return state, out

    given = (rows_of(0, 5, 3, 2), jax.random.split(jax.random.key(0), 5))
    memory = assert_inplace(lambda s, x: lax.scan(step, s, x), jax.eval_shape(lambda: empty(buffer)), given)
    assert memory.temporary < 40_000


def test_eager_sample_copies_nothing_that_grows():
    buffer = buffer_of(Epoch(), "steps", lanes=2)
    state = empty(buffer)
    after, _ = buffer.sample(state, jax.random.key(1), 7)
    pairs = zip(jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(after), strict=True)
    moved = {jax.tree_util.keystr(path) for (path, a), b in pairs if a is not b}
    assert all(name.startswith((".sampler.turn", ".counters", ".token")) for name in moved)


def test_counts_do_not_overflow():
    """The longest lane there can be, overwritten again and again within one epoch."""
    length = 2**31 - 2**24 - 1
    geometry = fbuf.Buffer(capacity=length).geometry
    state = Epoch().init(geometry, dense=True)
    whole = jnp.full((1,), length, jnp.int32)
    turn = dataclasses.replace(state.turn, start=whole, closed=whole - 3)
    state = dataclasses.replace(state, held=whole, turn=turn)
    slots = jnp.arange(5, dtype=jnp.int32)[:, None]
    change = _anchors.dense(slots, jnp.ones((5, 1), bool), None)
    for _ in range(3):
        state = Epoch().change(state, change, geometry, jnp.int32(0))
        assert state.held.tolist() == state.turn.closed.tolist() == [length]


def test_a_small_epoch_in_a_long_run():
    """Rows come round a thousand times before it goes on: then it is over."""
    state, _ = sample(SMALL, filled(SMALL, 10), jax.random.key(0), 4)
    rows = jnp.arange(10_000, dtype=jnp.int32).reshape(-1, 10)
    state = jax.jit(lambda s: lax.scan(lambda s, r: (SMALL.extend(s, r), None), s, rows)[0])(state)
    state, batch = sample(SMALL, state, jax.random.key(1), 4)
    assert all(n >= 9_990 for n in np.asarray(batch.data).tolist())
    assert (int(SMALL.stats(state)["epoch"]), int(SMALL.stats(state)["epoch_left"])) == (2, 6)


@pytest.mark.parametrize("view", ["row", slow("steps")])
def test_rows_given_up_for_want_of_room(view):
    """A table of blocks for half the rows: the oldest are retired as new ones come."""
    rng = np.random.default_rng(9)
    storage = fbuf.storages.Deduplicated(keys=("obs",), block=(1, 4), blocks=128)
    buffer = fbuf.Buffer(250, storage=storage, view=VIEWS[view], sampler=Epoch())
    oracle, arrived = Oracle(Epoch()), 0
    state = buffer.init({n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()} | {"obs": np.zeros(4, np.uint8)})
    for i in range(60):
        if i % 3 != 2:
            new = rows_of(i, 10) | {"obs": jnp.asarray(rng.integers(0, 256, (10, 4)), jnp.uint8)}
            state = extend(buffer, state, new | {"action": jnp.arange(arrived, arrived + 10, dtype=jnp.int32)})
            arrived += 10
        state, batch = sample(buffer, state, jax.random.key(i), 16)
        live = list(range(arrived - int(state.ring.size[0]), arrived))
        if state.anchors is not None:
            live = [n for n in live if int(state.anchors.flags[n % 250]) & _anchors.OPEN]
        oracle.sample(live, 16, np.asarray(batch.data["action"])[np.asarray(batch.mask)].tolist())
        oracle.check_stats(live, counted := buffer.stats(state))
    assert oracle.begun > 3
    assert int(counted["retired_rows"]) > 200 and int(counted["draws_refused"]) == 0


@pytest.mark.parametrize("name", ["shuffle", "drop_last"])
@pytest.mark.parametrize("value", ["yes", 1, None])
def test_arguments_must_be_bools(name, value):
    fix = {"shuffle": "False", "drop_last": "True"}[name]
    message = f"Epoch: {name} is {value!r}; expected a bool. Write Epoch\\({name}={fix}\\)."
    with pytest.raises(TypeError, match=message):
        Epoch(**{name: value})


def test_it_is_a_value():
    assert Epoch() == Epoch(shuffle=True) != Epoch(drop_last=True)
    assert repr(Epoch(drop_last=True)) == "Epoch(drop_last=True)"
    assert (Epoch().numbers, Epoch().options, Epoch().prioritized) == ({}, {}, False)
