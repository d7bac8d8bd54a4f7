"""`storages.Deduplicated`: kinds of leaves, chunks, bad hashes, counters, growth and memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import _blocktable
from fbuf._state import COUNTERS
from fbuf.samplers import Prioritized
from fbuf.storages import Deduplicated, _coded
from fbuf.testing import assert_inplace
from fbuf.views import Row, Transition
from tests.support.deduplicated import (
    KEY,
    SMALL,
    Fields,
    Trial,
    check,
    check_leaves,
    check_programs,
    from_pool,
    methods_of,
    same,
    same_bits,
    small,
)
from tests.support.deduplicated_device import (
    BATCH_BYTES,
    OBS,
    SIZES,
    atari,
    check_full_table,
    check_masked_draws,
    check_retirement,
    noise_rows,
)


@pytest.mark.parametrize("kind", ["frames, colour, stacks", "one table"])
def test_leaves_of_every_kind_are_exact(kind: str) -> None:
    check_leaves(kind, 3)


def test_rows_and_references_are_right_after_any_calls() -> None:
    check_programs("refuse", 14, 33)  # two of three lanes at once


def test_after_retirement_the_buffer_is_one_of_only_the_newest_rows() -> None:
    check_retirement("prioritized", "transition")


def test_draws_of_refused_rows_are_masked() -> None:
    check_masked_draws("prioritized", "transition")


def test_more_lanes_than_a_chunk_holds() -> None:
    lanes = _coded._CHUNK // 4 + 3
    buffer = fbuf.Buffer(3 * lanes, lanes=lanes, storage=Deduplicated(keys=("obs",), block=(4, 4), blocks=2**13))
    trial, rng = Trial(buffer, {"obs": ((8, 8), np.uint8)}), np.random.default_rng(0)
    pool = rng.integers(0, 256, (400, 8, 8), np.uint8)
    for _ in range(3):
        trial.extend({"obs": pool[rng.integers(0, 400, (2, lanes))]})
    trial.compare()
    assert trial.counters().tolist() == [0, 0]


def test_rows_of_very_many_blocks_keep_the_count_of_blocks() -> None:
    """More blocks a row than `release` may take at once."""
    blocks = 4 * _blocktable.CHUNK_ITEMS
    try:
        buffer = fbuf.Buffer(1, storage=Deduplicated(keys=("obs",), block=(1, 1), blocks=2 * blocks))
        state = buffer.init({"obs": np.zeros((4, blocks // 4), np.uint32)})
    except ValueError as error:
        assert "Use larger blocks" in str(error)
        return
    for turn in range(3):
        rows = np.arange(turn * blocks, (turn + 1) * blocks, dtype=np.uint32).reshape(1, 4, -1)
        state = buffer.extend(state, {"obs": rows})
        assert same_bits(np.asarray(buffer.rows(state).data["obs"]), rows)
        check(state)


def test_rows_before_a_clear_do_not_count_after_convert() -> None:
    """The first two rows are the first of all: no stack reaches across the clear."""
    fields = {"reward": 0.0, "action": 0, "terminated": False, "truncated": False}
    rows = noise_rows(20) | {
        "reward": np.arange(20, dtype=np.float32),
        "action": np.zeros(20, np.int32),
        "terminated": np.zeros(20, bool),
        "truncated": np.zeros(20, bool),
    }
    buffer = fbuf.Buffer(64, storage=Deduplicated(keys=("obs",), blocks=1024))
    other = dataclasses.replace(buffer, view=Transition(stack=4, n_step=2))
    state = buffer.extend(buffer.clear(buffer.extend(buffer.init(OBS | fields), rows)), rows)
    converted = buffer.convert(other, state)
    assert int(other.stats(converted)["drawable"]) == 18
    check(converted)
    same(other.rows(converted).data, buffer.rows(state).data)


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


@pytest.mark.optimized
def test_a_write_needs_less_than_four_times_its_frames() -> None:
    """Temporary bytes, at a hundred times the rows and 16 times the blocks the same."""
    needed = []
    for capacity, blocks in SIZES:
        buffer, state, rows = atari(capacity, blocks)
        needed.append(assert_inplace(buffer.extend, state, rows, bound=4 * BATCH_BYTES).temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024


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
        same(buffer.peek(state, KEY, 64), batch)  # the old state has not changed
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


def test_arrays_load_only_where_their_ids_mean_the_same() -> None:
    """Other blocks of the same size, or a table of another size (the buffer before it grew), would show other frames."""
    buffer = fbuf.Buffer(64, storage=Deduplicated(keys=("obs",), block=(8, 8), blocks=512))
    state = buffer.extend(buffer.init(OBS), noise_rows(64))
    arrays = buffer.storage.to_arrays(state.rows)
    structure = jax.tree.structure(OBS)
    same(buffer.storage.from_arrays(arrays, buffer.geometry, OBS, structure), state.rows)
    for block, blocks, message in (((4, 16), 512, "other blocks or leaves"), ((8, 8), 256, "expected uint8")):
        other = Deduplicated(keys=("obs",), block=block, blocks=blocks)
        with pytest.raises(ValueError, match=message):
            other.from_arrays(arrays, buffer.geometry, OBS, structure)
