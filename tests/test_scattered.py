"""Buffers whose writer replaces any row, not the oldest: every storage gives what plain Python gives.

Two of the writers are written as a user would write them. What the host store promises by itself is in tests/test_places.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf import _typing
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Compressed, Deduplicated, Device, Host, Zstd
from fbuf.views import Episode, Hindsight, Sequence, Transition
from tests.inplace import assert_draw_write_draw


@dataclasses.dataclass(frozen=True)
class Largest:
    """Keeps the rows with the largest values of a leaf; of equal ones the older."""

    leaf: str
    streams: ClassVar[bool] = False

    def init(self, geometry: Any, spec: Any) -> jax.Array:
        if self.leaf not in spec:
            raise ValueError(f"Largest: leaf '{self.leaf}' is not among {', '.join(spec)}. Use one of those.")
        return jnp.full((geometry.capacity,), -jnp.inf, jnp.float32)  # value of the row in each slot

    def choose(self, own: Any, geometry: Any, held: Any, leaves: Any, keep: Any) -> Any:
        nowhere = jnp.int32(geometry.capacity)

        def one(carry: Any, row: Any) -> Any:
            values, held = carry
            value, keep = row
            full = held == nowhere
            slot = jnp.where(full, jnp.argmin(values).astype(jnp.int32), held)
            takes = keep & (~full | (value > values[slot]))
            slot = jnp.where(takes, slot, nowhere)
            return (values.at[slot].set(value, mode="drop"), held + (takes & ~full).astype(jnp.int32)), slot

        rows = (leaves[self.leaf].astype(jnp.float32).reshape(-1), keep.reshape(-1))
        (own, _), slot = lax.scan(one, (own, held), rows)
        return slot.reshape(keep.shape), own


@dataclasses.dataclass(frozen=True)
class Anywhere:
    """Replaces a random row once the buffer is full: all rows of a call at once."""

    seed: int = 0
    streams: ClassVar[bool] = False

    def init(self, geometry: Any, spec: Any) -> jax.Array:
        return jnp.uint32(0)  # calls so far

    def choose(self, own: Any, geometry: Any, held: Any, leaves: Any, keep: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(self.seed), own)
        rank = jnp.cumsum(keep.reshape(-1), dtype=jnp.int32).reshape(keep.shape) - jnp.int32(1)
        anywhere = jax.random.randint(key, keep.shape, 0, geometry.capacity, jnp.int32)
        slot = jnp.where(held + rank < geometry.capacity, held + rank, anywhere)
        return jnp.where(keep, slot, jnp.int32(-1)), own + jnp.uint32(1)


STORAGES = {
    "Device": Device(),
    "Deduplicated": Deduplicated(keys=("obs",), blocks=512),
    "Host": Host(keys=("obs",)),
    "Compressed": Compressed(keys=("obs",)),
    "Compressed, small": Compressed(keys=("obs", "score"), codec=Zstd(chunk=1, dictionary=0), slack=3),
}
HOSTED = [name for name in STORAGES if name not in ("Device", "Deduplicated")]
WRITERS = {
    "Largest": Largest("score"),
    "Anywhere": Anywhere(),
    "TopK": fbuf.writers.TopK("score"),
    "Reservoir": fbuf.writers.Reservoir(),
}
SAMPLERS = {
    "Uniform": Uniform(),
    "Prioritized": Prioritized(),
    "Consume": Consume(2),
    "Ranked": Ranked(uniform=0.2),
    "kit": Prioritized(uniform=0.2, largest="held"),
    "distinct": Prioritized(replace=False),
}
EXAMPLE = {
    "obs": jax.ShapeDtypeStruct((8, 8), np.uint8),
    "score": jax.ShapeDtypeStruct((), np.float32),
    "id": jax.ShapeDtypeStruct((), np.int32),
    "done": jax.ShapeDtypeStruct((), np.bool_),
}
BATCH = 6


def rows_of(first: int, *shape: int) -> dict[str, np.ndarray]:
    """Rows that tell their number, with scores in no order."""
    number = first + np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    return {
        "obs": (number[..., None, None] % 5 + np.arange(8)[:, None] * np.ones(8, int)).astype(np.uint8),
        "score": (number * 7919 % 101).astype(np.float32),
        "id": number.astype(np.int32),
        "done": number % 7 == 0,
    }


def make(storage: Any = "Device", writer: Any = "Largest", capacity: int = 12, **more: Any) -> fbuf.Buffer:
    return fbuf.Buffer(capacity, storage=STORAGES.get(storage, storage), writer=WRITERS.get(writer, writer), **more)


# ---------------------------------------------------------------------------------------------- storages do not matter


@functools.cache
def batches(storage: str, writer: str, sampler: str, mode: str, lanes: int | None) -> list[Any]:
    """What 12 steps of a write, a draw and an update give."""
    buffer = make(storage, writer, sampler=SAMPLERS[sampler], lanes=lanes)
    shape = (5,) if lanes is None else (5, lanes)

    def step(state: Any, given: Any) -> Any:
        rows, key, mask = given
        state, batch = buffer.sample(buffer.extend(state, rows, mask=mask), key, BATCH)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.arange(1.0, BATCH + 1))
        state = buffer.update_rows(state, batch.index, {"obs": batch.data["obs"] + jnp.uint8(1)})
        return state, (batch.data, batch.mask, batch.index, batch.probability, batch.weight)

    masks = np.random.default_rng(0).random((12, *shape)) < 0.8
    given = [(rows_of(100 * i, *shape), jax.random.key(i), masks[i]) for i in range(12)]
    state = buffer.init(EXAMPLE)
    if mode == "scan":
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *given)
        state, out = jax.jit(lambda state, given: lax.scan(step, state, given), donate_argnums=0)(state, stacked)
        drawn = [jax.tree.map(lambda x, i=i: x[i], out) for i in range(12)]
    else:
        run = jax.jit(step, donate_argnums=0) if mode == "donated" else step
        drawn = []
        for one in given:
            state, out = run(state, one)
            drawn.append(out)
    stats = jax.device_get(buffer.stats(state))
    assert not any(stats[n] for n in stats if n.startswith(("refused", "expired", "retired")))
    return [jax.device_get(x) for x in [*drawn, buffer.rows(state).data, buffer.rows(state).index.slot]]


ALIKE = [(w, s, m, e) for w in WRITERS for s in SAMPLERS for m in ("eager", "donated", "scan") for e in (None, 3)]
DEFAULT = {("Largest", "Uniform", "scan", None), ("Anywhere", "Prioritized", "donated", 3)}


@pytest.mark.parametrize(
    ("writer", "sampler", "mode", "lanes"),
    [pytest.param(*p, marks=() if p in DEFAULT else pytest.mark.slow) for p in ALIKE],
)
def test_storages_do_not_matter(writer: str, sampler: str, mode: str, lanes: int | None) -> None:
    reference = batches("Device", writer, sampler, mode, lanes)
    assert sum(int(drawn[1].sum()) for drawn in reference[:12]) > 3 * BATCH
    for storage in STORAGES:
        if storage == "Deduplicated" and lanes is None:
            continue  # half of the time of these tests is its compilation
        other = batches(storage, writer, sampler, mode, lanes)
        same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), reference, other)
        assert all(jax.tree.leaves(same)), storage


OURS = [pytest.param(w, marks=pytest.mark.slow) for w in ("TopK", "Reservoir")]


@pytest.mark.parametrize("writer", ["Largest", "Anywhere", *OURS])
def test_eager_jit_and_scan_agree(writer: str) -> None:
    one, *others = (batches("Compressed", writer, "Uniform", mode, None) for mode in ("eager", "donated", "scan"))
    for other in others:
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


# ---------------------------------------------------------------------------------------------------- plain Python


class Model:
    """Rows by slot, with the order in which they came."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.arrived = capacity, 0
        self.held: dict[int, tuple[int, dict[str, Any]]] = {}  # arrival and row, by slot

    def place(self, row: dict[str, Any], slot: int) -> None:
        self.arrived += 1
        self.held[slot] = self.arrived, row

    def in_order(self) -> list[dict[str, Any]]:
        return [row for _, row in sorted(self.held.values(), key=lambda pair: pair[0])]

    def largest(self, row: dict[str, Any]) -> None:
        if len(self.held) < self.capacity:
            self.place(row, len(self.held))
            return
        slot = min(self.held, key=lambda s: (self.held[s][1]["score"], s))
        if row["score"] > self.held[slot][1]["score"]:
            self.place(row, slot)


