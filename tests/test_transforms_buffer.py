"""Buffers with transforms: what is stored, what is drawn, with which storage, in which program, and what they know.

The reference is the same buffer without transforms, and `transforms.apply` (or numpy) on what goes in and comes out of it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf import _observing, transforms
from fbuf.samplers import Epoch, Prioritized
from fbuf.storages import Device, Memmap, Ragged
from fbuf.testing import assert_inplace, measure
from fbuf.transforms import (
    Augment,
    Cast,
    Chain,
    Concatenate,
    Drop,
    Map,
    Normalize,
    NormalizeReward,
    Rename,
    RewardToGo,
    Scale,
    Select,
    Split,
    Stack,
)
from fbuf.views import Episode, Sequence, Transition
from tests import test_combinations as combinations
from tests.support import pieces

ON_WRITE = Chain(
    (
        Rename({"observation": "obs"}),
        Cast("action", "int16", source="int32"),
        RewardToGo(0.9),
        ("at_write", Normalize("speed")),
        Drop("nothing"),
    )
)
ON_READ = Chain((NormalizeReward(), Augment("obs", 1), Scale("obs", offset=0.5), Rename({"action": "act"})))
BATCH, LANES = 6, 2


def given_rows(rng: np.random.Generator, count: int, lanes: int = LANES) -> dict[str, np.ndarray]:
    rows = combinations.rows_of(rng, count)
    rows = {"observation": rows.pop("obs"), **rows}
    rows |= {"speed": rng.normal(3, 2, (count, LANES)).astype(np.float32), "nothing": np.zeros((count, LANES), np.int8)}
    return rows


EXAMPLE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), given_rows(np.random.default_rng(0), 1))


def make(storage: Any, view: Any, on_read: Any = ON_READ, **settings: Any) -> fbuf.Buffer:
    return fbuf.Buffer(40, lanes=LANES, storage=storage, view=view, on_write=ON_WRITE, on_read=on_read, **settings)


def same(one: Any, two: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def close(one: Any, two: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), one, two)


@functools.partial(jax.jit, static_argnums=0)
def step(buffer: fbuf.Buffer, state: Any, rows: Any, key: Any) -> Any:
    state, batch = buffer.sample(buffer.extend(state, rows), key, BATCH)
    return state, batch


@functools.cache
def batches(storage: str, view: str) -> list[Any]:
    buffer = make(combinations.fresh(combinations.STORAGES[storage]), VIEWS[view])
    state, out = buffer.init(EXAMPLE), []
    for i in range(6):
        state, batch = step(buffer, state, given_rows(np.random.default_rng(i), 5), jax.random.key(i))
        out.append(jax.device_get((batch.data, batch.mask, batch.index.slot)))
    return out


VIEWS = {"Row": fbuf.views.Row(), "Transition": Transition(2, stack=3), "Sequence": Sequence(4, boundary="mask", at=1)}
STORAGES = [name for name in combinations.STORAGES if name != "Ragged"]


# ----------------------------------------------------------------------------------------- through the storages


@pytest.mark.parametrize(
    ("storage", "view"),
    [
        pytest.param(s, v, marks=() if (s, v) == ("Compressed", "Sequence") else pytest.mark.slow)
        for s in STORAGES
        for v in VIEWS
        if s != "Device"
    ],
)
def test_storages_do_not_matter(storage: str, view: str) -> None:
    want = batches("Device", view)
    assert sum(int(mask.sum()) for _, mask, _ in want) > 2 * BATCH
    same(batches(storage, view), want)


def stored_by_hand(state: Any, rows: list[Any]) -> dict[str, np.ndarray]:
    """What numpy makes of the rows of a few calls."""
    out: dict[str, list[Any]] = {}
    speeds: list[Any] = []
    for call in rows:
        made = {n: x for n, x in call.items() if n not in ("observation", "nothing")}
        made["obs"], made["action"] = call["observation"], call["action"].astype(np.int16)
        speeds.append(call["speed"])
        seen = np.concatenate(speeds).astype(np.float64)
        made["speed"] = ((call["speed"] - seen.mean()) / seen.std()).astype(np.float32)
        end, total = call["terminated"] | call["truncated"], np.zeros(LANES)
        sums = []
        for t in range(len(end))[::-1]:
            total = call["reward"][t] + np.where(end[t], 0, 0.9 * total)
            sums.append(total)
        made["reward_to_go"] = np.array(sums[::-1], np.float32)
        for name, x in made.items():
            out.setdefault(name, []).append(x)
    return {name: np.concatenate(x) for name, x in out.items()}


def test_what_is_stored_and_what_is_drawn() -> None:
    """Rows, `get` and `last` speak of what is stored; a batch is what the view makes of that, transformed."""
    buffer = make(Device(), VIEWS["Row"])
    plain = dataclasses.replace(buffer, on_read=None)
    calls = [given_rows(np.random.default_rng(i), 5) for i in range(4)]
    state = buffer.init(EXAMPLE)
    for rows in calls:
        state = buffer.extend(state, rows)
    want = stored_by_hand(state, calls)
    held = buffer.rows(state)
    close(jax.tree.map(lambda x: x[:20], held.data), want)
    np.testing.assert_array_equal(held.data["obs"][:20], want["obs"])
    close(buffer.last(state, 3).data, {n: x[-3:] for n, x in want.items()})
    key = jax.random.key(7)
    batch = buffer.peek(state, key, BATCH)
    before = plain.peek(buffer.convert(plain, state), key, BATCH)
    same(batch.index, before.index)
    assert batch.data.keys() == (before.data.keys() - {"action"}) | {"act"}
    same(batch.data["act"], before.data["action"])
    deviation = np.concatenate([c["reward"] for c in calls]).astype(np.float64).std()
    close(batch.data["reward"], before.data["reward"] / np.float32(deviation))
    frames = np.asarray(before.data["obs"])  # each of one colour: a shift changes nothing
    close(batch.data["obs"], frames / np.float32(255) + np.float32(0.5))
    same(buffer.get(state, batch.index).data, before.data)


@pytest.mark.parametrize("much", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "much"])
def test_eager_jitted_scanned_and_donated(much: bool) -> None:
    buffer = fbuf.Buffer(
        40, lanes=LANES, on_write=NormalizeReward(), on_read=Scale("reward", 2.0, 0.5), batch_size=BATCH
    )
    rows: list[Any] = [given_rows(np.random.default_rng(i), 5) for i in range(5)]
    example: Any = EXAMPLE
    if much:
        buffer = make(Device(), VIEWS["Sequence"], prefetch=1, batch_size=BATCH, sampler=Prioritized())
    else:
        rows, example = [{"reward": x["reward"]} for x in rows], {"reward": EXAMPLE["reward"]}
    keys = jax.random.split(jax.random.key(0), 5)

    def one(state: Any, given: Any) -> Any:
        state, batch = buffer.sample(buffer.extend(state, given[0]), given[1])
        return state, (batch.data, batch.mask)

    def several(run: Any) -> Any:
        state, out = buffer.init(example), []
        for pair in zip(rows, keys, strict=True):
            state, batch = run(state, pair)
            out.append(batch)
        return state, jax.tree.map(lambda *x: jnp.stack(x), *out)

    eager = several(one)
    same(several(jax.jit(one, donate_argnums=0)), eager)
    stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
    same(jax.jit(lambda s, x: lax.scan(one, s, x), donate_argnums=0)(buffer.init(example), (stacked, keys)), eager)


def test_peek_over_keys() -> None:
    buffer = make(Device(), VIEWS["Row"])
    state = buffer.extend(buffer.init(EXAMPLE), given_rows(np.random.default_rng(0), 5))
    keys = jax.random.split(jax.random.key(0), 3)
    many = jax.vmap(lambda key: buffer.peek(state, key, 4))(keys)
    close(jax.tree.map(lambda x: x[1], many).data, buffer.peek(state, keys[1], 4).data)
    assert not np.array_equal(many.index.slot[0], many.index.slot[1])


# ------------------------------------------------------------------------------------------------------ prefetch


@pytest.mark.parametrize(
    "storage",
    ["Device", pytest.param("Compressed", marks=pytest.mark.slow), pytest.param("Host", marks=pytest.mark.slow)],
)
def test_a_batch_drawn_ahead_is_what_peek_gave(storage: str) -> None:
    """Random shifts and statistics too are those of the draw, whatever was written since."""
    buffer = make(combinations.fresh(combinations.STORAGES[storage]), VIEWS["Row"], prefetch=1, batch_size=BATCH)
    state = buffer.extend(buffer.init(EXAMPLE), given_rows(np.random.default_rng(0), 5))
    state, first = buffer.sample(state, jax.random.key(0))
    same(first.data, buffer.peek(state, jax.random.fold_in(jax.random.key(0), 1)).data)
    want = buffer.peek(state, jax.random.key(1))
    state, _ = buffer.sample(state, jax.random.key(1))
    rows = given_rows(np.random.default_rng(1), 3)
    state = buffer.extend(state, {**rows, "reward": rows["reward"] * 100})
    assert not np.array_equal(buffer.peek(state, jax.random.key(1)).data["reward"], want.data["reward"])
    state, batch = buffer.sample(state, jax.random.key(2))
    same(batch.data, want.data)


@pytest.mark.parametrize("key", [jax.random.PRNGKey, lambda seed: jax.random.key(seed, impl="rbg")], ids=["raw", "rbg"])
def test_any_kind_of_key(key: Any) -> None:
    buffer = fbuf.Buffer(10, on_read=Augment("x", 1), prefetch=1, batch_size=4)
    state = buffer.extend(buffer.init({"x": jnp.zeros((3, 3))}), {"x": jnp.arange(45.0).reshape(5, 3, 3)})
    want = buffer.peek(buffer.sample(state, key(0))[0], key(1)).data
    state, _ = buffer.sample(buffer.sample(state, key(0))[0], key(1))
    same(buffer.sample(state, key(2))[1].data, want)


# --------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_not_there_is_zeros(view: str) -> None:
    add = Map(lambda row: {**row, "action": row["action"] + 1, "made": jnp.float32(3)})
    on_read = (Scale("reward", offset=7.0), Normalize("speed", center=True), add)
    buffer = dataclasses.replace(make(Device(), VIEWS[view], on_read), on_write=None)
    rows = given_rows(np.random.default_rng(0), 9)
    rows = {"obs": rows.pop("observation"), **rows}
    state = buffer.init(jax.tree.map(lambda x: x[0, 0], rows))
    empty = buffer.peek(state, jax.random.key(0), 3)
    assert not empty.mask.any() and all(not np.asarray(x).any() for x in jax.tree.leaves(empty.data))
    batch = buffer.peek(buffer.extend(state, rows), jax.random.key(0), 64)
    assert batch.mask.all() and (np.asarray(batch.data["made"]) == 3).all()
    if view == "Sequence":
        gone = ~np.asarray(batch.data["mask"])
        assert gone.any()
        for name in ("reward", "speed"):
            assert not np.asarray(batch.data[name])[gone].any()
            assert np.asarray(batch.data[name])[~gone].all()


def collapsed(window: Any) -> Any:
    """One value a window beside its rows: a number, a vector as wide as rows are, and the state it begins with."""
    total = {"total": window["reward"].sum(), "wide": window["x"].sum(0), "begins": window["x"][0]}
    return {**window, **total}


def discounted(window: Any) -> Any:
    """Only of windows of four rows."""
    return {"sum": (window["reward"] * 0.5 ** jnp.arange(4.0)).sum(), "mask": window["mask"]}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("width", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_one_value_a_window_is_not_taken_for_its_rows(width: int, nested: bool) -> None:
    """Though it is as long as the window, and rows are missing there."""
    names = ("total", "wide", "begins", "reward")
    later: Any = (
        Scale(names, 2.0, 1.0),
        Rename({"wide": "x/wide", "x": "x/rows"}),
        Normalize(("x/wide", "x/rows"), of="x"),
    )
    on_read = (Map(collapsed), Chain(later)) if nested else (Map(collapsed), *later)
    view = Sequence(4, boundary="mask", at=1, episode_end=("done",))
    buffer = fbuf.Buffer(20, view=view, on_read=on_read)
    rng = np.random.default_rng(width)
    x, reward = rng.normal(3, 2, (9, width)).astype(np.float32), rng.normal(size=9).astype(np.float32)
    rows = {"x": x, "reward": reward, "done": np.arange(9) % 3 == 2}
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    batch = buffer.peek(state, jax.random.key(0), 16).data
    plain_buffer = dataclasses.replace(buffer, on_read=None)
    plain = plain_buffer.peek(buffer.convert(plain_buffer, state), jax.random.key(0), 16).data
    there = np.asarray(plain["mask"])
    assert not there.all()
    before = np.asarray(plain["x"])
    close(batch["total"], np.asarray(plain["reward"]).sum(1) * 2 + 1)
    close(batch["begins"], before[:, 0] * 2 + 1)
    close(batch["reward"], np.where(there, np.asarray(plain["reward"]) * 2 + 1, 0).astype(np.float32))
    mean, std = x.mean(0), x.std(0)
    close(batch["x"]["wide"], (before.sum(1) * 2 + 1 - mean) / std)
    close(batch["x"]["rows"], np.where(there[..., None], (before - mean) / std, 0))


def apart(window: Any) -> Any:
    """Two vectors and two numbers a window."""
    x, reward = window["x"], window["reward"]
    one = {"sum": x.sum(0), "first": x[0], "least": reward.min(), "most": reward.max()}
    return {**window, **one, "image": jnp.tile(reward.sum(), (5, 5))}


def laned_windows(width: int, on_read: Any = None) -> tuple[fbuf.Buffer, Any]:
    """Windows of four rows, of which the last may be missing."""
    view = Sequence(4, boundary="mask", episode_end=("done",))
    buffer = fbuf.Buffer(20, view=view, on_read=on_read)
    x = np.random.default_rng(width).normal(size=(9, width)).astype(np.float32)
    rows = {"x": x, "reward": np.arange(1.0, 10.0, dtype=np.float32), "done": np.arange(9) % 3 == 2}
    return buffer, buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)


# Together 4 numbers, a window's rows; 3 to a vector, or 4, or 5, the rows of the window that is traced to tell them apart.
@pytest.mark.parametrize("width", [2, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 5))])
def test_axes_of_what_is_there_once_a_window_are_its_own(width: int) -> None:
    join = Concatenate(("sum", "first"), into="both", sizes=(width, width))
    stack = Stack(("least", "most"), into="range")
    on_read = (Map(apart), join, stack, Augment("image", 1), join.inverse(), Stack(("sum", "first"), "pair", axis=-1))
    buffer, state = laned_windows(width, on_read)
    batch = buffer.peek(state, jax.random.key(0), 16).data
    plain, same = laned_windows(width)
    before = plain.peek(same, jax.random.key(0), 16).data
    assert not np.asarray(before["mask"]).all()
    x, reward = np.asarray(before["x"]), np.asarray(before["reward"])
    close(batch["pair"], np.stack([x.sum(1), x[:, 0]], axis=-1))
    close(batch["range"], np.stack([reward.min(1), reward.max(1)], axis=-1))
    close(batch["image"], np.tile(reward.sum(1)[:, None, None], (1, 5, 5)))


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            Concatenate(("x", "sum"), "y"),
            r"leaf 'sum' is \[4\] a window, but 'x' is \[4\] a row; .*Map and jnp.broadcast_to",
        ),
        (Stack(("reward", "most"), "y"), r"leaf 'most' is \[\] a window, but 'reward' is \[\] a row"),
        (Concatenate(("least", "most"), "y"), r"leaf 'least' is float32\[\] a window, and has no axis -1. Use Stack"),
        (Split("sum", ("a", "b"), (1, 1)), r"leaf 'sum' is \[4\] a window, but sizes=\(1, 1\) come to 2; expected 4"),
    ],
)
def test_rows_and_what_is_there_once_a_window_do_not_join(stage: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laned_windows(4, (Map(apart), stage))


def test_a_function_of_windows_of_one_length_goes_on() -> None:
    view = Sequence(4, boundary="mask", episode_end=("done",))
    buffer = fbuf.Buffer(8, view=view, on_read=(Map(discounted), Scale("sum", 1.0, 1.0)))
    rows = {"reward": jnp.ones(4), "done": jnp.array([False, True, False, False])}
    state = buffer.extend(buffer.init({"reward": 0.0, "done": False}), rows)
    assert set(buffer.peek(state, jax.random.key(0), 16).data["sum"].tolist()) <= {2.0, 2.5, 2.75, 2.875}


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5))
def test_statistics_of_rows_that_were_written(masks: Any) -> None:
    """Of all that ever came, overwritten or not, and of none that was masked."""
    buffer, extend = _small()
    state, seen, rng = buffer.init({"reward": 0.0}), [], np.random.default_rng(len(masks))
    for mask in masks:
        reward = rng.normal(2, 3, 4).astype(np.float32)
        state = extend(state, {"reward": reward}, np.array(mask))
        seen += reward[np.array(mask)].tolist()
    stats = buffer.stats(state)
    np.testing.assert_allclose(stats["r_mean"], np.mean(seen) if seen else 0, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stats["r_std"], np.std(seen) if seen else 0, rtol=1e-4, atol=1e-5)
    state = buffer.clear(state)
    assert int(buffer.size(state)) == 0 and float(buffer.stats(state)["r_mean"]) == float(stats["r_mean"])


@functools.cache
def _small() -> Any:
    buffer = fbuf.Buffer(3, on_read={"r": NormalizeReward()})
    return buffer, jax.jit(lambda state, rows, mask: buffer.extend(state, rows, mask=mask))


def test_numbers_that_are_none_are_counted_and_spoil_nothing() -> None:
    buffer = fbuf.Buffer(8, on_write={"norm": NormalizeReward()}, on_read={"later": NormalizeReward(clip=5.0)})
    state = buffer.init({"reward": 0.0})
    state = buffer.extend(state, {"reward": jnp.array([1.0, jnp.nan, 3.0, jnp.inf, 1e30])})
    stats = buffer.stats(state)
    assert int(stats["norm_skipped"]) == 3 and float(stats["norm_mean"]) == 2.0 and float(stats["norm_std"]) == 1.0
    state = buffer.extend(state, {"reward": jnp.array([5.0, 7.0])})
    assert np.isfinite(float(buffer.stats(state)["norm_std"])) and np.isfinite(float(buffer.stats(state)["later_std"]))


# ---------------------------------------------------------------------------------------- in place, and fused


@pytest.mark.parametrize("prefetch", [0, 1])
def test_steps_are_in_place(prefetch: int) -> None:
    settings = {"prefetch": 1, "batch_size": 8} if prefetch else {}
    buffer = fbuf.Buffer(
        200_000, lanes=2, view=Transition(), on_write=ON_WRITE, on_read=ON_READ, sampler=Prioritized(), **settings
    )
    state = jax.eval_shape(buffer.init, EXAMPLE)

    def step(state: Any, given: Any) -> Any:
        state, batch = buffer.sample(state, given[1], 8)
        state = buffer.extend(state, given[0])
        state, other = buffer.sample(state, given[1], 8)
        return state, (batch, other)

    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, 2, *x.shape), x.dtype), EXAMPLE)
    assert_inplace(step, state, (rows, jax.ShapeDtypeStruct((2,), jnp.uint32)))


def frames(on_read: Any, batch: int) -> tuple[Any, Any]:
    buffer = fbuf.Buffer(1000, on_read=on_read)
    state = jax.eval_shape(buffer.init, {"obs": jax.ShapeDtypeStruct((84, 84), np.uint8)})
    return (lambda state, key: buffer.sample(state, key, batch)), (state, jax.ShapeDtypeStruct((2,), jnp.uint32))


@pytest.mark.parametrize("scale", [Scale("obs"), Scale("obs", 2 / 255, -1.0)], ids=["factor", "offset"])
def test_scale_costs_no_copy(scale: Scale) -> None:
    """The compiled program has one float array of the batch's size, its result; what it reads stays uint8."""
    batch = 64
    fn, args = frames(scale, batch)
    plain = measure(*_flat(frames(None, batch)))
    memory = measure(fn, *args)
    pixels = batch * 84 * 84
    assert memory.made - plain.made <= 4 * pixels
    assert memory.temporary <= plain.temporary + pixels + 4096  # the uint8 batch is no result any more
    text = jax.jit(fn, donate_argnums=0).lower(*args).compile().as_text()
    entry, own = text[text.index("ENTRY") :], r"= f32\[64,84,84\]\S* "
    made = [line for line in entry.splitlines() if re.search(own + r"(?!get-tuple-element|bitcast|parameter)\w", line)]
    assert len(made) == 1, made
    called = re.search(own + r"call\(.*to_apply=(%[\w.-]+)", made[0])
    if called:  # older releases of XLA cut a kernel into parts for several threads in a function of its own
        body = text[text.index(f"\n{called[1]} (") :]
        made = re.findall(r"ROOT .*", body[: body.index("\n}")])
    assert len(made) == 1 and re.search(own + r"fusion\(", made[0]), made


