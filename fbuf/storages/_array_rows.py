"""Rows as arrays `[C, ...]`: the gathers and scatters that every storage uses for leaves on the device.

Gathers use `promise_in_bounds`, which is as fast as a memory copy on CPU. Scatters of unique indices write only the given
rows. Zeroing masked rows fuses into the gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.pytree import Spec, item_bytes, zero_unless

Leaves = Mapping[str, jax.Array]
HostPlan = tuple[int, str, int]
"""Host bytes of a full buffer, how they are known, and the bytes without compression."""


def allocate(capacity: int, spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Return zeros `[C, ...]` by leaf."""
    return {name: jnp.zeros((capacity, *leaf.shape), leaf.dtype) for name, leaf in spec.items()}


def write(array: jax.Array, slot: jax.Array, values: jax.Array, token: jax.Array) -> jax.Array:
    """Write `values` `[..., item]` to unique slots int32[...]; out-of-range slots are dropped."""
    item = array.shape[1:]
    at = slot.reshape(-1) + token
    return array.at[at].set(values.reshape((at.shape[0], *item)), mode="drop", unique_indices=True)


def read(array: jax.Array, slot: jax.Array) -> jax.Array:
    """Return `[..., item]` of slots int32[...]; zeros for slots out of range."""
    inside = (slot >= jnp.int32(0)) & (slot < jnp.int32(array.shape[0]))
    at = jnp.where(inside, slot, jnp.int32(0))
    return zero_unless(inside, array.at[at].get(mode="promise_in_bounds"))


class OwnedArray:
    """An array with no other owner, which `from_arrays` need not copy."""

    __slots__ = ("array",)

    def __init__(self, array: jax.Array):
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the array's shape."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """Return the array's dtype."""
        return self.array.dtype


def as_device_array(array: Any, dtype: Any) -> jax.Array:
    """Return an array given to `from_arrays`: a copy, unless it is `OwnedArray`."""
    if isinstance(array, OwnedArray) and array.dtype == dtype:
        return array.array
    return jnp.array(array.array if isinstance(array, OwnedArray) else array, dtype)


def select_leaves(call: str, keys: tuple[str, ...] | None, spec: Spec, least: int) -> tuple[str, ...]:
    """Return the leaves that a storage treats apart: `keys` (or their subtrees), or all of `least` bytes a row.

    Raises:
      ValueError: a key names nothing, or no leaf is large enough.
    """
    if keys is None:
        chosen = tuple(name for name, leaf in spec.items() if item_bytes(leaf) >= least)
        if not chosen:
            raise ValueError(f"{call}: no leaf of {', '.join(spec)} has {least} bytes a row. Name some: keys=(...).")
        return chosen
    if not keys:
        raise ValueError(f"{call}: keys is empty; expected names of leaves ({', '.join(spec)}). Use storages.Device().")
    for key in keys:
        if not any(name == key or name.startswith(key + "/") for name in spec):
            raise ValueError(f"{call}: keys names '{key}', but rows have {', '.join(spec)}. Use one of those.")
    return tuple(n for n in spec if any(n == key or n.startswith(key + "/") for key in keys))
