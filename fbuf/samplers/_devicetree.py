"""Priorities as arrays beside the rest of the state: a sum tree, and a tree of minima if asked for; see `Trees`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fbuf import _sumtree
from fbuf.samplers._trees import Drawn


def init(capacity: int, least: bool) -> tuple[jax.Array, jax.Array]:
    """float32[nodes] twice; the second [0] unless `least`."""
    low = _sumtree.init(capacity, jnp.inf) if least else jnp.zeros((0,), jnp.float32)
    return _sumtree.init(capacity), low


def set(
    tree: jax.Array, low: jax.Array, slot: jax.Array, leaf: jax.Array, capacity: int, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """In place where the state is donated."""
    slot = slot + token
    tree = _sumtree.set(tree, slot, leaf, capacity)
    if low.size:
        lowest = jnp.where(leaf > jnp.float32(0), leaf, jnp.float32(jnp.inf))
        low = _sumtree.set(low, slot, lowest, capacity, reduce="min")
    return tree, low


def draw(tree: jax.Array, low: jax.Array, key: jax.Array, batch_size: int, capacity: int, stratified: bool) -> Drawn:
    """By loops or by levels, as the platform likes it."""
    slot, leaf = _sumtree.draw(tree, key, batch_size, capacity, stratified=stratified)
    least = _sumtree.root(low) if low.size else jnp.zeros((), jnp.float32)
    return Drawn(slot, leaf, _sumtree.root(tree), least)


def clear(tree: jax.Array, low: jax.Array, capacity: int, least: bool) -> tuple[jax.Array, jax.Array]:
    """New ones."""
    return init(capacity, least)
