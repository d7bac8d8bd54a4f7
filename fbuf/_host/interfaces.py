"""What a store asks of a column's rows, as they are or encoded.

Writing is in three steps, so that an exception leaves the store as it was: `stage` is slow and shows readers nothing,
`reserve` allocates, `commit` cannot fail; `cancel` undoes `reserve`. Reading is in two: `fetch` says how, under the
store's lock, and `run` does it without. One writer at a time, with any number of readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fbuf._host.batch import Batch
from fbuf._host.types import Array


class Census(NamedTuple):
    """What `Store.stats` adds up."""

    chunks: int = 0  # encoded, live
    payload: int = 0  # their bytes
    dictionaries: int = 0


class Job(Protocol):
    """Chunks to compress again."""

    @property
    def part(self) -> Any:
        """The chunked column that made it: `packer`, `look`, `swap` and `leave` do its work."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""


class Fetch(Protocol):
    """A read under way; holds what it reads alive."""

    volatile: bool
    """Whether rows may be overwritten while they are read: those that have expired by the end are then no rows."""

    def run(self, outs: Sequence[memoryview]) -> Array | None:
        """Fills the requests' outputs. Raises StoreCorrupted, or what a codec of the user's raises.

        Returns:
          bool[M], rows that are damaged unless they have expired; None if all are well.
        """


class Part(Protocol):
    """The newest `depth` rows of each lane of one column."""

    def stage(self, batch: Batch, rows: Array) -> Any:
        """Prepares a batch; the result has `incompressible`, which asks for a ring instead and needs no `cancel`."""

    def reserve(self, staged: Any) -> None:
        """Store the bytes. The last step that can fail."""
        return None

    def cancel(self, staged: Any) -> None:
        """Undo `reserve`."""
        return None

    def commit(self, batch: Batch, rows: Array, staged: Any) -> None:
        """Makes a staged batch readable and drops what has expired."""

    def compact(self, count: Array) -> None:
        """Give memory back, where that pays."""
        return None

    def lot(self, count: Array, least: int | None) -> Job | None:
        """Return chunks to compress again, if there are `least` (None: a whole lot); the store's lock is held."""
        return None

    def fetch(self, lane: Array, count: Array, there: Array, rows: Array, starts: Array) -> Fetch:
        """Says how to fetch rows; the store's lock is held.

        Args:
          lane: int64[M], of every row of every request, one request after another.
          count: int64[M], its count in the lane.
          there: bool[M], whether to fetch it at all; the output is undefined where not.
          rows: int64[E], rows of each lane now.
          starts: int64[R], where each request begins.
        """

    def size(self, count: Array) -> int:
        """Bytes held when the lanes have int64[E] `count` rows."""

    def census(self, count: Array) -> Census:
        """Return counts for `Store.stats`."""
        return Census()


class Kept(Protocol):
    """What the registry asks of anything that callbacks reach by its id: rows (`Served`) or `Priorities`."""

    last_error: Exception | None
    """What a call raised last: JAX turns exceptions of callbacks into text."""

    def stats(self) -> dict[str, int]:
        """Counts."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    def disk(self) -> int:
        """Bytes of files."""
        return 0

    def repack(self) -> None:
        """Compress again what is worth it; by default nothing."""
        return None

    def close(self) -> None:
        """Frees everything."""


class Served(Kept, Protocol):
    """A store of rows: `Store` (of arrays) or `Records` (ragged)."""

    def write(self, rows: Sequence[Array], keep: Array | None) -> Array:
        """Takes `[N, E, ...]` a column in; tickets uint64[N, E], 0 where `keep` is False."""

    def read(self, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Fills the `out` of each (column, tickets, out); bool[M]: the row was there, or its ticket is 0."""

    def request(self, requests: Sequence[tuple[int, Array]]) -> int:
        """Begins a read of (column, tickets), or does not: a number for `collect`, 0 for none."""

    def collect(self, number: int, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """What `read` does, out of a request if there is one."""

    def patch(self, tickets: Array, keep: Array, fields: Mapping[int, Array]) -> Array:
        """Stores rows again with some columns replaced; their new tickets."""

    def to_arrays(self) -> dict[str, Any]:
        """Everything as flat arrays."""
