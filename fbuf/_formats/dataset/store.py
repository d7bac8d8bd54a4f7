"""The store of a data set: all its pieces as one, numpy in and numpy out, for callbacks and for whoever reads without JAX.

What `fbuf._host.store.store.Store` is for rows that come and go: rows behind tickets (that of row r is r + 1), so that the
callbacks, reading ahead and the registry of open stores serve both. It never changes, so it needs no locks beside that of
reading ahead, and no row ever expires.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from fbuf._formats.dataset.chunked_leaf import ChunkedLeaf
from fbuf._formats.dataset.plain_leaf import PlainLeaf
from fbuf._host.columns.spec import Column
from fbuf._host.store.read_ahead import PendingRows
from fbuf._host.store.reads import Found, TicketReads
from fbuf._host.types import Array, StoreClosed

_alive: dict[int, weakref.ref[PieceStore]] = {}


def is_open(path: str) -> bool:
    """Whether a data set is open in this process, or some state of it can still be reached."""
    stores = [ref() for ref in list(_alive.values())]
    return any(store is not None and store.path == path and not store.closed for store in stores)


class PieceStore(TicketReads):
    """Rows 0 to `rows` - 1 of some columns.

    Args:
      path: The data set's folder.
      parts: By column.
      first: int64[P], row number of each piece's first row; and of each column in chunks, int64[P], the place of that row.
      disk: Bytes of the files.
    """

    def __init__(
        self,
        path: str,
        parts: Sequence[ChunkedLeaf | PlainLeaf],
        rows: int,
        first: Array,
        places: Mapping[int, Array],
        disk: int,
    ) -> None:
        super().__init__()
        self.columns = tuple(Column(part.leaf.name, part.leaf.shape, part.leaf.dtype, None) for part in parts)
        self.path = path
        self.identity = ""
        self.rows = rows
        self.disk = disk
        self._parts: list[ChunkedLeaf | PlainLeaf] = list(parts)
        self._first = first
        self._shift = {column: place - first for column, place in places.items()}
        self.closed = False
        _alive[id(self)] = weakref.ref(self)
        weakref.finalize(self, _alive.pop, id(self), None).atexit = False

    def _opened(self) -> list[ChunkedLeaf | PlainLeaf]:
        parts = self._parts
        if self.closed:
            raise StoreClosed("fbuf.datasets: the data set is closed; expected it open. Open it again.")
        return parts

    # ---------------------------------------------------------------- reading

    def _find_rows(self, column: int, tickets: Array, starts: Array) -> Found:
        there = (tickets != 0) & (tickets <= np.uint64(self.rows))
        row = np.where(there, tickets - np.uint64(1), np.uint64(0)).astype(np.int64)
        part = self._opened()[column]
        if isinstance(part, PlainLeaf):
            fetch: Any = part.fetch(row, starts)
        else:
            fetch = part.fetch(self._places(column, row), there, starts)
        return fetch, there, [], PendingRows(column, tickets, row, row)

    def _check_open(self) -> None:
        self._opened()

    def _places(self, column: int, row: Array) -> Array:
        """Where rows lie among the chunks of a column."""
        shift = self._shift[column]
        if len(shift) == 1:
            return np.asarray(row + shift[0])
        return np.asarray(row + shift[np.searchsorted(self._first, row, side="right") - 1])

    # ---------------------------------------------------------------- what it does not do

    def _refuse(self) -> NoReturn:
        raise TypeError("fbuf.datasets: a data set is read-only.")

    def write(self, rows: Sequence[Array], keep: Array | None) -> Array:
        """Raises TypeError."""
        self._refuse()

    def patch(self, tickets: Array, keep: Array, fields: Mapping[int, Array]) -> Array:
        """Raises TypeError."""
        self._refuse()

    def to_arrays(self) -> dict[str, Any]:
        """Nothing: the rows lie in files of their own."""
        return {}

    def repack(self) -> None:
        """Nothing: it was done when the pieces were written."""

    # ---------------------------------------------------------------- size, end

    @property
    def nbytes(self) -> int:
        """Bytes of memory: index, dictionaries, leaves that are kept there, rows read ahead."""
        return sum(part.nbytes for part in self._opened()) + self._ahead.nbytes

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Bytes in memory by leaf, and on the disk of those kept in chunks."""
        parts = self._opened()
        disk = [part.payload if isinstance(part, ChunkedLeaf) else 0 for part in parts]
        return {part.leaf.name: (part.nbytes, size) for part, size in zip(parts, disk, strict=True)}

    def stats(self) -> dict[str, int]:
        """Counts, as `Store.stats` has them."""
        chunked = [part for part in self._opened() if isinstance(part, ChunkedLeaf)]
        return {
            "rows_accepted": self.rows,
            "rows_live": self.rows,
            "chunks": sum(part.ring for part in chunked),
            "payload_bytes": sum(part.payload for part in chunked),
            "raw_bytes": self.rows * sum(c.nbytes for c in self.columns),
            "dictionaries": sum(len(part.table) for part in chunked),
            "patches": 0,
            "nbytes": self.nbytes,
        }

    def close(self) -> None:
        """Reads under way finish, later ones raise StoreClosed; files are closed with the last of them. Twice is fine."""
        self._ahead.close()
        self.closed = True
        self._parts = []
