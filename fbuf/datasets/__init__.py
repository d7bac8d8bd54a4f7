"""Data sets on the disk as frozen buffers: `open` one, look at it with `info`, check it with `verify`, `delete` it.

The rows stay in the files, compressed, and are read inside jit; all views and samplers work on them. `atari_dqn` brings the
runs of the DQN replay data set that `available` lists.
"""

from fbuf.datasets._atari import atari_dqn
from fbuf.datasets._atari_names import available
from fbuf.datasets._info import Info, delete, info, verify
from fbuf.datasets._open import open

__all__ = ["Info", "atari_dqn", "available", "delete", "info", "open", "verify"]
