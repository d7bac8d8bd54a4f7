"""Turns chunks of rows into bytes and back: the `Codec` Protocol, `Zstd`, and what the store keeps while it uses one.

Zstd compresses each chunk as one frame against a shared *raw-content dictionary*: a few past rows, untrained. On Atari
frames that is 1.2-4x smaller than no dictionary and faster both ways, because matches are long. Rejected: trained
dictionaries (worse than 8 raw frames), XOR against the previous frame, bit planes, lz4, and
`multi_decompress_to_buffer` (slower than a loop: it sizes outputs by the compressed total). A decompressor shared by two
threads corrupts its output or crashes, so every call makes its own (about 8 us a dictionary) and none is kept: there is
nothing to share, and nothing held for threads that have ended.

Source: RFC 8878; measured with python-zstandard 0.25 on six Atari games.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import zstandard

Array = np.ndarray[Any, Any]
Unpack = Callable[[memoryview], memoryview]
"""Encoded bytes to rows; the result is valid until the next call."""
Decode = Callable[[memoryview, int, "Dictionary | None"], memoryview]
"""The same for bytes with this checksum and dictionary, which it verifies first."""

_DDICT_BYTES = 27_352
"""What zstd 1.5 allocates beside the content to decode with a dictionary (`ZSTD_sizeof_DDict`, not exposed)."""
FIRST_DICTIONARY, SECOND_DICTIONARY, RENEWAL = 512, 4096, 65_536
"""Rows after which a dictionary is tried: early, once there is variety, then regularly."""
DRIFT = 1.25
"""Tried sooner when bytes a row exceed this times the best seen since the last dictionary."""
WORTHWHILE = 1.3
"""A column that compresses less than this becomes a raw ring."""
PROBE_BYTES, PROBE_CHUNKS = 65_536, 256
"""Raw bytes, or chunks of small rows, seen before `WORTHWHILE` is asked."""
_TRIAL = 16  # chunks a new dictionary is tried on


class StoreCorrupted(RuntimeError):
    """Stored bytes do not decode to what was stored."""


@runtime_checkable
class Codec(Protocol):
    """What a host column needs of a codec: any hashable value with these. Called from several threads at once."""

    @property
    def chunk(self) -> int:
        """k, rows of one lane encoded together, >= 1."""

    def encode(self, rows: Array) -> bytes:
        """Bytes of rows `[k, *shape]`, C-contiguous; lossless, as far as the user cares."""

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Fills `out`, `[k, *shape]`. A store has checked `data` against a checksum before."""


