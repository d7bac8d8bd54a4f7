"""Which slots new rows take: `Ring`, the oldest first."""

from fbuf.writers._ring import Ring

__all__ = ["Ring"]
