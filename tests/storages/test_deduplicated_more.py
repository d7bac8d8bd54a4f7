"""`storages.Deduplicated`: kinds of leaves, chunks, bad hashes, counters, growth and memory."""

import jax
import numpy as np
import pytest

import fbuf
from fbuf._algorithms import block_table
from fbuf.storages import Deduplicated
from fbuf.testing import assert_inplace
from tests.support.deduplicated import check, check_leaves
from tests.support.deduplicated_device import BATCH_BYTES, OBS, SIZES, atari, noise_rows
from tests.support.trees import same

pytestmark = pytest.mark.more


@pytest.mark.parametrize("kind", ["frames, colour, stacks", "one table"])
def test_leaves_of_every_kind_are_exact(kind):
    check_leaves(kind, 3)


def test_rows_of_very_many_blocks_keep_the_count_of_blocks():
    """More blocks a row than `release` may take at once."""
    blocks = 4 * block_table.CHUNK_ITEMS
    try:
        buffer = fbuf.Buffer(1, storage=Deduplicated(keys=("obs",), block=(1, 1), blocks=2 * blocks))
        state = buffer.init({"obs": np.zeros((4, blocks // 4), np.uint32)})
    except ValueError as error:
        assert "Use larger ones" in str(error)
        return
    for turn in range(3):
        rows = np.arange(turn * blocks, (turn + 1) * blocks, dtype=np.uint32).reshape(1, 4, -1)
        state = buffer.extend(state, {"obs": rows})
        same(buffer.rows(state).data["obs"], rows)
        check(state)


@pytest.mark.in_place
def test_a_write_needs_less_than_four_times_its_frames():
    needed = []
    for capacity, blocks in SIZES:
        buffer, state, rows = atari(capacity, blocks)
        needed.append(assert_inplace(buffer.extend, state, rows, bound=4 * BATCH_BYTES).temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024


def test_arrays_load_only_where_their_ids_mean_the_same():
    """Other blocks of the same size, or a table of another size (the buffer before it grew), would show other frames."""
    buffer = fbuf.Buffer(64, storage=Deduplicated(keys=("obs",), block=(8, 8), blocks=512))
    state = buffer.extend(buffer.init(OBS), noise_rows(64))
    arrays = buffer.storage.to_arrays(state.rows)
    structure = jax.tree.structure(OBS)
    same(buffer.storage.from_arrays(arrays, buffer.geometry, OBS, structure), state.rows)
    for block, blocks, message in (((4, 16), 512, "blocks differ"), ((8, 8), 256, "expected uint8")):
        other = Deduplicated(keys=("obs",), block=block, blocks=blocks)
        with pytest.raises(ValueError, match=message):
            other.from_arrays(arrays, buffer.geometry, OBS, structure)
