"""Numbers of two or four bits, such as int4: several share a byte on a device, each has a byte in NumPy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def is_sub_byte(dtype: Any) -> bool:
    """Return whether numbers of this dtype have no byte of their own on a device."""
    return jnp.dtype(dtype).name.startswith(("int2", "int4", "uint2", "uint4", "float4"))


def to_bytes(values: Array) -> Array:
    """Return numbers without bytes as uint8, which NumPy can view as their dtype; others as they are."""
    if not is_sub_byte(values.dtype):
        return values
    return lax.bitcast_convert_type(values, _unsigned(values.dtype)).astype(jnp.uint8)


def from_bytes(array: Array, dtype: Any) -> Array:
    """Return the values, of this dtype, from which `to_bytes` made the array."""
    return lax.bitcast_convert_type(array.astype(_unsigned(dtype)), dtype) if is_sub_byte(dtype) else array


def _unsigned(dtype: Any) -> Any:
    return jnp.uint2 if "int2" in jnp.dtype(dtype).name else jnp.uint4
