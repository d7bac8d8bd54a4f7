"""Where rows go that move to other slots (`SlotRemap`) or to other shards (`SlotJoin`) when a state is loaded, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.slots import Geometry, Ring


class SlotRemap(NamedTuple):
    """Old and new slots of the rows held, oldest first."""

    before: Geometry
    after: Geometry
    old: np.ndarray  # int32[N, E]; C where a lane has fewer rows
    new: np.ndarray  # int32[N, E]; distinct and out of range there
    ring: Any  # the new rings; None if they stay

    @property
    def number(self) -> int:
        """Return N, the rows of the longest lane."""
        return int(self.old.shape[0])

    def chunk(self, start: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return old slots, new slots and validity of `size` rows from `start` on."""
        lanes, nowhere = self.after.lanes, self.after.capacity
        old = np.full((size, lanes), self.before.capacity, np.int32)
        new = (nowhere + np.arange(size * lanes, dtype=np.int32)).reshape(size, lanes)
        stop = min(start + size, self.number)
        old[: stop - start] = self.old[start:stop]
        exists = old < self.before.capacity
        new[exists] = self.new[start:stop][exists[: stop - start]]
        return old, new, exists

    def slot_table(self) -> np.ndarray:
        """Return int32[C + 1], the new slot of each old one; the new C for none."""
        out = np.full(self.before.capacity + 1, self.after.capacity, np.int32)
        exists = self.old < self.before.capacity
        out[self.old[exists]] = self.new[exists]
        return out

    def by_slot(self, array: Any, fill: Any) -> np.ndarray:
        """Return an array [C, ...] by slot in its new order."""
        array = np.asarray(array)
        out = np.full((self.after.capacity, *array.shape[1:]), fill, array.dtype)
        exists = self.old < self.before.capacity
        out[self.new[exists]] = array[self.old[exists]]
        return out

    def read_queues(self, entries: Any, head: Any, count: Any) -> list[np.ndarray]:
        """Return of each lane the entries of a queue [C] that begins at `head`, oldest first."""
        entries, lanes, length = np.asarray(entries), self.before.lanes, self.before.length
        heads, counts = np.asarray(head), np.asarray(count)
        return [entries[(heads[e] + np.arange(counts[e])) % length * lanes + e] for e in range(lanes)]

    def pack_queues(self, queues: list[np.ndarray], dtype: Any) -> jax.Array:
        """Return the lanes' queues as one array, each from its first position on."""
        out = np.zeros((self.after.length, self.after.lanes), dtype)
        for lane, queue in enumerate(queues):
            out[: len(queue), lane] = queue
        return jnp.asarray(out.reshape(-1))


class SlotJoin(NamedTuple):
    """Where the entries of a new shard come from, in the joined arrays of the parts."""

    before: Geometry  # of one part
    after: Geometry
    source: np.ndarray  # int64[C], by slot; -1: none
    lane: np.ndarray  # int64[E]
    place: np.ndarray  # int64[parts * C], the new slot of each old one; -1: none
    ring: Ring
    begun: int

    def slots(self, arrays: Sequence[Any], fill: Any = 0) -> np.ndarray:
        """Return an array [C, ...] by slot, or by place in the lanes' queues."""
        joined = np.concatenate([np.asarray(array)[: self.before.capacity] for array in arrays])
        out = joined[self.source]
        out[self.source < 0] = fill
        return out

    def lanes(self, arrays: Sequence[Any]) -> np.ndarray:
        """Return an array [..., E] by lane."""
        return np.concatenate([np.asarray(array) for array in arrays], axis=-1)[..., self.lane]

    def names(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Return old slots as places in the joined arrays."""
        return [np.asarray(array) + part * self.before.capacity for part, array in enumerate(arrays)]


class Prefix:
    """The first `rows` of an array, of which a checkpoint keeps no more; a single leaf to JAX."""

    __slots__ = ("array", "rows")

    def __init__(self, array: Any, rows: int):
        self.array, self.rows = array, rows
