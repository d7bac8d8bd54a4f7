"""`PieceWriter`: rows become a piece of a data set, whole or not at all.

Large leaves go through a store in memory, which encodes them as a live buffer would (chunks against dictionaries, and, where
the codec says so, again with a longer search once many are there); the piece is that store as a checkpoint folder. Memory:
what the encoded rows take. Rejected: a store in files (twice the writing, no second compression).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from fbuf._formats import checkpoint
from fbuf._formats.dataset import directory
from fbuf._formats.dataset.plain_leaf import Collected
from fbuf._formats.dataset.schema import Schema
from fbuf._host.store.store import Column, Store
from fbuf._host.types import Array

MOST_ROWS = 1 << 24
"""Rows of a piece."""
MOST_TOGETHER = 64 * 64
"""Rows from one end of all chunks to the next: never more with chunks of two sizes."""
_AT_ONCE = 1 << 23  # raw bytes that the store is given at once


class PieceWriter:
    """A piece being written; a context, which leaves nothing behind unless `commit` was called.

    Args:
      path: The data set's folder; made if it is not there.
      number: Of the piece, 0 to 2^20 - 1.
      schema: What rows are.
      sync: Wait for the disk. False: killed processes do no harm, a failure of power may.
    Raises:
      FileExistsError: there is a piece of this number. ValueError: chunks of leaves hardly ever end together.
    """

    def __init__(self, path: str | os.PathLike[str], number: int, schema: Schema, *, sync: bool = True) -> None:
        self.path, self.number, self.schema = directory.root(path), number, schema
        self.rows = 0
        self._sync = sync
        self._refuse_another()
        if schema.together > MOST_TOGETHER:
            raise ValueError(
                f"PieceWriter: leaves are kept as {schema.kinds}: all chunks end together only at every {schema.together} "
                f"rows; expected at most {MOST_TOGETHER}, as a piece is filled up to there. Take equal chunks."
            )
        large = [leaf for leaf in schema.leaves if leaf.codec is not None]
        self._large = tuple(leaf.name for leaf in large)
        self._multiple = schema.together
        self._small = {leaf.name: Collected(leaf) for leaf in schema.leaves if leaf.codec is None}
        columns = tuple(Column(leaf.name, leaf.shape, leaf.dtype, leaf.codec, settled=True) for leaf in large)
        self._store = Store(columns, lanes=1, length=MOST_ROWS + self._multiple, slack=0) if columns else None
        self._step = max(_AT_ONCE // max(schema.row_bytes, 1), 1)
        self._last: dict[str, Array] = {}
        self._open = True

    def _refuse_another(self) -> None:
        if directory.is_committed(self.path, self.number):
            raise FileExistsError(
                errno.EEXIST,
                f"PieceWriter: {self.path} has a piece {self.number}; expected none. Remove it first: "
                f"_pieces.discard(path, {self.number}).",
            )

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        held = sum(rows.nbytes for rows in self._small.values())
        return held + (self._store.nbytes if self._store is not None and self._open else 0)

    def append(self, rows: Mapping[str, Any]) -> None:
        """Adds rows in order of time: `[N, *shape]` by name of leaf.

        Raises:
          ValueError, TypeError: leaves are missing, or of other shapes or dtypes. Nothing was added.
        """
        self._check_open("append")
        arrays, number = self._checked(rows)
        if self.rows + number > MOST_ROWS:
            raise ValueError(
                f"PieceWriter.append: piece {self.number} would have {self.rows + number} rows; expected at most {MOST_ROWS}. "
                f"Begin another piece."
            )
        for start in range(0, number, self._step):
            part = {name: array[start : start + self._step] for name, array in arrays.items()}
            if self._store is not None:
                self._store.write([np.ascontiguousarray(part[name])[:, None] for name in self._large], None)
            for name, collected in self._small.items():
                collected.append(part[name])
            self.rows += len(next(iter(part.values())))
        if number:
            self._last = {name: np.array(arrays[name][-1:]) for name in self._large}

    def _checked(self, rows: Mapping[str, Any]) -> tuple[dict[str, Array], int]:
        names = self.schema.names
        wrong = [n for n in (*names, *rows) if n not in rows or n not in names]
        if wrong:
            what = "missing" if wrong[0] in names else "not in the schema"
            raise ValueError(
                f"PieceWriter.append: leaf '{wrong[0]}' is {what} (got: {', '.join(rows) or 'nothing'}; expected: "
                f"{', '.join(names)})."
            )
        arrays = {name: np.asarray(rows[name]) for name in names}
        number = {len(a) if a.ndim else -1 for a in arrays.values()}
        for leaf in self.schema.leaves:
            array = arrays[leaf.name]
            if array.dtype != leaf.dtype:
                raise TypeError(
                    f"PieceWriter.append: leaf '{leaf.name}' is {array.dtype}; expected {leaf.dtype}. Cast with "
                    f"x.astype('{leaf.dtype.name}')."
                )
            if array.ndim != len(leaf.shape) + 1 or array.shape[1:] != leaf.shape or len(number) > 1:
                raise ValueError(
                    f"PieceWriter.append: leaf '{leaf.name}' has shape {list(array.shape)}; expected "
                    f"{['N', *leaf.shape]}, N the same for all leaves."
                )
        return arrays, number.pop()

    def _check_open(self, call: str) -> None:
        if not self._open:
            raise ValueError(f"PieceWriter.{call}: piece {self.number} is closed; expected it open. Begin another.")

    def commit(self, meta: dict[str, Any] | None = None) -> None:
        """Writes the piece: from then on it is there, whatever happens.

        Args:
          meta: What else to keep, as JSON.
        Raises:
          ValueError: it has no rows. OSError: the disk is full, or fails; there is no piece then.
        Cost: what is encoded is compressed again where it pays, and written once.
        """
        self._check_open("commit")
        if not self.rows:
            raise ValueError(f"PieceWriter.commit: piece {self.number} has no rows; expected some.")
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
        self._refuse_another()
        checkpoint.write(directory.folder(self.path, self.number), arrays, about, keep=1, sync=self._sync)
        self.close()

    def close(self) -> None:
        """Gives memory back; a piece that was not committed is gone."""
        self._open = False
        if self._store is not None:
            self._store.close()
        self._small = {}
