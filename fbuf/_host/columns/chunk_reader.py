"""How rows come out of a `Chunks` column: what to decode and what to copy where, found under the lock, done without it.

Rows that lie next to each other in a chunk and go to neighbouring places are one copy (a stack of frames is one or two), and a
chunk is decoded once whatever number of requests needs it. The index is consulted with a few numpy calls for all rows
together; Python steps are left for one decompression a chunk and one copy a run. Rejected: decoding straight into the output
(zstd's stream reader is slower a chunk than the copy it saves, and few requests want whole chunks).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fbuf._host.codecs.encoder import Coder
from fbuf._host.codecs.zstd import Dictionary
from fbuf._host.columns.chunk_cache import Cache
from fbuf._host.types import Array, flat


class Encoded(Protocol):
    """What a column of chunks is asked for: `Chunks`, or one that only reads."""

    k: int  # rows of a chunk
    row: int  # bytes of one
    lanes: int
    ring: int  # places of chunks in the index, whose arrays are [ring, E], or [ring] of one lane
    address: Array
    length: Array
    checksum: Array
    slot: Array
    table: Any  # dictionaries, `get(slot)`
    arena: Any  # `views(addresses, lengths)`: the bytes, one after another
    open: Array  # [E, k, *shape], chunks that are being filled
    coder: Coder
    cache: Cache | None


@dataclass
class Plan:
    """Bytes to decode and where their rows go. Holds what it reads alive."""

    volatile = False  # the bytes of a chunk are never overwritten

    coder: Coder
    blobs: Iterator[tuple[memoryview, int, Dictionary | None]]  # encoded chunks, with checksums
    addresses: list[int]  # of those
    cache: Cache | None
    opened: list[memoryview]  # chunks that were still open, after those
    moves: Iterator[tuple[bool, int, slice, slice]]  # whether the next chunk begins; request, its bytes, the chunk's

    def run(self, outs: Sequence[memoryview]) -> None:
        """Fills the requests' outputs. Raises StoreCorrupted, or what a codec of the user's raises."""
        chunks = self._decoded()
        data = memoryview(b"")
        for fresh, request, to, source in self.moves:
            if fresh:
                data = next(chunks)
            outs[request][to] = data[source]

    def _decoded(self) -> Iterator[memoryview]:
        decode = self.coder.decoder()
        if self.cache is None:
            for blob, crc, dictionary in self.blobs:
                yield decode(blob, crc, dictionary)
        else:
            for (blob, crc, dictionary), address in zip(self.blobs, self.addresses, strict=True):
                rows = self.cache.get(address)
                if rows is None:
                    rows = decode(blob, crc, dictionary)
                    if self.coder.reuses:
                        rows = memoryview(bytes(rows))
                    self.cache.put(address, rows)
                yield rows
        yield from self.opened


def plan(part: Encoded, lane: Array, count: Array, there: Array, rows: Array, starts: Array) -> Plan:
    """How to fetch rows of encoded chunks, as `Part.fetch` describes it.

    Cost: a few tens of microseconds, and about 0.5 us a chunk.
    """
    k, ring, lanes = part.k, part.ring, part.lanes
    chunk = count // k
    at = count - chunk * k
    # A run is consecutive rows of one chunk that go to consecutive places: one copy.
    breaks = np.ones(len(lane), bool)
    breaks[1:] = (count[1:] != count[:-1] + 1) | (at[1:] == 0) | (lane[1:] != lane[:-1]) | (there[1:] != there[:-1])
    breaks[starts[starts < len(lane)]] = True
    begin = np.flatnonzero(breaks)
    size = np.diff(begin, append=len(lane))
    wanted = there[begin]
    if not wanted.all():
        begin, size = begin[wanted], size[wanted]
    lane, chunk = lane[begin], chunk[begin]
    key = np.where(chunk == rows[lane] // k, ring, chunk % ring) * lanes + lane
    order = np.argsort(key, kind="stable")
    begin, size, key = begin[order], size[order], key[order]
    fresh = np.ones(len(key), bool)
    fresh[1:] = key[1:] != key[:-1]
    request = np.searchsorted(starts, begin, side="right") - 1
    size *= part.row
    to = (begin - starts[request]) * part.row
    source = at[begin] * part.row
    moves = zip(
        fresh.tolist(),
        request.tolist(),
        map(slice, to.tolist(), (to + size).tolist()),
        map(slice, source.tolist(), (source + size).tolist()),
        strict=True,
    )
    unique = key[fresh]
    closed = unique[: np.searchsorted(unique, ring * lanes)]
    slots = part.slot.reshape(-1)[closed].tolist()
    addresses = part.address.reshape(-1)[closed]
    blobs = zip(
        part.arena.views(addresses, part.length.reshape(-1)[closed]),
        part.checksum.reshape(-1)[closed].tolist(),
        [part.table.get(slot) for slot in slots],
        strict=True,
    )
    # The store keeps filling open chunks: take a copy now. Their keys are the largest, so they come last.
    opened = [flat(part.open[e].copy()) for e in (unique[len(closed) :] - ring * lanes).tolist()]
    return Plan(part.coder, blobs, addresses.tolist() if part.cache else [], part.cache, opened, moves)