@given(data=st.data())
@pytest.mark.parametrize("storage", ["Device", "Compressed, small"])
def test_the_largest_stay_and_come_out_in_order(storage: str, data: st.DataObject) -> None:
    lanes = data.draw(st.sampled_from([None, 3]), "lanes")
    buffer, model = make(storage, lanes=lanes), Model(12)
    state, first, width = buffer.init(EXAMPLE), 0, lanes or 1
    for _ in range(data.draw(st.integers(1, 6), "calls")):
        call = data.draw(st.sampled_from(["extend", "extend", "masked", "update", "clear"]), "call")
        num = data.draw(st.sampled_from([1, 6, 17]), "rows")
        if call in ("extend", "masked"):
            rows = rows_of(first, num, width)
            first += num * width
            mask = np.ones((num, width), bool)
            if call == "masked":
                mask = np.random.default_rng(first).random((num, width)) < 0.5
            for n, e in np.ndindex(num, width):
                if mask[n, e]:
                    model.largest({name: x[n, e] for name, x in rows.items()})
            shaped = {name: x if lanes else x[:, 0] for name, x in rows.items()}
            state = buffer.extend(state, shaped, mask=None if call == "extend" else mask if lanes else mask[:, 0])
        elif call == "update" and model.held:
            index = buffer.rows(state).index
            index = fbuf.Index(index.slot.reshape(-1)[:4], index.ticket.reshape(-1)[:4])
            obs = np.full((4, 8, 8), first % 200, np.uint8)
            state = buffer.update_rows(state, index, {"obs": obs})
            for row in model.in_order()[:4]:
                row["obs"] = obs[0]
        elif call == "clear":
            state, model.held = buffer.clear(state), {}
        assert int(buffer.size(state)) == len(model.held)
        expected = model.in_order()
        for got, wanted in (
            (buffer.rows(state), expected),
            (buffer.last(state, 2), ([None] * 2 * width + expected)[-2 * width :]),
        ):
            flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[1 if lanes is None else 2 :]), got)
            padded = wanted + [None] * (flat.mask.size - len(wanted))
            assert flat.mask.tolist() == [row is not None for row in padded]
            for i, row in enumerate(padded):
                for name in EXAMPLE:
                    zero = np.zeros(EXAMPLE[name].shape, EXAMPLE[name].dtype)
                    assert np.array_equal(flat.data[name][i], zero if row is None else row[name])