@dataclass(frozen=True)
class Zstd:
    """Zstandard. On its own (`encode`, `decode`) without dictionaries; in a store with them.

    Attributes:
      level: 1 to 22. Higher levels write 4x slower and up from 9; with a dictionary they save 5-20 %.
      chunk: k, 1 to 64. Rows compressed together: more is smaller, fewer read faster. 1 is right where the rows of a lane are
        not alike from one to the next (a data set in random order: a chunk would only make draws decode rows that nobody
        asked for), and is what is used, whatever is said here, with a writer that replaces any row.
      dictionary: Past rows in a dictionary, 0 (none) to 256.
    Raises:
      ValueError: a field out of range.
    """

    level: int = 1
    chunk: int = 8
    dictionary: int = 16

    def __post_init__(self) -> None:
        for name, low, high in (("level", 1, 22), ("chunk", 1, 64), ("dictionary", 0, 256)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(
                    f"Zstd: {name} is {value!r}; expected an integer from {low} to {high}. "
                    f"The default is Zstd({name}={getattr(type(self), name)})."
                )

    def encode(self, rows: Array) -> bytes:
        """One frame, with its content size; the checksum is the store's."""
        return compressor(self, rows.nbytes, None).compress(flat(rows))

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Fills `out`. Raises StoreCorrupted unless `data` is one frame of exactly its size."""
        if out.nbytes:
            flat(out)[:] = _unpacker(out.nbytes, None)(memoryview(data))


class Dictionary:
    """Past rows that chunks are compressed against, and how many live chunks need it.

    Args:
      content: The rows.
      crc: What `zlib.crc32(content)` was; None for rows that were verified on their way here.
    Raises:
      StoreCorrupted: it is something else now.
    """

    __slots__ = ("data", "crc", "slot", "count")

    def __init__(self, content: bytes, crc: int | None = None) -> None:
        self.data = zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        self.crc = zlib.crc32(content)
        if crc is not None and crc != self.crc:
            raise damaged("a dictionary", self.crc, crc)
        self.slot = 0  # in the column's table; 0: not yet entered
        self.count = 0
        zstandard.ZstdDecompressor(dict_data=self.data)  # digests it now, on one thread

    @property
    def nbytes(self) -> int:
        """Content and what decoding needs beside it."""
        return len(self.data) + _DDICT_BYTES


def checksum(data: bytes | memoryview, dictionary: Dictionary | None) -> int:
    """crc32 of encoded bytes and of what they were encoded against: any changed byte, of either, changes it."""
    return zlib.crc32(data, dictionary.crc if dictionary is not None else 0)


def damaged(what: str, crc: int, expected: int) -> StoreCorrupted:
    """The error of bytes with another checksum."""
    return StoreCorrupted(
        f"Store.read: {what} has checksum {crc:#010x}; expected {expected:#010x}. "
        f"Its bytes were damaged: load the last checkpoint with fbuf.load(path)."
    )


def flat(array: Array) -> memoryview:
    """The bytes of a C-contiguous array of any dtype (bfloat16 and float8 have no buffer protocol of their own)."""
    return memoryview(cast(Any, array.reshape(-1).view(np.uint8)))


def compressor(codec: Zstd, size: int, dictionary: Dictionary | None) -> zstandard.ZstdCompressor:
    """A compressor for units of `size` bytes, as lean as its dictionary allows."""
    extra: dict[str, int] = {}
    if codec.level == 1 and size >= 16_384:
        # Frames repeat in long matches. Against level 1's own (13, 6): 1-10 % fewer bytes, 65 KB more context.
        extra = {"hash_log": 14, "min_match": 7}
    parameters = zstandard.ZstdCompressionParameters.from_level(
        codec.level,
        source_size=max(size, 1),
        dict_size=len(dictionary.data) if dictionary else 0,
        # The whole dictionary stays in reach as long as the content fits the window.
        window_log=min(max((size - 1).bit_length(), 10), 27),
        write_checksum=False,  # `checksum` is faster, see `chunks`
        write_content_size=True,
        write_dict_id=False,
        **extra,
    )
    if dictionary is None:
        return zstandard.ZstdCompressor(compression_params=parameters)
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=dictionary.data)


def _unpacker(size: int, dictionary: Dictionary | None) -> Unpack:
    """Decompresses frames of `size` bytes; for one thread, for one call."""
    if dictionary is None:
        decompressor = zstandard.ZstdDecompressor()
    else:
        decompressor = zstandard.ZstdDecompressor(dict_data=dictionary.data)
    decompress, content_size = decompressor.decompress, zstandard.frame_content_size

    def unpack(data: memoryview) -> memoryview:
        try:
            # `decompress` believes the header whatever limit it is given: a small frame may claim gigabytes.
            claimed = content_size(data)
            if claimed == size:
                out = decompress(data)
                if len(out) == size:
                    return memoryview(out)
                claimed = len(out)
        except zstandard.ZstdError as error:
            raise StoreCorrupted(
                f"Store.read: a zstd frame does not decode ({error}); expected {size} bytes. "
                f"Its bytes were damaged: load the last checkpoint with fbuf.load(path)."
            ) from error
        raise StoreCorrupted(
            f"Store.read: a zstd frame claims {claimed} bytes; expected {size}. "
            f"Its bytes were damaged: load the last checkpoint with fbuf.load(path)."
        )

    return unpack


class Coder:
    """A column's codec at work. This one serves any user value: no dictionaries, nothing kept."""

    def __init__(self, codec: Codec, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.codec = codec
        self.current: Dictionary | None = None
        self._shape, self._dtype = shape, dtype

    @property
    def nbytes(self) -> int:
        """Contexts kept between calls."""
        return 0

    def encode(self, rows: Array) -> bytes:
        """One chunk `[k, *shape]` as bytes, against `current`."""
        data = self.codec.encode(rows)
        if not isinstance(data, bytes):
            raise TypeError(
                f"Store.write: {self.codec!r}.encode gave {type(data).__name__}; expected bytes. Return bytes(data)."
            )
        if len(data) >= 1 << 32:
            raise ValueError(
                f"Store.write: {self.codec!r}.encode gave {len(data)} bytes; expected less than 4 GiB a chunk. "
                f"Use a smaller chunk."
            )
        return data

    def decoder(self) -> Decode:
        """Verifies and decodes chunks; for one thread, for one call. The result is valid until the next one."""
        unpackers: dict[Dictionary | None, tuple[Unpack, int]] = {}
        crc32 = zlib.crc32

        def decode(data: memoryview, expected: int, dictionary: Dictionary | None) -> memoryview:
            pair = unpackers.get(dictionary)
            if pair is None:
                pair = unpackers[dictionary] = self.unpacker(dictionary), checksum(b"", dictionary)
            unpack, seed = pair
            crc = crc32(data, seed)
            if crc != expected:
                raise damaged("a chunk", crc, expected)
            return unpack(data)

        return decode

    def unpacker(self, dictionary: Dictionary | None) -> Unpack:
        """Decodes chunks that used this dictionary, unverified; for one thread, for one call."""
        scratch = np.empty((self.codec.chunk, *self._shape), self._dtype)

        def unpack(data: memoryview) -> memoryview:
            self.codec.decode(data, scratch)
            return flat(scratch)

        return unpack

    def due(self, rows: int) -> bool:
        """Whether a new dictionary should be tried after `rows` rows."""
        return False

    def renew(self, rows: int, total: int, fetch: Callable[[int], memoryview]) -> float | None:
        """Tries a new dictionary; bytes a chunk with it, None if there is none."""
        return None

    def adopt(self, dictionary: Dictionary | None, rows: int) -> None:
        """Goes on from a checkpoint: this dictionary, after `rows` rows."""


class ZstdCoder(Coder):
    """`Zstd` with the dictionaries of one column. Not thread-safe but for `decoder` and `unpacker`."""

    codec: Zstd

    def __init__(self, codec: Zstd, shape: tuple[int, ...], dtype: np.dtype[Any], capacity: int) -> None:
        super().__init__(codec, shape, dtype)
        self._row = int(np.prod(shape)) * dtype.itemsize
        self._size = codec.chunk * self._row
        self._gain_rows = min(capacity, RENEWAL)  # rows a dictionary may serve
        self._random = np.random.default_rng(0)
        self._compressor = compressor(codec, self._size, None)
        self._mean = self._best = 0.0  # bytes a chunk: running mean, and its lowest with this dictionary
        self._next = FIRST_DICTIONARY if codec.dictionary else 1 << 62
        self._last = 0

    @property
    def nbytes(self) -> int:
        """The compression context, with its digest of the dictionary."""
        return int(self._compressor.memory_size())

    def encode(self, rows: Array) -> bytes:
        """One chunk as one frame."""
        data = self._compressor.compress(flat(rows))
        self._mean += (len(data) - self._mean) / 64 if self._mean else len(data)
        self._best = min(self._best or self._mean, self._mean)
        return data

    def unpacker(self, dictionary: Dictionary | None) -> Unpack:
        return _unpacker(self._size, dictionary)

    def due(self, rows: int) -> bool:
        if rows >= self._next:
            return True
        drifted = self._mean > DRIFT * self._best and rows - self._last >= SECOND_DICTIONARY
        return drifted and self.codec.dictionary > 0

    def renew(self, rows: int, total: int, fetch: Callable[[int], memoryview]) -> float | None:
        """Makes a dictionary of rows drawn uniformly from `total` chunks, oldest first; keeps it if it pays for itself.

        Args:
          rows: Rows encoded so far.
          fetch: The rows of a chunk, valid until the next call.
        Returns:
          Bytes a chunk with the new dictionary; None if the old one stays.
        Cost: some 50 chunks decoded and encoded: about a millisecond for Atari frames.
        """
        self._last = rows
        self._next = _milestone(rows)
        self._best = self._mean  # drift is counted from here, whatever comes of the trial
        chunk = self.codec.chunk
        trial = range(total - min(_TRIAL, total // 2), total)  # the newest; the dictionary comes from those before
        choice = trial.start * chunk
        picks = self._random.choice(choice, min(self.codec.dictionary, choice), replace=False)
        content = bytearray()
        for pick in np.sort(picks).tolist():
            at = pick % chunk * self._row
            content += fetch(pick // chunk)[at : at + self._row]
        if not trial or len(content) < 8:
            return None
        candidate = Dictionary(bytes(content))
        challenger = compressor(self.codec, self._size, candidate)
        old = new = 0
        for i in trial:
            raw = fetch(i)
            old += len(self._compressor.compress(raw))
            new += len(challenger.compress(raw))
        saved = (old - new) / len(trial) / chunk * self._gain_rows
        if saved > candidate.nbytes:
            self.current, self._compressor = candidate, challenger
            self._mean = self._best = new / len(trial)
            return self._mean
        return None

    def adopt(self, dictionary: Dictionary | None, rows: int) -> None:
        self.current = dictionary
        self._compressor = compressor(self.codec, self._size, dictionary)
        self._last = rows
        if self.codec.dictionary:
            self._next = _milestone(rows)


def _milestone(rows: int) -> int:
    steps = (FIRST_DICTIONARY, SECOND_DICTIONARY)
    return next((s for s in steps if rows < s), rows + RENEWAL)


def coder_of(codec: Codec, shape: tuple[int, ...], dtype: np.dtype[Any], capacity: int) -> Coder:
    """What a column of `capacity` rows encodes and decodes with."""
    if isinstance(codec, Zstd):
        return ZstdCoder(codec, shape, dtype, capacity)
    return Coder(codec, shape, dtype)
