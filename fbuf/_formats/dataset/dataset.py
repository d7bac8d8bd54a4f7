"""Finished data sets, open for reading from any thread, without JAX.

`DataSetStore` serves all segments as one store, with the read methods of `fbuf._host.store.store.Store`: row r has ticket
r + 1, so callbacks and prefetch work unchanged. Rows never change or expire. `DataSet` opens one by path.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from fbuf._core.arguments import check_choice
from fbuf._core.closing import Closing
from fbuf._formats import checkpoint
from fbuf._formats.checkpoint.data_file import OpenFile
from fbuf._formats.checkpoint.filesystem import Path
from fbuf._formats.checkpoint.read import Saved
from fbuf._formats.dataset import directory
from fbuf._formats.dataset import manifest as manifest_file
from fbuf._formats.dataset.chunked_leaf import ChunkedLeaf
from fbuf._formats.dataset.manifest import Manifest, SegmentEntry
from fbuf._formats.dataset.plain_leaf import PlainLeaf
from fbuf._formats.dataset.schema import TRUNCATED, Schema
from fbuf._host.columns.spec import Column
from fbuf._host.store.read_ahead import PendingRows
from fbuf._host.store.reads import Found, TicketReads
from fbuf._host.types import Array, StoreClosed, StoreCorrupted

Leaf = ChunkedLeaf | PlainLeaf
_alive: dict[int, weakref.ref[DataSetStore]] = {}


def is_open(path: str) -> bool:
    """Return whether a data set is open in this process, or a reachable state refers to it."""
    stores = [ref() for ref in list(_alive.values())]
    return any(store is not None and store.path == path and not store.closed for store in stores)


class DataSetStore(TicketReads):
    """Rows 0 to `rows` - 1 of some columns.

    Args:
      path: The data set's folder.
      columns: The leaves.
      first: int64[S], row number of each segment's first row.
      places: int64[S] by chunked column, the place of that row among the chunks.
      disk: Bytes of the files.
    """

    def __init__(
        self, path: str, columns: Sequence[Leaf], rows: int, first: Array, places: Mapping[int, Array], disk: int
    ) -> None:
        super().__init__()
        self.columns = tuple(Column(part.leaf.name, part.leaf.shape, part.leaf.dtype, None) for part in columns)
        self.path = path
        self.identity = ""
        self.rows = rows
        self.disk = disk
        self._columns: list[Leaf] = list(columns)
        self._first = first
        self._shift = {column: place - first for column, place in places.items()}
        self.closed = False
        _alive[id(self)] = weakref.ref(self)
        weakref.finalize(self, _alive.pop, id(self), None).atexit = False

    def _open_columns(self) -> list[Leaf]:
        columns = self._columns  # before the check: `close` runs in any thread
        if self.closed:
            raise StoreClosed("fbuf.datasets: the data set is closed. Open it again.")
        return columns

    def _find_rows(self, columns: Sequence[int], tickets: Array, starts: Array) -> list[Found]:
        present = (tickets != 0) & (tickets <= np.uint64(self.rows))
        row = np.where(present, tickets - np.uint64(1), np.uint64(0)).astype(np.int64)
        rows = PendingRows(tickets, row, row)
        return [(self._fetch(column, row, present, starts), present, [], rows) for column in columns]

    def _fetch(self, column: int, row: Array, present: Array, starts: Array) -> Any:
        part = self._open_columns()[column]
        if isinstance(part, PlainLeaf):
            return part.fetch(row, starts)
        shift = self._shift[column]
        at = 0 if len(shift) == 1 else np.searchsorted(self._first, row, side="right") - 1
        return part.fetch(np.asarray(row + shift[at]), present, starts)

    def try_write(self, *_: Any) -> NoReturn:
        """Raise TypeError: rows do not change."""
        raise TypeError("fbuf.datasets: a data set is read-only.")

    def to_arrays(self) -> dict[str, Any]:
        """Return nothing: the rows are in their own files."""
        return {}

    def repack(self) -> None:
        """Do nothing: segments were recompressed when written."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory: index, dictionaries, leaves in memory, prefetched rows."""
        return sum(part.nbytes for part in self._open_columns()) + self._ahead.nbytes

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return bytes in memory, and on the disk if chunked, by leaf."""
        columns = self._open_columns()
        disk = [part.payload if isinstance(part, ChunkedLeaf) else 0 for part in columns]
        return {part.leaf.name: (part.nbytes, size) for part, size in zip(columns, disk, strict=True)}

    def stats(self) -> dict[str, int]:
        """Return the counts of `Store.stats`."""
        chunked = [part for part in self._open_columns() if isinstance(part, ChunkedLeaf)]
        return {
            "rows_accepted": self.rows,
            "rows_live": self.rows,
            "chunks": sum(part.ring for part in chunked),
            "payload_bytes": sum(part.payload for part in chunked),
            "raw_bytes": self.rows * sum(c.nbytes for c in self.columns),
            "dictionaries": sum(len(part.table) for part in chunked),
            "row_updates": 0,
            "nbytes": self.nbytes,
        }

    def close(self) -> None:
        """Close: running reads finish, later ones raise StoreClosed. Twice is fine."""
        self._ahead.close()
        self.closed = True
        self._columns = []


MEMORY = 1 << 28
"""Bytes of memory for plain leaves of many values."""


class DataSet(Closing):
    """An open data set. Closes with `with`, or `close()`; running reads then finish.

    Attributes:
      path: Its folder.
      rows: The number of rows.
      schema: Their leaves.
      segments: `SegmentEntry`s, in order: number, rows `begin` to `stop`, `cut`.
      meta: The JSON saved with them.
      identity: An id of these rows, wherever their files are.
      store: The store that callbacks read from.
    """

    def __init__(self, path: str, manifest: Manifest, store: DataSetStore) -> None:
        self.path, self.manifest, self.store = path, manifest, store
        self.schema: Schema = manifest.schema
        self.segments: tuple[SegmentEntry, ...] = manifest.segments
        self.meta: dict[str, Any] = manifest.meta
        self.rows = manifest.rows
        self.identity = store.identity = manifest.identity
        self._column = {name: i for i, name in enumerate(self.schema.names)}

    @classmethod
    def open(cls, path: Path, verify: str = "lazy", *, memory: int = MEMORY, cache: int = 0) -> DataSet:
        """Open a data set.

        Args:
          path: Its folder.
          verify: "lazy": check sizes and headers of files now, each block and chunk when read. "full": check every byte now.
          memory: Bytes for leaves that are neither encoded nor of few values, the smallest first; the others are read from the
            files.
          cache: Bytes of decoded chunks to keep, for each chunked leaf.
        Raises:
          FileNotFoundError: it is missing or unfinished.
          StoreCorrupted: a file is damaged.
          VersionError: a later release wrote it.
        Cost: about 30 ms for a million Atari frames; memory 18 bytes a chunk, a byte a row for each leaf of few values,
          an eighth for each flag, and dictionaries as needed.
        """
        check_choice("fbuf.datasets", "verify", verify, ("full", "lazy"))
        base = directory.root(path)
        manifest = manifest_file.load(base)
        return cls(base, manifest, _open_store(base, manifest, verify == "full", memory, cache))

    def read(self, rows: Mapping[str, Any]) -> dict[str, Array]:
        """Read rows by number, int64[...] by leaf; return `[..., *shape]` by leaf.

        Raises:
          IndexError: there is no such row. KeyError: there is no such leaf. StoreCorrupted: the data is damaged.
        """
        requests, out = [], {}
        for name, number in rows.items():
            leaf, at = self.schema[name], np.asarray(number)
            if at.dtype.kind not in "iu":
                raise TypeError(f"DataSet.read: rows of leaf '{name}' are {at.dtype}; expected integers.")
            if at.size and not (0 <= int(at.min()) and int(at.max()) < self.rows):
                raise IndexError(f"DataSet.read: rows are {int(at.min())} to {int(at.max())}; there are {self.rows}.")
            out[name] = np.empty((*at.shape, *leaf.shape), leaf.dtype)
            requests.append((self._column[name], np.asarray(at.astype(np.uint64) + np.uint64(1)), out[name]))
        self.store.read(requests)
        return out

    def read_rows(self, start: int, stop: int, leaves: Sequence[str] | None = None) -> dict[str, Array]:
        """Return rows `start` to `stop - 1`, `[N, *shape]` by leaf; None: of all leaves. Raises as `read`."""
        if not 0 <= start <= stop <= self.rows:
            raise IndexError(f"DataSet.read_rows: rows are {start} to {stop}; there are {self.rows}.")
        number = np.arange(start, stop, dtype=np.int64)
        return self.read(dict.fromkeys(self.schema.names if leaves is None else leaves, number))

    def close(self) -> None:
        """Close it; twice is fine."""
        self.store.close()

    def __repr__(self) -> str:
        return f"DataSet({self.path!r}, {self.rows} rows, {len(self.segments)} segments)"


def _open_store(base: str, manifest: Manifest, full: bool, memory: int, cache: int) -> DataSetStore:
    files: list[OpenFile] = []
    first = np.cumsum([0, *(part.rows for part in manifest.segments)])
    cuts = [int(stop) - 1 for part, stop in zip(manifest.segments, first[1:], strict=True) if part.cut]
    columns: list[Leaf] = []
    for leaf in manifest.schema.leaves:
        if leaf.codec is not None:
            columns.append(ChunkedLeaf(leaf, files, cache))
        else:
            columns.append(PlainLeaf(leaf, cuts if leaf.name == TRUNCATED else ()))
    disk = 0
    for part in manifest.segments:
        saved = _open_segment(base, manifest, part)
        try:
            info = directory.info_of(saved)
            disk += info.nbytes
            if full:
                saved.verify()
            _add_segment(columns, saved, info.rows, part, len(files))
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, StoreCorrupted) as error:
            saved.close()
            raise StoreCorrupted(_damage(base, part, f"{error}.")) from error
        files.extend(saved.files)
    plain = [column for column in columns if isinstance(column, PlainLeaf)]
    for column in sorted(plain, key=lambda column: column.leaf.nbytes):
        wanted = column.resident_bytes
        column.freeze(wanted <= memory)
        memory -= wanted if wanted <= memory else 0
    places = {}
    begin = np.array([part.begin for part in manifest.segments], np.int64)
    for i, chunked in enumerate(columns):
        if isinstance(chunked, ChunkedLeaf):
            chunked.freeze()
            places[i] = np.array(chunked.first, np.int64) + begin
    return DataSetStore(base, columns, manifest.rows, first[:-1], places, disk)


def _open_segment(base: str, manifest: Manifest, part: SegmentEntry) -> Saved:
    name = f"segment {part.number} of {base}"
    try:
        saved = directory.open_segment(base, part.number)
    except checkpoint.CheckpointNotFound:
        raise FileNotFoundError(
            errno.ENOENT, f"fbuf.datasets: {name} is missing. Restore its folder, or remove {_repair(base)}"
        ) from None
    except StoreCorrupted as error:
        text = str(error).partition(" is whole: ")[2].partition(" Load another checkpoint")[0] or str(error)
        raise StoreCorrupted(_damage(base, part, text)) from error
    if saved.manifest.save != part.save:
        saved.close()
        raise FileNotFoundError(errno.ENOENT, f"fbuf.datasets: {name} was rewritten. Remove {_repair(base)}")
    return saved


def _damage(base: str, part: SegmentEntry, why: str) -> str:
    return (
        f"fbuf.datasets: segment {part.number} of {base} is damaged: {why} Restore it from a copy, or remove "
        f"{directory.folder(base, part.number)} and {_repair(base)}"
    )


def _repair(base: str) -> str:
    return f"{os.path.join(base, manifest_file.NAME)}, and write the data set again; complete segments are kept."


def _add_segment(columns: Sequence[Leaf], saved: Saved, rows: int, part: SegmentEntry, file: int) -> None:
    if part.stop > rows:
        raise ValueError(f"it has {rows} rows; expected {part.stop} or more")
    for column in columns:
        if isinstance(column, ChunkedLeaf):
            column.add(saved, rows, file)
        else:
            column.add(saved, rows, part.begin, part.stop)
