"""Data sets: segments, each a checkpoint folder, and `dataset.json`, which lists the rows that make up the data set.

Independent of JAX and buffers. One process writes a segment by appending rows; uncommitted segments do not exist. All
segments open as one store. Encoded frames stay in the files until read, so a data set may be larger than memory.

    <root>/Pong/1/
      dataset.json            the data set's contents; unfinished without it
      pieces/<number>/        one checkpoint folder of `fbuf._formats.checkpoint` per segment

Example:
  >>> import numpy as np, tempfile
  >>> from fbuf._formats import dataset
  >>> schema = dataset.Schema({"t": ((), "int32")})
  >>> with tempfile.TemporaryDirectory() as path:
  ...     with dataset.SegmentWriter(path, 0, schema) as segment:
  ...         segment.append({"t": np.arange(5, dtype=np.int32)})
  ...         segment.commit()
  ...     made = dataset.finish(path, [dataset.SegmentRows(0, begin=1)])
  ...     with dataset.DataSet.open(path) as opened:
  ...         opened.rows, opened.read_rows(0, 2)["t"].tolist()
  (4, [1, 2])
"""

from fbuf._formats.dataset.dataset import DataSet, is_open
from fbuf._formats.dataset.directory import committed, discard, root
from fbuf._formats.dataset.manifest import SegmentRows, finish, is_dataset, load, remove
from fbuf._formats.dataset.schema import Schema
from fbuf._formats.dataset.segment_writer import SegmentWriter

__all__ = [
    "DataSet",
    "SegmentWriter",
    "Schema",
    "SegmentRows",
    "committed",
    "discard",
    "finish",
    "is_dataset",
    "is_open",
    "load",
    "remove",
    "root",
]
