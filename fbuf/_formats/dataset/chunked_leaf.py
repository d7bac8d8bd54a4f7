"""An encoded leaf of all segments as one column: the index in memory, the chunks in files.

It has the interface of a live store's column with one lane, so `fbuf._host.columns.chunked` plans and decodes its
batches. `FileChunks` reads with `pread`, one call per run of adjacent chunks. The index takes 18 bytes a chunk. Dictionaries
(about 140 KB per 30,000 frames) are read when first needed, and kept.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fbuf._formats.checkpoint.data_file import OpenFile
from fbuf._formats.checkpoint.read import Saved
from fbuf._formats.dataset.schema import Leaf
from fbuf._host.codecs import Dictionary, coder_of
from fbuf._host.columns.chunked import ChunkCache, ChunkFetch, fetch_chunks
from fbuf._host.memory.arena import Spans
from fbuf._host.memory.lazy_array import expect, lazily, within
from fbuf._host.types import Array

_BITS = 40  # an address is file << 40 | offset
_MAX_READ = 1 << 20
_MIN_RUNS, _COLD_SECONDS, _HINTED_BATCHES = 16, 20e-6, 32
"""Batches of at least `_MIN_RUNS` reads show whether the files are in the page cache: a read then takes less than
`_COLD_SECONDS`. If not, the next `_HINTED_BATCHES` batches are announced to the system."""


class FileChunks:
    """Encoded chunks by address, in read-only files."""

    def __init__(self, files: Sequence[OpenFile]) -> None:
        self.files = files
        self.hinted = 0  # batches left to announce, since the last one waited for the disk

    def views(self, addresses: Array, lengths: Array) -> Iterator[memoryview]:
        """Yield chunks in order, read on request; adjacent chunks in one call.

        Raises:
          StoreCorrupted: a file is too short. OSError: it cannot be read.
        """
        number = len(addresses)
        if not number:
            return
        sizes = lengths.astype(np.int64)
        offsets = (addresses & np.uint64((1 << _BITS) - 1)).astype(np.int64)
        apart = np.ones(number, bool)
        apart[1:] = addresses[1:] != addresses[:-1] + lengths[:-1]
        begin = np.flatnonzero(apart)
        ends = np.cumsum(sizes)
        runs = list(
            zip(
                (addresses[begin] >> np.uint64(_BITS)).tolist(),
                offsets[begin].tolist(),
                begin.tolist(),
                np.append(begin[1:], number).tolist(),
                strict=True,
            )
        )
        size_list, stops = sizes.tolist(), ends.tolist()
        files, waited = self.files, 0.0
        hinted = self.hinted > 0
        if hinted:
            self.hinted -= 1
            self._hint(runs, size_list, stops)
        for file, offset, first, last in runs:
            while first < last:
                stop = first + 1
                base = stops[first] - size_list[first]
                while stop < last and stops[stop] - base <= _MAX_READ:
                    stop += 1
                size = stops[stop - 1] - base
                began = time.perf_counter()
                data = memoryview(_read(files[file], size, offset))
                waited += time.perf_counter() - began
                if stop == number and not hinted and len(runs) >= _MIN_RUNS and waited > len(runs) * _COLD_SECONDS:
                    self.hinted = _HINTED_BATCHES  # before the last yield, which may not return
                at = 0
                for length in size_list[first:stop]:
                    yield data[at : at + length]
                    at += length
                offset, first = offset + size, stop

    def _hint(self, runs: list[tuple[int, int, int, int]], lengths: list[int], stops: list[int]) -> None:
        """Ask the system to start reading all of them; without effect if they are in the page cache."""
        for file, offset, first, last in runs:
            with contextlib.suppress(OSError, AttributeError):
                size = stops[last - 1] - stops[first] + lengths[first]
                os.posix_fadvise(self.files[file].fd, offset, size, os.POSIX_FADV_WILLNEED)


def _read(file: OpenFile, size: int, at: int) -> bytes:
    try:
        data = os.pread(file.fd, size, at)
    except OSError:
        data = b""
    if len(data) != size:
        out = bytearray(size)
        file.read(memoryview(out), at)  # raises, or reads again
        return bytes(out)
    return data


class DictionaryTable:
    """The dictionaries of all segments by number from 1, read when first needed."""

    def __init__(self) -> None:
        self._sources: list[Any] = []  # (array, start, stop, crc)
        self._loaded: dict[int, Dictionary] = {}

    def add(self, array: Any, start: int, stop: int, crc: int) -> int:
        """Add the dictionary in bytes `start` to `stop` of a saved array; return its number."""
        self._sources.append((array, start, stop, crc))
        return len(self._sources)

    def get(self, number: int) -> Dictionary | None:
        """Return a dictionary; None for 0. Raises StoreCorrupted."""
        if not number:
            return None
        dictionary = self._loaded.get(number)
        if dictionary is None:
            array, start, stop, crc = self._sources[number - 1]
            dictionary = self._loaded.setdefault(number, Dictionary(bytes(array[start:stop]), crc))
        return dictionary

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the dictionaries in memory."""
        return sum(dictionary.nbytes for dictionary in list(self._loaded.values()))


