"""Types of the host side: arrays, errors, batches, tickets, and what a store asks of its columns.

Writing has three steps, so that an exception leaves the store unchanged: `stage` encodes and shows readers nothing,
`reserve` allocates, `commit` cannot fail; `cancel` undoes `reserve`. Reading has two: `fetch` locates rows under the store's
lock, `run` copies or decodes them without it. One writer at a time, with any number of readers.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
DType = np.dtype[Any]
F = TypeVar("F", bound=Callable[..., Any])


LOST = np.uint64(2**64 - 1)
"""In place of the ticket of a row that could not be changed."""


class StoreClosed(RuntimeError):
    """The store was closed; its rows are gone."""


class StoreCorrupted(RuntimeError):
    """Stored bytes do not decode to what was stored."""


def raise_if_corrupted(damaged: Array | None, present: Array) -> None:
    """Raise StoreCorrupted if a row that is there is damaged."""
    if damaged is not None and (damaged & present).any():
        raise StoreCorrupted(
            f"Store.read: {int((damaged & present).sum())} rows have other checksums than they were stored "
            f"with; expected the same. Their bytes were damaged: load the last checkpoint with fbuf.load(path)."
        )


def without_traceback(error: Exception) -> Exception:
    """Return a copy of an error without its traceback, whose frames would keep states and their store alive."""
    try:
        copied = copy.copy(error).with_traceback(None)
        if isinstance(copied, OSError) and isinstance(error, OSError):
            copied.strerror = error.strerror  # what was added to it is not in the arguments
        return copied
    except Exception:  # made of what it does not say
        return RuntimeError(f"{type(error).__name__}: {error}")


def flat(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array of any dtype (bfloat16 and float8 have no buffer protocol)."""
    return memoryview(cast(Any, array.reshape(-1).view(np.uint8)))


def crc_of(arrays: Iterable[Array], crc: int = 0) -> int:
    """Return the crc32 of the bytes of arrays, one after the other, continued from `crc`."""
    for array in arrays:
        crc = zlib.crc32(flat(np.ascontiguousarray(array)), crc)
    return crc


