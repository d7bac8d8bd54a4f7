"""A sharded buffer on one device, where it is the unsharded one, and on eight in a process of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fbuf.sharded import Sharded
from tests.support.paths import ROOT
from tests.support.sharded import buffer_of, example, fill, mesh_of, rows_and_masks, run
from tests.support.trees import same


def batches(buffer: Any) -> Any:
    """What a few steps return, without the shard of each row."""

    @jax.jit
    def step(state: Any, rows: Any, key: jax.Array) -> Any:
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
def test_one_shard_equals_the_unsharded_buffer(draw: Any) -> None:
    buffer = buffer_of("buffer")
    got, want = batches(Sharded(buffer, mesh_of(1), draw=draw)), batches(buffer)
    for found in got:
        assert found[1].pop("balance") == 1.0
    same(got, want)


def test_arrays_of_all_shards_are_split() -> None:
    sharded = Sharded(buffer_of("prioritized"), mesh_of(1))
    state = sharded.init(example())
    assert all(leaf.ndim and leaf.size for leaf in jax.tree.leaves(state))
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state)} == {jax.sharding.PartitionSpec("data")}


def test_eight_devices() -> None:
    run(ROOT / "tests/sharded/eight_devices.py")
