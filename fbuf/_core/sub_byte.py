"""Numbers of two or four bits, such as int4: several share a byte on a device, each has a byte in NumPy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

SUB_BYTE = frozenset(("int2", "int4", "uint2", "uint4", "float4_e2m1fn"))
"""Names of dtypes whose numbers have no byte of their own on a device."""


def to_bytes(values: Array) -> Array:
    """Return numbers without bytes as uint8, which NumPy can view as their dtype; others as they are."""
    if values.dtype.name not in SUB_BYTE:
        return values
    return lax.bitcast_convert_type(values, _unsigned(values.dtype)).astype(jnp.uint8)


def from_bytes(array: Array, dtype: Any) -> Array:
    """Return the values, of this dtype, from which `to_bytes` made the array."""
    return (
        lax.bitcast_convert_type(array.astype(_unsigned(dtype)), dtype) if jnp.dtype(dtype).name in SUB_BYTE else array
    )


def _unsigned(dtype: Any) -> Any:
    return jnp.uint2 if "int2" in jnp.dtype(dtype).name else jnp.uint4