def records_errors(method: F) -> F:
    """Keep what a method raises as `last_error`: JAX turns exceptions of callbacks into text."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.last_error = without_traceback(error)
            raise

    return cast(F, call)


def unfit(found: str, expected: str, fix: str = "Load another checkpoint.") -> ValueError:
    """Return the error of arrays that a store cannot load."""
    return ValueError(f"Store.from_arrays: {found}; expected {expected}. {fix}")


def corrupted(found: str, expected: str) -> StoreCorrupted:
    """Return the error of damaged rows."""
    return StoreCorrupted(
        f"Store.read: {found}; expected {expected}. Bytes were damaged: load the last checkpoint with fbuf.load(path), or "
        f"write a data set again; python -m fbuf verify PATH names the file."
    )


def damaged_file(found: str, expected: str) -> StoreCorrupted:
    """Return the error of a damaged file of a store."""
    return StoreCorrupted(
        f"Buffer.resume: {found}; expected {expected}. Bytes were damaged: start a new store at another path."
    )


@dataclass
class Batch:
    """Rows to write, `[N, E, *shape]` a column, and where they are stored. Rows of a lane are counted from 0."""

    rows: Sequence[Array]
    keep: Array | None  # bool[N, E]; None: all
    before: Array  # int64[E], rows of each lane until now
    after: Array  # int64[E]
    uniform: bool  # lanes are level and keep all rows: slices suffice
    low: tuple[Array, Array] | None = None  # int64[E], first rows to keep, before and after; None: by depth
    # Where rows are in any order: int64[N], their places, used as counts of a single lane (then E is 1, all are kept, and
    # `before` and `after` only count rows), and those of the places whose row is evicted.
    at: Array | None = None
    evicted: Array | None = None
    # Of the rows that are written as they are: what goes into their checksums (`fbuf._host.columns.raw_file`).
    names: Array | None = None
    _picks: dict[int, Array] = field(default_factory=dict)
    _places: tuple[Array, Array, Array] | None = None

    def places(self) -> tuple[Array, Array, Array]:
        """Return for every kept row its place on axis 0, its lane, and its count in the lane."""
        if self._places is None:
            n, e = self.rows[0].shape[:2]
            if self.at is not None:
                step, lane, count = np.arange(n), np.zeros(n, np.int64), self.at
            elif self.keep is None:
                step, lane = np.divmod(np.arange(n * e), e)
                count = self.before[lane] + step
            else:
                step, lane = np.nonzero(self.keep)
                count = (self.before + np.cumsum(self.keep, axis=0) - 1)[step, lane]
            self._places = step, lane, count
        return self._places

    def lane(self, rows: Array, lane: int, start: int, stop: int) -> Array:
        """Return kept rows `start` to `stop` of a lane, C-contiguous; a view where the input allows."""
        if self.keep is None:
            return np.ascontiguousarray(rows[start:stop, lane])
        picks = self._picks.get(lane)
        if picks is None:
            picks = self._picks[lane] = np.flatnonzero(self.keep[:, lane])
        return np.ascontiguousarray(rows[picks[start:stop], lane])


class Tickets:
    """Number the rows of `lanes` lanes: row `count` of a lane is `count * E + lane + 1`. The newest `depth` are readable.

    Args:
      first: What row 0 of each lane counts as.
    """

    def __init__(self, lanes: int, depth: int, first: int) -> None:
        self.lanes = lanes
        self.depth = depth
        self.first = first
        self._base = first * lanes + 1  # of row 0 of lane 0

    def of(self, lane: Array, count: Array) -> Array:
        """Return the tickets uint64[...] of rows `count` of lanes, int64[...]."""
        number = count.astype(np.uint64) * np.uint64(self.lanes)
        return cast(Array, number + lane.astype(np.uint64) + np.uint64(self._base))

    def of_batch(self, keep: Array | None, n: int, before: Array) -> Array:
        """Return tickets uint64[n, E] of rows that follow int64[E] `before`; 0 where bool[n, E] `keep` is False."""
        step = np.arange(n)[:, None] if keep is None else np.cumsum(keep, axis=0) - 1
        tickets = self.of(np.arange(self.lanes), before + step)
        return tickets if keep is None else np.where(keep, tickets, np.uint64(0))

    def find(self, tickets: Array, rows: Array) -> tuple[Array, Array, Array]:
        """Return lane and count, int64[...], and whether the row is readable when the lanes have int64[E] `rows`; 0, 0 where
        not.
        """
        number = tickets - np.uint64(self._base)  # wraps below the base, to counts beyond any lane's
        if self.lanes == 1:
            (high,) = rows.tolist()
            present = (number < high) & (number >= max(high - self.depth, 0))
            return np.zeros(number.shape, np.int64), np.where(present, number, 0).astype(np.int64), present
        count, rest = np.divmod(number, np.uint64(self.lanes))
        lane = rest.astype(np.int64)
        high = rows.astype(np.uint64)
        low = np.maximum(rows - self.depth, 0).astype(np.uint64)
        present = (count < high[lane]) & (count >= low[lane])
        return np.where(present, lane, 0), np.where(present, count, 0).astype(np.int64), present


def ranges(start: Array, stop: Array) -> tuple[Array, Array]:
    """Return (lane, number) for start[lane] <= number < stop[lane]."""
    size = np.maximum(stop - start, 0)
    lane = np.repeat(np.arange(len(size)), size)
    within = np.arange(len(lane)) - np.repeat(np.cumsum(size) - size, size)
    return lane, start[lane] + within


InvalidRows = tuple[Array, Array]
"""Lanes and counts int64[M] of rows that are missing, or are not what was written."""


class ColumnStats(NamedTuple):
    """Counts that `Store.stats` adds up."""

    chunks: int = 0  # encoded, live
    payload: int = 0  # their bytes
    dictionaries: int = 0


class Fetch(Protocol):
    """A read in progress; keeps alive what it reads."""

    may_be_overwritten: bool
    """Whether rows may be overwritten while they are read: those that have expired by the end are then no rows."""

    def run(self, outs: Sequence[memoryview]) -> Array | None:
        """Fill the outputs of the requests. Raises StoreCorrupted, or what a user's codec raises.

        Returns:
          bool[M], rows that are damaged unless they have expired; None if all are well.
        """


class ColumnData(Protocol):
    """The newest `depth` rows of each lane of one column."""

    def stage(self, batch: Batch, rows: Array) -> Any:
        """Prepare a batch. A result that is `incompressible` asks for a raw column instead and needs no `cancel`."""
        return None

    def reserve(self, staged: Any) -> None:
        """Store the bytes. The last step that can fail."""
        return None

    def cancel(self, staged: Any) -> None:
        """Undo `reserve`."""
        return None

    def commit(self, batch: Batch, rows: Array, staged: Any) -> None:
        """Make a staged batch readable and drop expired rows."""

    def compact(self, count: Array) -> None:
        """Free memory where that pays."""
        return None

    def next_job(self, count: Array, least: int | None) -> Any:
        """Return chunks to recompress (`RecompressJob`), if there are `least` (None: a whole job); the store's lock is held."""
        return None

    def fetch(self, lane: Array, count: Array, present: Array, rows: Array, starts: Array) -> Fetch:
        """Say how to fetch rows; the store's lock is held.

        Args:
          lane: int64[M], of every row of every request, one request after another.
          count: int64[M], its count in the lane.
          present: bool[M], whether to fetch it at all; the output is undefined where not.
          rows: int64[E], rows of each lane now.
          starts: int64[R], where each request begins.
        """

    def size(self, count: Array) -> int:
        """Return the bytes held when the lanes have int64[E] `count` rows."""

    def column_stats(self, count: Array) -> ColumnStats:
        """Return counts for `Store.stats`."""
        return ColumnStats()


class HostObject(Protocol):
    """What the registry asks of an object that callbacks reach by its id: a `RowStore` or `Priorities`."""

    last_error: Exception | None
    """What a call raised last: JAX turns exceptions of callbacks into text."""

    def stats(self) -> dict[str, int]:
        """Return counts."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory."""

    @property
    def disk(self) -> int:
        """Return the bytes of files."""
        return 0

    def repack(self) -> None:
        """Recompress what is worth it; by default nothing."""
        return None

    def close(self) -> None:
        """Free everything."""


class RowStore(HostObject, Protocol):
    """A store of rows: `Store` (arrays) or `Records` (ragged)."""

    def try_write(self, rows: Sequence[Array], keep: Array | None) -> tuple[Array, Exception | None]:
        """Store `[N, E, ...]` a column; return tickets uint64[N, E], 0 where `keep` is False and where not stored, and why."""

    def read(self, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Fill the `out` of each (column, tickets, out); return bool[M]: the row was there, or its ticket is 0."""

    def request(self, requests: Sequence[tuple[int, Array]]) -> int:
        """Start a read of (column, tickets) where the store can; return a number for `collect`, 0 for none."""
        return 0

    def collect(self, number: int, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Do what `read` does, from a started read if there is one."""
        return self.read(requests)

    def to_arrays(self) -> dict[str, Any]:
        """Return everything as flat arrays."""
