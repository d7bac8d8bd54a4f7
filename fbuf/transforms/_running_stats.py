r"""Track the running mean and variance of each element of a leaf.

A batch with count :math:`n`, mean :math:`m` and sum of squared deviations :math:`s` is merged by

.. math:: \delta = m - \bar x, \quad \bar x \mathrel{+}= \delta n / N, \quad M \mathrel{+}= s + \delta^2 (N - n) n / N.

Mean and :math:`M` are sums of two float32, and counts are 64-bit, so single rows still count after 10^8 rows. Numbers not
finite or beyond 1e15 are skipped and counted. In a sharded buffer a batch is that of all shards.

Source: Chan, Golub and LeVeque 1979; Knuth, TAOCP volume 2, section 4.2.2 (error of a floating sum).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fbuf._algorithms import uint64
from fbuf._algorithms.uint64 import Wide
from fbuf._core.component import state
from fbuf._core.control_flow import sum_of_shards
from fbuf._core.slots import Geometry, Ranges, expand

_LARGEST = 1e15  # a billion squares of such numbers have a finite sum


@state
class Moments:
    """Hold the statistics of a leaf, element by element."""

    seen: jax.Array  # uint32[2, *item], high word first
    mean: jax.Array  # float32[2, *item], the sum of both
    squares: jax.Array  # float32[2, *item], sum of squared deviations from the mean, likewise
    skipped: jax.Array  # uint32[], numbers not finite or beyond 1e15; wraps

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "mean", self.mean, -2 * _LARGEST, 2 * _LARGEST


def init(shape: tuple[int, ...]) -> Moments:
    """Return empty statistics."""
    return Moments(
        seen=jnp.zeros((2, *shape), jnp.uint32),
        mean=jnp.zeros((2, *shape), jnp.float32),
        squares=jnp.zeros((2, *shape), jnp.float32),
        skipped=jnp.zeros((), jnp.uint32),
    )


def merge(moments: Moments, values: jax.Array, kept: jax.Array) -> Moments:
    """Add numbers [*lead, *item] where `kept` bool[*lead]."""
    axes = tuple(range(kept.ndim))
    x = values.astype(jnp.float32)
    wanted = jnp.broadcast_to(expand(kept, x.ndim), x.shape)
    fine = wanted & (jnp.abs(x) <= jnp.float32(_LARGEST))
    # Relative to the current mean, so a large mean loses no digits.
    apart = jnp.where(fine, x - mean(moments)[(None,) * len(axes)], jnp.float32(0))
    count, skipped, delta = sum_of_shards(
        (
            jnp.sum(fine, axis=axes, dtype=jnp.uint32),
            jnp.sum(wanted & ~fine, dtype=jnp.uint32),
            jnp.sum(apart, axis=axes),
        )
    )
    number = jnp.maximum(count, jnp.uint32(1)).astype(jnp.float32)
    zero = jnp.float32(0)
    delta = delta / number
    rest = jnp.where(fine, apart - delta[(None,) * len(axes)], zero)
    correction, squares = sum_of_shards((jnp.sum(rest, axis=axes), jnp.sum(rest * rest, axis=axes)))
    correction = correction / number
    squares = jnp.maximum(squares - number * correction * correction, zero)
    delta = delta + correction
    seen = uint64.add(Wide(moments.seen[0], moments.seen[1]), Wide(jnp.zeros_like(count), count))
    share = count.astype(jnp.float32) / jnp.maximum(uint64.as_float(seen), jnp.float32(1))
    before = uint64.as_float(Wide(moments.seen[0], moments.seen[1]))
    return Moments(
        seen=jnp.stack(seen),
        mean=_add(moments.mean, delta * share),
        squares=_add(moments.squares, squares + delta * delta * (before * share)),
        skipped=moments.skipped + skipped,
    )


def mean(moments: Moments) -> jax.Array:
    """Return the mean, float32[*item]; 0 if empty."""
    return moments.mean[0] + moments.mean[1]


def variance(moments: Moments) -> jax.Array:
    """Return the population variance, float32[*item]; 0 if empty."""
    number = jnp.maximum(count(moments), jnp.float32(1))
    return jnp.maximum(moments.squares[0] + moments.squares[1], jnp.float32(0)) / number


def count(moments: Moments) -> jax.Array:
    """Return the count, float32[*item]."""
    return uint64.as_float(Wide(moments.seen[0], moments.seen[1]))


def _add(pair: jax.Array, more: jax.Array) -> jax.Array:
    """Add a number to a sum of two words."""
    total = pair[0] + more
    part = total - pair[0]
    lost = (pair[0] - (total - part)) + (more - part)
    low = pair[1] + lost
    high = total + low
    return jnp.stack([high, low - (high - total)])