def test_of_several_rows_for_one_slot_the_last_is_written() -> None:
    for storage in ("Device", "Compressed"):
        buffer = make(storage, "Anywhere", capacity=4)
        state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 200))
        got = jax.device_get(buffer.rows(state))
        key = jax.random.fold_in(jax.random.key(0), jnp.uint32(0))
        slots = [*range(4), *np.asarray(jax.random.randint(key, (200, 1), 0, 4, jnp.int32))[4:, 0].tolist()]
        last = sorted(max(i for i, s in enumerate(slots) if s == slot) for slot in range(4))
        assert got.data["id"].tolist() == last and got.mask.all()
        assert np.array_equal(got.data["obs"], rows_of(0, 200)["obs"][last])


# ------------------------------------------------------------------------------------------------ indices, old states


def test_an_index_is_stale_once_its_row_is_replaced() -> None:
    for storage in ("Device", "Compressed"):
        buffer = make(storage, "Largest", sampler=Prioritized())
        state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 12))
        index = buffer.rows(state).index
        best = rows_of(1000, 3) | {"score": np.float32([500, 501, 502])}
        after = buffer.extend(state, best)
        there = np.asarray(buffer.get(after, index).mask)
        order = np.argsort(np.asarray(rows_of(0, 12)["score"]), kind="stable")
        assert sorted(np.flatnonzero(~there).tolist()) == sorted(order[:3].tolist())
        after = buffer.update_priority(after, index, np.ones(12, np.float32))
        after = buffer.update_rows(after, index, {"done": np.zeros(12, bool)})
        assert int(buffer.stats(after)["refused_stale"]) == 6
        index = buffer.rows(after).index
        again = buffer.extend(buffer.clear(after), rows_of(0, 12))
        assert not np.asarray(buffer.get(buffer.clear(after), index).mask).any()
        assert not np.asarray(buffer.get(again, index).mask).any()


