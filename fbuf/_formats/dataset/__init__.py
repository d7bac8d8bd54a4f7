"""The files of a data set: pieces, each a checkpoint folder, and `dataset.json`, which says which of their rows make it up.

Knows nothing of JAX and buffers. A piece is made by one process, from rows that are appended; what was not committed never
was. A data set is opened as one store, however many pieces it has: encoded frames stay in the files and are read when they are
asked for, so that it may be larger than memory.

    <root>/Pong/1/
      dataset.json            what the data set is; without it, it is unfinished
      pieces/<number>/        one checkpoint folder of `fbuf._formats.checkpoint` each

Why not one store in files (`Memmap`): a piece is whole or not there, can be made by another process, checked by itself and
thrown away by itself.

Example:
  >>> import numpy as np, tempfile
  >>> from fbuf._formats import dataset as _pieces
  >>> schema = _pieces.Schema({"t": ((), "int32")})
  >>> with tempfile.TemporaryDirectory() as path:
  ...     with _pieces.PieceWriter(path, 0, schema) as piece:
  ...         piece.append({"t": np.arange(5, dtype=np.int32)})
  ...         piece.commit()
  ...     made = _pieces.finish(path, [_pieces.Used(0, begin=1)])
  ...     with _pieces.DataSet.open(path) as dataset:
  ...         dataset.rows, dataset.read_rows(0, 2)["t"].tolist()
  (4, [1, 2])
"""

from fbuf._formats.dataset.dataset import DataSet, is_open
from fbuf._formats.dataset.directory import PieceInfo, committed, discard, root
from fbuf._formats.dataset.manifest import Manifest, Part, Used, finish, is_dataset, load, remove
from fbuf._formats.dataset.schema import Leaf, Schema
from fbuf._formats.dataset.segment_writer import PieceWriter

__all__ = [
    "DataSet",
    "Leaf",
    "Manifest",
    "Part",
    "PieceInfo",
    "PieceWriter",
    "Schema",
    "Used",
    "committed",
    "discard",
    "finish",
    "is_dataset",
    "is_open",
    "load",
    "remove",
    "root",
]
