"""Dtypes that DLPack carries between JAX and torch, and checks shared by both directions.

Every leaf is checked before the first one is converted, so errors name the leaf and the fix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fbuf._core.lazy_import import import_extra

NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
"""The dtypes to which JAX narrows 64-bit dtypes unless `jax_enable_x64` is on."""
SHARED = frozenset(
    "bool uint8 int8 uint16 int16 uint32 int32 float16 bfloat16 float32 complex64 float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()
).union(NARROW)
"""The dtypes that DLPack carries. `from_torch` needs `jax_enable_x64` for those of 64 bits."""


@functools.cache
def import_torch(call: str) -> Any:
    """Return the module torch. Raises ImportError: it is missing."""
    return import_extra(call, "torch", '"fbuf[torch]"')


def name_leaf(call: str, path: Any, bare: str) -> str:
    """Return the leaf's name for messages; `bare` for a tree of one leaf."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{call}: leaf '{name}'" if name else f"{call}: {bare}"


def refuse(where: str, leaf: Any, want: str, wrap: str) -> None:
    """Raise TypeError for a leaf that is not an array."""
    fix = "Leave it out of the tree."
    if isinstance(leaf, (bool, int, float, complex, np.generic)):
        fix = f"Wrap it: {wrap}."
    elif type(leaf).__module__.split(".")[0] == "tensordict":
        fix = "Convert it: fbuf.torch.from_tensordict(x)."
    elif hasattr(leaf, "to_dict"):
        fix = "Unpack it: x.to_dict()."
    raise TypeError(f"{where} is a {type(leaf).__name__}; expected {want}. {fix}")


def convert(where: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a conversion; name the leaf in errors that no check foresaw."""
    try:
        return function(*args)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise RuntimeError(f"{where} was refused on its way through DLPack: {error}") from error
