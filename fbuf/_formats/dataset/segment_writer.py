"""`SegmentWriter`: write rows as a segment of a data set, complete or not at all.

Large leaves are encoded by a store in memory, like a live buffer's, and recompressed where the codec says so. The segment is
that store as a checkpoint folder. Memory: the encoded rows.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

import numpy as np

from fbuf._core.closing import Closing
from fbuf._formats import checkpoint
from fbuf._formats.checkpoint.filesystem import Path
from fbuf._formats.dataset import directory
from fbuf._formats.dataset.plain_leaf import LeafWriter
from fbuf._formats.dataset.schema import Schema
from fbuf._host.store.store import Column, Store
from fbuf._host.types import Array

MAX_ROWS = 1 << 24
"""Rows of a segment."""
MAX_COMMON_ROWS = 64 * 64
"""The largest number of rows after which the chunks of all leaves end together."""
_STEP_BYTES = 1 << 23  # raw bytes per write to the store


class SegmentWriter(Closing):
    """A segment being written; a context, which leaves nothing behind unless `commit` was called.

    Args:
      path: The data set's folder; created if missing.
      number: The segment's, 0 to 2^20 - 1.
      schema: The rows' leaves.
      sync: Wait for the disk. False: safe if the process is killed, not if power fails.
    Raises:
      FileExistsError: the segment exists. ValueError: the leaves' chunks rarely end together.
    """

    def __init__(self, path: Path, number: int, schema: Schema, *, sync: bool = True) -> None:
        self.path, self.number, self.schema = directory.root(path), number, schema
        self.rows = 0
        self._sync = sync
        self._check_absent()
        if schema.common_rows > MAX_COMMON_ROWS:
            raise ValueError(
                f"SegmentWriter: leaves are stored as {schema.kinds}: all chunks end together only at every "
                f"{schema.common_rows} rows; expected at most {MAX_COMMON_ROWS}. Use equal chunks."
            )
        large = [leaf for leaf in schema.leaves if leaf.codec is not None]
        self._large = tuple(leaf.name for leaf in large)
        self._multiple = schema.common_rows
        self._small = {leaf.name: LeafWriter(leaf) for leaf in schema.leaves if leaf.codec is None}
        columns = tuple(Column(leaf.name, leaf.shape, leaf.dtype, leaf.codec, settled=True) for leaf in large)
        self._store = Store(columns, lanes=1, length=MAX_ROWS + self._multiple, slack=0) if columns else None
        self._step = max(_STEP_BYTES // max(schema.row_bytes, 1), 1)
        self._last: dict[str, Array] = {}
        self._open = True

    def _check_absent(self) -> None:
        if directory.is_committed(self.path, self.number):
            raise FileExistsError(errno.EEXIST, f"SegmentWriter: {self.path} has a segment {self.number}.")

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory held."""
        small = sum(rows.nbytes for rows in self._small.values())
        return small + (self._store.nbytes if self._store is not None and self._open else 0)

    def append(self, rows: Mapping[str, Any]) -> None:
        """Append rows in order of time: `[N, *shape]` by leaf name.

        Raises:
          ValueError, KeyError: leaves have other shapes or dtypes, or are missing. Nothing was added.
        """
        self._check_open("append")
        arrays, number = self._checked_rows(rows)
        if self.rows + number > MAX_ROWS:
            raise ValueError(f"SegmentWriter: {self.rows + number} rows; expected at most {MAX_ROWS}. Begin another.")
        for start in range(0, number, self._step):
            part = {name: array[start : start + self._step] for name, array in arrays.items()}
            if self._store is not None:
                self._store.write([np.ascontiguousarray(part[name])[:, None] for name in self._large], None)
            for name, collected in self._small.items():
                collected.append(part[name])
            self.rows += len(next(iter(part.values())))
        if number:
            self._last = {name: np.array(arrays[name][-1:]) for name in self._large}

    def _checked_rows(self, rows: Mapping[str, Any]) -> tuple[dict[str, Array], int]:
        arrays = {name: np.asarray(rows[name]) for name in self.schema.names}
        number = len(next(iter(arrays.values())))
        for leaf in self.schema.leaves:
            array, shape = arrays[leaf.name], (number, *leaf.shape)
            if array.dtype != leaf.dtype or array.shape != shape:
                raise ValueError(
                    f"SegmentWriter: '{leaf.name}' is {array.dtype}{list(array.shape)}; expected {leaf.dtype}{list(shape)}."
                )
        return arrays, number

    def _check_open(self, call: str) -> None:
        if not self._open:
            raise ValueError(f"SegmentWriter.{call}: segment {self.number} is closed. Begin another.")

    def commit(self, meta: dict[str, Any] | None = None) -> None:
        """Write the segment; only then does it exist.

        Args:
          meta: JSON to save with it.
        Raises:
          ValueError: it has no rows. OSError: the disk is full, or fails; there is no segment then.
        Cost: encoded leaves are recompressed where it pays, and written once.
        """
        self._check_open("commit")
        if not self.rows:
            raise ValueError(f"SegmentWriter.commit: segment {self.number} has no rows. Append some first.")
        arrays: dict[str, Any] = {}
        if self._store is not None:
            missing = -self.rows % self._multiple
            for start in range(0, missing, self._step):
                again = min(self._step, missing - start)
                self._store.write([np.repeat(self._last[n], again, axis=0)[:, None] for n in self._large], None)
            self._store.repack()
            for name, array in self._store.to_arrays().items():
                column, colon, rest = name.partition(":")
                if colon and column.startswith("column"):
                    arrays[f"rows/{self._large[int(column[6:])]}/{rest}"] = array
        for name, collected in self._small.items():
            arrays |= {f"rows/{name}/{kind}": array for kind, array in collected.to_arrays().items()}
        about = {
            "piece": {"version": directory.VERSION, "rows": self.rows},
            "schema": self.schema.to_json(),
            "meta": {} if meta is None else meta,
        }
        self._check_absent()
        checkpoint.write(directory.folder(self.path, self.number), arrays, about, keep=1, sync=self._sync)
        self.close()

    def close(self) -> None:
        """Free the memory; an uncommitted segment is lost."""
        self._open = False
        if self._store is not None:
            self._store.close()
        self._small = {}
