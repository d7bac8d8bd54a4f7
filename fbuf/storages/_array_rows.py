"""Leaves on the device, arrays `[C, ...]`: allocate, load, and choose which leaves a storage treats apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.packed_leaf import PackedLeaf, pack, packing_for, unpack, zeros
from fbuf._core.pytree import Spec, is_under, item_bytes, under

HostPlan = tuple[int, str, int]
"""Host bytes of a full buffer, how they are known, and the bytes without compression."""


def allocate(capacity: int, spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Return zeros `[C, ...]` by leaf."""
    return {name: jnp.zeros((capacity, *leaf.shape), leaf.dtype) for name, leaf in spec.items()}


def allocate_packed(capacity: int, spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array | PackedLeaf]:
    """Return zeros `[C, ...]` by leaf, packed where a TPU gains by it."""
    out: dict[str, jax.Array | PackedLeaf] = {}
    for name, leaf in spec.items():
        packing = packing_for(capacity, leaf)
        out |= allocate(capacity, {name: leaf}) if packing is None else {name: zeros(capacity, packing, leaf.dtype)}
    return out


def in_numpy(array: jax.Array) -> np.ndarray[Any, Any]:
    """Return an array in CPU memory as NumPy's view of it, once it is computed."""
    return np.asarray(memoryview(array))


def take(array: np.ndarray[Any, Any], slot: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the rows `[..., *item]` of an array `[C, *item]` in slots int64[...], modulo C."""
    return array.take(slot, 0, None, "wrap")


class OwnedArray:
    """An array with no other owner, which `from_arrays` need not copy."""

    __slots__ = ("array",)

    def __init__(self, array: Any):
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the array's shape."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """Return the array's dtype."""
        return self.array.dtype


def as_stored(array: Any, like: Any) -> jax.Array | PackedLeaf:
    """Return an array given to `from_arrays` in the layout of `like`: a copy, unless it is `OwnedArray`."""
    rows = array.array if isinstance(array, OwnedArray) else array
    if isinstance(like, PackedLeaf) and isinstance(rows, PackedLeaf) and like.packing == rows.packing:
        whole = OwnedArray(rows.array) if rows is not array else rows.array
        return PackedLeaf(as_device_array(whole, like.dtype), like.packing)
    if isinstance(rows, PackedLeaf):
        rows = array = unpack_rows(rows)
    if not isinstance(like, PackedLeaf):
        return as_device_array(array, like.dtype)
    return PackedLeaf(pack(jnp.asarray(rows, like.dtype), like.packing).reshape(like.array.shape), like.packing)


@jax.jit
def unpack_rows(leaf: PackedLeaf) -> jax.Array:
    """Return all rows as an array `[C, ...]`."""
    return unpack(leaf.array.reshape(leaf.shape[0], *leaf.packing.stored), leaf.packing)


def as_device_array(array: Any, dtype: Any) -> jax.Array:
    """Return an array given to `from_arrays`: a copy, unless it is `OwnedArray`."""
    if isinstance(array, OwnedArray) and array.dtype == dtype and not isinstance(array.array, PackedLeaf):
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
        if not under(key, spec):
            raise ValueError(f"{call}: keys names '{key}', but rows have {', '.join(spec)}. Use one of those.")
    return tuple(name for name in spec if is_under(name, keys))
