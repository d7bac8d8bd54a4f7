"""The ordering primitive: reads that finish before later writes, without ordered effects and without a copy.

A verb that reads an array (rows, tree, flags, tickets) which a later verb of the same step writes in place leaves XLA
two choices: finish the read first, or copy the array. It often copies, because it would rather compute "one element of
the gather" again later. It can do neither to what went through a conditional. `order_after_reads` is the identity, spelled as a
conditional whose other branch never runs; the token it returns is the old one plus a zero that XLA cannot know to be
zero. Every write of every verb adds the token to its indices, so every write waits for every earlier read.

`vmap` turns a conditional whose predicate is batched into a `select`, which XLA does see through: a vmapped step then
copies everything (26 MB for three states of 400,000 rows). The predicate is therefore reduced over the batch, which
changes nothing as it is never true.

Tried and rejected: `optimization_barrier` (no effect on CPU), peeking at one element of the read (XLA recomputes it),
`ordered=True` effects (no vmap, and only for callbacks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")


@jax.custom_batching.custom_vmap
def _is_never(token: jax.Array) -> jax.Array:
    """bool[], False; XLA cannot know. Unbatched under any number of `vmap`s."""
    return token < jnp.int32(-1)


@_is_never.def_vmap
def _is_never_of_all(axis_size: int, in_batched: Sequence[bool], token: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return _is_never(jnp.min(token)), False


def order_after_reads(token: jax.Array, reads: T) -> tuple[jax.Array, T]:
    """Returns `(token, reads)` unchanged in value, ordered: what uses the new token runs after `reads`.

    Args:
      token: int32[], 0 in every state; signed, because `uint32 < -1` is true in JAX.
      reads: pytree of arrays that were read from the state. Use the returned ones.
    Cost: nothing measurable; the arrays are not copied.
    """

    def keep(values: T) -> tuple[T, jax.Array]:
        return values, jnp.zeros((), jnp.int32)

    def never(values: T) -> tuple[T, jax.Array]:
        return jax.tree.map(jnp.zeros_like, values), jnp.ones((), jnp.int32)

    reads, zero = lax.cond(_is_never(token), never, keep, reads)
    return token + zero, reads


@jax.custom_batching.custom_vmap
def any_unbatched(flags: jax.Array) -> jax.Array:
    """bool[], whether any of `flags` holds, for any of a `vmap`'s members: never batched.

    As the condition of a loop or a branch it keeps `vmap` from selecting between old and new arrays, which would copy
    them. The members that are done go on with the others, so the body must leave them as they are.
    """
    return jnp.any(flags)


@any_unbatched.def_vmap
def _any_of_all(axis_size: int, in_batched: Sequence[bool], flags: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return any_unbatched(flags), False
