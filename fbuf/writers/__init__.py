"""Which slots new rows take: `Ring`, the oldest first; `TopK`, the lowest; `Reservoir`, any; `Frozen` takes none."""

from fbuf.writers._frozen import Frozen
from fbuf.writers._reservoir import Reservoir
from fbuf.writers._ring import Ring
from fbuf.writers._topk import TopK

__all__ = ["Frozen", "Reservoir", "Ring", "TopK"]
