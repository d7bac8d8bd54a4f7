"""Which slots new rows take: `Ring`, the oldest first; `TopK`, the lowest first; `Reservoir`, any."""

from fbuf.writers._reservoir import Reservoir
from fbuf.writers._ring import Ring
from fbuf.writers._topk import TopK

__all__ = ["Reservoir", "Ring", "TopK"]
