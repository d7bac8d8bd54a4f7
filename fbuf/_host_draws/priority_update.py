"""`PriorityUpdate`: the arguments of `Replay.update_priority`, until the program of the next draw sets them, or another call.

Each jitted call costs 50 us or more in a Python loop. Only an update that refuses nothing waits: the others must raise at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._core.dispatch import with_fields
from fbuf._core.sample import Index
from fbuf._host_draws.deferred import Deferred, ReplayEngine, Update
from fbuf._host_draws.reads import drawn_rows
from fbuf._host_draws.rings import HostRings
from fbuf._host_draws.row_block import RowBlock

_INT, _UINT, _FLOAT, _DOUBLE = map(np.dtype, (np.int32, np.uint32, np.float32, np.float64))
_WITHOUT_SIGN, _INFINITY = np.array(0x7FFFFFFF, np.int32), 0x7F800000  # bits of float32


def copied_update(index: Any, error: Any, mask: Any) -> Update | None:
    """Return an update, None unless its arguments are finite NumPy arrays [B]."""
    if mask is not None or type(error) is not np.ndarray or error.ndim != 1 or not error.size:
        return None
    if error.dtype not in (_FLOAT, _DOUBLE):
        return None
    rows = drawn_rows(index)
    if rows is not None:
        slot = rows.slot
    else:
        slot, generation = index.slot, index.generation
        if not (type(slot) is type(generation) is np.ndarray and slot.shape == generation.shape):
            return None
        if slot.dtype != _INT or generation.dtype != _UINT:
            return None
        slot = slot.copy()
        index = with_fields(index, {"slot": slot, "generation": generation.copy()})
    if slot.shape != error.shape:
        return None
    if error.dtype == _DOUBLE:
        with np.errstate(over="ignore"):
            error = error.astype(_FLOAT)
    bits = error.view(_INT) & _WITHOUT_SIGN
    largest = int(bits.max())  # of floats >= 0 the order of the bits is theirs, and NaN is above infinity
    return Update(index, slot, bits, largest, rows) if largest < _INFINITY else None


class PriorityUpdate(Deferred):
    """At most one update of rows held, of a buffer whose rows can all be drawn, for draws by programs."""

    def __init__(self, buffer: Buffer):
        self._rings = HostRings(buffer.geometry)
        self.drop()

    def drop(self) -> None:
        """Forget the update."""
        self.update = None

    def keep(self, engine: ReplayEngine, block: RowBlock | None, index: Index, error: Any, mask: Any) -> bool:
        """Write the collected rows, then let the update wait."""
        update = copied_update(index, error, mask)
        if update is None:
            return False
        engine.flush()
        fresh = self._rings.holds(engine.state.header, update.index)
        self.update = update if fresh else None
        return fresh

    def settle(self, engine: ReplayEngine) -> None:
        """Set the priorities that wait."""
        if self.update is not None:
            update, self.update = self.update, None
            engine.set_priorities(update.index, update.error.view(_FLOAT), None, 0.9)
