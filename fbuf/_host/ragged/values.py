"""Encode one value of a ragged leaf as bytes and back: text, bytes, numbers, arrays of any shape and dtype.

The first byte says what follows; an array carries its dtype and shape. Other Python objects go through the user's `encode`;
without one the store keeps the object itself. Pickle is never used.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from fbuf._host.types import Array, StoreCorrupted

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]

_ARRAY, _TEXT, _BYTES, _NONE, _BOOL, _INT, _FLOAT, _COMPLEX, _USER = b"atb-?ifcu"
_CONSTANT = {_NONE: 0, _BOOL: 1, _FLOAT: 8, _COMPLEX: 16}
"""Bytes after the mark, where that is always the same."""


class Missing:
    """Stand for a leaf that a row lacks."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = Missing()


@functools.lru_cache(maxsize=256)
def dtype_code(dtype: np.dtype[Any]) -> str | None:
    """Return a name from which `dtype_of` finds a dtype; None for objects and records."""
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        return None
    return dtype.name if dtype.isbuiltin == 2 else dtype.str


@functools.lru_cache(maxsize=256)
def dtype_of(code: str) -> np.dtype[Any]:
    """Return the dtype of a `dtype_code`, JAX's own included. Raises TypeError."""
    try:
        return np.dtype(code)
    except TypeError:
        import ml_dtypes

        kind = getattr(ml_dtypes, code, None)
        if kind is None:
            raise
        return np.dtype(kind)


def encode(value: Any, custom: Encode | None) -> bytes | None:
    """Return a value as bytes; None if it has no such form and `custom` is None.

    Raises:
      TypeError: the user's `encode` gives something else than bytes.
    """
    kind = type(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        code = dtype_code(value.dtype)
        if code is not None:
            return head(code, value.shape) + value.tobytes()
    elif kind is str:
        return bytes([_TEXT]) + value.encode("utf-8", "surrogatepass")
    elif kind is bytes:
        return bytes([_BYTES]) + value
    elif value is None:
        return bytes([_NONE])
    elif kind is bool:
        return bytes([_BOOL, value])
    elif kind is int:
        return bytes([_INT]) + value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    elif kind is float:
        return bytes([_FLOAT]) + struct.pack("<d", value)
    elif kind is complex:
        return bytes([_COMPLEX]) + struct.pack("<dd", value.real, value.imag)
    if custom is None:
        return None
    data = custom(value)
    if not isinstance(data, bytes):
        raise TypeError(f"Ragged: encode gave {type(data).__name__}; expected bytes. Return bytes(x).")
    return bytes([_USER]) + data


def decode(data: memoryview, custom: Decode | None) -> Any:
    """Return the value that `encode` encoded; arrays are writeable copies.

    Raises:
      StoreCorrupted: the bytes are of no known form.
      TypeError: the user's `decode` is wanted and was not given.
    """
    mark = data[0] if len(data) else -1
    rest = data[1:]
    if len(rest) != _CONSTANT.get(mark, len(rest)):
        raise malformed(f"{len(data)} bytes")
    if mark == _ARRAY:
        return array(data).copy()
    if mark == _TEXT:
        return str(rest, "utf-8", "surrogatepass")
    if mark == _BYTES:
        return bytes(rest)
    if mark == _NONE:
        return None
    if mark == _BOOL:
        return bool(rest[0])
    if mark == _INT:
        return int.from_bytes(rest, "little", signed=True)
    if mark == _FLOAT:
        return struct.unpack("<d", rest)[0]
    if mark == _COMPLEX:
        return complex(*struct.unpack("<dd", rest))
    if mark != _USER:
        raise malformed(f"mark {mark}")
    if custom is None:
        raise TypeError("Ragged: a value was stored with encode=, but there is no decode=. Give both.")
    return custom(bytes(rest))


@functools.lru_cache(maxsize=4096)
def head(code: str, shape: tuple[int, ...]) -> bytes:
    """Return the bytes before an array's elements: mark, dtype, shape."""
    name = code.encode()
    return struct.pack(f"<BBB{len(name)}s{len(shape)}q", _ARRAY, len(name), len(shape), name, *shape)


@functools.lru_cache(maxsize=4096)
def _parsed(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return dtype, shape and number of elements of a head. Raises ValueError, TypeError, struct.error."""
    mark, length, ndim = struct.unpack_from("<BBB", data)
    code, *shape = struct.unpack_from(f"<{length}s{ndim}q", data, 3)
    if mark != _ARRAY or min(shape, default=0) < 0:
        raise ValueError("no array")
    return dtype_of(code.decode()), tuple(shape), math.prod(shape)


def array(data: memoryview) -> Array:
    """Return the array in these bytes, a view. Raises StoreCorrupted."""
    try:
        start = 3 + data[1] + 8 * data[2]
        dtype, shape, count = _parsed(bytes(data[:start]))
        if len(data) != start + count * dtype.itemsize:
            raise ValueError(f"{len(data)} bytes")
        if not count or not dtype.itemsize:
            return np.empty(shape, dtype)
        return np.frombuffer(data, dtype, count, start).reshape(shape)
    except (struct.error, ValueError, TypeError, IndexError) as error:
        raise malformed(str(error)) from error


def malformed(what: str) -> StoreCorrupted:
    """Return the error of bytes that are not a value."""
    return StoreCorrupted(
        f"Records.read: a stored value is malformed ({what}); expected what was stored. "
        f"Its bytes were damaged: load the last checkpoint with fbuf.load(path)."
    )
