"""Write rows in a ring: `Ring` evicts the oldest row of a lane; `Frozen` holds a data set and refuses new rows.

The arithmetic is in `fbuf._core.slots`. Rows of a data set have generation 1, and need neither tickets nor a queue of
anchors.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from jax import Array

from fbuf._core import slots
from fbuf._core.component import component
from fbuf._core.slots import Geometry, Placement
from fbuf._core.slots import Ring as RingState
from fbuf._interfaces.writer import Streaming


@component
class Ring(Streaming):
    """Evict the oldest row of the lane.

    Example:
      >>> import fbuf
      >>> fbuf.Buffer(capacity=1000).writer
      Ring()
    """

    row_by_row = True

    init = staticmethod(slots.init_rings)
    resume = staticmethod(slots.resume_rings)
    place = staticmethod(slots.place)
    clear = staticmethod(slots.clear_rings)
    generation = staticmethod(slots.generation)


@component
class Frozen(Ring):
    """Refuse changes, for `storages.DataSet`: `add`, `extend`, `clear` and `update_rows` raise at trace time.

    All other methods work: `sample`, `peek`, `get`, `rows`, `stats`, and `update_priority`, `set` and `convert`
    for the sampler's part of the state.

    Memory a row, besides the storage: none if every row can be drawn (`views.Row`); else 1 byte of flags and 1/32 byte of
    counts (`views.Hindsight`: 4 bytes more). The sampler adds: `Uniform`, `Epoch` and `Staleness` nothing,
    `Uniform(over="episodes")` 12 bytes, `Prioritized` 4.6, `Consume` 8.

    Example:
      >>> import fbuf
      >>> fbuf.writers.Frozen()
      Frozen()
    """

    read_only = True
    row_by_row = False  # each `add` must raise

    def init(self, geometry: Geometry) -> RingState:
        return slots.resume_rings(geometry, np.full(geometry.lanes, geometry.length, np.int64))

    def resume(self, geometry: Geometry, count: np.ndarray) -> RingState:
        return self.init(geometry)

    def place(self, ring: RingState, geometry: Geometry, num: int, keep: Array | None, skipped: int = 0) -> Placement:
        self.refuse("Buffer.extend")

    def clear(self, ring: RingState) -> RingState:
        self.refuse("Buffer.clear")

    def refuse(self, call: str) -> NoReturn:
        """Raise TypeError, because rows of a data set do not change."""
        raise TypeError(
            f"{call}: writer is {self!r}; expected a writer that accepts rows. Collect new rows in another buffer and "
            f"sample from both with fbuf.Mixture, or change a data set with fbuf.datasets.preprocess(...)."
        )