class ChunkedLeaf:
    """A leaf in chunks of k rows; each segment starts a chunk and fills its last."""

    lanes = 1
    verified = True

    def __init__(self, leaf: Leaf, files: Sequence[OpenFile], cache: int = 0) -> None:
        assert leaf.codec is not None
        self.leaf, self.k, self.row = leaf, leaf.codec.chunk, leaf.nbytes
        self.coder = coder_of(leaf.codec, leaf.shape, leaf.dtype, 1)
        self.arena = FileChunks(files)
        self.table = DictionaryTable()
        self.cache = ChunkCache(cache) if cache else None
        self.open: Array = np.empty((0,), leaf.dtype)  # no chunk is being filled
        self._parts: list[tuple[Array, ...]] = []
        self.first: list[int] = []  # place of each segment's first row
        self.ring = 0  # chunks
        self.address: Array = np.zeros(0, np.uint64)
        self.length: Array = np.zeros(0, np.uint32)
        self.checksum: Array = np.zeros(0, np.uint32)
        self.slot: Array = np.zeros(0, np.uint32)

    def add(self, saved: Saved, rows: int, file: int) -> None:
        """Add the rows of a segment, whose first file has number `file`.

        Raises:
          ValueError: its arrays are inconsistent. StoreCorrupted: some are damaged.
        """
        arrays = within(saved.arrays, f"rows/{self.leaf.name}/")
        state = expect(arrays, "state", np.int64, (7,)).tolist()
        if state[0] != self.k:
            raise ValueError(f"chunks of leaf '{self.leaf.name}' hold {state[0]} rows; expected {self.k}")
        chunks = int(lazily(arrays, "address", np.uint64, (None, 1)).shape[0])
        if not -(-rows // self.k) <= chunks < 1 << 30:
            raise ValueError(f"leaf '{self.leaf.name}' has {chunks} chunks; expected {-(-rows // self.k)} or more")
        names = (("address", np.uint64), ("length", np.uint32), ("checksum", np.uint32), ("dictionary", np.uint16))
        address, length, crc, slot = (expect(arrays, name, dtype, (chunks, 1)).reshape(-1) for name, dtype in names)
        span = Spans(expect(arrays, "span", np.int64, (None, 3)), state[6])
        payload = lazily(arrays, "payload", np.uint8, (span.total,))
        if (length == 0).any():
            raise ValueError(f"leaf '{self.leaf.name}' has chunks without bytes")
        place = span.find(address, length.astype(np.int64))
        numbers = self._dictionary_numbers(arrays, slot)
        self._parts.append((_addresses(payload, place, length, file), length, crc, numbers))
        self.first.append(self.ring * self.k)
        self.ring += chunks

    def _dictionary_numbers(self, arrays: Any, slot: Array) -> Array:
        """Return the dictionary number of each chunk, across all segments."""
        sizes = expect(arrays, "dictionary_length", np.int64, (None,))
        slots = expect(arrays, "dictionary_slot", np.uint16, sizes.shape)
        crcs = expect(arrays, "dictionary_checksum", np.uint32, sizes.shape)
        if (sizes < 1).any() or len(np.unique(slots)) < len(slots):
            raise ValueError(f"leaf '{self.leaf.name}' has empty dictionaries, or two of one name")
        contents = lazily(arrays, "dictionaries", np.uint8, (int(sizes.sum()),))
        number: Array = np.zeros(int(slots.max(initial=0)) + 1, np.uint32)
        used = np.bincount(slot, minlength=len(number)) > 0
        used[0] = False
        stop = 0
        for name, size, crc in zip(slots.tolist(), sizes.tolist(), crcs.tolist(), strict=True):
            stop += size
            if name and used[name]:
                number[name] = self.table.add(contents, stop - size, stop, crc)
        if int(slot.max(initial=0)) >= len(number) or (number[slot] == 0)[slot > 0].any():
            raise ValueError(f"chunks of leaf '{self.leaf.name}' name missing dictionaries")
        return number[slot]

    def freeze(self) -> None:
        """Build the index, after all segments were added."""
        address, length, checksum, slot = (np.concatenate(arrays) for arrays in zip(*self._parts, strict=True))
        self.address, self.length, self.checksum = address, length, checksum
        self.slot = slot.astype(np.uint16) if len(self.table) < 1 << 16 else slot
        self._parts = []

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory."""
        index = self.address.nbytes + self.length.nbytes + self.checksum.nbytes + self.slot.nbytes
        return index + self.table.nbytes + (self.cache.nbytes if self.cache is not None else 0)

    @property
    def payload(self) -> int:
        """Return the bytes of the chunks."""
        return int(self.length.sum(dtype=np.int64))

    def fetch(self, place: Array, present: Array, starts: Array) -> ChunkFetch:
        """Plan the read of rows by place int64[M], those in `present` bool[M], of requests that begin at `starts`."""
        end: Array = np.full(1, self.ring * self.k, np.int64)
        return fetch_chunks(self, np.zeros(len(place), np.int64), place, present, end, starts)


def _addresses(payload: Any, place: Array, length: Array, file: int) -> Array:
    """Return the addresses of byte strings at `place` of a saved array; each must be contiguous in one file."""
    first, files, offset, size, _ = payload.block_places()
    if not len(first):
        raise ValueError("there are chunks without bytes")
    follows = (files[1:] == files[:-1]) & (offset[1:] == offset[:-1] + size[:-1])
    begin = np.flatnonzero(np.concatenate([[True], ~follows]))
    run = np.searchsorted(first[begin], place, side="right") - 1
    ends = np.append(first[begin[1:]], payload.shape[0])
    if (place + length > ends[run]).any():
        raise ValueError("a chunk is not contiguous")
    at = begin[run]
    number = (files[at] + file).astype(np.uint64)
    return np.asarray(number << np.uint64(_BITS) | (offset[at] + place - first[at]).astype(np.uint64))