@pytest.mark.parametrize("storage", HOSTED)
def test_an_old_state_reads_its_own_rows_or_says_that_they_expired(storage: str) -> None:
    kind = dataclasses.replace(STORAGES[storage], slack=10, on_expired="mask")
    buffer = make(kind, "Anywhere")
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 12))
    old, expected = state, jax.device_get(buffer.rows(state).data)
    for i in range(8):
        state = buffer.extend(state, rows_of(100 * i + 100, 4))
        got = jax.device_get(buffer.rows(old))
        for name in EXAMPLE:
            shown = got.mask.reshape(-1, *(1,) * (expected[name].ndim - 1))
            assert np.array_equal(got.data[name], np.where(shown, expected[name], 0))
        assert got.mask.all() if i < 2 else not got.mask.all() or i < 4
        assert np.asarray(buffer.rows(state).mask).all()
    strict = make(dataclasses.replace(kind, on_expired="raise"), "Anywhere")
    with pytest.raises(Exception, match="expired"):
        jax.block_until_ready(strict.rows(old))


@pytest.mark.parametrize("storage", [name for name in HOSTED if STORAGES[name].slack is None])
def test_two_futures_of_a_state_keep_apart(storage: str) -> None:
    buffer = make(storage, "Anywhere")
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 12))
    one, two = buffer.extend(state, rows_of(100, 5)), buffer.extend(state, rows_of(200, 5))
    for future, first in ((one, 100), (two, 200), (state, 0)):
        got = jax.device_get(buffer.rows(future).data)
        everything = {int(i): rows_of(int(i), 1)["obs"][0] for i in got["id"]}
        assert all(np.array_equal(obs, everything[int(i)]) for i, obs in zip(got["id"], got["obs"], strict=True))
        assert set(got["id"].tolist()) <= set(range(12)) | set(range(first, first + 5))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere the store cannot look at the state's tickets")
@pytest.mark.parametrize("storage", ["Host", "Compressed"])
def test_steps_that_are_tried_and_dropped_cost_nothing(storage: str) -> None:
    buffer = make(dataclasses.replace(STORAGES[storage], slack=8), "Largest")
    extend = jax.jit(buffer.extend)
    state = extend(buffer.init(EXAMPLE), rows_of(0, 12) | {"score": np.arange(12, dtype=np.float32)})
    for i in range(20):
        extend(state, rows_of(500, 5) | {"score": np.full(5, 1000 + i, np.float32)})
        state = buffer.update_rows(state, buffer.last(state, 1).index, {"done": np.ones(1, bool)})
        state = extend(state, rows_of(100 + i, 1) | {"score": np.float32([3.5])})
    rows = jax.device_get(buffer.rows(state))
    assert sorted(rows.data["id"].tolist()) == [*range(4, 12), 100, 101, 102, 103]
    assert all(
        np.array_equal(o, rows_of(int(i), 1)["obs"][0]) for i, o in zip(rows.data["id"], rows.data["obs"], strict=True)
    )


