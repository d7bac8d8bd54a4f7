"""`storages.Deduplicated`: bad hashes, counters near 2^32, growth, loops and memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf import _blocktable
from fbuf._state import COUNTERS
from fbuf.samplers import Prioritized, Uniform
from fbuf.storages import Deduplicated
from fbuf.testing import assert_inplace, measure
from fbuf.views import Row, Transition
from tests.support.deduplicated import (
    KEY,
    SMALL,
    Fields,
    Trial,
    check,
    from_pool,
    methods_of,
    same,
    small,
)
from tests.support.deduplicated_device import (
    BATCH_BYTES,
    OBS,
    PLAYED,
    SIZES,
    atari,
    check_batches,
    check_full_table,
    noise_rows,
    played,
)

# ------------------------------------------------------------------------------------------------------- bad hashes


def _constant(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    zero = jnp.zeros(blocks.shape[:1], jnp.uint32)
    return zero, zero + jnp.uint32(5)


def test_equal_fingerprints_of_different_blocks_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocktable, "digest", _constant)
    storage = Deduplicated(keys=("obs",), block=(4, 4), blocks=512, on_full="refuse")
    trial = Trial(fbuf.Buffer(37, storage=storage), {"obs": ((8, 8), np.uint8)})  # a capacity of this test alone
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (60, 4, 4), np.uint8)

    def rows(kinds: int) -> Fields:
        tiles = pool[rng.integers(0, kinds, (6, 1, 2, 2))]
        return {"obs": np.moveaxis(tiles, -3, -2).reshape(6, 1, 8, 8)}

    for _ in range(8):
        trial.extend(rows(40))
        trial.compare()
    assert trial.counters()[0] == 0  # two buckets hold 64 blocks (63 if one of them is the first)
    prints = np.asarray(trial.state.rows.tables[0].prints)
    assert len(set(prints[prints != 0])) == 1 and np.sum(prints != 0) <= 64
    for _ in range(8):  # more kinds than that: some rows are refused, the others are exact
        trial.extend({"obs": rng.integers(0, 256, (6, 1, 8, 8), np.uint8)})
        trial.extend(rows(60))
        trial.compare()
    assert trial.counters()[0] > 0


# --------------------------------------------------------------------------------------------------------- counters


@pytest.mark.parametrize("on_full", ["refuse", "retire"])
def test_counters_wrap_at_2_to_the_32(on_full: str) -> None:
    """Nothing but noise, in a table far too small: some row can always be read."""
    trial, which = Trial(small(on_full), SMALL), ("refuse", "retire").index(on_full)
    counter = COUNTERS.index(("refused_rows", "retired_rows")[which])
    counters = trial.state.counters.at[counter].set(jnp.uint32(2**32 - 3))
    trial.state, went = dataclasses.replace(trial.state, counters=counters), 0
    for seed in range(8):
        before, rng = trial.counters(), np.random.default_rng(seed)
        noise = {name: rng.integers(0, 256, (4, 3, *shape), np.uint8) for name, (shape, _) in SMALL.items()}
        trial.extend(noise, np.ones((4, 3), bool))
        went += int((trial.counters() - before)[which])
        trial.compare()
        assert any(n not in trial.refused for lane in trial.arrived for n in lane)
    assert went > 6 and int(trial.counters()[which]) == (2**32 - 3 + went) % 2**32


# --------------------------------------------------------------------------------------------------- jit, vmap, scan


LANES, BATCH = 2, 6


RICH = fbuf.Buffer(
    48,
    lanes=LANES,
    storage=Deduplicated(keys=("obs",), block=(4, 4), blocks=64),
    sampler=Prioritized(),
    view=Transition(n_step=2, stack=2),
)


EXAMPLE = {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in PLAYED.items()}


def rich_rows(seed: int, steps: int = 3) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return jax.device_put(played(rng, 1 + 100 * seed, (steps, LANES)))


def step(buffer: fbuf.Buffer, state: Any, key: jax.Array, rows: Any) -> Any:
    """Every verb that changes a state but `clear`."""
    state = buffer.extend(state, rows)
    state, batch = buffer.sample(state, key, BATCH)
    state = buffer.update_priority(state, batch.index, batch.data["reward"])
    return buffer.update_rows(state, batch.index, {"obs": batch.data["obs"][:, 0]}), batch


@functools.cache
def stepped() -> Callable[..., Any]:
    """The step, compiled ahead of time."""
    shapes = (jax.eval_shape(RICH.init, EXAMPLE), jax.random.key_data(KEY), rich_rows(0))
    return jax.jit(functools.partial(step, RICH)).lower(*shapes).compile()


@functools.cache
def filled(seed: int = 0) -> Any:
    """A state whose table is full and has retired rows. Nobody may donate it."""
    state = RICH.init(EXAMPLE)
    for turn in range(8):
        state, _ = stepped()(state, jax.random.key_data(jax.random.key(turn)), rich_rows(10 * seed + turn))
    assert int(RICH.stats(state)["retired_rows"]) > 0
    check(state)
    return state


def near(a: Any, b: Any) -> None:
    """As `same`, but for the last bits of sums of floats."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), jax.device_get(a), jax.device_get(b))


