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
from fbuf._host.columns.spec import Column, check_request
from fbuf._host.store.read_ahead import ReadAhead, Reading, Still
from fbuf._host.store.row_updates import Patches
from fbuf._host.types import Array, StoreClosed, bare, flat

_alive: dict[int, weakref.ref[PieceStore]] = {}


def is_open(path: str) -> bool:
    """Whether a data set is open in this process, or some state of it can still be reached."""
    stores = [ref() for ref in list(_alive.values())]
    return any(store is not None and store.path == path and not store.closed for store in stores)


class PieceStore:
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
        self.columns = tuple(Column(part.leaf.name, part.leaf.shape, part.leaf.dtype, None) for part in parts)
        self.path = path
        self.identity = ""
        self.rows = rows
        self.disk = disk
        self.last_error: Exception | None = None
        self._parts: list[ChunkedLeaf | PlainLeaf] = list(parts)
        self._first = first
        self._shift = {column: place - first for column, place in places.items()}
        self._patches = Patches([], 0)
        self._ahead = ReadAhead(weakref.WeakMethod(self._finish))
        self.closed = False
        _alive[id(self)] = weakref.ref(self)
        weakref.finalize(self, _alive.pop, id(self), None).atexit = False

    def _opened(self) -> list[ChunkedLeaf | PlainLeaf]:
        parts = self._parts
        if self.closed:
            raise StoreClosed("fbuf.datasets: the data set is closed; expected it open. Open it again.")
        return parts

    # ---------------------------------------------------------------- reading

    def read(self, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Fetches rows by ticket, as `Store.read` does; chunks that several requests of a column need are decoded once."""
        try:
            for index, tickets, out in requests:
                check_request(self.columns, index, tickets, out)
            reading = self._look_up([(column, tickets) for column, tickets, _ in requests])
            return self._finish(reading, [out for *_, out in requests])
        except Exception as error:
            self.last_error = bare(error)
            raise

    def _look_up(self, requests: Sequence[tuple[int, Array]]) -> Reading:
        parts = self._opened()
        wanted = [np.ascontiguousarray(t).reshape(-1) for _, t in requests]
        present: list[Array] = [np.ones(0, bool)] * len(requests)
        fetches: list[Any] = []
        for column in sorted({c for c, _ in requests}):
            group = [i for i, request in enumerate(requests) if request[0] == column]
            sizes = [wanted[i].size for i in group]
            starts = np.cumsum([0, *sizes[:-1]])
            tickets = np.concatenate([wanted[i] for i in group]) if len(group) > 1 else wanted[group[0]]
            there = (tickets != 0) & (tickets <= np.uint64(self.rows))
            row = np.where(there, tickets - np.uint64(1), np.uint64(0)).astype(np.int64)
            pieces = [slice(b, b + n) for b, n in zip(starts.tolist(), sizes, strict=True)]
            for i, piece in zip(group, pieces, strict=True):
                present[i] = there[piece]
            part = parts[column]
            if isinstance(part, PlainLeaf):
                fetch: Any = part.fetch(row, starts)
            else:
                fetch = part.fetch(self._places(column, row), there, starts)
            fetches.append((fetch, group, pieces, Still(column, tickets, row, row)))
        return Reading(wanted, present, fetches, [], self._patches)

    def _places(self, column: int, row: Array) -> Array:
        """Where rows lie among the chunks of a column."""
        shift = self._shift[column]
        if len(shift) == 1:
            return np.asarray(row + shift[0])
        return np.asarray(row + shift[np.searchsorted(self._first, row, side="right") - 1])

    def _finish(self, reading: Reading, outs: Sequence[Array]) -> Array:
        wanted, present, fetches, *_ = reading
        for fetch, group, *_ in fetches:
            fetch.run([flat(outs[i]) for i in group])
        for out, there in zip(outs, present, strict=True):
            if not there.all() and out.nbytes:
                out.reshape(-1).view(np.uint8).reshape(len(there), -1)[~there] = 0
        oks = [there | (t == 0) for there, t in zip(present, wanted, strict=True)]
        return np.concatenate(oks) if oks else np.ones(0, bool)

    def request(self, requests: Sequence[tuple[int, Array]]) -> int:
        """Begins a read on the store's own thread, as `Store.request` does."""
        return self._ahead.request(self.columns, requests, self._look_up)

    def collect(self, number: int, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """What `read` does, out of request `number` if that is what it asked for."""
        return self._ahead.collect(self.columns, number, requests, self.read)

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
