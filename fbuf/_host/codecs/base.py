"""How rows become bytes: the `Codec` Protocol, for a codec of one's own, and the values `Zstd` and `Raw`.

In a store `Zstd` works with dictionaries (`coder`, `zstd`); on its own, as here, without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from fbuf._host.codecs.zstd import compressor, unpacker
from fbuf._host.types import Array, flat


@runtime_checkable
class Codec(Protocol):
    """What a host column needs of a codec: any hashable value with these. Called from several threads at once.

    Example: frames in sixteen shades, half the bytes before zlib has begun. What it loses is the user's affair; the store
    checks that the bytes it stored are the bytes it decodes.
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
      repack: Compress chunks again in the background once some 38,000 frames are closed, with a longer search against a
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
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(
                    f"Zstd: {name} is {value!r}; expected an integer from {low} to {high}. "
                    f"The default is Zstd({name}={getattr(type(self), name)})."
                )
        if not isinstance(self.repack, bool):
            raise ValueError(f"Zstd: repack is {self.repack!r}; expected True or False. The default is True.")

    def encode(self, rows: Array) -> bytes:
        """One frame, with its content size; the checksum is the store's."""
        return compressor(self.level, rows.nbytes).compress(flat(rows))

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Fills `out`. Raises StoreCorrupted unless `data` is one frame of exactly its size."""
        if out.nbytes:
            flat(out)[:] = unpacker(out.nbytes)(memoryview(data))


@dataclass(frozen=True)
class Raw:
    """No codec: rows as they are, in a ring, neither encoded nor checked. For leaves that do not compress.

    A leaf for which `Zstd` gains less than 1.3x becomes such a ring by itself; this says it beforehand.

    Example:
      >>> import fbuf
      >>> storage = fbuf.storages.Compressed(keys=("obs", "noise"), codec={"noise": fbuf.storages.Raw()})
    """

    @property
    def chunk(self) -> int:
        """1."""
        return 1

    def encode(self, rows: Array) -> bytes:
        """The bytes of the rows."""
        return bytes(flat(np.ascontiguousarray(rows)))

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Fills `out`."""
        flat(out)[:] = memoryview(data)