def test_no_method_calls_back_to_the_host() -> None:
    """Whatever calls Python, in whatever way, says so in the text that is lowered."""
    state = jax.eval_shape(RICH.init, EXAMPLE)
    rows, key = rich_rows(0), jax.random.key_data(KEY)
    index = fbuf.Index(jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.uint32))
    calls = {
        "init": (lambda: RICH.init(EXAMPLE), ()),
        "step": (functools.partial(step, RICH), (state, key, rows)),
        "add": (RICH.add, (state, jax.tree.map(lambda x: x[0], rows))),
        "masked": (lambda s, r: RICH.extend(s, r, mask=r["terminated"]), (state, rows)),
        "get": (RICH.get, (state, index)),
        "rows": (RICH.rows, (state,)),
        "last": (lambda s: RICH.last(s, 2), (state,)),
        "stats": (RICH.stats, (state,)),
        "clear": (RICH.clear, (state,)),
        "convert": (lambda s: RICH.convert(dataclasses.replace(RICH, sampler=Uniform()), s), (state,)),
    }
    for name, (call, args) in calls.items():
        text = jax.jit(call).lower(*args).as_text()
        assert "callback" not in text and "host" not in text.replace("xla_host", ""), name
    shown = jax.jit(lambda x: jax.pure_callback(np.sin, x, x)).lower(jnp.float32(0)).as_text()
    assert "callback" in shown, "the check checks nothing"


def test_vmapped_states_do_what_single_ones_do() -> None:
    """Three buffers at once, one empty, one full and retiring, each with rows of its own."""
    states = [RICH.init(EXAMPLE), filled(0), filled(1)]
    rows, keys = [rich_rows(40 + i) for i in range(3)], jax.random.split(KEY, 3)
    keys = jax.vmap(jax.random.key_data)(keys)
    stack = lambda *x: jnp.stack(x)  # noqa: E731
    together = jax.jit(jax.vmap(functools.partial(step, RICH)))
    after = jax.tree.map(stack, *states)
    many = jax.tree.map(stack, *rows)
    for _ in range(3):
        after, batches = together(after, keys, many)
        for i in range(3):
            states[i], batch = stepped()(states[i], keys[i], rows[i])
            one = jax.tree.map(lambda x, i=i: x[i], (after, batches))
            near(one, (states[i], batch))
            same(one[0].rows, states[i].rows)
            check(one[0])


