"""Data sets on the disk as frozen buffers: `open` one, look at it with `info`, check it with `verify`, `delete` it.

The rows stay in the files, compressed, and are read inside jit; all views and samplers work on them.
"""

from fbuf.datasets._info import Info, delete, info, verify
from fbuf.datasets._open import open

__all__ = ["Info", "delete", "info", "open", "verify"]
