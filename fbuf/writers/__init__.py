"""Choose the slots of new rows: `Ring` evicts the oldest, `TopK` the lowest, `Reservoir` random rows, `Frozen` accepts none."""

from fbuf.writers._reservoir import Reservoir
from fbuf.writers._ring import Frozen, Ring
from fbuf.writers._topk import TopK

__all__ = ["Frozen", "Reservoir", "Ring", "TopK"]