def test_the_order_of_arrival_outlives_2_to_32_rows() -> None:
    buffer = make("Device", "Largest", capacity=4)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 2) | {"score": np.float32([1000, 2000])})
    late = dataclasses.replace(state.scatter, newest=jnp.array([2**32 - 3, 0], jnp.uint32))
    state = dataclasses.replace(state, scatter=late)
    for i in range(6):
        state = buffer.extend(state, rows_of(10 + i, 1) | {"score": np.float32([i + 1])})
        index = buffer.last(state, 1).index
        assert np.asarray(index.ticket)[0] != 0
    assert np.asarray(buffer.rows(state).data["id"]).tolist() == [0, 1, 14, 15]
    assert np.asarray(state.scatter.newest).tolist() == [4, 1]


# ------------------------------------------------------------------------------------------------- in place, clean


@pytest.mark.parametrize("storage", ["Device", "Host", "Compressed"])
@pytest.mark.parametrize("sampler", ["Uniform", "Prioritized"])
def test_a_step_copies_nothing(storage: str, sampler: str) -> None:
    keys = {} if storage == "Device" else {"keys": ("obs",)}
    buffer = fbuf.Buffer(
        40_000,
        lanes=2,
        storage=type(STORAGES[storage])(**keys),
        sampler=SAMPLERS[sampler],
        writer=Anywhere(),
    )
    example = {"obs": jax.ShapeDtypeStruct((16,), np.uint8), "score": jax.ShapeDtypeStruct((), np.float32)}
    state = buffer.init(example) if storage != "Device" else None
    assert_draw_write_draw(buffer, example, state)


def test_update_and_write_in_one_step_copy_nothing() -> None:
    buffer = fbuf.Buffer(80_000, sampler=Prioritized(), writer=Anywhere())
    example = {"obs": jax.ShapeDtypeStruct((16,), np.uint8)}

    def step(state: Any, rows: Any, key: Any) -> Any:
        state, batch = buffer.sample(state, key, 8)
        state = buffer.extend(state, rows)
        state = buffer.update_priority(state, batch.index, jnp.ones(8))
        state = buffer.update_rows(state, batch.index, {"obs": batch.data["obs"]})
        return buffer.extend(state, rows), batch

    rows = {"obs": jax.ShapeDtypeStruct((3, 16), np.uint8)}
    fbuf.testing.assert_inplace(step, jax.eval_shape(buffer.init, example), rows, jax.random.key(0))


def test_strict_promotion_and_x64() -> None:
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    for storage in ("Device", "Compressed"):
        for x64 in (False, True):
            if x64 and storage == "Device":
                continue
            with jax.numpy_dtype_promotion("strict"), wide(x64), jax.debug_nans(True):
                buffer = make(storage, "Largest", sampler=Prioritized())
                state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 30))
                state, batch = buffer.sample(state, jax.random.key(0), 4)
                state = buffer.update_rows(state, batch.index, {"score": batch.data["score"]})
                assert np.asarray(batch.mask).all() and np.asarray(buffer.rows(state).mask).all()


def test_a_buffer_on_the_device_vmaps() -> None:
    buffer = make("Device", "Largest", sampler=Prioritized())
    rows = jax.tree.map(lambda *x: np.stack(x), *(rows_of(100 * i, 30) for i in range(3)))
    states = jax.vmap(lambda rows: buffer.extend(buffer.init(EXAMPLE), rows))(rows)
    many = jax.vmap(lambda state, key: buffer.sample(state, key, 4)[1])(states, jax.random.split(jax.random.key(0), 3))
    for i in range(3):
        own = buffer.extend(buffer.init(EXAMPLE), rows_of(100 * i, 30))
        one = buffer.sample(own, jax.random.split(jax.random.key(0), 3)[i], 4)[1]
        assert np.array_equal(one.data["id"], many.data["id"][i])


# --------------------------------------------------------------------------------------------- kept, measured, converted


