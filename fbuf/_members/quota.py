r"""Assign the rows of a batch to members: quotas by largest remainder, by mass, or a random member for each row.

Of B rows, member s with fraction :math:`f_s` gets :math:`\lfloor f_s B \rfloor`. The remaining rows are assigned one each
to the largest remainders, the first of equal ones. Quotas differ from :math:`f_s B` by less than one row and sum to B. Rows
of empty buffers are assigned to the others in the same way; a buffer with fraction 0 gets none.

Of shards, s gets the rows between the floors of :math:`B \sum_{r < s} g_r + u` and :math:`B \sum_{r \le s} g_r + u`, for one
uniform random number u: :math:`g_s B` on average, differing from it by less than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def quotas(fractions: Sequence[float], total: int) -> tuple[int, ...]:
    """Compute quotas of known fractions exactly: 0.1 is a tenth."""
    parts = [Fraction(str(f)) for f in fractions]
    exact = [part * total / sum(parts) for part in parts]
    out = [int(share) for share in exact]
    order = sorted(range(len(out)), key=lambda i: (out[i] - exact[i], i))
    for i in order[: total - sum(out)]:
        out[i] += 1
    return tuple(out)


def traced(fractions: jax.Array, total: jax.Array) -> jax.Array:
    """Compute quotas int32[S] of fractions float32[S] with sum 1 (or 0: all 0) and `total` int32[] rows."""
    size = fractions.shape[0]
    exact = fractions * total.astype(jnp.float32)
    least = jnp.floor(exact)
    out = least.astype(jnp.int32)
    some = fractions > jnp.float32(0)
    rest = jnp.where(some, exact - least, jnp.float32(-1))
    place = jnp.arange(size, dtype=jnp.int32)
    # Count larger remainders pairwise: S is small.
    larger = rest[None, :] > rest[:, None]
    ahead = larger | ((rest[None, :] == rest[:, None]) & (place[None, :] < place[:, None]))
    rank = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    left = total - jnp.sum(out, dtype=jnp.int32)
    out = out + ((rank < left) & some).astype(jnp.int32)
    # float32 rounding of very large batches
    left = total - jnp.sum(out, dtype=jnp.int32)
    out = out + jnp.where(place == jnp.argmax(fractions).astype(jnp.int32), left, jnp.int32(0))
    return jnp.where(jnp.any(some), jnp.maximum(out, jnp.int32(0)), jnp.int32(0))


def counted(fractions: jax.Array) -> jax.Array:
    """Clip annealed fractions to [0, 1e30]; negative numbers and NaN become 0."""
    return jnp.where(fractions > jnp.float32(0), jnp.minimum(fractions, jnp.float32(1e30)), jnp.float32(0))


def normalized(fractions: jax.Array) -> jax.Array:
    """Normalise fractions float32[S] to sum 1, or return all 0; negative numbers and NaN count as 0."""
    fine = counted(fractions)
    total = jnp.sum(fine)
    return fine / jnp.where(total > jnp.float32(0), total, jnp.float32(1))


def in_order(quota: jax.Array, batch_size: int) -> jax.Array:
    """Return the source of each row, int32[B], first buffers first; S beyond all quotas."""
    return of_rank(quota, jnp.arange(batch_size, dtype=jnp.int32))


def of_rank(quota: jax.Array, rank: jax.Array) -> jax.Array:
    """Return the source of the rank-th row, int32[B]; S beyond all quotas."""
    upto = jnp.cumsum(quota, dtype=jnp.int32)
    return jnp.sum(rank[:, None] >= upto[None, :], axis=1, dtype=jnp.int32)


def at_random(key: jax.Array, fractions: jax.Array, batch_size: int) -> jax.Array:
    """Draw a source for each row, int32[B], by fractions with sum 1; S if all are 0."""
    upto = jnp.cumsum(fractions)
    total = upto[-1]
    # Keep below the total, to which rounding may raise the product.
    aim = jnp.minimum(jax.random.uniform(key, (batch_size,), jnp.float32) * total, jnp.nextafter(total, jnp.float32(0)))
    chosen = jnp.sum(aim[:, None] >= upto[None, :], axis=1, dtype=jnp.int32)
    return jnp.where(total > jnp.float32(0), chosen, jnp.int32(fractions.shape[0]))


def left_over(source: jax.Array, has_rows: jax.Array) -> jax.Array:
    """Return the rows whose buffer is empty, bool[B]; `has_rows` bool[S] are the others."""
    none = jnp.zeros((1,), bool)  # S: no buffer
    return ~jnp.concatenate([has_rows, none]).at[source].get(mode="promise_in_bounds")


def shared(source: jax.Array, fractions: jax.Array, has_rows: jax.Array) -> jax.Array:
    """Return sources for the rows of empty buffers by quotas, int32[B]; S for the other rows."""
    over = left_over(source, has_rows)
    rank = jnp.cumsum(over, dtype=jnp.int32) - jnp.int32(1)
    open_to = normalized(jnp.where(has_rows, fractions, jnp.float32(0)))
    quota = traced(open_to, jnp.sum(over, dtype=jnp.int32))
    return jnp.where(over, of_rank(quota, rank), jnp.int32(fractions.shape[0]))


def ends_by_mass(share: Any, batch_size: int, uniform: Any) -> Any:
    """Return int[K], the rows of a batch from each shard and those before it.

    Args:
      share: float[K] of JAX or NumPy.
      batch_size: B.
      uniform: Random numbers in [0, 1), equal on all shards. float[]: numbers of rows differ from B g by less than one.
        float[B]: the shard of each row is independent of the others.
    """
    xp = jnp if isinstance(share, jax.Array) else np
    upto = xp.cumsum(share)
    upto = upto / xp.where(upto[-1] > 0, upto[-1], 1.0)
    if np.ndim(uniform) == 0:
        end = xp.floor(upto * batch_size + uniform).astype(np.int32)
    else:
        end = xp.sum(uniform[None, :] < upto[:, None], axis=1, dtype=np.int32)
    # Rounding must not give rows to the shards without mass at the end.
    return xp.where(upto >= upto[-1], batch_size, xp.minimum(end, batch_size))
