r"""Compute importance weights :math:`(n P(i))^{-\beta}`, and draw the uniform part of a batch.

Samplers that draw unevenly share these functions. Weights are finite for any annealed numbers.

Source: Schaul et al. 2016, "Prioritized Experience Replay", section 3.4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fbuf._algorithms import permutation, random_bits
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._interfaces.sampler import EligibleSet


def importance_weights(
    number: jax.Array, chance: jax.Array, mask: jax.Array, beta: jax.Array, normalize: str | None, least: jax.Array
) -> jax.Array:
    """Return importance weights float32[B], 0 where `mask` is False.

    Args:
      number: float32[], anchors.
      chance: float32[B], probability of each row in one draw.
      mask: bool[B].
      beta: float32[], clipped by `finite_exponent`.
      normalize: Divide by the largest in the "batch", the largest possible in the "buffer", or not at all (None).
      least: float32[], the smallest probability of any row; for "buffer".
    """
    weight = power(number, jnp.where(mask, chance, jnp.float32(1)), beta)
    if normalize is not None:
        if normalize == "batch":
            largest = jnp.max(jnp.where(mask, weight, jnp.float32(0)))
        else:
            largest = power(number, jnp.where(jnp.any(mask), least, jnp.float32(1)), beta)
        weight = weight / jnp.where(largest > jnp.float32(0), largest, jnp.float32(1))
    return jnp.where(mask, weight, jnp.float32(0))


def power(number: jax.Array, chance: jax.Array, beta: jax.Array) -> jax.Array:
    """Return (n P)^-beta, finite."""
    product = jnp.maximum(number * chance, jnp.float32(1e-30))
    return jnp.minimum(jnp.power(product, -finite_exponent(beta)), jnp.float32(1e30))


def finite_exponent(number: jax.Array) -> jax.Array:
    """Clip an annealed exponent to [0, 1000]; NaN becomes 0."""
    return jnp.where(number >= jnp.float32(0), jnp.minimum(number, jnp.float32(1000)), jnp.float32(0))


def clip_unit(share: jax.Array) -> jax.Array:
    """Clip an annealed number to [0, 1]; NaN becomes 0."""
    return jnp.where(share >= jnp.float32(0), jnp.minimum(share, jnp.float32(1)), jnp.float32(0))


def uniform_mask(key: jax.Array, share: jax.Array, batch_size: int, *, spread: bool) -> jax.Array:
    """Return bool[B], the rows of a batch to draw uniformly, each with probability `share` float32[] in [0, 1].

    `spread`: any m successive rows contain `share * m` of them, plus or minus one; else rows are independent. Shares are
    counted in units of 2^-32, because float32 cannot distinguish `share` times successive large row numbers.
    """
    step = (jnp.minimum(share, jnp.float32(1 - 2**-24)) * jnp.float32(2**32)).astype(jnp.uint32)
    if spread:
        start = random_bits.pairs(key, 1, random_bits.SHARE)[0]
        before = start + jnp.arange(batch_size, dtype=jnp.uint32) * step
        chosen = before + step < before  # past 2^32
    else:
        chosen = random_bits.pairs(key, batch_size, random_bits.SHARE)[0] < step
    return chosen | (share >= jnp.float32(1))


def draw_uniform(
    key: jax.Array,
    eligible: EligibleSet,
    queue: AnchorQueue | None,
    batch_size: int,
    wanted: jax.Array,
    *,
    distinct: bool = False,
) -> jax.Array:
    """Draw slots int32[B] of anchors uniformly; `distinct`: without repeats, meaningful for the first n rows.

    Cost: O(B) with a queue or counts, or if every row is an anchor; else O(C), unless no row is `wanted` bool[B].
    """
    total = jnp.sum(eligible.available, dtype=jnp.int32)
    if distinct:
        nth = permutation.permute(permutation.key_words(key), jnp.arange(batch_size, dtype=jnp.int32), total)
        nth = jnp.minimum(nth, jnp.maximum(total - jnp.int32(1), jnp.int32(0)))
    else:
        nth = random_bits.randint_below(key, (batch_size,), total)
    if queue is None and eligible.flags is not None and eligible.before is None:
        return anchor_log.nth_by_scan(eligible.flags, nth, wanted)
    queue = anchor_log.init(eligible.geometry, dense=True) if queue is None else queue
    return anchor_log.nth(queue, eligible, nth)


def mix_uniform(
    slot: jax.Array,
    key: jax.Array,
    share: jax.Array,
    eligible: EligibleSet,
    queue: AnchorQueue | None,
    wanted: jax.Array,
    *,
    stratified: bool,
) -> jax.Array:
    """Replace a `share` float32[] in [0, 1] of the slots int32[B] by uniform draws; `wanted` bool[B]: there are anchors."""
    batch_size = slot.shape[0]
    replaced = uniform_mask(key, share, batch_size, spread=stratified)
    return jnp.where(replaced, draw_uniform(key, eligible, queue, batch_size, wanted), slot)


def mixed_probability(probability: jax.Array, share: jax.Array | None, number: jax.Array) -> jax.Array:
    """Return probabilities where a `share` float32[] (None: 0) of draws is uniform over `number` float32[] anchors."""
    if share is None:
        return probability
    share = clip_unit(share)
    return (jnp.float32(1) - share) * probability + share / jnp.maximum(number, jnp.float32(1))