@pytest.mark.parametrize("storage", ["Device", "Compressed"])
def test_rows_go_through_arrays_and_on(storage: str) -> None:
    buffer = make(storage, "Anywhere")
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 30))
    state = buffer.update_rows(state, buffer.last(state, 2).index, {"obs": np.full((2, 8, 8), 9, np.uint8)})
    spec, structure = buffer.storage.spec(state.rows)
    arrays = {n: np.array(a) for n, a in buffer.storage.to_arrays(state.rows).items()}
    rows = buffer.storage.from_arrays(arrays, buffer.geometry, spec, structure)
    other = dataclasses.replace(state, rows=rows)
    for i in range(3):
        a, b = jax.device_get(buffer.rows(state)), jax.device_get(buffer.rows(other))
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))
        state, other = (buffer.extend(s, rows_of(100 * i, 5)) for s in (state, other))
    if storage != "Device":
        stream = dataclasses.replace(buffer, writer=fbuf.writers.Ring())
        with pytest.raises(ValueError, match="rows were saved in any order"):
            stream.storage.from_arrays(arrays, stream.geometry, spec, structure)


def test_convert_keeps_the_rows() -> None:
    for storage in ("Device", "Compressed"):
        buffer = make(storage, "Anywhere")
        state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 30))
        other = make(storage, "Anywhere", sampler=Prioritized())
        moved = buffer.convert(other, state)
        moved, batch = other.sample(moved, jax.random.key(0), 64)
        assert set(np.asarray(batch.data["id"]).tolist()) == set(np.asarray(buffer.rows(state).data["id"]).tolist())
        moved = other.extend(moved, rows_of(100, 5))
        assert int(other.size(moved)) == 12


def test_plan_says_what_is_measured() -> None:
    buffer = make("Compressed", "Largest", capacity=200)
    plan = buffer.plan(EXAMPLE, rows=rows_of(0, 150))
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 200))
    assert plan.device == buffer.nbytes(state)["device"]
    assert plan.host_raw == (200 + 16) * 64 and 0 < plan.host < 200_000


def test_a_replay_takes_such_a_writer() -> None:
    replay = fbuf.Replay(make("Compressed", "Largest"), EXAMPLE)
    replay.extend(rows_of(0, 50))
    assert len(replay) == 12 and replay.sample(4, to="numpy").mask.all()
    assert sorted(replay.rows().data["score"].tolist()) == sorted(rows_of(0, 50)["score"].tolist())[-12:]


@pytest.mark.slow
def test_a_hundred_thousand_rows_take_no_more_than_a_thousand() -> None:
    buffer = make("Compressed", "Anywhere", capacity=1000)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    state, sizes = buffer.init(EXAMPLE), []
    for i in range(500):
        state = extend(state, rows_of(200 * i, 200))
        if i % 50 == 9:
            sizes.append(buffer.nbytes(state)["host"])
    assert max(sizes) < min(sizes) + 5 * 32 * 1024  # the arena lets four segments lie idle before it moves anything


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"view": Transition(n_step=2)}, "looks at neighbouring rows, but Largest.* may replace any. Use view="),
        ({"view": Sequence(4)}, "looks at neighbouring rows"),
        ({"view": Episode(4)}, "looks at neighbouring rows"),
        ({"view": Hindsight(Transition(), lambda a, g: a, goal="g", achieved="a")}, "looks at neighbouring rows"),
        ({"sampler": Uniform(over="episodes"), "episode_end": ("done",)}, "goes by episodes, but .* Use sampler="),
        ({"sampler": Epoch()}, "counts on the oldest row being replaced first"),
        ({"sampler": Staleness(4)}, "counts on the oldest row being replaced first"),
    ],
    ids=["transition", "sequence", "episode", "hindsight", "by episode", "epoch", "staleness"],
)
def test_what_needs_rows_in_order_is_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**parts)


