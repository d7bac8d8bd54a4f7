"""`Deferred`: what a `Replay` does later than asked, before anything reads or writes the state. By default nothing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.sample import Index
from fbuf._host_draws import row_block
from fbuf._host_draws.reads import DrawnRows, HeldArrays
from fbuf._host_draws.row_block import RowBlock


class ReplayEngine(Protocol):
    """What draws and deferred work use of the engine of a `Replay` (`fbuf._replay.engine`)."""

    state: BufferState
    arrays: HeldArrays

    def flush(self) -> None:
        """Do what is deferred, and write the collected rows."""

    def waits(self) -> bool:
        """Return whether a row whose priority was given waits for later ones."""

    def set_priorities(self, index: Index, error: Any, mask: Any, eta: float) -> Any:
        """Call `Buffer.update_priority`. Return what was counted."""


@dataclasses.dataclass
class Update:
    """The arguments of an update."""

    index: Any  # `Index` of NumPy arrays, which the caller cannot change
    slot: np.ndarray[Any, Any]  # its slots, int32[B] or int64[B]
    error: np.ndarray[Any, Any]  # int32[B], bits of |errors| float32[B]
    largest: int  # of these
    rows: DrawnRows | None  # of the batch, where `index` is not computed

    def is_of(self, rows: DrawnRows | None) -> bool:
        """Return whether these are the rows of a batch, in its order."""
        if self.rows is not None:
            return self.rows is rows
        if rows is None or not np.array_equal(self.index.slot, rows.compute("slot")):
            return False
        return np.array_equal(self.index.generation, rows.compute("generation"))

    def packed(self) -> np.ndarray[Any, Any]:
        """Return int32[3, B], slots and the bits of |errors| and generations."""
        return np.array((self.slot, self.error, self.index.generation.view(np.int32)), np.int32)


class Deferred:
    """What waits, and how collected rows are written before it is done.

    Attributes:
      update: Priorities that wait for the next draw, if any.
      fuses: Whether the program that draws may write the collected rows, after it set `update`.
    """

    update: Update | None = None
    fuses = True

    def drop(self) -> None:
        """Forget what waits."""

    def settle(self, engine: ReplayEngine) -> None:
        """Do what waits."""

    def keep(self, engine: ReplayEngine, block: RowBlock | None, index: Index, error: Any, mask: Any) -> bool:
        """Let an update of priorities wait: copy its arguments. Return False, and keep nothing, unless every row can be set."""
        return False

    def write(self, buffer: Buffer, state: BufferState, block: RowBlock, packed: Any) -> BufferState:
        """Write the collected rows, `packed` from `block`."""
        after: BufferState = row_block.write(buffer, state, packed)
        return after

    def lower_writes(self, buffer: Buffer, state: BufferState, block: RowBlock, packed: Any) -> list[Any]:
        """Return functions that lower the programs of `write`."""
        return [functools.partial(row_block.write.lower, buffer, state, packed)]
