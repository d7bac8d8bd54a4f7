"""The n-th open row, found by counting: of flags of a byte a row, and how many are open before each block of them.

What a data set needs in place of a log of its anchors (4 bytes a row; at 50 million rows 200 MB): its rows never change, so
that counts made once stay right. A draw halves the counts (some 20 looks) and counts within one block. Rejected: a list of the
closed rows, which is smaller only where few are closed, and whose size no shape can know beforehand.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128
"""Rows of a block: 1/32 byte a row for its count, and 128 bytes looked at by a draw."""
_LOT = 128  # blocks counted at once
OPEN = 8
"""The bit of a flag that says so, as `fbuf._indexing.anchors` has it."""


def init(capacity: int) -> jax.Array:
    """int32[blocks], none open."""
    return jnp.zeros((-(-capacity // BLOCK),), jnp.int32)


def counted(flags: jax.Array) -> jax.Array:
    """int32[blocks], how many of uint8[C] are open before each block. Memory: a lot of blocks."""
    capacity = flags.shape[0]
    blocks = -(-capacity // BLOCK)
    within = jnp.arange(_LOT, dtype=jnp.int32)
    earlier = within[None, :] < within[:, None]  # a running sum of few, as one that compiles at once

    def count(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        before, total = carry
        block = number.astype(jnp.int32) * jnp.int32(_LOT) + within
        at = block[:, None] * jnp.int32(BLOCK) + jnp.arange(BLOCK, dtype=jnp.int32)[None, :]
        here = flags.at[jnp.minimum(at, jnp.int32(capacity - 1))].get(mode="promise_in_bounds")
        each = jnp.sum(_is_open(here) & (at < jnp.int32(capacity)), axis=1, dtype=jnp.int32)
        upto = total + jnp.sum(jnp.where(earlier, each[None, :], jnp.int32(0)), axis=1, dtype=jnp.int32)
        before = before.at[block].set(upto, mode="drop", unique_indices=True)
        return before, total + jnp.sum(each, dtype=jnp.int32)

    start = (init(capacity), jnp.zeros((), jnp.int32))
    return lax.fori_loop(0, -(-blocks // _LOT), count, start)[0]


def nth(flags: jax.Array, before: jax.Array, nth: jax.Array) -> jax.Array:
    """Slots of the `nth` int32[B] open rows in order of slot; any slot where there are not so many."""
    last = jnp.int32(flags.shape[0] - 1)
    block = jnp.maximum(jnp.searchsorted(before, nth, side="right").astype(jnp.int32) - jnp.int32(1), jnp.int32(0))
    first = block * jnp.int32(BLOCK)
    at = first[:, None] + jnp.arange(BLOCK, dtype=jnp.int32)[None, :]
    here = flags.at[jnp.minimum(at, last)].get(mode="promise_in_bounds")
    upto = jnp.cumsum(_is_open(here) & (at <= last), axis=1, dtype=jnp.int32)
    passed = upto <= (nth - before.at[block].get(mode="promise_in_bounds"))[:, None]
    return jnp.minimum(first + jnp.sum(passed, axis=1, dtype=jnp.int32), last)


def _is_open(flags: jax.Array) -> jax.Array:
    return (flags & jnp.uint8(OPEN)) != jnp.uint8(0)
