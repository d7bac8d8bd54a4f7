"""Closed chunks compressed again, better, by a thread of their own: writes must be fast, what is kept small.

A live chunk is compressed with a short search against rows of the past. Once a *lot* of chunks is closed it is compressed
again with a long search (4x the time of a write) against rows drawn from the lot itself, of which nobody could know when it
was written: 10-30 % fewer bytes on Atari frames, and read faster, because matches are longer. ChunkedColumn that would not shrink
stay as they are, and a new dictionary must save more in its lot than it takes.

The thread lives for as long as there is a lot to do and takes the store's locks only to look and to swap some chunks at a
time; what it reads is immutable. A damaged chunk is left to the reader, who will be told, and a lot that fails is left as
it is: it would only have saved memory. Rejected: higher levels of zstd (9 takes 3x the time and 12 10x, for the same bytes
or 5 % less); always large dictionaries (48 rows pay for themselves in some games only, so they are tried).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import zstandard

from fbuf._host.codecs.base import Zstd
from fbuf._host.codecs.encoder import ZstdCoder
from fbuf._host.codecs.zstd import Dictionary, checksum, compressor
from fbuf._host.types import Array, StoreCorrupted

LOT_BYTES = 1 << 28
"""Raw bytes of a lot: 38,000 frames of 84x84."""
_PIECE = 64  # chunks swapped at once
_TRIAL = 24  # chunks on which dictionaries are compared
_MORE = 3  # times the usual rows: the larger of two dictionaries tried
_SEARCH = {  # a long one: as small as level 9, in a quarter of its time
    "strategy": zstandard.STRATEGY_LAZY2,
    "hash_log": 16,
    "chain_log": 17,
    "search_log": 5,
    "min_match": 6,
}
_BUSY = 0.5  # share of its time that the thread works, so that a learner on few cores hardly feels it


@dataclass
class RecompressJob:
    """Chunks to compress again, oldest first, as they were when the lot was taken; one may have expired since."""

    part: Any  # the `ChunkedColumn` they are in
    lane: Array
    chunk: Array
    address: Array
    checksum: Array
    books: list[Dictionary | None]
    done: int = 0
    compressors: dict[int, zstandard.ZstdCompressor] = field(default_factory=dict)  # by id of the dictionary
    new: Dictionary | None = None  # for all of them; None: each against its own
    chosen: bool = False
    sample: Sample | None = None  # until it is chosen

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.done == len(self.books)


class Sample(NamedTuple):
    """What is looked at to choose a dictionary."""

    trial: list[int]  # chunks on which dictionaries are compared
    rows: list[list[tuple[int, int]]]  # (chunk, row in it) of each candidate

    @property
    def chunks(self) -> list[int]:
        """All of them."""
        return sorted({*self.trial, *(chunk for rows in self.rows for chunk, _ in rows)})


class RecompressedChunks(NamedTuple):
    """Some chunks of a lot as they are to be kept."""

    at: list[int]
    blobs: list[bytes]
    books: list[Dictionary | None]
    checksums: list[int]


def applies(codec: Any) -> bool:
    """Whether chunks of this codec are worth another search."""
    return isinstance(codec, Zstd) and codec.repack and codec.level < 9


class Packer:
    """The dictionaries of a column's lots. For one thread at a time."""

    def __init__(self, coder: ZstdCoder, size: int) -> None:
        self.codec = coder.codec
        self._coder = coder
        self._size = size  # bytes of a chunk's rows
        self._random = np.random.default_rng(1)
        self.latest: Dictionary | None = None  # of the lot before: free if it serves this one too

    def wanted(self, lot: RecompressJob) -> list[int]:
        """Which chunks of a lot `pack` looks at next."""
        if not lot.chosen:
            lot.sample = lot.sample or self._sample(len(lot.books))
            return lot.sample.chunks
        return list(range(lot.done, min(lot.done + _PIECE, len(lot.books))))

    def pack(self, lot: RecompressJob, found: dict[int, memoryview]) -> RecompressedChunks:
        """Some chunks of a lot compressed again; first none, while their dictionary is chosen.

        Those that a lot without a new dictionary cannot make smaller come back as they were, and so do damaged ones: all
        of a lot moves, so that the memory it was in is free.

        Args:
          found: What is there of the chunks that were `wanted`.
        """
        packed = RecompressedChunks([], [], [], [])
        if not lot.chosen:
            assert lot.sample is not None
            self._choose(lot, lot.sample, found)
            lot.chosen, lot.sample = True, None
            return packed
        lot.done = min(lot.done + _PIECE, len(lot.books))
        decode = self._coder.decoder()
        for i, stored in found.items():
            blob, book, crc = bytes(stored), lot.books[i], int(lot.checksum[i])
            try:
                rows = self._coder.chunk_of(decode(stored, crc, book))
                data = self._compressor(lot, lot.new or book).compress(self._coder.packed(rows))
            except StoreCorrupted:
                data = blob
            if len(data) < len(blob) or (lot.new is not None and data is not blob):
                blob, book = data, lot.new or book
                crc = checksum(blob, book)
            packed.at.append(i)
            packed.blobs.append(blob)
            packed.books.append(book)
            packed.checksums.append(crc)
        return packed

    def _compressor(self, lot: RecompressJob, dictionary: Dictionary | None) -> zstandard.ZstdCompressor:
        made = lot.compressors.get(id(dictionary))
        if made is None:
            made = lot.compressors[id(dictionary)] = compressor(9, self._size, dictionary, **_SEARCH)
        return made

    def _sample(self, total: int) -> Sample:
        """Chunks to try dictionaries on, evenly; and rows for one of either size, uniformly from the others."""
        k = self.codec.chunk
        trial = np.unique(np.linspace(0, total - 1, _TRIAL).astype(np.int64))
        others = np.setdiff1d(np.arange(total), trial)
        rows = []
        for n in (self.codec.dictionary, self.codec.dictionary * _MORE):
            if 0 < n <= len(others) * k // 4:
                picks = np.sort(self._random.choice(len(others) * k, n, replace=False)).tolist()
                rows.append([(int(others[pick // k]), pick % k) for pick in picks])
        return Sample(trial.tolist(), rows)

    def _choose(self, lot: RecompressJob, sample: Sample, found: dict[int, memoryview]) -> None:
        """One dictionary for the lot: the last lot's, a new one of either size, or each chunk's own."""
        total = len(lot.books)
        decode = self._coder.decoder()

        def raw(i: int) -> memoryview:
            return decode(found[i], int(lot.checksum[i]), lot.books[i])

        try:
            trial = {i: bytes(self._coder.packed(self._coder.chunk_of(raw(i)))) for i in sample.trial if i in found}
            contents = [b"".join(self._coder.row_of(raw(i), at) for i, at in r if i in found) for r in sample.rows]
        except StoreCorrupted:  # no lot of its own for damaged bytes: each chunk against what it has
            return
        if not trial:
            return
        freed = self._freed(lot)
        best = sum(len(self._compressor(lot, lot.books[i]).compress(x)) for i, x in trial.items()) / len(trial) * total
        for candidate in (self.latest, *(Dictionary(content) for content in contents if len(content) >= 8)):
            if candidate is None:
                continue
            packer = self._compressor(lot, candidate)
            size = sum(len(packer.compress(x)) for x in trial.values()) / len(trial) * total
            size += (0 if candidate is self.latest else candidate.nbytes) - freed
            if size < best:
                best, lot.new = size, candidate
        self.latest = lot.new or self.latest
        lot.compressors = {k: c for k, c in lot.compressors.items() if lot.new is None or k == id(lot.new)}

    @staticmethod
    def _freed(lot: RecompressJob) -> float:
        """Bytes of the dictionaries that nobody needs once the lot has another."""
        uses: dict[int, list[Any]] = {}
        for book in lot.books:
            if book is not None:
                uses.setdefault(id(book), [book, 0])[1] += 1
        return float(sum(book.nbytes * min(n / max(book.count, 1), 1.0) for book, n in uses.values()))


def start(repack_some: weakref.WeakMethod[Callable[[], bool]]) -> threading.Thread:
    """Call a store's method in a thread until it returns False; the thread does not keep the store alive."""
    thread = threading.Thread(target=_run, args=(repack_some,), name="fbuf-repack", daemon=True)
    thread.start()
    return thread


def _run(reference: weakref.WeakMethod[Callable[[], bool]]) -> None:
    while True:
        repack_some = reference()
        if repack_some is None:
            return
        begin = time.perf_counter()
        try:
            if not repack_some():
                return
        except Exception:  # is the store's `last_error`, and closed stores say so; what was not swapped is as it was
            return
        finally:
            del repack_some
        time.sleep((time.perf_counter() - begin) * (1 / _BUSY - 1))
