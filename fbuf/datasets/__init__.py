"""Data sets on disk as frozen buffers: `open`, `info`, `verify`, `delete`.

Rows stay compressed in their files and are read inside jit; every view and sampler works. `atari_dqn` downloads runs of the
DQN replay data set (`available` lists them), `minari` converts Minari's (`to_minari` writes them), `preprocess` maps a function
over one. Data of other libraries, and your own: `fbuf.interop.from_file(...).save(path)` and its siblings. On the command line:
`python -m fbuf datasets`.
"""

from fbuf.datasets._atari.atari import atari_dqn, available
from fbuf.datasets._info import delete, info, verify
from fbuf.datasets._minari import minari
from fbuf.datasets._open import open
from fbuf.datasets._preprocess import preprocess
from fbuf.datasets._to_minari import to_minari

__all__ = ["atari_dqn", "available", "delete", "info", "minari", "open", "preprocess", "to_minari", "verify"]
