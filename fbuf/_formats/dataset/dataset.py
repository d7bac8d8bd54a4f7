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

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint.data_file import OpenFile
from fbuf._formats.checkpoint.read import Saved
from fbuf._formats.dataset import directory
from fbuf._formats.dataset import manifest as _manifest
from fbuf._formats.dataset.chunked_leaf import ChunkedLeaf
from fbuf._formats.dataset.manifest import Manifest, Part
from fbuf._formats.dataset.plain_leaf import PlainLeaf
from fbuf._formats.dataset.schema import TRUNCATED, Schema
from fbuf._host.columns.spec import Column, check_request
from fbuf._host.store.read_ahead import ReadAhead, Reading, Still
from fbuf._host.store.row_updates import Patches
from fbuf._host.types import Array, StoreClosed, StoreCorrupted, bare, flat

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


MEMORY = 1 << 28
"""Bytes of memory granted to small leaves of many values."""


class DataSet:
    """A data set, open. Closes with `with`, or `close()`; reads under way then finish.

    Attributes:
      path: Its folder.
      rows: How many there are.
      schema: What they are.
      pieces: `Part`s, in order: number, rows `begin` to `stop` of it, `cut`.
      meta: What was kept beside them.
      identity: Names these very rows, wherever their files lie.
      store: What callbacks read from.
    """

    def __init__(self, path: str, manifest: Manifest, store: PieceStore) -> None:
        self.path, self.manifest, self.store = path, manifest, store
        self.schema: Schema = manifest.schema
        self.pieces: tuple[Part, ...] = manifest.parts
        self.meta: dict[str, Any] = manifest.meta
        self.rows = manifest.rows
        self.identity = store.identity = manifest.identity
        self._column = {name: i for i, name in enumerate(self.schema.names)}

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], verify: str = "lazy", *, memory: int = MEMORY, cache: int = 0
    ) -> DataSet:
        """Opens a data set.

        Args:
          path: Its folder.
          verify: "lazy": sizes and headers of files now, each block and chunk as it is read. "full": every byte now.
          memory: Bytes granted to leaves that are neither encoded nor of few values, the smallest first; the others are read
            from the files.
          cache: Bytes of decoded chunks kept, for each leaf in chunks.
        Raises:
          FileNotFoundError: there is none, or it is not finished.
          StoreCorrupted: something of it is damaged.
          VersionError: a later release wrote it.
        Cost: some 30 ms for a million Atari frames; memory 18 bytes a chunk, a byte a row for each leaf of few values, an
          eighth for each flag, and dictionaries as they are needed.
        """
        if verify not in ("full", "lazy"):
            raise ValueError(f"fbuf.datasets: verify is {verify!r}; expected 'full' or 'lazy'.")
        base = directory.root(path)
        manifest = _manifest.load(base)
        return cls(base, manifest, _store(base, manifest, verify == "full", memory, cache))

    def read(self, rows: Mapping[str, Any]) -> dict[str, Array]:
        """Rows by number, int64[...] by leaf: `[..., *shape]` by leaf.

        Raises:
          IndexError: there is no such row. KeyError: there is no such leaf. StoreCorrupted: what is read is damaged.
        """
        requests, out = [], {}
        for name, number in rows.items():
            leaf, at = self.schema[name], np.asarray(number)
            if at.dtype.kind not in "iu":
                raise TypeError(f"DataSet.read: rows of leaf '{name}' are {at.dtype}; expected integers.")
            if at.size and not (0 <= int(at.min()) and int(at.max()) < self.rows):
                raise IndexError(
                    f"DataSet.read: rows {int(at.min())} to {int(at.max())} are asked for; there are {self.rows}."
                )
            out[name] = np.empty((*at.shape, *leaf.shape), leaf.dtype)
            requests.append((self._column[name], np.asarray(at.astype(np.uint64) + np.uint64(1)), out[name]))
        self.store.read(requests)
        return out

    def read_rows(self, start: int, stop: int, leaves: Sequence[str] | None = None) -> dict[str, Array]:
        """Rows `start` to `stop - 1`, `[N, *shape]` by leaf; None: of all leaves. Raises as `read`."""
        if not 0 <= start <= stop <= self.rows:
            raise IndexError(f"DataSet.read_rows: rows {start} to {stop} are asked for; there are {self.rows}.")
        number = np.arange(start, stop, dtype=np.int64)
        return self.read(dict.fromkeys(self.schema.names if leaves is None else leaves, number))

    def close(self) -> None:
        """Closes it; twice is fine."""
        self.store.close()

    def __enter__(self) -> DataSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DataSet({self.path!r}, {self.rows} rows, {len(self.pieces)} pieces)"


