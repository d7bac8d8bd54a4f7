"""What a drawn anchor means: `Row` (the row itself), `Transition` (stack, n-step return, next observation)."""

from fbuf.views._row import Row
from fbuf.views._transition import Transition

__all__ = ["Row", "Transition"]
