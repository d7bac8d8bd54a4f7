"""Leaves on the device, arrays `[C, ...]`: allocate, load, and choose which leaves a storage treats apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.pytree import Spec, item_bytes

HostPlan = tuple[int, str, int]
"""Host bytes of a full buffer, how they are known, and the bytes without compression."""


def allocate(capacity: int, spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Return zeros `[C, ...]` by leaf."""
    return {name: jnp.zeros((capacity, *leaf.shape), leaf.dtype) for name, leaf in spec.items()}


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
