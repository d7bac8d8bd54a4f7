"""The closed table of dtypes that a checkpoint may hold, and how each lies in a safetensors file.

A manifest names a dtype, and the name is looked up here: nothing that a file says is ever given to `np.dtype` or to an
attribute look-up. safetensors has no names for most of JAX's small floats and integers, and its numpy side knows not even
bfloat16: these are stored as unsigned integers of the same size, and complex numbers as pairs of floats; the manifest has
the true dtype. Everything is little endian. Objects, text, dates and records have no place.
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
"""Every dtype there is."""


@functools.lru_cache(maxsize=64)
def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of a name in the table.

    Raises:
      KeyError: no such name.
      ImportError: `ml_dtypes` is too old to have it.
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


def canonical(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same dtype, little endian. Raises TypeError: it is not in the table."""
    if dtype.name in NAMES and (dtype.isbuiltin != 2 or dtype == dtype_named(dtype.name)):
        return dtype_named(dtype.name)
    raise TypeError(dtype.name)


def stored(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """What safetensors calls such an array, and its shape there."""
    code, pair = _code(dtype)
    return code, (*shape, 2) if pair else shape


@functools.lru_cache(maxsize=64)
def _code(dtype: np.dtype[Any]) -> tuple[str, bool]:
    name = dtype.name
    return _PAIRS.get(name) or _PLAIN.get(name) or _VIEWS[name], name in _PAIRS
