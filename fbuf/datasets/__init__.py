"""Data sets on the disk as frozen buffers: `open` one, look at it with `info`, check it with `verify`, `delete` it.

The rows stay in the files, compressed, and are read inside jit; all views and samplers work on them. `atari_dqn` brings the
runs of the DQN replay data set that `available` lists, `minari` those of Minari, `from_arrays` one's own; `preprocess`
makes another of each. `python -m fbuf datasets` does much of it from the command line.
"""

from fbuf.datasets._arrays.from_arrays import from_arrays
from fbuf.datasets._atari.atari import atari_dqn, available
from fbuf.datasets._info import Info, delete, info, verify
from fbuf.datasets._minari import minari
from fbuf.datasets._open import open
from fbuf.datasets._preprocess import preprocess

__all__ = [
    "Info",
    "atari_dqn",
    "available",
    "delete",
    "from_arrays",
    "info",
    "minari",
    "open",
    "preprocess",
    "verify",
]