def test_scan_does_what_a_loop_does() -> None:
    keys = jax.vmap(jax.random.key_data)(jax.random.split(KEY, 4))
    many = jax.tree.map(lambda *x: jnp.stack(x), *(rich_rows(50 + i) for i in range(4)))
    scanned, batches = jax.jit(lambda s: lax.scan(lambda s, x: step(RICH, s, *x), s, (keys, many)))(filled())
    state = filled()
    for i in range(4):
        state, batch = stepped()(state, keys[i], rich_rows(50 + i))
        same(jax.tree.map(lambda x, i=i: x[i], batches.index), batch.index)
    same(scanned.rows, state.rows)
    near(scanned, state)
    check(scanned)


def test_gradients_go_through_sample() -> None:
    def loss(weight: jax.Array, state: Any, key: jax.Array) -> Any:
        state, batch = RICH.sample(state, key, BATCH)
        error = weight * batch.data["obs"].astype(jnp.float32).mean(axis=(1, 2, 3)) - batch.data["reward"]
        return jnp.mean(batch.weight * error**2), state

    slope, _ = jax.jit(jax.grad(loss, has_aux=True))(jnp.float32(0.5), filled(), KEY)
    batch = RICH.peek(filled(), KEY, BATCH)
    feature = np.asarray(batch.data["obs"]).astype(np.float32).mean(axis=(1, 2, 3))
    want = np.mean(2 * batch.weight * (0.5 * feature - batch.data["reward"]) * feature)
    np.testing.assert_allclose(slope, want, rtol=1e-4)
    assert slope != 0


def test_batches_are_those_of_device() -> None:
    check_batches("none", "final")


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.optimized
def test_a_write_needs_less_than_four_times_its_frames() -> None:
    """Temporary bytes, at a hundred times the rows and 16 times the blocks the same."""
    needed = []
    for capacity, blocks in SIZES:
        buffer, state, rows = atari(capacity, blocks)
        needed.append(assert_inplace(buffer.extend, state, rows, bound=4 * BATCH_BYTES).temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024


@pytest.mark.optimized
def test_control_a_step_that_drops_the_state_copies() -> None:
    """The rows of the largest buffer are ids: a copy of these is what a dropped state costs."""
    buffer, state, rows = atari(10**5, 2**18)

    def careless(state: Any, rows: Any, key: Any) -> Any:
        _, batch = buffer.sample(state, key, 8)
        return buffer.extend(state, rows), batch

    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    assert measure(careless, state, rows, key).temporary > 4 * BATCH_BYTES


# -------------------------------------------------------------------------------------------------- full tables, growth


def test_growing_keeps_rows_indices_priorities_and_batches() -> None:
    """A full table of two leaves, and one of a third; then rows come that had found no place before."""
    leaves = SMALL | {"c": ((6, 6), np.float32)}
    cut = {"a": (4, 4), "b": (4, 4), "c": (3, 3)}
    storage = Deduplicated(keys=("a", "b", "c"), block=cut, blocks={"a": 64, "b": 64, "c": 96}, on_full="refuse")
    buffer = fbuf.Buffer(36, lanes=3, storage=storage, sampler=Prioritized())
    trial, rng = Trial(buffer, leaves), np.random.default_rng(0)
    every = np.ones((4, 3), bool)

    def extend() -> None:
        numbers = rng.integers(0, 9, (4, 3, 6, 6)).astype(np.float32)
        numbers[rng.random(numbers.shape) < 0.1] = np.nan
        trial.extend(from_pool(rng, (4, 3)) | {"c": numbers}, every, rng.exponential(size=(4, 3)).astype(np.float32))
        trial.compare()

    for _ in range(5):
        extend()
    assert trial.refused
    state = trial.state
    readable = [n for lane in trial.arrived for n in lane if n not in trial.refused]
    index, batch = trial.index_of(readable), buffer.peek(state, KEY, 64)
    for wanted, places in ((None, [192, 160]), ({"a": 608, "b": 416, "c": 96}, [1024, 96])):
        grown, larger = buffer.grow(state, wanted)
        assert [len(table.count) for table in larger.rows.tables] == places
        check(larger)
        same(grown.peek(larger, KEY, 64), batch)
        same(grown.rows(larger), buffer.rows(state))
        assert bool(grown.get(larger, index).mask.all())
        same(larger.sampler, state.sampler)
        stats, before = jax.device_get((grown.stats(larger), buffer.stats(state)))
        assert stats["blocks"] == before["blocks"]
        # of the fullest table: the one that stays as it is, the second time
        assert stats["blocks_load"] < before["blocks_load"] if wanted is None else stats["blocks_load"] > 0.8
        empty = jax.eval_shape(grown.init, trial.example)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(empty)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(larger)
        ]
        same(buffer.peek(state, KEY, 64), batch)  # the old state still is what it was
    trial.buffer, trial.methods, trial.state = grown, methods_of(grown), larger
    trial.compare()
    extend()
    extend()


