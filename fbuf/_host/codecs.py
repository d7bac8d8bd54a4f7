"""Codecs of host columns: the `Codec` Protocol, for a user's own, the values `Zstd`, `Raw` and `BitPack`, and their coders.

In a store a chunk of `Zstd` is one frame, compressed against a raw-content dictionary: a few past rows, untrained. On Atari
frames that is 1.2-4x smaller than without, and faster both ways. A new dictionary is tried early, then regularly, and sooner
when the size of chunks has changed (the game changed). It is kept if it saves more bytes than it takes. A decompressor
shared by two threads corrupts its output, so every call makes its own (about 8 us a dictionary).

Source: RFC 8878; measured with python-zstandard 0.25 on six Atari games.
"""

from __future__ import annotations

import functools
import itertools
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import zstandard

from fbuf._host.memory.lazy_array import Identity
from fbuf._host.types import Array, StoreCorrupted, corrupted, flat

Expand = Callable[[memoryview], memoryview]
Unpack = Callable[[memoryview, "int | None"], memoryview]
"""(encoded bytes, their checksum; None: neither checksum nor size is checked) -> rows, valid until the next call."""

_DDICT_BYTES = 27_352
"""What zstd 1.5 allocates beside the content to decode with a dictionary (`ZSTD_sizeof_DDict`, not exposed)."""
_CDICT_BYTES = 14_912
"""What it allocates beside content and tables to encode with one (`ZSTD_sizeof_CDict`, not exposed)."""


class Dictionary:
    """Past rows that chunks are compressed against, and how many live chunks need it.

    Args:
      content: The rows.
      crc: What `zlib.crc32(content)` was; None for rows that were verified on their way here.
    Raises:
      StoreCorrupted: it is something else now.
    """

    __slots__ = ("data", "crc", "slot", "count", "identity", "digest")

    def __init__(self, content: bytes, crc: int | None = None) -> None:
        self.data = _raw(content)
        self.digest = 0  # bytes of the tables that encoding needs
        self.crc = zlib.crc32(content)
        if crc is not None and crc != self.crc:
            raise damaged("a dictionary", self.crc, crc)
        self.slot = 0  # in the column's table; 0: not yet entered
        self.count = 0
        self.identity = Identity()
        zstandard.ZstdDecompressor(dict_data=self.data)  # digests it now, on one thread

    @property
    def nbytes(self) -> int:
        """Return the bytes of the content, of what decoding needs besides, and of the tables that encoding needs."""
        return len(self.data) + _DDICT_BYTES + self.digest

    def digested(self, parameters: zstandard.ZstdCompressionParameters) -> zstandard.ZstdCompressionDict:
        """Return the content with the tables that encoding needs, made by the first call: a compressor is then cheap."""
        if not self.digest:
            self.data.precompute_compress(compression_params=parameters)
            chain = 0 if parameters.strategy == zstandard.STRATEGY_FAST else 4 << parameters.chain_log
            self.digest = _CDICT_BYTES + (4 << parameters.hash_log) + chain
        return self.data

    def free_digest(self) -> None:
        """Free those tables. Decompressors keep the content that they have."""
        if self.digest:
            data = _raw(self.data.as_bytes())
            zstandard.ZstdDecompressor(dict_data=data)
            self.data, self.digest = data, 0


def _raw(content: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def checksum(data: bytes | memoryview, dictionary: Dictionary | None) -> int:
    """Return the crc32 of encoded bytes and of their dictionary."""
    return zlib.crc32(data, dictionary.crc if dictionary is not None else 0)


def damaged(what: str, crc: int, expected: int) -> StoreCorrupted:
    """Return the error of bytes with another checksum."""
    return corrupted(f"{what} has checksum {crc:#010x}", f"{expected:#010x}")


def compressor(level: int, size: int, dictionary: Dictionary | None = None, **search: int) -> zstandard.ZstdCompressor:
    """Return a compressor for units of `size` bytes; `search` overrides its level.

    Its context takes half a megabyte for chunks of frames. Making one takes 10 us once the dictionary is digested, which with
    a `search` it is not.
    """
    data = None if dictionary is None else _raw(dictionary.data.as_bytes()) if search else dictionary.data
    if level == 1 and size >= 16_384:
        # Frames repeat in long matches. Against level 1's own (13, 6): 1-10 % fewer bytes, 65 KB more context.
        search = {"hash_log": 14, "min_match": 7}
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level,
        source_size=max(size, 1),
        dict_size=len(data) if data is not None else 0,
        # The whole dictionary stays in reach as long as the content fits the window.
        window_log=min(max((size - 1).bit_length(), 10), 27),
        write_checksum=False,  # `checksum` is faster, see `chunks`
        write_content_size=True,
        write_dict_id=False,
        **search,
    )
    if dictionary is not None and data is dictionary.data:
        data = dictionary.digested(parameters)
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=data)


