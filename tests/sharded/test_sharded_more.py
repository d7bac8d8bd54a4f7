"""A sharded buffer on one device, where it is the unsharded one, and on eight and in two processes of their own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.sharded import Sharded
from tests.support.refusals import raises
from tests.support.sharded import buffer_of, fill, mesh_of, rows_and_masks, run
from tests.support.tables import checks
from tests.support.trees import same
from tests.support.two_processes import check_killed, check_two_processes

pytestmark = pytest.mark.more

# The cases of each process; more are quick, all are exhaustive.
HERE = {
    "eight_devices": "(every_anchor and sampler2 and view1) or (in_place and Prioritized and local and not "
    "blocks) or collectives or refusals or print or (one_axis and local and True and 8) or (mass and global) or "
    "(strict and local) or (priorities and batch and global)",
    "eight_devices_saved": "(draws_the_same and batch and 2) or (on_the_host and Compressed and True) or Consume or 64_bits or "
    "planned or (without_lanes and Prioritized and 4) or (new_transform and 4) or (mixtures and Host) or "
    "packed_leaves or cannot_store",
    "eight_devices_rows eight_devices_mixture": "(written_back and global) or inside or (all_rows "
    "and local) or whole or windows_summaries or episode_of_shards",
}


def batches(buffer):
    """What a few steps return, without the shard of each row."""

    @jax.jit
    def step(state, rows, key):
        state, batch = buffer.sample(buffer.extend(state, rows), key, 32)
        state = buffer.update_priority(state, batch.index, jnp.float32(1000) * batch.probability)
        shown = (batch.data, batch.index.slot, batch.index.ticket, batch.probability, batch.weight, batch.mask)
        return buffer.cut(state), (shown, buffer.stats(state), buffer.size(state), buffer.can_sample(state))

    rows, state, out = {name: leaf[:2] for name, leaf in rows_and_masks()[0].items()}, fill(buffer), []
    for turn in range(3):
        state, found = step(state, rows, jax.random.key(turn))
        out.append(jax.device_get(found))
    return out


@pytest.mark.optimized
@pytest.mark.parametrize("draw", ["local", "global"])
def test_one_shard_equals_the_unsharded_buffer(draw):
    buffer = buffer_of("buffer")
    got, want = batches(Sharded(buffer, mesh_of(1), draw=draw)), batches(buffer)
    for found in got:
        assert found[1].pop("balance") == 1.0
    same(got, want)


def test_foreign_rows_are_refused_with_one_shard_too():
    sharded = Sharded(fbuf.prioritized(8), mesh_of(1))
    state = sharded.extend(sharded.init({"id": np.int32(0)}), {"id": np.arange(8, dtype=np.int32)})
    index = sharded.peek(state, jax.random.key(0), 4).index
    after = sharded.update_priority(state, dataclasses.replace(index, shard=jnp.array([0, 1, -1, 2])), jnp.full(4, 9.0))
    assert int(sharded.stats(after)["refused_out_of_range"]) == 3
    masked = sharded.peek(sharded.init({"id": np.int32(0)}), jax.random.key(0), 4).index
    after = sharded.update_priority(state, masked, jnp.full(4, 9.0))
    assert int(sharded.stats(after)["refused_out_of_range"]) == 0


def test_states_of_other_buffers_are_refused():
    kinds = fbuf.prioritized(64), fbuf.prioritized(128), fbuf.Buffer(64), fbuf.prioritized(64, lanes=4)
    buffers = [Sharded(buffer, mesh_of(1)) for buffer in kinds]
    states = [buffer.init({"id": np.int32(0)}) for buffer in buffers]
    for one in range(len(kinds)):
        for other, buffer in enumerate(buffers):
            if one == other:
                buffer.check_state(states[one])
                continue
            for call in (
                buffer.check_state,
                buffer.size,
                lambda state, b=buffer: b.sample(state, jax.random.key(0), 4),
            ):
                raises(ValueError, "made by another buffer", call, states[one])
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), states[0])
    raises(ValueError, "leading axis of 2", lambda: buffers[0].size(stacked))


@pytest.mark.parametrize("files", HERE)
def test_eight_devices(files):
    first, *rest = (f"tests/sharded/{file}.py" for file in files.split())
    run(first, HERE[files], *rest)


test_two_processes = checks((check_two_processes, [("local", "Host")]), (check_killed, [1]))
