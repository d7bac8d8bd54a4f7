"""`PriorityUpdate`: the arguments of `Replay.update_priority`, until the program of the next draw sets them, or another call.

Each jitted call costs 50 us or more in a Python loop. Only an update that refuses nothing waits: the others must raise at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._core.sample import Index
from fbuf._host_draws.deferred import Deferred, ReplayEngine
from fbuf._host_draws.rings import HostRings
from fbuf._host_draws.row_block import RowBlock

_INT, _UINT, _FLOAT, _DOUBLE = map(np.dtype, (np.int32, np.uint32, np.float32, np.float64))
_WITHOUT_SIGN, _INFINITY = np.array(0x7FFFFFFF, np.int32), 0x7F800000  # bits of float32


def packed_update(index: Index, error: Any, mask: Any) -> tuple[np.ndarray[Any, Any], int] | None:
    """Return int32[3, B], slots and the bits of |errors| and generations, and the bits of the largest error.

    None unless they are finite NumPy arrays [B].
    """
    slot: Any = index.slot
    generation: Any = index.generation
    if mask is not None or not (type(slot) is type(generation) is type(error) is np.ndarray):
        return None
    if slot.ndim != 1 or not slot.size or not slot.shape == generation.shape == error.shape:
        return None
    if slot.dtype != _INT or generation.dtype != _UINT or error.dtype not in (_FLOAT, _DOUBLE):
        return None
    if error.dtype == _DOUBLE:
        with np.errstate(over="ignore"):
            error = error.astype(_FLOAT)
    packed = np.array((slot, error.view(_INT), generation.view(_INT)))
    bits = packed[1]
    bits &= _WITHOUT_SIGN
    largest = int(bits.max())  # of floats >= 0 the order of the bits is theirs, and NaN is above infinity
    return (packed, largest) if largest < _INFINITY else None


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
        found = packed_update(index, error, mask)
        if found is None:
            return False
        engine.flush()
        packed, _ = found
        fresh = self._rings.holds(engine.state.header, packed[0], packed[2].view(_UINT))
        self.update = packed if fresh else None
        return fresh

    def settle(self, engine: ReplayEngine) -> None:
        """Set the priorities that wait."""
        if self.update is not None:
            (slot, error, generation), self.update = self.update, None
            index: Any = Index(slot, generation.view(_UINT))
            engine.set_priorities(index, error.view(_FLOAT), None, 0.9)
