r"""Draw different leaves of a sum tree in proportion to their values: exact, in O(B log B log C), without writes.

Give every leaf an exponential arrival time whose rate is its value. The first B arrivals are B draws without replacement.
The first arrival below a node is exponential with the sum of the node as rate. Given that time t, the time of a child is
:math:`t + T_c - \min_k T_k` with fresh exponential times T of the children. The search runs from the top and keeps the B + 1
earliest nodes of each level.

With :math:`\tau` the time of leaf B + 1, a leaf is drawn with probability :math:`\pi_i = 1 - e^{-leaf_i \tau}` given the
others, and :math:`\sum_{i \in batch} f_i / \pi_i` is an unbiased estimate of :math:`\sum_i f_i`.

Sources: Efraimidis and Spirakis 2006 (arrival times); Kool et al. 2019, section 4 (from the top); Duffield et al. 2007.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._algorithms import random, sum_tree
from fbuf._algorithms.sum_tree import FAN_OUT
from fbuf._core import control_flow

_LEAST_RATE = 1e-36  # of a leaf above zero, relative to the total: its time is a finite float32


class WeightedSample(NamedTuple):
    """Hold B distinct leaves in random order; missing rows are at the end."""

    slot: Array  # int32[B], all different; C where mask is False
    mask: Array  # bool[B]
    chance: Array  # float32[B], of being drawn given the times of the others; 0 where mask is False
    time: Array  # float32[], of leaf B + 1, in units of 1 / total; inf if there is none


def draw(tree: Array, key: Array, batch_size: int, capacity: int, wanted: Array | None = None) -> WeightedSample:
    """Draw `B` different leaves of a sum tree float32[nodes(C)], each in proportion to the leaves that are left.

    `wanted` int32[], if given, is the number of leaves to draw, at most B.

    Cost: O(B log B log C).
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

    def time_of(wait: Array, mass: Array) -> Array:
        rate = jnp.maximum(mass * scale, jnp.float32(_LEAST_RATE))
        return jnp.where(mass > jnp.float32(0), wait / rate, jnp.float32(jnp.inf))

    top = lax.slice(tree, (offsets[first],), (offsets[first] + width,))
    node = lax.iota(np.int32, width)
    node, time = _earliest(node, time_of(waits[:width], top), beam)

    def level(carry: tuple[Array, Array], item: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        node, time = carry
        offset, wait = item
        start = node * jnp.int32(FAN_OUT)
        mass = jax.vmap(lambda at: lax.dynamic_slice(tree, (at,), (FAN_OUT,)))(start + offset)
        duration = time_of(wait, mass)
        soonest = jnp.min(duration, axis=1, keepdims=True)
        late = duration - jnp.where(jnp.isfinite(soonest), soonest, jnp.float32(0))
        child = start[:, None] + lax.iota(np.int32, FAN_OUT)[None, :]
        return _earliest(child.reshape(-1), (time[:, None] + late).reshape(-1), beam), None

    if first:
        below = jnp.asarray([offsets[k] for k in range(first - 1, -1, -1)], jnp.int32)
        (node, time), _ = control_flow.scan(level, (node, time), (below, waits[width:].reshape(first, beam, FAN_OUT)))
    wanted = jnp.int32(batch_size) if wanted is None else wanted
    mask = jnp.isfinite(time[:batch_size]) & (lax.iota(np.int32, batch_size) < wanted)
    slot = jnp.where(mask, node[:batch_size], jnp.int32(capacity))
    leaf = sum_tree.get(tree, jnp.where(mask, slot, jnp.int32(0)))
    end = time[wanted]
    chance = chance_of(leaf * scale, end)
    found = jnp.sum(mask, dtype=jnp.int32)
    mixed = random.shuffled(jax.random.bits(order, (batch_size,), jnp.uint32), found)
    return WeightedSample(slot[mixed], mask[mixed], jnp.where(mask, chance, jnp.float32(0))[mixed], end)


def chance_of(share: Array, time: Array) -> Array:
    """Return the probability that a leaf with this `share` of the total arrives before `time`."""
    return -jnp.expm1(-jnp.maximum(share, jnp.float32(_LEAST_RATE)) * time)


def _exponential(bits: Array) -> Array:
    """Return exponential times float32 of mean 1 from 24 of 32 random bits; never 0 nor infinite."""
    uniform = (bits >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2**-24)
    return -jnp.log1p(-(uniform * np.float32(1 - 2**-23) + np.float32(2**-25)))


def _earliest(node: Array, time: Array, beam: int) -> tuple[Array, Array]:
    """Return the `beam` nodes with the least time, earliest first, padded with infinite times."""
    if node.shape[0] < beam:
        missing = beam - node.shape[0]
        node = jnp.concatenate([node, jnp.zeros((missing,), jnp.int32)])
        time = jnp.concatenate([time, jnp.full((missing,), jnp.inf, jnp.float32)])
    least, place = lax.top_k(-time, beam)
    return node[place], -least
