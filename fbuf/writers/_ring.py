"""`Ring`: new rows replace the oldest of their lane, so neighbours in time are neighbours in the buffer.

The arithmetic is in `fbuf._indexing.ring`; this is the value a user puts into a `Buffer`.
"""

from __future__ import annotations

import jax
import numpy as np

from fbuf._core.component import component
from fbuf._core.geometry import Geometry, Placement
from fbuf._core.geometry import Ring as RingState
from fbuf._indexing import ring as _ring


@component
class Ring:
    """Round robin: of more rows than fit, the newest stay.

    Example:
      >>> import fbuf
      >>> fbuf.Buffer(capacity=1000).writer
      Ring()
    """

    streams = True

    def init(self, geometry: Geometry) -> RingState:
        return _ring.init(geometry)

    def resume(self, geometry: Geometry, count: np.ndarray) -> RingState:
        return _ring.resume(geometry, count)

    def place(self, ring: RingState, geometry: Geometry, num: int, keep: jax.Array | None, skipped: int) -> Placement:
        return _ring.place(ring, geometry, num, keep, skipped)

    def clear(self, ring: RingState) -> RingState:
        return _ring.clear(ring)

    def generation(self, ring: RingState, geometry: Geometry, slot: jax.Array) -> jax.Array:
        return _ring.generation(ring, geometry, slot)
