"""Does something to every leaf of some trees, in place: block after block, so that it needs no memory.

For what is rare: applying a new exponent to all leaves, bringing back into range what a common factor has driven out of it.
A vectorized `_sumtree.rebuild` would be faster but holds everything twice, and inside a branch XLA copies what it changes
(so it is a loop, of no turn where nothing is to be done).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._pin import any_of

T = TypeVar("T")
_BLOCK = 1024


def every_leaf(trees: T, change: Callable[[T, jax.Array, jax.Array], T], capacity: int, when: jax.Array) -> T:
    """The trees after `change(trees, slot, at)` for all slots, if `when` bool[].

    Args:
      trees: A pytree of arrays.
      change: Gets slots int32[A] to write, C where there is none, and the same as places to read, all in [0, C). Under
        `vmap` it may run for members for which `when` is False, and must leave those as they are.
      capacity: C, static.
    Cost: O(C) if `when`, else nothing.
    """
    block = min(_BLOCK, capacity)
    turns = jnp.where(any_of(when), jnp.int32(-(-capacity // block)), jnp.int32(0))

    def turn(i: jax.Array, trees: T) -> T:
        slot = jnp.minimum(i * jnp.int32(block) + jnp.arange(block, dtype=jnp.int32), jnp.int32(capacity))
        return change(trees, slot, jnp.minimum(slot, jnp.int32(capacity - 1)))

    return lax.fori_loop(jnp.int32(0), turns, turn, trees)
