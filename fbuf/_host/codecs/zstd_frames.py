"""Zstandard frames against a shared dictionary, for `Zstd` in a store (its defaults: `codec`).

A chunk is one frame, compressed against a raw-content dictionary: a few past rows, untrained. On Atari frames that is 1.2-4x
smaller than without, and faster both ways. A decompressor shared by two threads corrupts its output, so every call makes its
own (about 8 us a dictionary).

Source: RFC 8878; measured with python-zstandard 0.25 on six Atari games.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import zstandard

from fbuf._host.memory.lazy_array import Identity
from fbuf._host.types import StoreCorrupted, corrupted

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


def unpacker(size: int, dictionary: Dictionary | None = None, packed: int = -1, expand: Expand | None = None) -> Unpack:
    """Return a function that verifies and decompresses frames of `size` bytes, for one thread and one call.

    Args:
      packed, expand: Frames of `packed` bytes are allowed too; `expand` makes rows of them.
    """
    seed = checksum(b"", dictionary)
    decompress = zstandard.ZstdDecompressor(dict_data=dictionary.data if dictionary else None).decompress
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
        if len(rows) == packed and expand is not None:
            return expand(rows)
        raise corrupted(f"a zstd frame holds {len(rows)} bytes", f"{size}")

    return unpack


def _undecodable(error: zstandard.ZstdError, size: int) -> StoreCorrupted:
    return corrupted(f"a zstd frame does not decode ({error})", f"{size} bytes")
