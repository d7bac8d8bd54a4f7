"""`HostRings`: the rings of a state in CPU memory, in NumPy; `fbuf._core.slots` has the same arithmetic in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fbuf._buffer.state import host_ring
from fbuf._core.slots import Geometry


class Rings(NamedTuple):
    """Where each lane writes next, and how many rows it holds: int64[E]."""

    cursor: np.ndarray[Any, Any]
    size: np.ndarray[Any, Any]
    lap: np.ndarray[Any, Any]
    total: int  # rows held
    generations: np.ndarray[Any, Any]  # uint32[2 E], of each lane those of rows of the lap before and of this one
    next_slot: int | None  # that the first lane writes next, if the others write beside it, in the same lap


class HostRings:
    """The rings of the states of one buffer; of each header they are read once."""

    def __init__(self, geometry: Geometry):
        self._geometry = geometry
        self._header: Any = None
        self._rings: Any = None
        self._last: Any = 0, None  # the last rings after more rows

    def read(self, header: jax.Array, more: int = 0) -> Rings:
        """Return the rings of a header after `more` rows in each lane, at most as many as a lane holds."""
        if header is not self._header:
            cursor, size, lap = (part.astype(np.int64) for part in host_ring(memoryview(header)))
            beside = not (cursor - cursor[0]).any() and not (lap - lap[0]).any()
            next_slot = int(cursor[0]) * self._geometry.lanes if beside else None
            rings = Rings(cursor, size, lap, int(size.sum()), _generations(lap), next_slot)
            room = self._geometry.length - 1 - int(cursor.max())  # rows until a lane begins another lap
            # No call between these, which may raise.
            self._rings, self._room, self._last, self._header = rings, room, (0, rings), header
        if not more:
            return self._rings
        if more != self._last[0]:
            (cursor, size, lap, total, generations, next_slot), length = self._rings, self._geometry.length
            if total < self._geometry.capacity:
                size = np.minimum(size + more, length)
                total = int(size.sum())
            cursor = cursor + more
            if next_slot is not None:
                next_slot = (next_slot + more * self._geometry.lanes) % self._geometry.capacity
            if more > self._room:  # some lane begins another lap
                lap = lap + (cursor >= length)
                cursor, lap = cursor % length, (lap & 0xFFFFFFFF) + (lap >> 32)  # 0 is no lap
                generations = _generations(lap)
            self._last = more, Rings(cursor, size, lap, total, generations, next_slot)
        return self._last[1]

    def total(self, header: jax.Array, more: int) -> int:
        """Return the rows held after `more` in each lane."""
        total = self.read(header).total
        return total if total == self._geometry.capacity else self.read(header, more).total

    def generations(self, header: jax.Array, more: int = 0) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
        """Return a function from slots int64[B] of rows that are held, after `more` in each lane, to generations uint32[B]."""
        rings, lanes = self.read(header), self._geometry.lanes
        if more and (rings.next_slot is None or more > self._room):
            rings, more = self.read(header, more), 0

        def generations(slot: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            if rings.next_slot is not None:
                generation: np.ndarray[Any, Any] = rings.generations.take(slot < rings.next_slot + more * lanes)
                return generation
            position, lane = np.divmod(slot, lanes)
            return rings.generations.take(2 * lane + (position < rings.cursor.take(lane)))

        return generations

    def holds(self, header: jax.Array, index: Any, more: int = 0) -> bool:
        """Return whether every row of an `Index` `[B]` in NumPy is held, after `more` rows in each lane."""
        (lanes, length, _), slot, generation = self._geometry, index.slot, index.generation
        if slot.min() < 0 or slot.max() >= lanes * length:
            return False
        position, lane = (slot, 0) if lanes == 1 else np.divmod(slot, lanes)
        cursor, size, lap = (part[lane] for part in self.read(header, more)[:3])
        age = (cursor - 1 - position) % length  # 0 the newest
        return bool(((age < size) & (generation_of(position, cursor, lap) == generation)).all())


def _generations(lap: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([generation_of(0, 0, lap), lap]).T.astype(np.uint32).reshape(-1)


def generation_of(position: Any, cursor: Any, lap: Any) -> Any:
    """Return int64, the generations of rows that are held."""
    generation = lap - (position >= cursor)  # written in the previous lap
    generation -= generation == 0  # 0 is no lap
    return generation & 0xFFFFFFFF
