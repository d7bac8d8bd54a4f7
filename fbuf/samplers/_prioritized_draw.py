"""Which rows `Prioritized` puts into a batch, and how likely each was: with replacement, or without.

If every leaf is 0, all anchors are alike. What the chances become, weights, stands in `fbuf._indexing.importance`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms import draw_without_replacement, permutation, sum_tree
from fbuf._algorithms.random_bits import anew
from fbuf._indexing.importance import alike, unit
from fbuf._interfaces.sampler import EligibleSet
from fbuf.samplers import _priority_common, _priority_leaves
from fbuf.samplers._priority_leaves import PrioritizedState


class Chosen(NamedTuple):
    """Rows of a batch before they are weighed."""

    slot: jax.Array  # int32[B]
    mask: jax.Array  # bool[B]
    chance: jax.Array  # float32[B]
    least: jax.Array  # float32[], the smallest chance there is; for normalize="buffer"


def with_replacement(
    sampler: PrioritizedState,
    key: jax.Array,
    batch_size: int,
    eligible: EligibleSet,
    number: jax.Array,
    share: jax.Array | None,
    stratified: bool,
) -> Chosen:
    """Each row on its own, in proportion to its leaf; a `share` float32[] (or None) of them whatever it is."""
    capacity = eligible.geometry.capacity
    some = jnp.broadcast_to(number > jnp.float32(0), (batch_size,))
    slot, leaf, mass, low = _priority_leaves.draw(sampler, key, batch_size, capacity, stratified)
    flat = mass <= jnp.float32(0)  # every leaf is 0: all anchors alike
    if stratified:  # one share after another: half a batch would be the older half of the buffer
        order = permutation.mixed(jax.random.fold_in(key, 2), batch_size)
        slot, leaf = slot[order], leaf[order]
    if share is not None:
        share = unit(share)
        slot = _priority_common.sharing(slot, key, share, eligible, sampler.log, some, stratified=stratified)
        leaf = sum_tree.get(sampler.tree, slot)

    own = anew(key)  # `vmap` selects between keys

    def all_alike(slot: jax.Array, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        any_slot = alike(jax.random.fold_in(own(), 1), eligible, sampler.log, batch_size, some & flat)
        return any_slot, jnp.ones_like(leaf)

    slot, leaf = lax.cond(flat, all_alike, lambda slot, leaf: (slot, leaf), slot, leaf)
    mass = jnp.where(flat, jnp.maximum(number, jnp.float32(1)), mass)
    least = jnp.where(flat | ~jnp.isfinite(low), leaf[0], low) / mass
    chance = leaf / mass
    if share is not None:
        each = share / jnp.maximum(number, jnp.float32(1))
        chance = (jnp.float32(1) - share) * chance + each
        least = (jnp.float32(1) - share) * least + each
        # 0 if a leaf is 0 and none is drawn whatever it is: then the least that was.
        least = jnp.where(least > jnp.float32(0), least, jnp.min(chance))
    return Chosen(slot, some, chance, least)


def without_replacement(
    sampler: PrioritizedState,
    key: jax.Array,
    batch_size: int,
    wanted: jax.Array,
    eligible: EligibleSet,
    number: jax.Array,
) -> Chosen:
    """The first `wanted` int32[] of them one after another, each in proportion to the leaves that are left."""
    capacity, mass = eligible.geometry.capacity, sum_tree.root(sampler.tree)
    flat = mass <= jnp.float32(0)
    race = draw_without_replacement.draw(sampler.tree, key, batch_size, capacity, wanted)
    size = jnp.maximum(wanted, jnp.int32(1)).astype(jnp.float32)
    own = anew(key)  # `vmap` selects between keys

    def all_alike(slot: jax.Array, mask: jax.Array, chance: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        there = lax.iota(np.int32, batch_size).astype(jnp.float32) < jnp.minimum(number, wanted.astype(jnp.float32))
        slot = alike(jax.random.fold_in(own(), 1), eligible, sampler.log, batch_size, there & flat, distinct=True)
        each = jnp.minimum(size / jnp.maximum(number, jnp.float32(1)), jnp.float32(1))
        return slot, there, jnp.broadcast_to(each, chance.shape)

    slot, mask, chance = lax.cond(flat, all_alike, lambda *same: same, race.slot, race.mask, race.chance)
    least = chance[0]
    if sampler.low.shape[0]:
        low = sum_tree.root(sampler.low)
        of_low = draw_without_replacement.chance_of(low / jnp.where(flat, jnp.float32(1), mass), race.time)
        least = jnp.where(flat | ~jnp.isfinite(low), chance[0], of_low)
    return Chosen(slot, mask, chance / size, least / size)