@pytest.mark.parametrize(("number", "view"), [(60, Row()), (300, Transition())])
def test_a_table_with_room_for_all_rows_gives_up_none(number: int, view: Any) -> None:
    check_full_table(number, view)


def test_masked_writes_do_not_change_the_forecast() -> None:
    """A write that is masked throughout changes nothing of what is foreseen; one that is padded counts what it brings."""
    buffer = fbuf.Buffer(2000, storage=Deduplicated(keys=("obs",), block=(8, 8), blocks=2048))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for number, brought, between in ((160, 160, True), (512, 8, False)):
        state = buffer.init(OBS)
        for i in range(30 if between else 200):
            state = extend(state, noise_rows(number, seed=i), mask=np.arange(number) < brought)
            if between:
                state = extend(state, noise_rows(number), mask=np.zeros(number, bool))
        stats = buffer.stats(state)
        assert int(stats["refused_rows"]) == 0 and int(stats["retired_rows"]) > 0
        assert 0.55 < float(stats["blocks_load"]) < 0.96, (number, stats)


def test_load_is_that_of_the_fullest_table() -> None:
    example = OBS | {"wide": jax.ShapeDtypeStruct((4, 64), np.uint8)}
    storage = Deduplicated(
        keys=("obs", "wide"),
        block={"obs": (8, 8), "wide": (4, 64)},
        blocks={"obs": 64, "wide": 1024},
        on_full="refuse",
    )
    buffer = fbuf.Buffer(100, storage=storage)
    wide = np.random.default_rng(1).integers(0, 256, (40, 4, 64), dtype=np.uint8)
    state = buffer.extend(buffer.init(example), noise_rows(40) | {"wide": wide})
    stats = buffer.stats(state)
    assert int(stats["refused_rows"]) > 20 and float(stats["blocks_load"]) > 0.8


def test_drawing_a_refused_row_is_no_error_of_the_draw() -> None:
    storage = Deduplicated(keys=("obs",), block=(8, 8), blocks=64, on_full="refuse")
    replay = fbuf.Replay(fbuf.Buffer(100, storage=storage), OBS)
    with pytest.raises(ValueError, match=r"one by one: \d+ rows; .*`grow`"):
        replay.extend(noise_rows(40))
    batch = replay.sample(64)
    stats = replay.stats()
    assert 0 < int(np.sum(~np.asarray(batch.mask))) == stats["draws_refused"] and stats["expired_rows"] == 0


def test_growing_small_shared_tables_and_unknown_leaves() -> None:
    example = {name: jax.ShapeDtypeStruct((8, 8), np.uint8) for name in "abc"}
    buffer = fbuf.Buffer(4, storage=Deduplicated(keys=("a", "b", "c"), block=(8, 8), blocks=64))
    state = buffer.init(example)
    grown, _ = buffer.grow(state)
    assert sum(dict(grown.storage.blocks).values()) >= 192
    with pytest.raises(ValueError, match="'typo'"):
        buffer.grow(state, {"a": 128, "b": 128, "c": 128, "typo": 64})
    with pytest.raises(ValueError, match="buffer.grow"):
        buffer.extend(grown.init(example), {name: np.zeros((1, 8, 8), np.uint8) for name in "abc"})