def test_a_writer_without_a_method_is_named() -> None:
    class Half:
        streams = False

        def init(self, geometry: Any, spec: Any) -> None: ...

    with pytest.raises(TypeError, match=r"has no `choose`; see fbuf.parts.Scattering"):
        fbuf.Buffer(10, writer=Half())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"writer is 3; expected a part of fbuf.writers. Write .*writers.Ring\(\)"):
        fbuf.Buffer(10, writer=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"writer is the class Ring; expected a value. Write Ring\(\)"):
        fbuf.Buffer(10, writer=fbuf.writers.Ring)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leaf 'rank' is not among"):
        fbuf.Buffer(10, writer=Largest("rank")).init(EXAMPLE)
    assert isinstance(fbuf.writers.Ring(), _typing.Streaming) and isinstance(Largest("score"), _typing.Scattering)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Gives what it is told."""

    slots: tuple[int, ...]
    dtype: Any = jnp.int32
    streams: ClassVar[bool] = False

    def init(self, geometry: Any, spec: Any) -> Any:
        return jnp.uint32(0)

    def choose(self, own: Any, geometry: Any, held: Any, leaves: Any, keep: Any) -> Any:
        return jnp.array(self.slots, self.dtype)[:, None], own if self.dtype == jnp.int32 else (own, own)


@pytest.mark.parametrize("storage", ["Device", "Compressed"])
def test_a_row_that_would_leave_a_slot_empty_is_refused_and_counted(storage: str) -> None:
    for slots, kept, refused in (((0, 2, 1), [0, 1, 2], 0), ((0, 3, 1), [0, 2], 1), ((4, 4, -1), [], 1)):
        buffer = make(storage, writer=Fixed(slots))
        state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 3))
        rows = jax.device_get(buffer.rows(state))
        assert rows.data["id"][rows.mask].tolist() == kept and int(buffer.size(state)) == len(kept)
        assert int(buffer.stats(state)["refused_rows"]) == refused
        state, batch = buffer.sample(state, jax.random.key(0), 20)
        assert set(np.asarray(batch.data["id"])[np.asarray(batch.mask)].tolist()) == set(kept)
        with pytest.raises(ValueError, match="1 rows") if refused else pytest.MonkeyPatch.context():
            fbuf.checked(buffer.extend)(state, rows_of(0, 3))


def test_slots_and_states_of_another_kind_are_refused() -> None:
    buffer = make(writer=Fixed((0, 1, 2), jnp.float32))
    with pytest.raises(TypeError, match=r"choose gave slots float32\[3, 1\]; expected int32\[3, 1\]"):
        buffer.extend(buffer.init(EXAMPLE), rows_of(0, 3))
    buffer = make(writer=Fixed((0, 1)))
    with pytest.raises(TypeError, match=r"choose gave slots int32\[2, 1\]; expected int32\[3, 1\]"):
        buffer.extend(buffer.init(EXAMPLE), rows_of(0, 3))

    class Growing(Fixed):
        def choose(self, own: Any, *given: Any) -> Any:
            return super().choose(own, *given)[0], (own, own)

    buffer = make(writer=Growing((0, 1, 2)))
    with pytest.raises(TypeError, match="choose gave another state than it got"):
        buffer.extend(buffer.init(EXAMPLE), rows_of(0, 3))


def test_a_state_of_another_writer_is_refused() -> None:
    one, other = make("Device", "Largest"), make("Device", writer=fbuf.writers.Ring())
    state = one.init(EXAMPLE)
    with pytest.raises(ValueError, match="this state was made by another buffer"):
        other.extend(state, rows_of(0, 3))


# ---------------------------------------------------------------------------------------------------- shuffled rows


def test_a_shuffled_data_set_is_a_stream_of_chunks_of_one() -> None:
    """Neighbours are not alike, so that a chunk is of no use; the dictionary is."""
    order = np.random.default_rng(0).permutation(2000)
    game = np.repeat(np.random.default_rng(1).integers(0, 255, (1, 40, 40), np.uint8), 2000, 0)
    game[np.arange(2000), np.arange(2000) % 40] = 7
    sizes = {}
    for chunk in (1, 8):
        storage = Compressed(codec=Zstd(chunk=chunk))
        buffer = fbuf.Buffer(2000, storage=storage)
        extend = jax.jit(buffer.extend, donate_argnums=0)
        state = buffer.init(jax.ShapeDtypeStruct((40, 40), np.uint8))
        for i in range(0, 2000, 100):
            state = extend(state, game[order[i : i + 100]])
        got = buffer.get(state, np.arange(2000))
        assert np.array_equal(got.data, game[order]) and np.asarray(got.mask).all()
        sizes[chunk] = buffer.nbytes(state)["host"]
    assert sizes[1] < game.nbytes / 4, sizes