def _flat(pair: Any) -> Any:
    return pair[0], *pair[1]


def test_without_transforms_nothing_changes() -> None:
    buffer = fbuf.Buffer(10, prefetch=1, batch_size=2)
    for none in (None, (), {}, Chain()):
        assert fbuf.Buffer(10, prefetch=1, batch_size=2, on_write=none, on_read=none) == buffer
    state = buffer.init({"x": 0.0})
    assert state.transforms is None and state.ahead.reading is None
    scaled = dataclasses.replace(buffer, on_read=Scale("x"))
    assert jax.tree.structure(scaled.init({"x": 0.0})) == jax.tree.structure(state)


# ---------------------------------------------------------------------------------------------- one's own, in 15 lines


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Clip:
    """Cuts rewards."""

    largest: float

    def apply(self, data: Any, context: Any) -> Any:
        return {**data, "reward": jnp.clip(data["reward"], -self.largest, self.largest)}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Largest:
    """Divides rewards by the largest that came."""

    def watches(self, spec: Any) -> tuple[str, ...]:
        return ("reward",)

    def init(self, spec: Any) -> Any:
        return jnp.float32(0)

    def observe(self, memory: Any, leaves: Any, mask: Any) -> Any:
        return jnp.maximum(memory, jnp.max(jnp.where(mask, jnp.abs(leaves["reward"]), jnp.float32(0))))

    def stats(self, memory: Any) -> dict[str, jax.Array]:
        return {"is": memory}

    def apply(self, data: Any, context: Any) -> Any:
        return {**data, "reward": data["reward"] / context.memory}


