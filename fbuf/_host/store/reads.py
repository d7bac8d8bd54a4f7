"""Read rows by ticket, now or ahead: the base class of `Store` and of the read-only store of a data set.

A read finds its rows under the lock of the store (`_look_up`) and copies or decodes them without it (`_run`).
"""

from __future__ import annotations

import abc
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from fbuf._host.columns.spec import Column
from fbuf._host.store.read_ahead import PendingRows, ReadAhead, Reading
from fbuf._host.types import Array, Fetch, StoreCorrupted, flat, raise_if_corrupted, records_errors

Found = tuple[Fetch, Array, list[tuple[int, Callable[[memoryview], None]]], PendingRows]
"""How to fetch rows, bool[M] of which are there, what writes the updated ones of those, and what tells whether they last."""
_MOST_KEPT = (1 << 25) - (1 << 16)  # bytes; freeing more than 32 MiB does not raise glibc's threshold


@functools.cache
def _keep_freed(bits: int) -> None:
    """Let glibc keep freed batches of less than `2**bits` bytes, by freeing an array of that size once.

    Otherwise glibc may return a large batch to the system, which clears every page of the next batch: that takes longer than
    the read. The threshold that this raises is one of the whole process.
    """
    np.empty(min(1 << bits, _MOST_KEPT), np.uint8)


class TicketReads(abc.ABC):
    """Reads of rows by ticket; a store says where they are (`_find_rows`)."""

    columns: tuple[Column, ...]
    _path: str | None = None  # of the store's folder, for errors

    def __init__(self) -> None:
        self.last_error: Exception | None = None
        self._lock = threading.Lock()
        self._ahead = ReadAhead(weakref.WeakMethod(self._run))

    @abc.abstractmethod
    def _find_rows(self, columns: Sequence[int], tickets: Array, starts: Array) -> list[Found]:
        """Find rows of each column by tickets uint64[M], of requests that begin at int64[R] `starts`; `_lock` is held.

        Raise StoreClosed or StoreCorrupted if rows cannot be read.
        """

    def _are_readable(self, rows: PendingRows) -> Array:
        """Return bool[M], which rows have not expired since they were found: by default all. `_lock` is held."""
        return np.ones(len(rows.tickets), bool)

    @records_errors
    def read(self, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Fetch rows by ticket. A chunk that several requests of a column need is decoded once.

        Args:
          requests: (column, tickets uint64[...], out `[..., *shape]`). `out` is C-contiguous and writeable, and every byte
            of it is written. Ticket 0 and tickets of expired or unknown rows give zeros.
        Returns:
          bool[M], one request after another: False where the row expired or never was; True for ticket 0.
        Raises:
          StoreCorrupted: Stored bytes are damaged; `out` is then undefined.
          ValueError, TypeError, StoreClosed: As for `write`.
        Cost: 3 ms for 256 pairs of 4-stacks of 84x84 with Zstd, half of it in zstd; about 100 us a call.
        """
        reading = self._look_up([(column, tickets) for column, tickets, _ in requests])
        return self._run(reading, [out for *_, out in requests])

    def request(self, requests: Sequence[tuple[int, Array]]) -> int:
        """Start a read of (column, tickets uint64[...]) on the store's own thread; `collect` returns its rows.

        The rows are located now, so that compressed rows that expire before `collect` are still read.

        Returns:
          A number for `collect`, 1 to 2^32 - 1; 0 if no read was started.
        Raises:
          ValueError, TypeError, StoreClosed: As for `write`.
        Cost: about 100 us; the rows of the last two requests stay in memory.
        """
        copies = [(column, tickets.copy()) for column, tickets in requests]
        columns = self.columns
        rows = [((*tickets.shape, *columns[i].shape), columns[i].dtype) for i, tickets in copies]
        return self._ahead.begin(self._look_up(copies), copies, rows)

    @records_errors
    def collect(self, number: int, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Do what `read` does, with the rows of request `number` if it asked for these tickets and has not been dropped.

        Waits for a request that is running. A request that failed, was dropped or asked for other rows is no error: the
        rows are read now, which raises their errors.
        """
        ok = self._ahead.take(number, requests)
        return self.read(requests) if ok is None else ok

    def _look_up(self, requests: Sequence[tuple[int, Array]]) -> Reading:
        """Find the rows of (column, tickets)."""
        wanted = [np.ascontiguousarray(t).reshape(-1) for _, t in requests]
        present: list[Array] = [np.ones(0, bool)] * len(requests)
        reading = Reading(wanted, present, [], [])
        with self._lock:
            groups: dict[int, list[int]] = {}
            for i, (column, _) in enumerate(requests):
                groups.setdefault(column, []).append(i)
            by_tickets: dict[tuple[int, ...], list[int]] = {}  # columns, by the tickets of their requests
            for column, group in groups.items():
                by_tickets.setdefault(tuple(id(requests[i][1]) for i in group), []).append(column)
            for columns in by_tickets.values():
                group = groups[columns[0]]
                sizes = [wanted[i].size for i in group]
                stops = list(itertools.accumulate(sizes, initial=0))
                spans = list(itertools.starmap(slice, itertools.pairwise(stops)))
                tickets = np.concatenate([wanted[i] for i in group]) if len(group) > 1 else wanted[group[0]]
                found = self._find_rows(columns, tickets, np.array(stops[:-1]))
                for column, (fetch, rows_present, updated, pending) in zip(columns, found, strict=True):
                    for i, span in zip(groups[column], spans, strict=True):
                        present[i] = rows_present[span]
                        for at, put in updated:
                            if span.start <= at < span.stop:
                                reading.updated.append((i, at - span.start, self.columns[column].nbytes, put))
                    reading.fetches.append((fetch, groups[column], spans, pending))
        return reading

    def _run(self, reading: Reading, outs: Sequence[Array]) -> Array:
        """Fill `outs`, one a request, and return what `read` does. Called once for each `reading`."""
        try:
            return self._fill(reading, outs)
        except StoreCorrupted as error:
            if self._path is None or self._path in str(error):
                raise
            text = str(error).replace("Store.read: ", f"Store.read: at {self._path}, ", 1)
            raise StoreCorrupted(text) from error

    def _fill(self, reading: Reading, outs: Sequence[Array]) -> Array:
        wanted, present, fetches, updated = reading
        _keep_freed(sum(out.nbytes for out in outs).bit_length())
        damaged = [fetch.run([flat(outs[i]) for i in group]) for fetch, group, *_ in fetches]
        if any(fetch.may_be_overwritten for fetch, *_ in fetches):
            with self._lock:  # rows that were overwritten while they were copied have expired by now
                at_risk = {id(rows): rows for fetch, *_, rows in fetches if fetch.may_be_overwritten}
                last = {key: self._are_readable(rows) for key, rows in at_risk.items()}
            for (fetch, group, spans, rows), bad in zip(fetches, damaged, strict=True):
                if fetch.may_be_overwritten:
                    readable = last[id(rows)]
                    raise_if_corrupted(bad, readable)
                    for i, span in zip(group, spans, strict=True):
                        present[i] = present[i] & readable[span]
        for i, at, row, put in updated:
            if present[i][at]:
                put(flat(outs[i])[at * row : (at + 1) * row])
        for out, is_present in zip(outs, present, strict=True):
            if not is_present.all() and out.nbytes:
                out.reshape(-1).view(np.uint8).reshape(len(is_present), -1)[~is_present] = 0
        oks = [is_present | np.logical_not(t) for is_present, t in zip(present, wanted, strict=True)]
        return np.concatenate(oks) if oks else np.ones(0, bool)
