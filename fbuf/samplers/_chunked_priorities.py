"""Write and draw priorities of `Prioritized` in loops of few operations, bit for bit as its `update`, `change` and `draw`.

XLA runs a program of at least 1,000 operations in a thread of its own on CPUs, which doubles the time of a draw of 256 rows. It
counts the operations of a loop once, and hands kernels to threads where many of them are ready at the start: so loops read
their arguments from one array of words. A `Replay` draws with these functions (`fbuf._host_draws.prioritized`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from fbuf._algorithms import sum_tree
from fbuf._core import control_flow
from fbuf._core.slots import Geometry
from fbuf._members import weights
from fbuf.samplers._prioritized import Prioritized, PrioritizedState, leaf_of, least_chance, lowest, queries, seen

CHUNK = 8
EARLIER = -1.0
"""Stands for the priority of a row that is new, but not newer than the update."""


def chunked(size: int) -> int:
    """Return the least multiple of `CHUNK` that is at least `size`."""
    return -(-size // CHUNK) * CHUNK


def _floats(words: Array, start: Array, number: int) -> Array:
    return lax.bitcast_convert_type(lax.dynamic_slice(words, (start,), (number,)), jnp.float32)


def random_numbers(key: Array, size: int, stratified: bool) -> Array:
    """Return the bits int32[2, N] of the uniforms of a draw in its order, for `draw`; those after B repeat the first."""
    top, bottom, order = queries(key, size, stratified)
    numbers = jnp.stack([top[:size], bottom[:size]])
    numbers = numbers if order is None else numbers[:, order]
    numbers = jnp.concatenate([numbers, jnp.broadcast_to(numbers[:, :1], (2, chunked(size) - size))], axis=1)
    return lax.bitcast_convert_type(numbers, jnp.int32)


def write(
    config: Prioritized,
    sampler: PrioritizedState,
    words: Array,
    at: int,
    updated: int,
    changed: int,
    geometry: Geometry,
) -> PrioritizedState:
    """Set priorities of `updated` rows, then open and close `changed` anchors, in turn; slot C is skipped.

    Args:
      words: int32[...], the bits of the largest priority of the update in words[1]. Slots begin at words[at]. After them come
        the bits of priorities, or of what is added to that of new rows: 0, or -inf where an anchor closes; `EARLIER` of rows
        that came before the update, where `sampler.top` is None.
    """
    capacity, token, end = geometry.capacity, jnp.int32(0), updated + changed
    largest = _floats(words, jnp.int32(1), 1)[0] if updated else None
    if sampler.top is None:  # the first priority does not depend on leaves, so that one loop writes all
        earlier = config.first_priority(sampler)
        return _written(seen(sampler, largest, token), config, words, at, end, range(end), updated, capacity, earlier)
    if updated:
        sampler = _written(sampler, config, words, at, end, range(updated), updated, capacity)
        sampler = seen(sampler, largest, token)
    if changed:
        sampler = _written(sampler, config, words, at, end, range(updated, end), updated, capacity)
        sampler = seen(sampler, None, token)
    return sampler


def _written(
    sampler: PrioritizedState,
    config: Prioritized,
    words: Array,
    at: int,
    number: int,
    which: range,
    updated: int,
    capacity: int,
    earlier: Array | None = None,
) -> PrioritizedState:
    """Write the priorities numbered `which`, of which those from `updated` on are of new rows."""
    first = config.first_priority(sampler)

    def item(i: Array) -> tuple[Array, Array, Array]:
        slot = lax.dynamic_index_in_dim(words, at + i, keepdims=False)
        priority = _floats(words, at + number + i, 1)[0]
        new = priority + first if earlier is None else jnp.where(priority == EARLIER, earlier, priority + first)
        priority = jnp.where(i < updated, priority, new)  # a sum with 0 flushes subnormal numbers
        leaf = leaf_of(sampler, jnp.maximum(priority, jnp.float32(0)))
        return slot, priority, jnp.where(priority >= jnp.float32(0), leaf, jnp.float32(0))

    def low(i: Array) -> tuple[Array, Array]:
        slot, priority, leaf = item(i)
        return slot, lowest(sampler, leaf, priority >= jnp.float32(0))

    trees: dict[str, Any] = {"tree": sum_tree.set_in_turn(sampler.tree, lambda i: item(i)[::2], which, capacity)}
    if sampler.low is not None:
        trees["low"] = sum_tree.set_in_turn(sampler.low, low, which, capacity, reduce="min")
    if sampler.top is not None:
        trees["top"] = sum_tree.set_in_turn(sampler.top, lambda i: item(i)[:2], which, capacity, reduce="max")
    return dataclasses.replace(sampler, **trees)


def draw(
    sampler: PrioritizedState,
    words: Array,
    at: int,
    size: int,
    capacity: int,
    number: Array,
    beta: Array,
    normalize: str | None,
) -> Array:
    """Draw `size` of `number` float32[] anchors, with replacement, by the `random_numbers` that begin at words[at].

    Returns:
      float32[N / 8, 3, 8], probabilities, the bits of slots, and weights. If every leaf is 0, probabilities are NaN.
    """
    most, mass = chunked(size), sum_tree.root(sampler.tree)
    inverse = jnp.float32(1) / mass

    def uniforms(i: Array) -> tuple[Array, Array]:
        start = at + i * CHUNK
        return _floats(words, start, CHUNK), _floats(words, start + most, CHUNK)

    found = sum_tree.descend_in_turn(sampler.tree, uniforms, most // CHUNK, CHUNK, capacity)

    def weigh(largest: Array, leaves: Array) -> tuple[Array, Array]:
        chance = lax.real(leaves) * inverse
        weight = weights.importance(number * chance, beta)
        return jnp.maximum(largest, jnp.max(weight)), jnp.stack([chance, lax.imag(leaves), weight])

    largest, drawn = control_flow.scan(weigh, jnp.float32(0), found)
    if normalize == "buffer":
        low = jnp.zeros((), jnp.float32) if sampler.low is None else sum_tree.root(sampler.low)
        largest = weights.importance(number * least_chance(lax.real(found[0, 0]), mass, low, False), beta)
    if normalize is None:
        return drawn

    def normalized(none: Array, part: Array) -> tuple[Array, Array]:
        return none, jnp.concatenate([part[:2], weights.normalized(part[2:], largest)])

    return control_flow.scan(normalized, number, drawn)[1]
