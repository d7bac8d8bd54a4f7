"""Checkpoints: a folder of named arrays in blocks. Each save writes what is new, atomically.

Independent of JAX, buffers and stores: `write` takes anything with a shape, a dtype and slices, `read` returns it. The format
is described in fbuf/FORMAT.md.

Example:
  >>> import numpy as np, tempfile
  >>> from fbuf._formats import checkpoint
  >>> with tempfile.TemporaryDirectory() as folder:
  ...     written = checkpoint.write(folder, {"frames": np.arange(6).reshape(3, 2)}, {"step": 1})
  ...     with checkpoint.read(folder) as saved:
  ...         saved.meta["step"], saved.arrays["frames"][1:].tolist()
  (1, [[2, 3], [4, 5]])
"""

from fbuf._formats.checkpoint.filesystem import Disk
from fbuf._formats.checkpoint.joint import Group, write_jointly
from fbuf._formats.checkpoint.manifest import CheckpointNotFound, SchemaError, VersionError
from fbuf._formats.checkpoint.read import Saved, SavedArray, read, restore
from fbuf._formats.checkpoint.snapshot import snapshot
from fbuf._formats.checkpoint.write import Written, write
from fbuf._host.types import StoreCorrupted

__all__ = [
    "CheckpointNotFound",
    "Disk",
    "Group",
    "Saved",
    "SavedArray",
    "SchemaError",
    "StoreCorrupted",
    "VersionError",
    "Written",
    "read",
    "restore",
    "snapshot",
    "write",
    "write_jointly",
]
