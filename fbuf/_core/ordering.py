"""The ordering primitive: reads finish before later writes, without ordered effects and without copies.

If a step reads an array and later writes it in place, XLA either finishes the read first or copies the array; it often
copies. It does neither to values that went through a conditional. `order_after_reads` is the identity as a conditional whose
other branch never runs. The token it returns is the old one plus a zero that XLA cannot fold. Every write adds the token to
its indices, so every write waits for every earlier read.

`vmap` turns a conditional with a batched predicate into a `select`, which brings the copies back. The predicate, which is
never true, is therefore reduced over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from fbuf._core import control_flow

T = TypeVar("T")


@jax.custom_batching.custom_vmap
def _is_never(token: jax.Array) -> jax.Array:
    """Return False, bool[], which XLA cannot fold; unbatched under any number of `vmap`s."""
    return token < jnp.int32(-1)


@_is_never.def_vmap
def _is_never_of_all(axis_size: int, in_batched: Sequence[bool], token: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return _is_never(jnp.min(token)), False


def order_after_reads(token: jax.Array, reads: T) -> tuple[jax.Array, T]:
    """Return `(token, reads)`, equal in value; operations that use the new token run after `reads`.

    Args:
      token: int32[], 0 in every state; signed, because `uint32 < -1` is true in JAX.
      reads: Arrays read from the state, as a pytree. Use the returned ones.
    Cost: none; the arrays are not copied.
    """

    def keep(values: T) -> tuple[T, jax.Array]:
        return values, jnp.zeros((), jnp.int32)

    def never(values: T) -> tuple[T, jax.Array]:
        return jax.tree.map(jnp.zeros_like, values), jnp.ones((), jnp.int32)

    reads, zero = control_flow.cond(_is_never(token), never, keep, reads)
    return token + zero, reads


@jax.custom_batching.custom_vmap
def any_unbatched(flags: jax.Array) -> jax.Array:
    """Return bool[], whether any of `flags` holds in any member of a `vmap`: never batched.

    As the condition of a loop or a branch, it keeps `vmap` from selecting between old and new arrays, which would copy
    them. Members that are done run the body too, which must not change them.
    """
    return jnp.any(flags)


@any_unbatched.def_vmap
def _any_of_all(axis_size: int, in_batched: Sequence[bool], flags: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return any_unbatched(flags), False