def check_size(data: bytes | memoryview, *sizes: int) -> None:
    """Raise StoreCorrupted unless a frame claims one of these sizes: decompressing allocates what it claims, even gigabytes."""
    try:
        claimed = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise _undecodable(error, sizes[0]) from error
    if claimed not in sizes:
        raise corrupted(f"a zstd frame claims {claimed} bytes", f"{sizes[0]}")


def decompressor(dictionary: Dictionary | None) -> Callable[[memoryview], bytes]:
    """Return a function that decompresses frames, for one thread and one call. It raises ZstdError."""
    return zstandard.ZstdDecompressor(dict_data=dictionary.data if dictionary else None).decompress


def unpacker(size: int, dictionary: Dictionary | None = None, packed: int = -1, expand: Expand | None = None) -> Unpack:
    """Return a function that verifies and decompresses frames of `size` bytes, for one thread and one call.

    Args:
      packed, expand: Frames of `packed` bytes are allowed too; `expand` makes rows of them, or raises.
    """
    seed = checksum(b"", dictionary)
    decompress = decompressor(dictionary)
    crc32 = zlib.crc32

    def unpack(data: memoryview, expected: int | None) -> memoryview:
        if expected is not None:
            crc = crc32(data, seed)
            if crc != expected:
                raise damaged("a chunk", crc, expected)
            check_size(data, size, packed)
        try:
            rows = memoryview(decompress(data))
        except zstandard.ZstdError as error:
            raise _undecodable(error, size) from error
        if len(rows) == size:
            return rows
        if expand is not None:
            return expand(rows)
        raise corrupted(f"a zstd frame holds {len(rows)} bytes", f"{size}")

    return unpack


def _undecodable(error: zstandard.ZstdError, size: int) -> StoreCorrupted:
    return corrupted(f"a zstd frame does not decode ({error})", f"{size} bytes")


