"""`PriorityUpdate`: the arguments of `Replay.update_priority` in host memory, until the next draw or other read.

Each jitted call costs 50 us or more in a Python loop, so one program sets these priorities, writes the collected rows and
draws the next batch. Only an update that refuses nothing is kept: the others must raise at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.sample import Index
from fbuf._replay.host_rings import HostRings

_INT, _UINT, _FLOAT, _DOUBLE = map(np.dtype, (np.int32, np.uint32, np.float32, np.float64))


class PriorityUpdate:
    """At most one update of the states of a buffer: of rows held, and, where not all can be drawn, of the last batch only."""

    def __init__(self, buffer: Buffer):
        self._rings, self._dense = HostRings(buffer.geometry), buffer.dense
        self._drawn: Any = None, b""  # header, and bytes of the slots and tickets int32[2, B], of the last batch
        self.packed: np.ndarray[Any, Any] | None = None  # int32[3, B]: slots, and the bits of tickets and errors

    def drawn(self, header: jax.Array, packed: np.ndarray[Any, Any]) -> None:
        """Note the slots and tickets int32[2, B] of a batch, all of rows held under this header."""
        self._drawn = header, packed.tobytes()

    def keep(self, header: jax.Array, index: Index, error: Any, mask: Any) -> bool:
        """Copy the arguments. Return False, and keep nothing, unless they are NumPy arrays [B] and every row can be set."""
        arrays: tuple[Any, ...] = index.slot, index.ticket, error
        if mask is not None or not all(type(x) is np.ndarray and x.ndim == 1 and x.size for x in arrays):
            return False
        slot, ticket, error = arrays
        if slot.dtype != _INT or ticket.dtype != _UINT or error.dtype not in (_FLOAT, _DOUBLE):
            return False
        if not slot.size == ticket.size == error.size:
            return False
        packed = np.empty((3, slot.size), np.int32)
        packed[0], packed[1].view(_UINT)[:] = slot, ticket
        errors = packed[2].view(_FLOAT)
        with np.errstate(over="ignore"):
            errors[:] = error
        known, drawn = self._drawn
        held = known is header and packed[:2].tobytes() == drawn
        if not held and self._dense:
            held = self._rings.holds(header, slot, ticket)
        if not held or np.count_nonzero(np.isfinite(errors)) < errors.size:
            return False
        self.packed = packed
        return True

    def take(self) -> tuple[Index, np.ndarray[Any, Any]] | None:
        """Remove the update; return its index and errors, or None."""
        packed, self.packed = self.packed, None
        if packed is None:
            return None
        slot, ticket, error = packed
        index: Any = Index(slot, ticket.view(_UINT))
        return index, error.view(_FLOAT)


def set_packed(buffer: Buffer, state: BufferState, packed: jax.Array) -> BufferState:
    """Set the priorities of an update. Traced."""
    ticket, error = (jax.lax.bitcast_convert_type(packed[i], dtype) for i, dtype in ((1, jnp.uint32), (2, jnp.float32)))
    return buffer.update_priority(state, Index(packed[0], ticket), error)
