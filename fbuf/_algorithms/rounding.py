"""Round numbers of 64 bits, which are pairs of uint32 without x64, to float32; and products before they are added.

A pair is the low word and the high word. Each number is rounded once, to nearest, ties to even, as NumPy and x64 do.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms import uint64
from fbuf._algorithms.uint64 import Wide

_SIGN = np.uint32(0x80000000)
_INFINITE = np.uint32(0x7F800000)
_QUIET = np.uint32(0x7FC00000)


def to_float32(pairs: jax.Array, dtype: Any) -> jax.Array:
    """Return float32[...], the nearest of numbers of a 64-bit dtype in pairs uint32[..., 2].

    Example:
      >>> to_float32(jnp.asarray(np.array([0.1, -(2.0**40)]).view(np.uint32).reshape(2, 2)), np.float64)
      Array([ 1.0000000e-01, -1.0995116e+12], dtype=float32)
    """
    number = Wide(pairs[..., 1], pairs[..., 0])
    if dtype == np.float64:
        return _of_float64(number)
    if dtype == np.uint64:
        return _of_unsigned(number)
    is_negative = number.high >= _SIGN
    size = Wide(*(jnp.where(is_negative, b, a) for a, b in zip(number, uint64.negative(number), strict=True)))
    rounded = _of_unsigned(size)
    return jnp.where(is_negative, -rounded, rounded)


def _of_unsigned(number: Wide) -> jax.Array:
    """Return the nearest float32 of unsigned numbers."""
    free = jnp.minimum(lax.clz(number.high), jnp.uint32(31))
    # Move the first set bit to the top. Of bits far below it counts only whether one is set, which decides ties.
    high = (number.high << free) | ((number.low >> jnp.uint32(1)) >> (jnp.uint32(31) - free))
    high = high | ((number.low << free) != jnp.uint32(0)).astype(jnp.uint32)
    scale = lax.bitcast_convert_type((jnp.uint32(127 + 32) - free) << jnp.uint32(23), jnp.float32)
    large = high.astype(jnp.float32) * scale
    return jnp.where(number.high == jnp.uint32(0), number.low.astype(jnp.float32), large)


def _of_float64(number: Wide) -> jax.Array:
    """Return the nearest float32 of the bits of float64s."""
    size = number.high & ~_SIGN
    exponent = (size >> jnp.uint32(20)).astype(jnp.int32) - jnp.int32(1023 - 127)
    fraction = ((size & jnp.uint32(0xFFFFF)) << jnp.uint32(3)) | (number.low >> jnp.uint32(29))
    rest = number.low & jnp.uint32(2**29 - 1)  # below the precision of float32
    digits = ((fraction | jnp.uint32(2**23)) << jnp.uint32(8)) | (rest >> jnp.uint32(21))
    digits = digits | ((rest & jnp.uint32(2**21 - 1)) != jnp.uint32(0)).astype(jnp.uint32)
    # Numbers below 2^-126 have fewer digits.
    lost = jnp.clip(jnp.int32(1) - exponent, jnp.int32(0), jnp.int32(25)).astype(jnp.uint32)
    below = digits & ((jnp.uint32(1) << lost) - jnp.uint32(1))
    digits = (digits >> lost) | (below != jnp.uint32(0)).astype(jnp.uint32)
    kept, below = digits >> jnp.uint32(8), digits & jnp.uint32(0xFF)
    up = (below > jnp.uint32(128)) | ((below == jnp.uint32(128)) & ((kept & jnp.uint32(1)) != jnp.uint32(0)))
    # The first digit of `kept`, and a carry, raise the exponent.
    before = jnp.clip(exponent, jnp.int32(1), jnp.int32(255)).astype(jnp.uint32) - jnp.uint32(1)
    bits = (before << jnp.uint32(23)) + kept + up.astype(jnp.uint32)
    bits = jnp.minimum(bits, _INFINITE)
    is_nan = (size > jnp.uint32(0x7FF00000)) | ((size == jnp.uint32(0x7FF00000)) & (number.low != jnp.uint32(0)))
    bits = jnp.where(is_nan, _QUIET | fraction, bits)
    return lax.bitcast_convert_type(bits | (number.high & _SIGN), jnp.float32)


def rounded_product(a: jax.Array, b: jax.Array, keep: jax.Array) -> jax.Array:
    """Return a * b where `keep` bool[...], else 0, rounded as in NumPy.

    A sum of a plain product may become a fused multiply-add, which does not round the product. Between this one and its reader
    is an integer operation, which no compiler removes as long as it does not know `keep`.
    """
    product = a * b
    word = jnp.dtype(f"uint{8 * product.dtype.itemsize}")
    bits = lax.bitcast_convert_type(product, word) & -keep.astype(word)
    return lax.bitcast_convert_type(bits, product.dtype)