@runtime_checkable
class Codec(Protocol):
    """Define the members of a codec, a hashable value. They are called from several threads at once.

    Example: frames in sixteen shades, half the bytes before zlib. A codec may be lossy; the store checks encoded bytes only.
      >>> import dataclasses, zlib, fbuf, numpy as np
      >>> @dataclasses.dataclass(frozen=True)
      ... class Shades:
      ...     chunk: int = 8
      ...
      ...     def encode(self, rows):
      ...         shades = (rows.reshape(-1) >> 4).astype(np.uint8)
      ...         shades = np.append(shades, np.zeros(shades.size % 2, np.uint8))
      ...         return zlib.compress(shades[0::2] << 4 | shades[1::2])
      ...
      ...     def decode(self, data, out):
      ...         pairs = np.frombuffer(zlib.decompress(data), np.uint8)
      ...         shades = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)[: out.size]
      ...         out[...] = (shades * 17).reshape(out.shape)
      >>> fbuf.Buffer(1000, storage=fbuf.storages.Compressed(keys=("obs",), codec=Shades())).storage.codec
      Shades(chunk=8)
    """

    @property
    def chunk(self) -> int:
        """Return k, the rows of one lane encoded together, >= 1."""

    def encode(self, rows: Array) -> bytes:
        """Return bytes of rows `[k, *shape]`, C-contiguous."""

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Fill `out`, `[k, *shape]`. The store has compared `data` with its checksum if it comes from a file."""


def _check_range(codec: Any, name: str, low: int, high: int) -> None:
    """Raise unless a field is an int from `low` to `high`."""
    value = getattr(codec, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{type(codec).__name__}: {name} is {value!r}; expected an integer from {low} to {high}.")


@dataclass(frozen=True)
class Zstd:
    """Compress rows with Zstandard: without dictionaries by `encode` and `decode`, with them in a store.

    Attributes:
      level: 1 to 22. Higher levels write 4x slower and up from 9; with a dictionary they save 5-20 %.
      chunk: k, 1 to 64. Rows compressed together: more is smaller, fewer read faster. Use 1 where the rows of a lane are
        not similar from one to the next (a data set in random order), where a larger chunk would only decode rows that were
        not asked for. With a writer that replaces any row, 1 is used regardless.
      dictionary: Past rows in a dictionary, 0 (none) to 256.
      repack: Compress chunks again in the background once about 38,000 frames are closed, with a longer search against a
        dictionary of their own: 10-30 % smaller and read faster, for 8 to 20 us of a thread a frame of 84x84. Not done
        from level 9 on.
    Raises:
      ValueError: a field out of range.

    Example:
      >>> import fbuf
      >>> storage = fbuf.storages.Compressed(keys=("obs",), codec=fbuf.storages.Zstd(level=3, chunk=16))
    """

    level: int = 1
    chunk: int = 8
    dictionary: int = 16
    repack: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (("level", 1, 22), ("chunk", 1, 64), ("dictionary", 0, 256)):
            _check_range(self, name, low, high)
        if not isinstance(self.repack, bool):
            raise ValueError(f"Zstd: repack is {self.repack!r}; expected True or False. The default is True.")

    def encode(self, rows: Array) -> bytes:
        """Return one frame, with its content size and without a checksum."""
        return compressor(self.level, rows.nbytes).compress(flat(rows))

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Fill `out`. Raises StoreCorrupted unless `data` is one frame of exactly its size."""
        if out.nbytes:
            check_size(data, out.nbytes)
            flat(out)[:] = unpacker(out.nbytes)(memoryview(data), None)


