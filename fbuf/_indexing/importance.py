r"""Importance weights :math:`(n P(i))^{-\beta}`, and rows of a batch that are drawn whatever their priority.

Shared by the samplers that draw unevenly. Weights are finite whatever the numbers are annealed to: a chance may lie far
below the float32 resolution of the total.

Source: Schaul et al. 2016, "Prioritized Experience Replay", section 3.4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fbuf._algorithms import permutation, random_bits
from fbuf._indexing import anchor_log, anchors
from fbuf._indexing.anchor_log import Log
from fbuf._interfaces.sampler import EligibleSet


def importance(
    number: jax.Array, chance: jax.Array, mask: jax.Array, beta: jax.Array, normalize: str | None, least: jax.Array
) -> jax.Array:
    """float32[B], 0 where `mask` is False.

    Args:
      number: float32[], anchors.
      chance: float32[B], of each row in one draw.
      mask: bool[B].
      beta: float32[], as `exponent` has it.
      normalize: Divide by the largest in the "batch", the largest possible in the "buffer", or not at all (None).
      least: float32[], the smallest chance there is; for "buffer".
    """
    weight = _power(number, jnp.where(mask, chance, jnp.float32(1)), beta)
    if normalize is not None:
        if normalize == "batch":
            top = jnp.max(jnp.where(mask, weight, jnp.float32(0)))
        else:
            top = _power(number, jnp.where(jnp.any(mask), least, jnp.float32(1)), beta)
        weight = weight / jnp.where(top > jnp.float32(0), top, jnp.float32(1))
    return jnp.where(mask, weight, jnp.float32(0))


def _power(number: jax.Array, chance: jax.Array, beta: jax.Array) -> jax.Array:
    """(n P)^-beta, finite."""
    product = jnp.maximum(number * chance, jnp.float32(1e-30))
    return jnp.minimum(jnp.power(product, -exponent(beta)), jnp.float32(1e30))


def exponent(number: jax.Array) -> jax.Array:
    """An exponent that a user anneals, brought into [0, 1000]; NaN counts as 0."""
    return jnp.where(number >= jnp.float32(0), jnp.minimum(number, jnp.float32(1000)), jnp.float32(0))


def unit(share: jax.Array) -> jax.Array:
    """A number that a user anneals, brought into [0, 1]; NaN counts as 0."""
    return jnp.where(share >= jnp.float32(0), jnp.minimum(share, jnp.float32(1)), jnp.float32(0))


def ignoring(key: jax.Array, share: jax.Array, batch_size: int, *, spread: bool) -> jax.Array:
    """bool[B], which rows of a batch are drawn whatever their priority: each with chance `share` float32[] in [0, 1].

    `spread`: of any successive m rows `share * m`, but for one more or less; else each on its own. Counted in 2^-32, because
    a float32 cannot tell `share` times the ten thousandth row from that of the next.
    """
    step = (jnp.minimum(share, jnp.float32(1 - 2**-24)) * jnp.float32(2**32)).astype(jnp.uint32)
    if spread:
        start = jax.random.bits(key, (), jnp.uint32)
        before = start + jnp.arange(batch_size, dtype=jnp.uint32) * step
        chosen = before + step < before  # past 2^32
    else:
        chosen = jax.random.bits(key, (batch_size,), jnp.uint32) < step
    return chosen | (share >= jnp.float32(1))


def alike(
    key: jax.Array,
    eligible: EligibleSet,
    log: Log | None,
    batch_size: int,
    wanted: jax.Array,
    *,
    distinct: bool = False,
) -> jax.Array:
    """Slots int32[B] of anchors, all alike; `distinct`: none twice, meaningful for the first n rows.

    O(B) with a log, with counts, or where every row is an anchor; else O(C), unless no row is `wanted` bool[B].
    """
    total = jnp.sum(eligible.available, dtype=jnp.int32)
    if distinct:
        bits = jax.random.bits(key, (2,), jnp.uint32)
        nth = permutation.permute(bits, jnp.arange(batch_size, dtype=jnp.int32), total)
        nth = jnp.minimum(nth, jnp.maximum(total - jnp.int32(1), jnp.int32(0)))
    else:
        nth = random_bits.randint_below(key, (batch_size,), total)
    if log is None and eligible.flags is not None and eligible.before is None:
        return anchors.nth_open(eligible.flags, eligible.geometry, nth, wanted)
    log = anchor_log.init(eligible.geometry, dense=True) if log is None else log
    return anchor_log.nth(log, eligible, nth)
