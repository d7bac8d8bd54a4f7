r"""Draws different leaves of a sum tree, in proportion to their values: exactly, in O(B log B log C), writing nothing.

Think of every leaf as arriving at an exponential random time with its value for a rate. Who comes first is drawn in proportion
to the values, who comes second in proportion to those that are left, and so on: the B first are what drawing one after
another without putting back gives. The first to arrive below a node of the tree does so at an exponential time with the node's
sum for a rate, and given that time t, a child's is :math:`t + T_c - \min_k T_k` with fresh exponential times T of the children
(what is left of an exponential time is exponential again). So the race is run from the top: of the nodes of a level only the
B + 1 whose first comes earliest matter, as each of them holds a leaf that arrives no later than any other node's.

With :math:`\tau` the time of leaf B + 1, whether a leaf is among the first B given the others is
:math:`\pi_i = 1 - e^{-leaf_i \tau}`, and :math:`\sum_{i \in batch} f_i / \pi_i` is an unbiased estimate of
:math:`\sum_i f_i`: the weights of draws without replacement.

Rejected: drawing and setting the leaf to zero, B times (a chain of B updates, and `peek` would copy the tree); drawing with
replacement and again where two are alike (unbounded where one leaf has nearly all); times for all leaves (O(C)); strata
with one draw each (not what was asked for: leaves longer than a stratum come twice, and neighbours never together).

Sources: Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir" (the times); Kool et al. 2019, "Stochastic
Beams and Where to Find Them", section 4 (from the top, and the threshold); Duffield et al. 2007, "Priority sampling for
estimation of arbitrary subset sums" (unbiased).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms import permutation, sum_tree
from fbuf._algorithms.sum_tree import FAN_OUT

_LEAST_RATE = 1e-36  # of a leaf above zero, the total being 1: its time is still a finite float32


class Race(NamedTuple):
    """The first B, in random order; rows that are not there, where fewer leaves are above zero, at the end."""

    slot: jax.Array  # int32[B], all different; C where mask is False
    mask: jax.Array  # bool[B]
    chance: jax.Array  # float32[B], of being among the B given when the others come; 0 where mask is False
    time: jax.Array  # float32[], of leaf B + 1, in units of 1 / total; inf if there is none


def draw(tree: jax.Array, key: jax.Array, batch_size: int, capacity: int, wanted: jax.Array | None = None) -> Race:
    """Draws `B` different leaves of a sum tree float32[nodes(C)], each time in proportion to those that are left.

    Of them the first `wanted` int32[] alone, if given: the race ends with the one after them.

    Cost: O(B log B log C); nothing is written.
    """
    tree = lax.stop_gradient(tree)
    counts, offsets = sum_tree.layout(capacity)
    beam = batch_size + 1
    first = next(level for level, count in enumerate(counts) if count <= FAN_OUT * beam)
    times, order = jax.random.split(key)
    width = offsets[first + 1] - offsets[first]
    bits = jax.random.bits(times, (width + first * beam * FAN_OUT,), jnp.uint32)
    waits = _exponential(bits)
    total = sum_tree.root(tree)
    scale = jnp.float32(1) / jnp.where(total > jnp.float32(0), total, jnp.float32(1))

    def time_of(wait: jax.Array, mass: jax.Array) -> jax.Array:
        rate = jnp.maximum(mass * scale, jnp.float32(_LEAST_RATE))
        return jnp.where(mass > jnp.float32(0), wait / rate, jnp.float32(jnp.inf))

    top = lax.slice(tree, (offsets[first],), (offsets[first] + width,))
    node = lax.iota(np.int32, width)
    node, time = _earliest(node, time_of(waits[:width], top), beam)

    def level(
        carry: tuple[jax.Array, jax.Array], item: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        node, time = carry
        offset, wait = item
        start = node * jnp.int32(FAN_OUT)
        mass = jax.vmap(lambda at: lax.dynamic_slice(tree, (at,), (FAN_OUT,)))(start + offset)
        own = time_of(wait, mass)
        soonest = jnp.min(own, axis=1, keepdims=True)
        late = own - jnp.where(jnp.isfinite(soonest), soonest, jnp.float32(0))
        child = start[:, None] + lax.iota(np.int32, FAN_OUT)[None, :]
        return _earliest(child.reshape(-1), (time[:, None] + late).reshape(-1), beam), None

    if first:
        below = jnp.asarray([offsets[k] for k in range(first - 1, -1, -1)], jnp.int32)
        (node, time), _ = lax.scan(level, (node, time), (below, waits[width:].reshape(first, beam, FAN_OUT)))
    wanted = jnp.int32(batch_size) if wanted is None else wanted
    mask = jnp.isfinite(time[:batch_size]) & (lax.iota(np.int32, batch_size) < wanted)
    slot = jnp.where(mask, node[:batch_size], jnp.int32(capacity))
    leaf = sum_tree.get(tree, jnp.where(mask, slot, jnp.int32(0)))
    end = time[wanted]
    chance = chance_of(leaf * scale, end)
    found = jnp.sum(mask, dtype=jnp.int32)
    mixed = permutation.shuffled(jax.random.bits(order, (batch_size,), jnp.uint32), found)
    return Race(slot[mixed], mask[mixed], jnp.where(mask, chance, jnp.float32(0))[mixed], end)


def chance_of(share: jax.Array, time: jax.Array) -> jax.Array:
    """Of a leaf with this `share` of the total to come before `time`."""
    return -jnp.expm1(-jnp.maximum(share, jnp.float32(_LEAST_RATE)) * time)


def _exponential(bits: jax.Array) -> jax.Array:
    """float32, exponential times of mean 1 from 24 of 32 random bits; never 0 nor infinite."""
    uniform = (bits >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2**-24)
    return -jnp.log1p(-(uniform * np.float32(1 - 2**-23) + np.float32(2**-25)))


def _earliest(node: jax.Array, time: jax.Array, beam: int) -> tuple[jax.Array, jax.Array]:
    """The `beam` of them whose time is least, earliest first; padded with some that never come."""
    if node.shape[0] < beam:
        missing = beam - node.shape[0]
        node = jnp.concatenate([node, jnp.zeros((missing,), jnp.int32)])
        time = jnp.concatenate([time, jnp.full((missing,), jnp.inf, jnp.float32)])
    least, place = lax.top_k(-time, beam)
    return node[place], -least
