"""A checkpoint: a folder of named arrays in blocks, of which each save writes what is new, and which is whole or refused.

Knows nothing of JAX, buffers and stores: `write` takes what has a shape, a dtype and slices, `read` gives it back. The format
is described in fbuf/FORMAT.md. Why not the safetensors library, zarr, HDF5 or a data base: none of them has a commit that
survives a kill at any moment, a checksum for every byte, saves that cost what is new, and bounded memory at once.

Example:
  >>> import numpy as np, tempfile
  >>> from fbuf import _files
  >>> with tempfile.TemporaryDirectory() as folder:
  ...     written = _files.write(folder, {"frames": np.arange(6).reshape(3, 2)}, {"step": 1})
  ...     with _files.read(folder) as saved:
  ...         saved.meta["step"], saved.arrays["frames"][1:].tolist()
  (1, [[2, 3], [4, 5]])
"""

from fbuf._files._disk import Disk
from fbuf._files._errors import CheckpointNotFound, SchemaError, VersionError
from fbuf._files._reading import read, restore
from fbuf._files._saved import Saved, SavedArray
from fbuf._files._sources import Source
from fbuf._files._writing import Written, write
from fbuf._host.arrays import StoreCorrupted

__all__ = [
    "CheckpointNotFound",
    "Disk",
    "Saved",
    "SavedArray",
    "SchemaError",
    "Source",
    "StoreCorrupted",
    "VersionError",
    "Written",
    "read",
    "restore",
    "write",
]
