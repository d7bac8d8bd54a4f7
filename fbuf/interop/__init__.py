"""Rows from and to other libraries: flashbax, torchrl, plain arrays, `.npz` and `.h5` files.

Everything streams: blocks of some 8 MiB are in memory at a time, so what is larger than memory goes from a file into a
compressed or memory-mapped buffer, and back. Nothing is unpickled or evaluated; names, shapes and sizes that a file
states are checked against the file; what cannot be read is refused by name. What is needed besides numpy (h5py,
tensorstore) is imported by the call that needs it.
"""

from fbuf.interop._export import Exported, to_file
from fbuf.interop._flashbax import from_flashbax
from fbuf.interop._load import from_arrays, from_file
from fbuf.interop._ted import to_ted
from fbuf.interop._torchrl import from_torchrl
from fbuf.interop._vault import from_vault
from fbuf.torch._tensordict import TED

__all__ = [
    "TED",
    "Exported",
    "from_arrays",
    "from_file",
    "from_flashbax",
    "from_torchrl",
    "from_vault",
    "to_file",
    "to_ted",
]
