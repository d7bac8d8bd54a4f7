"""A checkpoint: a folder of named arrays in blocks, of which each save writes what is new, and which is whole or refused.

Knows nothing of JAX, buffers and stores: `write` takes what has a shape, a dtype and slices, `read` gives it back. The format
is described in fbuf/FORMAT.md. Why not the safetensors library, zarr, HDF5 or a data base: none of them has a commit that
survives a kill at any moment, a checksum for every byte, saves that cost what is new, and bounded memory at once.

Example:
  >>> import numpy as np, tempfile
  >>> from fbuf._formats import checkpoint as _files
  >>> with tempfile.TemporaryDirectory() as folder:
  ...     written = _files.write(folder, {"frames": np.arange(6).reshape(3, 2)}, {"step": 1})
  ...     with _files.read(folder) as saved:
  ...         saved.meta["step"], saved.arrays["frames"][1:].tolist()
  (1, [[2, 3], [4, 5]])
"""

from fbuf._formats.checkpoint.errors import CheckpointNotFound, SchemaError, VersionError
from fbuf._formats.checkpoint.filesystem import Disk
from fbuf._formats.checkpoint.layout import Source
from fbuf._formats.checkpoint.read import Saved, SavedArray, read, restore
from fbuf._formats.checkpoint.write import Written, write
from fbuf._host.types import StoreCorrupted

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
