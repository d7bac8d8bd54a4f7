r"""How many rows of a batch come from which buffer: quotas by largest remainder, or a source drawn for each row.

Of B rows, buffer s with fraction :math:`f_s` gets :math:`\lfloor f_s B \rfloor`, and the rows that are then left go one each
to the largest remainders :math:`f_s B - \lfloor f_s B \rfloor` (of equal ones to the first). So a quota is less than one row
away from :math:`f_s B`, and the quotas come to B. Rejected: rounding each (their sum is not B; torchrl rounds half to even),
and giving the rest to the last buffer (up to S - 1 rows too many).

What a buffer with nothing to draw leaves over goes to the others in the same way, by their fractions; a buffer whose fraction
is 0 never gets anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp


def quotas(fractions: Sequence[float], total: int) -> tuple[int, ...]:
    """Of fractions that are known, exactly: 0.1 is a tenth."""
    parts = [Fraction(str(f)) for f in fractions]
    exact = [part * total / sum(parts) for part in parts]
    out = [int(share) for share in exact]
    order = sorted(range(len(out)), key=lambda i: (out[i] - exact[i], i))
    for i in order[: total - sum(out)]:
        out[i] += 1
    return tuple(out)


def traced(fractions: jax.Array, total: jax.Array) -> jax.Array:
    """int32[S] of fractions float32[S] that sum up to 1 (or 0: none gets anything) and `total` int32[] rows."""
    size = fractions.shape[0]
    exact = fractions * total.astype(jnp.float32)
    least = jnp.floor(exact)
    out = least.astype(jnp.int32)
    some = fractions > jnp.float32(0)
    rest = jnp.where(some, exact - least, jnp.float32(-1))
    place = jnp.arange(size, dtype=jnp.int32)
    # How many come before each: S is small.
    larger = rest[None, :] > rest[:, None]
    ahead = larger | ((rest[None, :] == rest[:, None]) & (place[None, :] < place[:, None]))
    rank = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    left = total - jnp.sum(out, dtype=jnp.int32)
    out = out + ((rank < left) & some).astype(jnp.int32)
    # What float32 has rounded away, of very large batches.
    left = total - jnp.sum(out, dtype=jnp.int32)
    out = out + jnp.where(place == jnp.argmax(fractions).astype(jnp.int32), left, jnp.int32(0))
    return jnp.where(jnp.any(some), jnp.maximum(out, jnp.int32(0)), jnp.int32(0))


def counted(fractions: jax.Array) -> jax.Array:
    """Numbers that a user anneals, brought into [0, 1e30]: what is negative or NaN counts as 0."""
    return jnp.where(fractions > jnp.float32(0), jnp.minimum(fractions, jnp.float32(1e30)), jnp.float32(0))


def normalized(fractions: jax.Array) -> jax.Array:
    """float32[S] that sum up to 1, or all 0: what is negative or NaN counts as 0, what is infinite as 1e30."""
    fine = counted(fractions)
    total = jnp.sum(fine)
    return fine / jnp.where(total > jnp.float32(0), total, jnp.float32(1))


def in_order(quota: jax.Array, batch_size: int) -> jax.Array:
    """int32[B], the source of each row: those of the first buffer first. Rows beyond all quotas: S."""
    return of_rank(quota, jnp.arange(batch_size, dtype=jnp.int32))


def of_rank(quota: jax.Array, rank: jax.Array) -> jax.Array:
    """int32[B], where the rank-th row comes from; S beyond all quotas."""
    upto = jnp.cumsum(quota, dtype=jnp.int32)
    return jnp.sum(rank[:, None] >= upto[None, :], axis=1, dtype=jnp.int32)


def at_random(key: jax.Array, fractions: jax.Array, batch_size: int) -> jax.Array:
    """int32[B], a source for each row on its own, by fractions that sum up to 1; S where all are 0."""
    upto = jnp.cumsum(fractions)
    total = upto[-1]
    # Below the total, which a uniform number in [0, 1) may be rounded up to.
    aim = jnp.minimum(jax.random.uniform(key, (batch_size,), jnp.float32) * total, jnp.nextafter(total, jnp.float32(0)))
    chosen = jnp.sum(aim[:, None] >= upto[None, :], axis=1, dtype=jnp.int32)
    return jnp.where(total > jnp.float32(0), chosen, jnp.int32(fractions.shape[0]))


def left_over(source: jax.Array, there: jax.Array) -> jax.Array:
    """bool[B], rows whose buffer has nothing; `there` bool[S] says which have something."""
    none = jnp.zeros((1,), bool)  # S: no buffer at all
    return ~jnp.concatenate([there, none]).at[source].get(mode="promise_in_bounds")


def shared(source: jax.Array, fractions: jax.Array, there: jax.Array) -> jax.Array:
    """int32[B], sources of the rows that buffers without anything left over, by quotas; S for the other rows."""
    over = left_over(source, there)
    rank = jnp.cumsum(over, dtype=jnp.int32) - jnp.int32(1)
    open_to = normalized(jnp.where(there, fractions, jnp.float32(0)))
    quota = traced(open_to, jnp.sum(over, dtype=jnp.int32))
    return jnp.where(over, of_rank(quota, rank), jnp.int32(fractions.shape[0]))
