"""Which slots new rows take: `Ring`, the oldest first; `Frozen` takes none."""

from fbuf.writers._frozen import Frozen
from fbuf.writers._ring import Ring

__all__ = ["Frozen", "Ring"]
