"""Search sorted arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fbuf._core import control_flow


def number_up_to(ends: jax.Array, values: jax.Array) -> jax.Array:
    """Return int32[...], how many of the sorted `ends` [N] are at most each of `values` [...].

    It is `jnp.searchsorted(side="right")`, which JAX 0.10 cannot trace inside `jax.shard_map` over some axes of a mesh only.

    Cost: O(log N) a value.
    Example:
      >>> number_up_to(jnp.array([1, 3, 3, 7]), jnp.array([0, 3, 9])).tolist()
      [0, 3, 4]
    """
    number = ends.shape[0]

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // jnp.int32(2)
        up = (ends.at[jnp.minimum(middle, jnp.int32(number - 1))].get(mode="promise_in_bounds") <= values) & (
            low < high
        )
        return jnp.where(up, middle + jnp.int32(1), low), jnp.where(up, high, middle)

    start = jnp.zeros(values.shape, jnp.int32), jnp.full(values.shape, number, jnp.int32)
    return control_flow.fori_loop(0, number.bit_length(), halve, start)[0]
