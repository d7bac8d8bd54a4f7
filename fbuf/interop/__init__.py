"""Exchange rows with other libraries: readers of their buffers and files, and writers of `.npz`, `.h5` and TED.

Every reader returns a `Source`: `source.into(buffer)` fills a buffer, `source.save(path)` makes a data set. All read and write
blocks of about 8 MiB, so data may be larger than memory. Nothing is unpickled or evaluated; names, shapes and sizes in a file
are checked against the file. h5py, pyarrow and tensorstore are imported by the calls that need them.
"""

from fbuf.interop._export import to_file
from fbuf.interop._flashbax import from_flashbax, from_vault
from fbuf.interop._load import from_arrays, from_file
from fbuf.interop._others import from_cpprb, from_ogbench, from_rlds, from_sb3, from_skrl
from fbuf.interop._source import Source
from fbuf.interop._ted import to_ted
from fbuf.interop._torchrl import from_torchrl
from fbuf.torch._tensordict import TED

__all__ = [
    "TED",
    "Source",
    "from_arrays",
    "from_cpprb",
    "from_file",
    "from_flashbax",
    "from_ogbench",
    "from_rlds",
    "from_sb3",
    "from_skrl",
    "from_torchrl",
    "from_vault",
    "to_file",
    "to_ted",
]
