"""The dtypes that a checkpoint may hold, and how each is stored in a safetensors file.

The manifest holds the true dtype's name, which is looked up here and nowhere else. Types that safetensors lacks are stored as
unsigned integers of the same size, complex numbers as pairs of floats, all little endian.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

_PLAIN = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_PAIRS = {"complex64": "F32", "complex128": "F64", "complex32": "F16", "bcomplex32": "U16"}
_VIEWS = {"bfloat16": "U16"} | dict.fromkeys(
    (
        *("int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
        *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    ),
    "U8",
)
NAMES = (*_PLAIN, *_PAIRS, *_VIEWS)
"""All supported dtypes."""


@functools.lru_cache(maxsize=64)
def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of a name in the table.

    Raises:
      KeyError: the name is unknown.
      ImportError: `ml_dtypes` is too old for it.
    """
    if name in _PLAIN or name in ("complex64", "complex128"):
        dtype: np.dtype[Any] = np.dtype(name)
        return dtype if sys.byteorder == "little" else dtype.newbyteorder("<")
    if name not in NAMES:
        raise KeyError(name)
    import ml_dtypes

    if not hasattr(ml_dtypes, name):
        raise ImportError(f"ml_dtypes {ml_dtypes.__version__} has no {name}: pip install -U ml_dtypes")
    return np.dtype(getattr(ml_dtypes, name))


@functools.lru_cache(maxsize=64)
def canonical(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in little endian. Raises TypeError: it is not supported."""
    if dtype.name in NAMES and (dtype.isbuiltin != 2 or dtype == dtype_named(dtype.name)):
        return dtype_named(dtype.name)
    raise TypeError(dtype.name)


def stored(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the name and shape of an array in safetensors."""
    code, is_pair = _code(dtype)
    return code, (*shape, 2) if is_pair else shape


@functools.lru_cache(maxsize=64)  # `dtype.name` takes microseconds, and there are many blocks
def _code(dtype: np.dtype[Any]) -> tuple[str, bool]:
    name = dtype.name
    return _PAIRS.get(name) or _PLAIN.get(name) or _VIEWS[name], name in _PAIRS