def test_ones_own() -> None:
    rows = {"reward": jnp.array([-9.0, 1.0, 4.0])}
    buffer = fbuf.Buffer(4, on_write=Clip(2.0))
    assert buffer.rows(buffer.extend(buffer.init({"reward": 0.0}), rows)).data["reward"].tolist() == [
        -2.0,
        1.0,
        2.0,
        0.0,
    ]
    for settings in ({"on_read": Largest()}, {"on_write": Largest()}):
        buffer = fbuf.Buffer(4, sampler=Epoch(shuffle=False), **settings)
        state = buffer.extend(buffer.init({"reward": 0.0}), rows, mask=jnp.array([False, True, True]))
        assert float(buffer.stats(state)["largest_is"]) == 4.0
        assert buffer.sample(state, jax.random.key(0), 2)[1].data["reward"].tolist() == [0.25, 1.0]


# ------------------------------------------------------------------------------------------------- other verbs


def test_convert_keeps_what_stages_know_and_others_learn_from_the_rows_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_observing, "BLOCK_BYTES", 4 * 3)  # several blocks
    buffer = fbuf.Buffer(8, on_read=NormalizeReward(), episode_end=("done",))
    example = {"reward": 0.0, "done": False}
    state = buffer.init(example)
    for first in (0.0, 6.0):
        reward = first + jnp.arange(6.0)
        state = buffer.extend(state, {"reward": reward, "done": jnp.zeros(6, bool)})
    ever, held = np.arange(12.0), np.arange(4.0, 12.0)
    assert float(buffer.stats(state)["normalize_reward_mean"]) == ever.mean()
    more = dataclasses.replace(
        buffer, view=Sequence(2, episode_end=("done",)), on_read=buffer.on_read.append(Normalize("reward"), name="own")
    )
    stats = more.stats(buffer.convert(more, state))
    assert float(stats["normalize_reward_mean"]) == ever.mean()
    np.testing.assert_allclose(
        [stats["own_reward_mean"], stats["own_reward_std"]], [held.mean(), held.std()], rtol=1e-6
    )
    without = dataclasses.replace(buffer, on_read=Drop("done"))
    assert buffer.convert(without, state).transforms is None
    again = without.convert(buffer, buffer.convert(without, state))
    np.testing.assert_allclose(buffer.stats(again)["normalize_reward_mean"], held.mean(), rtol=1e-6)
    jitted = jax.jit(lambda state: buffer.convert(more, state))(state)
    np.testing.assert_allclose(more.stats(jitted)["own_reward_mean"], held.mean(), rtol=1e-6)