def _store(base: str, manifest: Manifest, full: bool, memory: int, cache: int) -> PieceStore:
    files: list[OpenFile] = []
    first = np.cumsum([0, *(part.rows for part in manifest.parts)])
    cuts = [int(stop) - 1 for part, stop in zip(manifest.parts, first[1:], strict=True) if part.cut]
    columns: list[ChunkedLeaf | PlainLeaf] = []
    for leaf in manifest.schema.leaves:
        if leaf.codec is not None:
            columns.append(ChunkedLeaf(leaf, files, cache))
        else:
            columns.append(PlainLeaf(leaf, cuts if leaf.name == TRUNCATED else ()))
    disk = 0
    for part in manifest.parts:
        saved = _piece(base, manifest, part)
        try:
            info = directory.info_of(saved)
            disk += info.nbytes
            if full:
                saved.verify()
            _take(columns, saved, info.rows, part, len(files))
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, StoreCorrupted) as error:
            saved.close()
            raise StoreCorrupted(_damaged(base, part, f"{error}.")) from error
        files.extend(saved.files)
    plain = [column for column in columns if isinstance(column, PlainLeaf)]
    for column in sorted(plain, key=lambda column: column.leaf.nbytes):
        wanted = column.wanted
        column.seal(wanted <= memory)
        memory -= wanted if wanted <= memory else 0
    places = {}
    begin = np.array([part.begin for part in manifest.parts], np.int64)
    for i, chunked in enumerate(columns):
        if isinstance(chunked, ChunkedLeaf):
            chunked.seal()
            places[i] = np.array(chunked.first, np.int64) + begin
    return PieceStore(base, columns, manifest.rows, first[:-1], places, disk)


def _piece(base: str, manifest: Manifest, part: Part) -> Saved:
    try:
        saved = directory.open_piece(base, part.number)
    except checkpoint.CheckpointNotFound:
        raise FileNotFoundError(
            errno.ENOENT,
            f"fbuf.datasets: piece {part.number} of {base} is missing; expected it at {directory.folder(base, part.number)}. "
            f"Put it back; or remove {_again(base)}",
        ) from None
    except StoreCorrupted as error:  # which speaks of a checkpoint
        text = str(error).partition("; expected one. ")[2] or str(error)
        raise StoreCorrupted(_damaged(base, part, text.partition(" Load another checkpoint")[0])) from error
    if saved.manifest.save != part.save:
        saved.close()
        raise FileNotFoundError(
            errno.ENOENT,
            f"fbuf.datasets: piece {part.number} of {base} was written anew since the data set was finished; expected "
            f"the one of then. Put it back; or remove {_again(base)}",
        )
    return saved


def _damaged(base: str, part: Part, why: str) -> str:
    return (
        f"fbuf.datasets: piece {part.number} of {base} is damaged: {why} Copy it from where it is whole; or remove "
        f"{directory.folder(base, part.number)} and {_again(base)}"
    )


def _again(base: str) -> str:
    """How a data set is made whole: what makes data sets leaves one that says it is finished alone."""
    return f"{os.path.join(base, _manifest.NAME)}, and run again what made the data set: pieces that are whole stay."


def _take(columns: Sequence[ChunkedLeaf | PlainLeaf], saved: Saved, rows: int, part: Part, file: int) -> None:
    if part.stop > rows:
        raise ValueError(f"it has {rows} rows; expected {part.stop} or more")
    for column in columns:
        if isinstance(column, ChunkedLeaf):
            column.add(saved, rows, file)
        else:
            column.add(saved, rows, part.begin, part.stop)
