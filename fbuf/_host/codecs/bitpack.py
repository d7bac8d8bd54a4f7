"""Zeros and ones as bits: for one-hot boards, masks and flags of any dtype.

What is packed are the bytes of 0 and 1 exactly (a float's -0.0 is neither), so unpacking gives back every bit. Rows with
anything else among them are kept as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.types import Array, StoreCorrupted, flat

_RAW, _BITS = 0, 1  # first byte of a chunk
_WHOLE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by bytes of an element


def packable(rows: Array) -> bool:
    """Whether every element is exactly 0 or 1."""
    whole, one = _whole(rows)
    return whole is not None and bool(((whole == 0) | (whole == one)).all())


def pack(rows: Array) -> bytes:
    """Rows `[k, *shape]` that are `packable`, each in whole bytes, its first element in the highest bit."""
    whole, _ = _whole(rows)
    assert whole is not None
    return np.packbits(whole.reshape(len(rows), -1) != 0, axis=1).tobytes()


def unpack(data: bytes | memoryview, out: Array) -> None:
    """The inverse, into a C-contiguous array."""
    whole, one = _whole(out)
    assert whole is not None
    each = out.size // len(out)
    bits = np.unpackbits(np.frombuffer(data, np.uint8).reshape(len(out), -1), axis=1, count=each)
    np.multiply(bits.reshape(-1), one, out=whole, casting="unsafe")


def packed_bytes(rows: Array) -> int:
    """Bytes that `pack` makes of rows of this shape."""
    return len(rows) * -(-(rows.size // len(rows)) // 8)


def _whole(rows: Array) -> tuple[Array | None, Any]:
    """The rows as unsigned integers of their width, and what 1 is as one of those."""
    kind = _WHOLE.get(rows.dtype.itemsize)
    if kind is None or rows.dtype.kind == "c":
        return None, None
    flat_rows = np.ascontiguousarray(rows).reshape(-1) if not rows.flags.c_contiguous else rows.reshape(-1)
    return flat_rows.view(kind), np.ones(1, rows.dtype).view(kind)[0]


@dataclass(frozen=True)
class BitPack:
    """A codec for rows of zeros and ones (masks, one-hot boards): 8 elements a byte, whatever their dtype, and no more.

    Written and read at the speed of a copy. `Zstd` does the same before it compresses, where rows are such, and is smaller
    where they repeat.

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
        if isinstance(self.chunk, bool) or not isinstance(self.chunk, int) or not 1 <= self.chunk <= 64:
            raise ValueError(
                f"BitPack: chunk is {self.chunk!r}; expected an integer from 1 to 64. The default is BitPack(chunk=16)."
            )

    def encode(self, rows: Array) -> bytes:
        """One byte that says which, then bits, or the rows as they are."""
        if packable(rows):
            return bytes([_BITS]) + pack(rows)
        return bytes([_RAW]) + bytes(flat(np.ascontiguousarray(rows)))

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Fills `out`. Raises StoreCorrupted unless `data` is of its size."""
        body = memoryview(data)[1:]
        kind = data[0] if len(data) else -1
        if kind == _BITS and len(body) == packed_bytes(out):
            unpack(body, out)
        elif kind == _RAW and len(body) == out.nbytes:
            flat(out)[:] = body
        else:
            raise StoreCorrupted(
                f"Store.read: a chunk of bits has kind {kind} and {len(body)} bytes; expected {packed_bytes(out)} of bits. "
                f"Its bytes were damaged: load the last checkpoint with fbuf.load(path)."
            )
