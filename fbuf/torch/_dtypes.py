"""What both directions share: the dtypes that cross, names of leaves, refusals.

Whatever makes the two libraries abort, narrow, copy or misread in silence is checked before torch or JAX is called, for all
leaves before any crosses; the message names the leaf and the fix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

NARROW = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}
"""What JAX makes of 64-bit dtypes unless `jax_enable_x64` is on."""
SHARED = frozenset(
    "bool uint8 int8 uint16 int16 uint32 int32 float16 bfloat16 float32 complex64 float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()
).union(NARROW)
"""What DLPack carries between the two. The 64-bit ones need `jax_enable_x64` on the way in."""


def import_torch(call: str) -> Any:
    """torch, or an error that says how to get it."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f'{call}: torch is missing ({error}); expected torch 2.6 or later. Run pip install "fbuf[torch]".'
        ) from error
    return torch


def name_leaf(call: str, path: Any, bare: str) -> str:
    """How a message names a leaf."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{call}: leaf '{name}'" if name else f"{call}: {bare}"


def refuse(where: str, leaf: Any, want: str, wrap: str) -> None:
    """Raises for a leaf that is no array."""
    if isinstance(leaf, (bool, int, float, complex, np.generic)):
        fix = f"Wrap it: {wrap}."
    elif type(leaf).__module__.split(".")[0] == "tensordict":
        fix = "Take it apart: fbuf.torch.from_tensordict(x)."
    elif hasattr(leaf, "to_dict"):
        fix = "Unpack it: x.to_dict()."
    else:
        fix = "Leave it out of the tree."
    raise TypeError(f"{where} is a {type(leaf).__name__}; expected {want}. {fix}")


def cross(where: str, convert: Callable[..., Any], *args: Any) -> Any:
    """Runs one conversion; what no check foresaw still says which leaf it was."""
    try:
        return convert(*args)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise RuntimeError(f"{where} was refused on its way through DLPack: {error}") from error
