"""Recompress closed chunks in a background thread: writes must be fast, stored chunks small.

A write compresses with a short search against past rows. Once a job of chunks is closed, it is compressed again with a long
search against rows drawn from the job: 10-30 % fewer bytes on Atari frames, and faster reads. A new dictionary must save
more in its job than it takes. The thread lives while there is a job, and takes the store's locks only to read and replace
some chunks at a time. Damaged chunks and failed jobs stay as they are.
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

from fbuf._host.codecs import Dictionary, Zstd, ZstdCoder, checksum, compressor
from fbuf._host.types import Array, StoreCorrupted

JOB_BYTES = 1 << 28
"""Raw bytes of a job: 38,000 frames of 84x84."""
_AT_ONCE = 64  # chunks swapped at once
_TRIAL = 24  # chunks on which dictionaries are compared
_LARGE_DICTIONARY_FACTOR = 3  # times the usual rows: the larger of two dictionaries tried
_SEARCH = {  # a long one: as small as level 9, in a quarter of its time
    "strategy": zstandard.STRATEGY_LAZY2,
    "hash_log": 16,
    "chain_log": 17,
    "search_log": 5,
    "min_match": 6,
}
_DUTY_CYCLE = 0.5  # share of its time that the thread works, so that a learner on few cores hardly feels it


@dataclass
class RecompressJob:
    """Chunks to recompress, oldest first, as they were when the job was made; some may have expired since."""

    part: Any  # the `ChunkedColumn` they are in
    lane: Array
    chunk: Array
    address: Array
    checksum: Array
    dictionaries: list[Dictionary | None]
    done: int = 0
    compressors: dict[int, zstandard.ZstdCompressor] = field(default_factory=dict)  # by id of the dictionary
    new: Dictionary | None = None  # for all of them; None: each against its own
    chosen: bool = False
    sample: Sample | None = None  # until it is chosen

    @property
    def finished(self) -> bool:
        """Return whether all chunks are done."""
        return self.done == len(self.dictionaries)


class Sample(NamedTuple):
    """The chunks from which a dictionary is chosen."""

    trial: list[int]  # chunks on which dictionaries are compared
    rows: list[list[tuple[int, int]]]  # (chunk, row in it) of each candidate

    @property
    def chunks(self) -> list[int]:
        """Return all chunks of the sample."""
        return sorted({*self.trial, *(chunk for rows in self.rows for chunk, _ in rows)})


class RecompressedChunks(NamedTuple):
    """Some chunks of a job after recompression."""

    at: list[int]
    blobs: list[bytes]
    dictionaries: list[Dictionary | None]
    checksums: list[int]


def applies(codec: Any) -> bool:
    """Return whether chunks of this codec are worth a longer search."""
    return isinstance(codec, Zstd) and codec.repack and codec.level < 9


class Packer:
    """Choose dictionaries and recompress the jobs of one column. Not thread-safe."""

    def __init__(self, coder: ZstdCoder, size: int) -> None:
        self.codec = coder.codec
        self._coder = coder
        self._size = size  # bytes of a chunk's rows
        self._random = np.random.default_rng(1)
        self.latest: Dictionary | None = None  # of the job before: free if it serves this one too

    def wanted(self, job: RecompressJob) -> list[int]:
        """Return which chunks of a job `pack` needs next."""
        if not job.chosen:
            job.sample = job.sample or self._sample(len(job.dictionaries))
            return job.sample.chunks
        return list(range(job.done, min(job.done + _AT_ONCE, len(job.dictionaries))))

    def pack(self, job: RecompressJob, found: dict[int, memoryview]) -> RecompressedChunks:
        """Recompress some chunks of a job; the first call only chooses their dictionary.

        Those that a job without a new dictionary cannot make smaller come back as they were, and so do damaged ones: all
        of a job moves, so that the memory it was in is free.

        Args:
          found: What is there of the chunks that were `wanted`.
        """
        packed = RecompressedChunks([], [], [], [])
        if not job.chosen:
            assert job.sample is not None
            self._choose(job, job.sample, found)
            job.chosen, job.sample = True, None
            return packed
        job.done = min(job.done + _AT_ONCE, len(job.dictionaries))
        decode = self._coder.decoder()
        for i, stored in found.items():
            blob, dictionary, crc = bytes(stored), job.dictionaries[i], int(job.checksum[i])
            try:
                rows = self._coder.chunk_of(decode(stored, crc, dictionary))
                data = self._compressor(job, job.new or dictionary).compress(self._coder.packed(rows))
            except StoreCorrupted:
                data = blob
            if len(data) < len(blob) or (job.new is not None and data is not blob):
                blob, dictionary = data, job.new or dictionary
                crc = checksum(blob, dictionary)
            packed.at.append(i)
            packed.blobs.append(blob)
            packed.dictionaries.append(dictionary)
            packed.checksums.append(crc)
        return packed

    def _compressor(self, job: RecompressJob, dictionary: Dictionary | None) -> zstandard.ZstdCompressor:
        made = job.compressors.get(id(dictionary))
        if made is None:
            made = job.compressors[id(dictionary)] = compressor(9, self._size, dictionary, **_SEARCH)
        return made

    def _sample(self, total: int) -> Sample:
        """Choose trial chunks, evenly, and rows for one dictionary of either size, uniformly from the others."""
        k = self.codec.chunk
        trial = np.unique(np.linspace(0, total - 1, _TRIAL).astype(np.int64))
        others = np.setdiff1d(np.arange(total), trial)
        rows = []
        for n in (self.codec.dictionary, self.codec.dictionary * _LARGE_DICTIONARY_FACTOR):
            if 0 < n <= len(others) * k // 4:
                picks = np.sort(self._random.choice(len(others) * k, n, replace=False)).tolist()
                rows.append([(int(others[pick // k]), pick % k) for pick in picks])
        return Sample(trial.tolist(), rows)

    def _choose(self, job: RecompressJob, sample: Sample, found: dict[int, memoryview]) -> None:
        """Choose the dictionary of a job: the last job's, a new one of either size, or each chunk's own."""
        total = len(job.dictionaries)
        decode = self._coder.decoder()

        def raw(i: int) -> memoryview:
            return decode(found[i], int(job.checksum[i]), job.dictionaries[i])

        try:
            trial = {i: bytes(self._coder.packed(self._coder.chunk_of(raw(i)))) for i in sample.trial if i in found}
            contents = [b"".join(self._coder.row_of(raw(i), at) for i, at in r if i in found) for r in sample.rows]
        except StoreCorrupted:  # damaged bytes: keep the dictionary of each chunk
            return
        if not trial:
            return
        freed = self._freed(job)
        best = (
            sum(len(self._compressor(job, job.dictionaries[i]).compress(x)) for i, x in trial.items())
            / len(trial)
            * total
        )
        for candidate in (self.latest, *(Dictionary(content) for content in contents if len(content) >= 8)):
            if candidate is None:
                continue
            packer = self._compressor(job, candidate)
            size = sum(len(packer.compress(x)) for x in trial.values()) / len(trial) * total
            size += (0 if candidate is self.latest else candidate.nbytes) - freed
            if size < best:
                best, job.new = size, candidate
        self.latest = job.new or self.latest
        job.compressors = {k: c for k, c in job.compressors.items() if job.new is None or k == id(job.new)}

    @staticmethod
    def _freed(job: RecompressJob) -> float:
        """Return the bytes of the dictionaries that are unused once the job has another."""
        uses: dict[int, list[Any]] = {}
        for dictionary in job.dictionaries:
            if dictionary is not None:
                uses.setdefault(id(dictionary), [dictionary, 0])[1] += 1
        return float(sum((d.nbytes - d.digest) * min(n / max(d.count, 1), 1.0) for d, n in uses.values()))


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
        time.sleep((time.perf_counter() - begin) * (1 / _DUTY_CYCLE - 1))
