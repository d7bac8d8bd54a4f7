"""Write and change rows: every shard writes those of its lanes, or its part of rows without lanes."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec

from fbuf._buffer import transforms, write
from fbuf._buffer.state import BufferState
from fbuf.sharded._operation import of_each, operation, same, split
from fbuf.sharded._rows import share_numbers


def _of_rows(sharded: Any, shape: tuple[int, int], axes: int) -> PartitionSpec:
    """Return the spec of rows `[N, E, ...]`, or of one of these axes; of one row without lanes."""
    return (same(), split(sharded), PartitionSpec(None, sharded.axis))[axes]


def _of_lanes(sharded: Any, *_: Any) -> PartitionSpec:
    """Return the spec of one value a lane."""
    return same() if sharded.buffer.lanes is None else split(sharded)


@operation(_of_rows, _of_rows, _of_rows)
def extend(
    sharded: Any, local: BufferState, leaves: Any, priority: Any, mask: Any, shape: tuple[int, int], axes: int
) -> tuple[BufferState, None]:
    """Write rows of `shape` [N, E] of this shard: see `write.extend`."""
    local = write.extend.core(sharded.shard, local, leaves, priority, mask, shape, axes)[0]
    sampler = sharded.shard.sampler
    # Without these, the largest priority and the newest version stay equal on all shards.
    may_change = priority is not None or sampler.largest == "held" or sampler.stamp is not None
    return share_numbers(sharded, local) if may_change else local, None


cut = of_each(write.cut, _of_lanes)
clear = of_each(write.clear)
set_numbers = of_each(write.set_numbers, same)
rebuild = of_each(write.rebuild)
refit = of_each(transforms.refit)
