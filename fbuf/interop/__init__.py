"""Exchange rows with other libraries: flashbax, torchrl, plain arrays, `.npz` and `.h5` files.

Every function reads and writes blocks of about 8 MiB, so data may be larger than memory. Nothing is unpickled or evaluated;
names, shapes and sizes in a file are checked against the file. h5py and tensorstore are imported by the calls that need them.
"""

from fbuf.interop._export import Exported, to_file
from fbuf.interop._flashbax import from_flashbax, from_vault
from fbuf.interop._load import from_arrays, from_file
from fbuf.interop._ted import to_ted
from fbuf.interop._torchrl import from_torchrl
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
