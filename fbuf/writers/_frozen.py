"""`Frozen`: no new rows; those of a data set are there from the beginning, and stay as they are.

So no row ever takes another's place: a row's generation is 1, and neither tickets nor a log of anchors are kept. What draws
need is counted once, when the state is made (`fbuf._buffer.convert`).
"""

from __future__ import annotations

from typing import NoReturn

import jax
import numpy as np

from fbuf._core.component import component
from fbuf._core.geometry import Geometry, Placement
from fbuf._core.geometry import Ring as RingState
from fbuf._indexing import ring as _ring


@component
class Frozen:
    """Read-only, for `storages.DataSet`: `add`, `extend`, `clear` and `update_rows` are errors at trace time.

    All else works: `sample`, `peek`, `get`, `rows`, `last`, `stats`, and `update_priority`, `set`, `rebuild`, `convert` for the
    sampler's part of the state.

    Memory a row, beside the storage's: none where every row can be drawn (`views.Row`); else 1 byte of flags and 1/32 of
    counts (`views.Hindsight`: 4 bytes more). To that comes what the sampler keeps: `Uniform`, `Epoch` and `Staleness` nothing,
    `Uniform(over="episodes")` 12 bytes, `Prioritized` 4.6, `Consume` 8.

    Example:
      >>> import fbuf
      >>> fbuf.writers.Frozen()
      Frozen()
    """

    streams = True

    def init(self, geometry: Geometry) -> RingState:
        return _ring.resume(geometry, np.full(geometry.lanes, geometry.length, np.int64))

    def resume(self, geometry: Geometry, count: np.ndarray) -> RingState:
        del count
        return self.init(geometry)

    def place(self, ring: RingState, geometry: Geometry, num: int, keep: jax.Array | None, skipped: int) -> Placement:
        self.refuse("Buffer.extend")

    def clear(self, ring: RingState) -> RingState:
        self.refuse("Buffer.clear")

    def generation(self, ring: RingState, geometry: Geometry, slot: jax.Array) -> jax.Array:
        return _ring.generation(ring, geometry, slot)

    def refuse(self, call: str) -> NoReturn:
        """Raises TypeError: rows do not change."""
        raise TypeError(
            f"{call}: the writer is {self!r}: rows of a data set stay as they are; expected a verb that reads them, or one of "
            f"the sampler's (update_priority, set, rebuild, convert). Collect new rows in a buffer of their own, "
            f"fbuf.Buffer(capacity, ...), and draw from both; a data set of changed rows is made by "
            f"fbuf.datasets.preprocess(...)."
        )
