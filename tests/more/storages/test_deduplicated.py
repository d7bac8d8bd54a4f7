"""`storages.Deduplicated`: kinds of leaves, chunks, bad hashes, counters, growth and memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._algorithms import block_table
from fbuf.storages import Deduplicated, _block_rows
from fbuf.testing import assert_inplace
from fbuf.views import Transition
from tests.support.deduplicated import Fields, Trial, check, check_leaves, check_programs, same_bits
from tests.support.deduplicated_device import (
    BATCH_BYTES,
    OBS,
    SIZES,
    atari,
    check_retirement,
    noise_rows,
)
from tests.support.trees import same


@pytest.mark.parametrize("kind", ["frames, colour, stacks", "one table"])
def test_leaves_of_every_kind_are_exact(kind: str) -> None:
    check_leaves(kind, 3)


def test_rows_and_references_are_right_after_any_calls() -> None:
    check_programs("refuse", 14, 33)  # two of three lanes at once


def test_after_retirement_the_buffer_is_one_of_only_the_newest_rows() -> None:
    check_retirement("prioritized", "transition")


def test_more_lanes_than_a_chunk_holds() -> None:
    lanes = _block_rows._CHUNK_BLOCKS // 4 + 3
    buffer = fbuf.Buffer(3 * lanes, lanes=lanes, storage=Deduplicated(keys=("obs",), block=(4, 4), blocks=2**13))
    trial, rng = Trial(buffer, {"obs": ((8, 8), np.uint8)}), np.random.default_rng(0)
    pool = rng.integers(0, 256, (400, 8, 8), np.uint8)
    for _ in range(3):
        trial.extend({"obs": pool[rng.integers(0, 400, (2, lanes))]})
    trial.compare()
    assert trial.counters().tolist() == [0, 0]


def test_rows_of_very_many_blocks_keep_the_count_of_blocks() -> None:
    """More blocks a row than `release` may take at once."""
    blocks = 4 * block_table.CHUNK_ITEMS
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
    monkeypatch.setattr(block_table, "digest", _constant)
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


@pytest.mark.optimized
def test_a_write_needs_less_than_four_times_its_frames() -> None:
    """Temporary bytes, at a hundred times the rows and 16 times the blocks the same."""
    needed = []
    for capacity, blocks in SIZES:
        buffer, state, rows = atari(capacity, blocks)
        needed.append(assert_inplace(buffer.extend, state, rows, bound=4 * BATCH_BYTES).temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024


def test_arrays_load_only_where_their_ids_mean_the_same() -> None:
    """Other blocks of the same size, or a table of another size (the buffer before it grew), would show other frames."""
    buffer = fbuf.Buffer(64, storage=Deduplicated(keys=("obs",), block=(8, 8), blocks=512))
    state = buffer.extend(buffer.init(OBS), noise_rows(64))
    arrays = buffer.storage.to_arrays(state.rows)
    structure = jax.tree.structure(OBS)
    same(buffer.storage.from_arrays(arrays, buffer.geometry, OBS, structure), state.rows)
    for block, blocks, message in (((4, 16), 512, "the arrays have blocks"), ((8, 8), 256, "expected uint8")):
        other = Deduplicated(keys=("obs",), block=block, blocks=blocks)
        with pytest.raises(ValueError, match=message):
            other.from_arrays(arrays, buffer.geometry, OBS, structure)
