"""Encode and decode the chunks of one column, with dictionaries for `Zstd`.

A new dictionary is tried early, then regularly, and sooner when the size of chunks has changed (the game changed). It is kept
if it saves more bytes than it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import zstandard

from fbuf._host.codecs.codec import (
    Codec,
    Dictionary,
    Unpack,
    Zstd,
    checksum,
    compressor,
    damaged,
    is_packable,
    pack_bits,
    packed_bytes,
    unpack_bits,
    unpacker,
)
from fbuf._host.types import Array, flat

Decode = Callable[[memoryview, int, "Dictionary | None"], memoryview]
"""(encoded bytes, their checksum, dictionary) -> rows, valid until the next call."""
Views = Sequence[memoryview]
Encoded = tuple[memoryview, int | None, "Dictionary | None", int]
"""A chunk: its bytes, their checksum (None: they never left the memory of this process), its dictionary and its address."""
Copy = tuple[bool, int, slice, slice]
"""Rows to copy: whether they begin the next chunk, the output, the bytes of the output and of the chunk."""

FIRST_DICTIONARY, SECOND_DICTIONARY, RENEWAL = 512, 4096, 65_536
"""Rows after which a dictionary is tried: early, once there is variety, then regularly."""
DRIFT = 1.25
"""Tried sooner when bytes a chunk have changed by this factor since: they grew, or another game is simpler."""
WORTHWHILE = 1.3
"""A column that compresses less than this becomes a raw ring."""
PROBE_BYTES, PROBE_CHUNKS = 65_536, 256
"""Raw bytes, or chunks of small rows, seen before `WORTHWHILE` is asked."""
_TRIAL = 16  # chunks a new dictionary is tried on


class Coder:
    """Encode and decode with any user's codec: no dictionaries."""

    def __init__(self, codec: Codec, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.codec = codec
        self.current: Dictionary | None = None
        self._shape, self._dtype = shape, dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of the compression context."""
        return 0

    def free_context(self) -> None:
        """Free the compression context; the next `encode` makes another."""

    def encode(self, rows: Array) -> bytes:
        """Return one chunk `[k, *shape]` as bytes, against `current`."""
        data = self.codec.encode(rows)
        if not isinstance(data, bytes):
            raise TypeError(f"Store.write: {self.codec!r}.encode gave {type(data).__name__}; expected bytes.")
        if len(data) >= 1 << 32:
            raise ValueError(f"{self.codec!r}.encode gave {len(data)} bytes; expected < 4 GiB. Use smaller chunks.")
        return data

    def decoder(self) -> Decode:
        """Return a function that verifies and decodes chunks, for one thread and one call."""
        unpackers: dict[Dictionary | None, Unpack] = {}

        def decode(data: memoryview, expected: int, dictionary: Dictionary | None) -> memoryview:
            if dictionary not in unpackers:
                unpackers[dictionary] = self._unpacker(dictionary)
            return unpackers[dictionary](data, expected)

        return decode

    def decode_chunks(
        self, chunks: Iterable[Encoded], opened: Iterable[memoryview], copies: Iterable[Copy], outs: Views, cache: Any
    ) -> None:
        """Decode chunks one after another, verify those with a checksum, and copy their rows to `outs`.

        Args:
          chunks: In the order of `copies`.
          opened: Rows of further chunks, which are not encoded.
          cache: A `ChunkCache`, or None.
        Raises:
          StoreCorrupted: A chunk is damaged.
        """
        encoded, plain = iter(chunks), iter(opened)
        unpackers: dict[Dictionary | None, Unpack] = {}
        rows: memoryview | None = None
        for next_chunk, out, to, source in copies:
            if next_chunk:
                rows = None  # zstd writes the next rows to the same memory, which is in the processor's cache
                chunk = next(encoded, None)
                if chunk is None:
                    rows = next(plain)
                elif cache is None or (rows := cache.get(chunk[3])) is None:
                    data, crc, dictionary, address = chunk
                    unpack = unpackers.get(dictionary)
                    if unpack is None:
                        unpack = unpackers[dictionary] = self._unpacker(dictionary)
                    rows = unpack(data, crc)
                    if cache is not None:
                        rows = rows if rows.readonly else memoryview(bytes(rows))  # not the scratch of the next chunk
                        cache.put(address, rows)
            assert rows is not None
            outs[out][to] = rows[source]

    def _unpacker(self, dictionary: Dictionary | None) -> Unpack:
        """Return a function that verifies and decodes chunks of this dictionary, for one thread and one call."""
        scratch = np.empty((self.codec.chunk, *self._shape), self._dtype)

        def unpack(data: memoryview, expected: int | None) -> memoryview:
            if expected is not None and checksum(data, dictionary) != expected:
                raise damaged("a chunk", checksum(data, dictionary), expected)
            self.codec.decode(data, scratch)
            return flat(scratch)

        return unpack

    def due(self, rows: int) -> bool:
        """Return whether a new dictionary should be tried after `rows` rows."""
        return False

    def renew(self, rows: int, total: int, fetch: Callable[[int], memoryview]) -> float | None:
        """Try a new dictionary; return bytes a chunk with it, None if the old one stays."""
        return None

    def adopt(self, dictionary: Dictionary | None, rows: int) -> None:
        """Resume from a checkpoint: this dictionary, after `rows` rows."""


class ZstdCoder(Coder):
    """`Zstd` with the dictionaries of one column. Only `decoder` and `decode_chunks` are thread-safe."""

    codec: Zstd

    def __init__(self, codec: Zstd, shape: tuple[int, ...], dtype: np.dtype[Any], capacity: int) -> None:
        super().__init__(codec, shape, dtype)
        self._size = codec.chunk * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._gain_rows = min(capacity, RENEWAL)  # rows a dictionary may serve
        self._random = np.random.default_rng(0)
        self._compressor: zstandard.ZstdCompressor | None = None  # None: the next chunk needs a new one
        # Bytes a chunk: running mean, and its lowest and highest since a dictionary was tried.
        self._mean = self._least = self._most = 0.0
        self._next = FIRST_DICTIONARY if codec.dictionary else 1 << 62
        self._last = self._adopted = 0  # rows when a dictionary was tried, and when one was taken
        rows = np.zeros((codec.chunk, *shape), dtype)  # never touched: a hostile file may claim large ones
        self._packed = packed_bytes(rows) if rows.size and is_packable(rows[:0]) else self._size
        # Whether rows are zeros and ones; None: none was seen yet. Where bits are no fewer they cannot be told apart.
        self._bits: bool | None = None if self._packed < self._size else False

    @property
    def nbytes(self) -> int:
        return 0 if self._compressor is None else int(self._compressor.memory_size())

    def free_context(self) -> None:
        self._compressor = None

    def encode(self, rows: Array) -> bytes:
        """Return one chunk as one frame."""
        if self._compressor is None:
            self._compressor = compressor(self.codec.level, self._size, self.current)
        data = self._compressor.compress(self.packed(rows))
        self._mean += (len(data) - self._mean) / 64 if self._mean else len(data)
        self._least = min(self._least or self._mean, self._mean)
        self._most = max(self._most, self._mean)
        return data

    def packed(self, rows: Array) -> memoryview:
        """Return the bytes to compress: those of rows `[k, *shape]`, or their bits where the column is zeros and ones."""
        if self._bits is None:
            self._bits = is_packable(rows)
        if self._bits and is_packable(rows):
            return memoryview(pack_bits(rows))
        return flat(rows)

    def chunk_of(self, data: memoryview) -> Array:
        """Return the rows of a decoded chunk."""
        return np.frombuffer(data, np.uint8).view(self._dtype).reshape(self.codec.chunk, *self._shape)

    def _unpacker(self, dictionary: Dictionary | None) -> Unpack:
        return unpacker(self._size, dictionary, self._packed, self._expand)

    def _expand(self, bits: memoryview) -> memoryview:
        """Return the rows that are packed as bits."""
        rows = np.empty((self.codec.chunk, *self._shape), self._dtype)
        unpack_bits(bits, rows)
        return flat(rows)

    def due(self, rows: int) -> bool:
        if rows >= self._next:
            return True
        if rows - self._last < SECOND_DICTIONARY or not self.codec.dictionary:
            return False
        return self._mean > DRIFT * self._least or DRIFT * self._mean < self._most

    def renew(self, rows: int, total: int, fetch: Callable[[int], memoryview]) -> float | None:
        """Make dictionaries of rows drawn from `total` chunks, oldest first, and keep the best if it pays for itself.

        One is drawn from all of them, one from the latest 4,096 rows, which is better where the game has changed.

        Args:
          rows: Rows encoded so far.
          fetch: The rows of a chunk, valid until the next call.
        Returns:
          Bytes a chunk with the new dictionary; None if the old one stays.
        Cost: some 80 chunks decoded and encoded: about two milliseconds for Atari frames.
        """
        early = rows >= self._next
        self._last = rows
        self._next = _milestone(rows) if early else self._next
        self._least = self._most = self._mean  # drift is counted from here, also if the trial fails
        chunk = self.codec.chunk
        trial = range(total - min(_TRIAL, total // 2), total)  # the newest; the dictionary comes from those before
        firsts = {0, max(trial.start - SECOND_DICTIONARY // chunk, 0)}
        drawn = [self._drawn(range(first, trial.start), fetch) for first in sorted(firsts)]
        books = [book for book in drawn if book is not None]
        if not trial or not books:
            return None
        packers = [compressor(self.codec.level, self._size, book) for book in (self.current, *books)]
        sizes = [0] * len(packers)
        for i in trial:
            raw = self.packed(self.chunk_of(fetch(i)))
            for at, packer in enumerate(packers):
                sizes[at] += len(packer.compress(raw))
        best = min(range(1, len(packers)), key=sizes.__getitem__)
        # It may serve as long as the one before it did.
        served = self._gain_rows
        if self._adopted > SECOND_DICTIONARY:
            served = min(max(rows - self._adopted, 2 * SECOND_DICTIONARY), served)
        saved = (sizes[0] - sizes[best]) / len(trial) / chunk * served
        book = books[best - 1]
        if saved <= book.nbytes - book.digest:  # the digest is of one dictionary a column, and faster than none
            return None
        self._use(book)
        self._adopted = rows
        self._mean = self._least = self._most = sizes[best] / len(trial)
        return self._mean

    def _use(self, dictionary: Dictionary | None) -> None:
        if self.current is not None:
            self.current.free_digest()
        self.current, self._compressor = dictionary, None

    def replace_unused(self, dictionary: Dictionary) -> None:
        """Encode against the dictionary of recompressed chunks if no chunk needs the current one any more."""
        if self.current is not None and self.current.count == 0:
            self._use(dictionary)
            self._mean = self._least = self._most = 0.0

    def _drawn(self, chunks: range, fetch: Callable[[int], memoryview]) -> Dictionary | None:
        """Return a dictionary of rows drawn uniformly from these chunks."""
        k = self.codec.chunk
        choice = len(chunks) * k
        content = bytearray()
        for pick in np.sort(self._random.choice(choice, min(self.codec.dictionary, choice), replace=False)).tolist():
            content += self.row_of(fetch(chunks[pick // k]), pick % k)
        return Dictionary(bytes(content)) if len(content) >= 8 else None

    def row_of(self, data: memoryview, at: int) -> memoryview:
        """Return what one row of a decoded chunk adds to a dictionary."""
        packed = self.packed(self.chunk_of(data))
        size = len(packed) // self.codec.chunk
        return packed[at * size : (at + 1) * size]

    def adopt(self, dictionary: Dictionary | None, rows: int) -> None:
        self.current = dictionary
        self._last = rows
        if self.codec.dictionary:
            self._next = _milestone(rows)


def _milestone(rows: int) -> int:
    steps = (FIRST_DICTIONARY, SECOND_DICTIONARY)
    return next((s for s in steps if rows < s), rows + RENEWAL)


def coder_of(codec: Codec, shape: tuple[int, ...], dtype: np.dtype[Any], capacity: int) -> Coder:
    """Return the coder of a column of `capacity` rows."""
    if isinstance(codec, Zstd):
        return ZstdCoder(codec, shape, dtype, capacity)
    return Coder(codec, shape, dtype)
