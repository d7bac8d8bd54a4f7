"""Read rows of encoded chunks: `fetch_chunks` finds the chunks under the store's lock, `ChunkFetch.run` decodes without it.

Each chunk is decoded once for all requests. A run of rows that are neighbours both in a chunk and in
the output is one copy. The index is read with a few numpy calls for all rows together.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fbuf._host.codecs.encoder import Coder, Copy, Encoded
from fbuf._host.types import Array, flat


class ChunkCache:
    """Decoded chunks by address; the least recently used are evicted first. Thread-safe.

    Addresses are never reused, so no entry is ever stale.

    Args:
      limit: Bytes of rows kept at most.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.hits = self.misses = 0
        self._rows: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, address: int) -> memoryview | None:
        """Return the rows of a chunk, or None."""
        with self._lock:
            rows = self._rows.get(address)
            if rows is None:
                self.misses += 1
            else:
                self.hits += 1
                self._rows.move_to_end(address)
            return rows

    def put(self, address: int, rows: memoryview) -> None:
        """Keep rows that are never written again."""
        with self._lock:
            if len(rows) > self.limit or address in self._rows:
                return
            self._rows[address] = rows
            self.nbytes += len(rows)
            while self.nbytes > self.limit:
                self.nbytes -= len(self._rows.popitem(last=False)[1])


class ChunkIndex(Protocol):
    """A column of chunks: `ChunkedColumn`, or a read-only one."""

    k: int  # rows of a chunk
    row: int  # bytes of a row
    lanes: int
    ring: int  # chunks the index has room for; its arrays are [ring, E], or [ring] of one lane
    address: Array
    length: Array
    checksum: Array
    slot: Array
    table: Any  # dictionaries: `get(slot)`
    arena: Any  # `views(addresses, lengths)` yields the bytes
    open: Array  # [E, k, *shape], chunks that are being filled
    coder: Coder
    cache: ChunkCache | None
    verified: bool  # whether chunks are compared with their checksums: bytes that come from files may be anything


@dataclass
class ChunkFetch:
    """Chunks to decode and where their rows go. Keeps alive what it reads."""

    may_be_overwritten = False  # the bytes of a chunk are never overwritten

    coder: Coder
    chunks: Iterable[Encoded]
    opened: list[memoryview]  # rows of chunks that were still open, which follow those
    copies: Iterable[Copy]
    cache: ChunkCache | None

    def run(self, outs: Sequence[memoryview]) -> None:
        """Fill the outputs of the requests. Raises StoreCorrupted, or what a user's codec raises."""
        self.coder.decode_chunks(self.chunks, self.opened, self.copies, outs, self.cache)


def fetch_chunks(index: ChunkIndex, lane: Array, count: Array, there: Array, rows: Array, starts: Array) -> ChunkFetch:
    """Find the chunks of rows, as `ColumnData.fetch` describes it.

    Cost: a few tens of microseconds, and about 0.5 us a chunk.
    """
    k, ring, lanes = index.k, index.ring, index.lanes
    chunk = count // k
    at = count - chunk * k
    # A run is consecutive rows of one chunk that go to consecutive places: one copy.
    breaks = np.ones(len(lane), bool)
    breaks[1:] = (count[1:] != count[:-1] + 1) | (at[1:] == 0) | (there[1:] != there[:-1])
    if lanes > 1:
        breaks[1:] |= lane[1:] != lane[:-1]
    breaks[starts[starts < len(lane)]] = True
    begin = np.flatnonzero(breaks)
    size = np.diff(begin, append=len(lane))
    wanted = there[begin]
    if not wanted.all():
        begin, size = begin[wanted], size[wanted]
    lane, chunk = lane[begin], chunk[begin]
    key = np.where(chunk == rows[lane] // k, ring, chunk % ring)
    if lanes > 1:
        key = key * lanes + lane
    order = np.argsort(key, kind="stable")
    begin, size, key = begin[order], size[order], key[order]
    first_of_chunk = np.ones(len(key), bool)
    first_of_chunk[1:] = key[1:] != key[:-1]
    request = np.searchsorted(starts, begin, side="right") - 1
    size *= index.row
    to = (begin - starts[request]) * index.row
    source = at[begin] * index.row
    copies = zip(
        first_of_chunk.tolist(),
        request.tolist(),
        map(slice, to.tolist(), (to + size).tolist()),
        map(slice, source.tolist(), (source + size).tolist()),
        strict=True,
    )
    unique = key[first_of_chunk]
    closed = unique[: np.searchsorted(unique, ring * lanes)]
    addresses = index.address.reshape(-1)[closed]
    chunks = zip(
        index.arena.views(addresses, index.length.reshape(-1)[closed]),
        index.checksum.reshape(-1)[closed].tolist() if index.verified else itertools.repeat(None),
        map(index.table.get, index.slot.reshape(-1)[closed].tolist()),
        itertools.repeat(0) if index.cache is None else addresses.tolist(),
        strict=False,
    )
    # The store keeps filling open chunks: take a copy now. Their keys are the largest, so they come last.
    opened = [flat(index.open[e].copy()) for e in (unique[len(closed) :] - ring * lanes).tolist()]
    return ChunkFetch(index.coder, chunks, opened, copies, index.cache)