def test_convert_refuses_another_on_write() -> None:
    buffer = fbuf.Buffer(8, on_write=Scale("x"))
    state = buffer.init({"x": jnp.uint8(0)})
    with pytest.raises(ValueError, match=r"other.on_write is None; expected Chain\(\(Scale.*add the rows anew"):
        buffer.convert(fbuf.Buffer(8), state)


def test_states_of_other_transforms_are_refused() -> None:
    buffer = fbuf.Buffer(8, on_write=Scale("x"))
    state = buffer.init({"x": jnp.uint8(0)})
    for other in (fbuf.Buffer(8), fbuf.Buffer(8, on_write=Normalize("x")), fbuf.Buffer(8, on_read=Normalize("x"))):
        with pytest.raises(ValueError, match="made by another buffer.*other transforms"):
            other.sample(state, jax.random.key(0), 2)
    with pytest.raises(ValueError, match="made by another buffer"):
        buffer.sample(fbuf.Buffer(8).init({"x": jnp.uint8(0)}), jax.random.key(0), 2)


def test_rows_are_checked_as_they_are_given() -> None:
    buffer = make(Device(), VIEWS["Row"])
    state, rows = buffer.init(EXAMPLE), given_rows(np.random.default_rng(0), 3)
    for broken, message in (
        (
            {**rows, "observation": rows["observation"].astype(np.float32)},
            "leaf 'observation' is float32; this .* uint8",
        ),
        ({n: x for n, x in rows.items() if n != "speed"}, "leaf 'speed' is missing"),
        ({**rows, "obs": rows["observation"]}, "leaf 'obs' is not in this buffer"),
        ({**rows, "reward": rows["reward"][..., None]}, r"leaf 'reward' has shape \[3, 2, 1\]; expected \[N, E\]"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"Buffer.extend: {message}"):
            buffer.extend(state, broken)
    assert buffer.extend(state, {n: x[:0] for n, x in rows.items()}) is state
    one = buffer.add(state, {n: x[0] for n, x in rows.items()})
    close(buffer.last(one, 1).data["obs"][0], rows["observation"][0])
    index = buffer.last(one, 1).index
    flat = fbuf.Index(index.slot.reshape(-1), index.ticket.reshape(-1))
    changed = buffer.update_rows(one, flat, {"action": jnp.full(2, 77, jnp.int16)})
    assert buffer.last(changed, 1).data["action"].tolist() == [[77, 77]]


@pytest.mark.parametrize(
    ("settings", "example", "message"),
    [
        ({"on_write": Scale("y")}, {"x": 0.0}, "Scale: leaf 'y' is not there"),
        ({"on_read": Scale("y")}, {"x": 0.0}, "Scale: leaf 'y' is not there"),
        ({"on_read": NormalizeReward()}, {"x": 0.0}, "statistics are to be of leaf 'reward', but rows have x"),
        ({"on_read": RewardToGo()}, {"reward": 0.0}, "it goes along time.*views.Sequence, views.Episode"),
        ({"on_write": Map(lambda row: row["x"].sum())}, {"x": jnp.zeros(3)}, None),
        ({"on_read": Map(lambda row: {"y": row["x"].sum()})}, {"x": jnp.zeros(3)}, None),
        (
            {"on_write": Drop("x"), "episode_end": ("x",)},
            {"x": False, "y": 0},
            "episode_end names 'x', but rows have y",
        ),
        ({"on_write": Drop("x")}, {}, "the example has no leaves"),
        ({"on_write": Drop("x"), "view": Sequence(2)}, {"x": False, "y": 0}, "episode_end names 'terminated'"),
    ],
)
def test_what_does_not_fit_is_said_by_init(settings: Any, example: Any, message: str | None) -> None:
    buffer = fbuf.Buffer(8, **settings)
    if message is None:
        state = buffer.init(example)
        assert buffer.plan(example).device == buffer.nbytes(state)["device"]
        return
    for call in (buffer.init, buffer.plan) if "on_read" not in settings else (buffer.init,):
        with pytest.raises((ValueError, TypeError), match=message):
            call(example)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Loses:
    """Forgets the leading axes."""

    def apply(self, data: Any, context: Any) -> Any:
        return {"x": data["x"].sum()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fbuf.Buffer(8, on_write=Augment("x")),
            "stage 'augment' of on_write, .* needs a key, but `extend` has none",
        ),
        (lambda: fbuf.Buffer(8, on_read=lambda x: x), r"on_read is <function.*Write Map\("),
        (lambda: fbuf.Buffer(8, on_write=3), "on_write is 3. Chain: a stage is 3, which has no `apply`"),
        (lambda: fbuf.Buffer(8, on_read=Scale), "a stage is the class Scale"),
        (
            lambda: fbuf.Buffer(8, storage=Ragged(), on_write=Scale("x")),
            "hold what is no array; expected None. Use on_read",
        ),
        (
            lambda: fbuf.Buffer(8, on_write=NormalizeReward(), on_read=NormalizeReward()),
            "both have a stage 'normalize_reward' that remembers something; expected two names",
        ),
        (lambda: fbuf.Buffer(8, on_write=Loses()).init({"x": 0.0}), r"'loses' of on_write.* leaf 'x' of shape \[\]"),
        (
            lambda: fbuf.Buffer(8, on_read=Loses()).init({"x": 0.0}),
            r"on_read, .* leaf 'x' of shape \[\] for a batch of 2",
        ),
    ],
)
def test_what_makes_no_sense(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_plan_is_what_is_then_measured() -> None:
    buffer = make(Device(), VIEWS["Row"], prefetch=1, batch_size=4)
    plan = buffer.plan(EXAMPLE, rows=given_rows(np.random.default_rng(0), 5))
    assert plan.device == buffer.nbytes(buffer.init(EXAMPLE))["device"]


def test_windows_to_the_end_of_episodes() -> None:
    """`Episode` with sums over each."""
    buffer = fbuf.Buffer(
        20, view=Episode(4, episode_end=("done",)), on_read=RewardToGo(1.0, episode_end=("done",), complete="all")
    )
    rows = {"reward": jnp.arange(1.0, 8.0), "done": jnp.array([0, 0, 1, 0, 1, 0, 0], bool)}
    batch = buffer.peek(buffer.extend(buffer.init({"reward": 0.0, "done": False}), rows), jax.random.key(0), 32)
    found = {tuple(x) for x in np.asarray(batch.data["reward_to_go"]).tolist()}
    assert found == {(6.0, 5.0, 3.0, 0.0), (9.0, 5.0, 0.0, 0.0)}
    np.testing.assert_array_equal(batch.data["all"], batch.data["mask"])


# ------------------------------------------------------------------------------------------ with everything else


def test_with_top_k_the_rank_is_of_what_is_stored() -> None:
    buffer = fbuf.Buffer(2, writer=fbuf.writers.TopK("score"), on_write=Scale("score", -1.0))
    state = buffer.extend(buffer.init({"score": 0.0}), {"score": jnp.array([3.0, 1.0, 2.0])})
    assert buffer.rows(state).data["score"].tolist() == [-1.0, -2.0]


def test_replay_and_checked() -> None:
    example = {"o": np.zeros(2, np.uint8), "reward": 0.0}
    buffer = fbuf.Buffer(8, on_write=Rename({"o": "obs"}), on_read=(Scale("obs", 1.0), NormalizeReward()))
    replay = fbuf.Replay(buffer, example)
    replay.add({"o": np.full(2, 3, np.uint8), "reward": 5})
    replay.extend({"o": np.full((2, 2), 3, np.uint8), "reward": np.array([5.0, 5.0], np.float32)})
    batch = replay.sample(4, to="numpy")
    assert (batch.data["obs"] == 3).all() and batch.data["obs"].dtype == np.float32
    assert replay.stats()["normalize_reward_mean"] == 5.0
    with pytest.raises(ValueError, match="Replay.add: leaf 'o' is missing"):
        replay.add({"obs": np.zeros(2, np.uint8), "reward": 0.0})
    checked = fbuf.checked(buffer)
    with pytest.raises(ValueError, match="there is nothing to draw"):
        checked.sample(checked.init(example), jax.random.key(0), 2)
    assert checked.on_read is buffer.on_read


def test_ragged_rows_are_transformed_after_they_are_read() -> None:
    buffer = fbuf.Buffer(8, storage=Ragged(), on_read=(Scale("reward", 2.0), NormalizeReward()))
    state = buffer.init({"text": "", "reward": 0.0})
    state = buffer.extend(state, [{"text": "a", "reward": 1.0}, {"text": "b", "reward": 3.0}])
    batch = buffer.sample(state, jax.random.key(0), 4)[1]
    want = {"a": 2.0, "b": 6.0}
    assert batch.data["reward"].tolist() == [want[x] for x in batch.lazy["text"]]
    assert float(buffer.stats(state)["normalize_reward_std"]) == 1.0
    larger, grown = buffer.grow(state)
    assert float(larger.stats(grown)["normalize_reward_std"]) == 1.0


def test_data_sets_are_looked_at_when_they_are_opened(tmp_path: Path) -> None:
    rows = pieces.make(tmp_path)
    buffer, state = fbuf.datasets.open(tmp_path, on_read=NormalizeReward())
    reward = np.asarray(rows["reward"], np.float64)
    np.testing.assert_allclose(buffer.stats(state)["normalize_reward_mean"], reward.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(buffer.stats(state)["normalize_reward_std"], reward.std(), rtol=1e-5)
    with pytest.raises(ValueError, match="on_write is .* are there already.*fbuf.datasets.preprocess"):
        dataclasses.replace(buffer, on_write=Scale("reward"))


def test_files_are_resumed(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(
        4, storage=Memmap(str(tmp_path / "rows")), on_write=Rename({"r": "reward"}), on_read=NormalizeReward()
    )
    state = buffer.extend(buffer.init({"r": 0.0}), {"r": jnp.arange(6.0)})
    buffer.flush(state)
    del state
    state = buffer.resume({"r": 0.0})
    assert float(buffer.stats(state)["normalize_reward_mean"]) == 3.5  # of the rows that are held
    state = buffer.extend(state, {"r": jnp.array([9.0])})
    assert float(buffer.last(state, 1).data["reward"][0]) == 9.0


def test_what_an_inverse_does_to_a_batch() -> None:
    on_read = Chain((Stack(("a", "b"), "both"), Normalize("both", of="a"), Scale("reward", 0.1, source="float32")))
    buffer = fbuf.Buffer(8, on_read=on_read)
    rows = {"a": jnp.arange(5.0), "b": 3 * jnp.arange(5.0), "reward": jnp.arange(5.0)}
    state = buffer.extend(buffer.init({n: 0.0 for n in rows}), rows)
    batch = buffer.peek(state, jax.random.key(0), 6)
    back = transforms.apply(on_read.inverse(), batch.data, memory=state.transforms.read)
    close(back, buffer.get(state, batch.index).data)


def test_names_of_subtrees_and_of_tuples() -> None:
    buffer = fbuf.Buffer(8, on_write=Select(("next/obs", "r")), on_read=Rename({("next", "obs"): "obs"}))
    state = buffer.init({"next": {"obs": 0.0, "t": 0}, "r": 0.0})
    assert buffer.peek(state, jax.random.key(0), 2).data.keys() == {"obs", "r"}


def test_exported_steps_know_what_rows_are(tmp_path: Path) -> None:
    from jax import export

    buffer = make(Device(), VIEWS["Row"])
    state, rows = buffer.init(EXAMPLE), given_rows(np.random.default_rng(0), 3)
    made = export.export(jax.jit(buffer.extend))(state, rows)
    again = export.deserialize(made.serialize())
    same(again.call(state, rows), jax.jit(buffer.extend)(state, rows))
