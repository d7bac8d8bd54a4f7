"""Rows as arrays `[C, ...]`: the gathers and scatters every storage uses for the leaves it keeps on the device.

`promise_in_bounds` gathers are as fast as a memory copy on CPU (`fill` is twice as slow, `jnp.take` a third slower), a
scatter of unique indices writes only the rows it is given, and the zeroing of masked rows fuses into the gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.pytree import Spec, item_bytes, zero_unless


def allocate(capacity: int, spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Zeros `[C, ...]` by leaf."""
    return {name: jnp.zeros((capacity, *leaf.shape), leaf.dtype) for name, leaf in spec.items()}


def write(array: jax.Array, slot: jax.Array, values: jax.Array, token: jax.Array) -> jax.Array:
    """`values` `[..., item]` into slots int32[...]; out-of-range slots are dropped, no slot may come twice."""
    item = array.shape[1:]
    at = slot.reshape(-1) + token
    return array.at[at].set(values.reshape((at.shape[0], *item)), mode="drop", unique_indices=True)


def read(array: jax.Array, slot: jax.Array) -> jax.Array:
    """`[..., item]` from slots int32[...]; zeros at slot C (any slot out of range)."""
    inside = (slot >= jnp.int32(0)) & (slot < jnp.int32(array.shape[0]))
    at = jnp.where(inside, slot, jnp.int32(0))
    return zero_unless(inside, array.at[at].get(mode="promise_in_bounds"))


class Owned:
    """An array of JAX's for `from_arrays` to take as it is, because nobody else has it."""

    __slots__ = ("array",)

    def __init__(self, array: jax.Array):
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """Of the array."""
        return self.array.dtype


def restored(array: Any, dtype: Any) -> jax.Array:
    """An array given to `from_arrays`: a copy, unless it is `Owned`."""
    if isinstance(array, Owned) and array.dtype == dtype:
        return array.array
    return jnp.array(array.array if isinstance(array, Owned) else array, dtype)


def choose(call: str, keys: tuple[str, ...] | None, spec: Spec, least: int) -> tuple[str, ...]:
    """The leaves of `spec` a storage treats apart: `keys` (a key names a subtree too), or all of `least` bytes a row.

    Raises:
      ValueError: a key names nothing, or no leaf is large enough.
    """
    if keys is None:
        chosen = tuple(name for name, leaf in spec.items() if item_bytes(leaf) >= least)
        if not chosen:
            raise ValueError(
                f"{call}: no leaf has {least} bytes a row or more (leaves: {', '.join(spec)}). "
                f"Name leaves with keys=(...), or use storages.Device()."
            )
        return chosen
    if not keys:
        raise ValueError(f"{call}: keys is empty; expected names of leaves ({', '.join(spec)}). Use storages.Device().")
    for key in keys:
        if not any(name == key or name.startswith(key + "/") for name in spec):
            raise ValueError(f"{call}: keys names '{key}', but rows have {', '.join(spec)}. Use one of those.")
    return tuple(n for n in spec if any(n == key or n.startswith(key + "/") for key in keys))
