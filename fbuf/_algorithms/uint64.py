"""Compute with 64-bit integers as pairs of uint32, because x64 is off by default in JAX.

Everything is exact, elementwise, and wraps at 2^64.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms.random import multiply_high

_SIGN = np.uint32(0x80000000)


class Wide(NamedTuple):
    """high * 2^32 + low; a signed number is in two's complement."""

    high: jax.Array  # uint32[...]
    low: jax.Array  # uint32[...]


def of(number: int) -> Wide:
    """Convert a Python int; negative ones to two's complement."""
    return Wide(jnp.uint32(number >> 32 & 0xFFFFFFFF), jnp.uint32(number & 0xFFFFFFFF))


def as_float(a: Wide) -> jax.Array:
    """Return the nearest float32, of an unsigned number."""
    return a.high.astype(jnp.float32) * jnp.float32(2**32) + a.low.astype(jnp.float32)


def add(a: Wide, b: Wide) -> Wide:
    """Return a + b.

    Example:
      >>> add(of(2**32 - 1), of(1))
      Wide(high=Array(1, dtype=uint32), low=Array(0, dtype=uint32))
    """
    low = a.low + b.low
    return Wide(a.high + b.high + (low < a.low).astype(jnp.uint32), low)


def negative(a: Wide) -> Wide:
    """Return -a in two's complement."""
    return Wide(~a.high + (a.low == jnp.uint32(0)).astype(jnp.uint32), ~a.low + jnp.uint32(1))


def at_most(a: Wide, b: Wide) -> jax.Array:
    """Return bool[...], a <= b as signed numbers."""
    high, other = a.high ^ _SIGN, b.high ^ _SIGN
    return (high < other) | ((high == other) & (a.low <= b.low))


def multiply(a: jax.Array, b: jax.Array) -> Wide:
    """Return the whole product of uint32s."""
    return Wide(multiply_high(a, b), a * b)


def product_high(a: Wide, b: Wide) -> Wide:
    """Return the high 64 of the 128 bits of a * b. With 64 random bits for a, it is uniform in [0, b)."""
    zero = jnp.uint32(0)
    below = multiply(a.low, b.low)
    one, other = multiply(a.high, b.low), multiply(a.low, b.high)
    middle = add(add(Wide(zero, below.high), Wide(zero, one.low)), Wide(zero, other.low))
    carried = add(Wide(zero, one.high), Wide(zero, other.high))
    return add(add(multiply(a.high, b.high), carried), Wide(zero, middle.high))
