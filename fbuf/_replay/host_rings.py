"""`HostRings`: the rings of a state in CPU memory, in NumPy; `fbuf._core.slots` has the same arithmetic in JAX."""

from __future__ import annotations

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
            self._header, self._rings = header, _rings(*(part.astype(np.int64) for part in host_ring(header)))
            self._last = 0, self._rings
        if not more:
            return self._rings
        if more != self._last[0]:
            (cursor, size, lap, held, *_), length = self._rings, self._geometry.length
            if len(cursor) == 1:  # a fifth of the time
                at, laps = int(cursor[0]) + more, int(lap[0])
                laps = (laps + (at >= length)) % (1 << 32) or 1  # 0 is no lap
                before = (laps - 1) % (1 << 32) or (1 << 32) - 1
                held = min(held + more, length)
                one = np.array([at % length]), np.array([held]), np.array([laps])
                self._last = more, Rings(*one, held, np.array((before, laps), np.uint32))
            else:
                lap = lap + (cursor + more >= length)
                lap = (lap & 0xFFFFFFFF) + (lap >> 32)
                self._last = more, _rings((cursor + more) % length, np.minimum(size + more, length), lap)
        return self._last[1]

    def holds(
        self, header: jax.Array, slot: np.ndarray[Any, Any], generation: np.ndarray[Any, Any], more: int = 0
    ) -> bool:
        """Return whether every row int32[B], uint32[B] is held, after `more` rows in each lane."""
        lanes, length, _ = self._geometry
        if slot.min() < 0 or slot.max() >= lanes * length:
            return False
        position, lane = (slot, 0) if lanes == 1 else np.divmod(slot, lanes)
        cursor, size, lap = (part[lane] for part in self.read(header, more)[:3])
        age = (cursor - 1 - position) % length  # 0 the newest
        return bool(((age < size) & (generation_of(position, cursor, lap) == generation)).all())


def _rings(cursor: np.ndarray[Any, Any], size: np.ndarray[Any, Any], lap: np.ndarray[Any, Any]) -> Rings:
    generations = np.stack([generation_of(0, 0, lap), lap], axis=1).astype(np.uint32)
    return Rings(cursor, size, lap, int(size.sum()), generations.reshape(-1))


def generation_of(position: Any, cursor: Any, lap: Any) -> Any:
    """Return int64, the generations of rows that are held."""
    generation = lap - (position >= cursor)  # written in the previous lap
    generation -= generation == 0  # 0 is no lap
    return generation & 0xFFFFFFFF