@dataclass(frozen=True)
class Raw:
    """Store rows as they are, neither encoded nor checked, for leaves that do not compress.

    A leaf for which `Zstd` gains less than 1.3x is stored this way automatically; `Raw` decides it beforehand.

    Example:
      >>> import fbuf
      >>> storage = fbuf.storages.Compressed(keys=("obs", "noise"), codec={"noise": fbuf.storages.Raw()})
    """

    chunk = 1

    def encode(self, rows: Array) -> bytes:
        """Return the bytes of the rows."""
        return bytes(flat(np.ascontiguousarray(rows)))

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Fill `out`."""
        flat(out)[:] = memoryview(data)


_RAW, _BITS = 0, 1  # first byte of a chunk
_WHOLE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by bytes of an element


def is_packable(rows: Array) -> bool:
    """Return whether every element is exactly 0 or 1 (a float's -0.0 is neither)."""
    whole, one = _whole(rows)
    return whole is not None and bool(((whole == 0) | (whole == one)).all())


def pack_bits(rows: Array) -> bytes:
    """Return packable rows `[k, *shape]` as bits, each row in whole bytes, its first element in the highest bit."""
    whole, _ = _whole(rows)
    assert whole is not None
    return np.packbits(whole.reshape(len(rows), -1) != 0, axis=1).tobytes()


def unpack_bits(data: bytes | memoryview, out: Array) -> None:
    """Unpack bits into a C-contiguous array."""
    whole, one = _whole(out)
    assert whole is not None
    each = out.size // len(out)
    bits = np.unpackbits(np.frombuffer(data, np.uint8).reshape(len(out), -1), axis=1, count=each)
    np.multiply(bits.reshape(-1), one, out=whole, casting="unsafe")


def packed_bytes(rows: Array) -> int:
    """Return how many bytes `pack_bits` makes of rows of this shape."""
    return len(rows) * -(-(rows.size // len(rows)) // 8)


def _whole(rows: Array) -> tuple[Array | None, Any]:
    """Return the rows as unsigned integers of their width, and 1 as one of those."""
    kind = _WHOLE.get(rows.dtype.itemsize)
    if kind is None or rows.dtype.kind == "c":
        return None, None
    flat_rows = np.ascontiguousarray(rows).reshape(-1) if not rows.flags.c_contiguous else rows.reshape(-1)
    return flat_rows.view(kind), np.ones(1, rows.dtype).view(kind)[0]


@dataclass(frozen=True)
class BitPack:
    """Encode rows of zeros and ones (masks, one-hot boards) as bits: 8 elements a byte, whatever their dtype.

    Writes and reads at the speed of a copy. `Zstd` packs such rows too before it compresses, and is smaller where they repeat.

    Attributes:
      chunk: k, 1 to 64. Rows encoded together.
    Raises:
      ValueError: chunk out of range.

    Example:
      >>> import numpy as np
      >>> board = np.eye(12, dtype=np.float32)[None]
      >>> codec = BitPack(chunk=1)
      >>> len(codec.encode(board)), board.nbytes
      (19, 576)
    """

    chunk: int = 16

    def __post_init__(self) -> None:
        _check_range(self, "chunk", 1, 64)

    def encode(self, rows: Array) -> bytes:
        """Return one byte that says which, then bits, or the rows as they are."""
        if is_packable(rows):
            return bytes([_BITS]) + pack_bits(rows)
        return bytes([_RAW]) + bytes(flat(np.ascontiguousarray(rows)))

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Fill `out`. Raises StoreCorrupted unless `data` is of its size."""
        body = memoryview(data)[1:]
        kind = data[0] if len(data) else -1
        if kind == _BITS and len(body) == packed_bytes(out):
            unpack_bits(body, out)
        elif kind == _RAW and len(body) == out.nbytes:
            flat(out)[:] = body
        else:
            raise corrupted(f"a chunk of bits has kind {kind} and {len(body)} bytes", f"{packed_bytes(out)} of bits")


Decode = Callable[[memoryview, int, "Dictionary | None"], memoryview]
"""(encoded bytes, their checksum, dictionary) -> rows, valid until the next call."""
Views = Sequence[memoryview]
Copy = tuple[bool, int, int, int, int, int]
"""Rows to copy: whether they begin the next chunk; the output, and first and last byte there; first and last of the chunk."""


class EncodedChunks(NamedTuple):
    """Chunks to decode, one after another."""

    data: Iterable[memoryview]
    slots: Sequence[int]  # of their dictionaries
    dictionaries: Mapping[int, Dictionary | None]  # by slot
    checksums: Sequence[int] | None  # None: the bytes never left the memory of this process
    addresses: Sequence[int]  # where there is a cache


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
        self._size = codec.chunk * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

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
        unpackers: dict[Dictionary | None, Callable[..., bytes | memoryview]] = {}

        def decode(data: memoryview, expected: int, dictionary: Dictionary | None) -> memoryview:
            if dictionary not in unpackers:
                unpackers[dictionary] = self._unpacker(dictionary)
            return memoryview(unpackers[dictionary](data, expected))

        return decode

    def decode_chunks(
        self, chunks: EncodedChunks, opened: Iterable[memoryview], copies: Iterable[Copy], outs: Views, cache: Any
    ) -> None:
        """Decode chunks one after another, verify those with a checksum, and copy their rows to `outs`.

        Args:
          chunks: In the order of `copies`.
          opened: Rows of further chunks, which are not encoded.
          cache: A `ChunkCache`, or None.
        Raises:
          StoreCorrupted: A chunk is damaged.
        """
        decoded = itertools.chain(self._decoded(chunks, cache), opened)
        size = self._size
        rows: memoryview | None = None
        for is_next, out, to, end, source, stop in copies:
            if is_next:
                rows = None  # zstd writes the next rows to the same memory, which is in the processor's cache
                rows = memoryview(next(decoded))
                if len(rows) != size:
                    rows = self._expand(rows)
            assert rows is not None
            outs[out][to:end] = rows[source:stop]

    def _decoded(self, chunks: EncodedChunks, cache: Any) -> Iterator[bytes | memoryview]:
        """Return the rows of chunks, valid until the next ones. Each step is a call from C: no frame of Python's a chunk."""
        checked = chunks.checksums is not None or cache is not None
        unpackers = {slot: self._unpacker(dictionary, checked) for slot, dictionary in chunks.dictionaries.items()}
        unpack = map(unpackers.__getitem__, chunks.slots)
        if not checked:
            return map(operator.call, unpack, chunks.data)
        checksums = itertools.repeat(None) if chunks.checksums is None else chunks.checksums
        if cache is None:
            return map(operator.call, unpack, chunks.data, checksums)
        return map(functools.partial(_cached, cache), chunks.addresses, unpack, chunks.data, checksums)

    def _unpacker(self, dictionary: Dictionary | None, checked: bool = True) -> Callable[..., bytes | memoryview]:
        """Return a function that decodes chunks of this dictionary, for one thread and one call: an `Unpack` if `checked`."""
        scratch = np.empty((self.codec.chunk, *self._shape), self._dtype)

        def unpack(data: memoryview, expected: int | None = None) -> memoryview:
            if expected is not None and checksum(data, dictionary) != expected:
                raise damaged("a chunk", checksum(data, dictionary), expected)
            self.codec.decode(data, scratch)
            return flat(scratch)

        return unpack

    def _expand(self, rows: memoryview) -> memoryview:
        """Return the rows of a decoded chunk of another size. Raises StoreCorrupted."""
        raise corrupted(f"a chunk holds {len(rows)} bytes", f"{self._size}")

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

    def decode_chunks(
        self, chunks: EncodedChunks, opened: Iterable[memoryview], copies: Iterable[Copy], outs: Views, cache: Any
    ) -> None:
        try:
            super().decode_chunks(chunks, opened, copies, outs, cache)
        except zstandard.ZstdError as error:
            raise _undecodable(error, self._size) from error

    def _unpacker(self, dictionary: Dictionary | None, checked: bool = True) -> Callable[..., bytes | memoryview]:
        return unpacker(self._size, dictionary, self._packed, self._expand) if checked else decompressor(dictionary)

    def _expand(self, rows: memoryview) -> memoryview:
        """Return the rows of a decoded chunk that is packed as bits."""
        if len(rows) != self._packed:
            raise corrupted(f"a zstd frame holds {len(rows)} bytes", f"{self._size}")
        whole = np.empty((self.codec.chunk, *self._shape), self._dtype)
        unpack_bits(rows, whole)
        return flat(whole)

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
        Cost: about 80 chunks decoded and encoded: about two milliseconds for Atari frames.
        """
        early = rows >= self._next
        self._last = rows
        self._next = _milestone(rows) if early else self._next
        self._least = self._most = self._mean  # drift is counted from here, also if the trial fails
        chunk = self.codec.chunk
        trial = range(total - min(_TRIAL, total // 2), total)  # the newest; the dictionary comes from those before
        firsts = {0, max(trial.start - SECOND_DICTIONARY // chunk, 0)}
        drawn = [self._drawn(range(first, trial.start), fetch) for first in sorted(firsts)]
        tried = [dictionary for dictionary in drawn if dictionary is not None]
        if not trial or not tried:
            return None
        packers = [compressor(self.codec.level, self._size, dictionary) for dictionary in (self.current, *tried)]
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
        dictionary = tried[best - 1]
        # The digest is of one dictionary a column, and faster than none.
        if saved <= dictionary.nbytes - dictionary.digest:
            return None
        self._use(dictionary)
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


def _cached(cache: Any, address: int, unpack: Unpack, data: memoryview, crc: int | None) -> memoryview:
    """Return the rows of a chunk from a `ChunkCache`, or decode and keep them."""
    rows: memoryview | None = cache.get(address)
    if rows is None:
        rows = unpack(data, crc)
        rows = rows if rows.readonly else memoryview(bytes(rows))  # not the scratch of the next chunk
        cache.put(address, rows)
    return rows


def _milestone(rows: int) -> int:
    steps = (FIRST_DICTIONARY, SECOND_DICTIONARY)
    return next((s for s in steps if rows < s), rows + RENEWAL)


def coder_of(codec: Codec, shape: tuple[int, ...], dtype: np.dtype[Any], capacity: int) -> Coder:
    """Return the coder of a column of `capacity` rows."""
    if isinstance(codec, Zstd):
        return ZstdCoder(codec, shape, dtype, capacity)
    return Coder(codec, shape, dtype)
