"""Leaves of rows in a layout for TPUs, with the shape that the user gave them.

In XLA's usual layout for TPUs the capacity is the innermost axis of an array `[C, ...]`, because that pads least. A row is then
a column through all tiles, and a step that writes rows transposes the whole array out and back. A packed leaf is one of
- *tiles*: `[C, 8 k, 128]`, each row in whole tiles, the last padded with zeros, for rows of many elements,
- *flat*: `[C * n]`, rows of n elements one after the other, for others.
Both are written and read in place at every capacity. `fbuf._core.slots` reads and writes them as any array `[C, ...]`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._core.component import component, state
from fbuf._core.sub_byte import SUB_BYTE

TILE = (8, 128)
_TILE_ELEMENTS = 8 * 128
_MOST_PADDING = 0.05  # of the elements of a row in tiles, if it can be flat
# Elements, whose positions are int32. Positions past the end are dropped, also where they wrap to negative ones: only a write
# of 3 * 2^30 elements in one call, with 12 GB of positions, could wrap further, into the array.
_MOST_FLAT = 2**30


@component
class Packing:
    """The shape of a row, and the form in which rows are stored."""

    shape: tuple[int, ...]
    form: Literal["tiles", "flat"]

    @property
    def elements(self) -> int:
        """Return the elements of a row."""
        return math.prod(self.shape)

    @property
    def stored(self) -> tuple[int, ...]:
        """Return the shape of a stored row."""
        tiles = -(-self.elements // _TILE_ELEMENTS)
        return (tiles * TILE[0], TILE[1]) if self.form == "tiles" else (self.elements,)


@state
class PackedLeaf:
    """Rows `[C, ...]` of one leaf, stored as `packing` says. Shapes are those of an array that is not packed."""

    array: Array
    packing: Packing  # static

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape `[C, ...]` that readers see."""
        stored, packing = tuple(self.array.shape), self.packing
        if packing.form == "flat":
            return (*stored[:-1], stored[-1] // packing.elements, *packing.shape)
        return (*stored[:-2], *packing.shape)

    @property
    def dtype(self) -> Any:
        """Return the dtype of the elements."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Return the number of axes that readers see."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Return the number of elements that readers see."""
        return math.prod(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return all rows as a NumPy array `[C, ...]`."""
        rows = unpack_on_host(np.asarray(self.array), self.packing)
        return rows if dtype is None else rows.astype(dtype)


def is_packed(leaf: Any) -> TypeGuard[PackedLeaf]:
    """Return whether a leaf of rows is packed."""
    return isinstance(leaf, PackedLeaf)


def with_structure(rows: Any) -> tuple[dict[str, Array | PackedLeaf], Any]:
    """Return the leaves of rows by name, packed ones whole, and the structure of one row."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(rows, is_leaf=is_packed)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}, structure


def stored_leaves(rows: Any) -> dict[str, Array | PackedLeaf]:
    """Return the leaves of rows by name, packed ones whole."""
    return with_structure(rows)[0]


def packing_for(capacity: int, item: jax.ShapeDtypeStruct) -> Packing | None:
    """Return the packing of C rows of such an item; None: an array `[C, ...]`, as for scalars, is as good."""
    elements = math.prod(item.shape)
    if not item.shape or not elements or not _has_bytes(item.dtype):
        return None
    tiles = Packing(tuple(item.shape), "tiles")
    if math.prod(tiles.stored) <= (1 + _MOST_PADDING) * elements:
        return tiles
    if capacity * elements < _MOST_FLAT:
        return Packing(tuple(item.shape), "flat")
    return tiles if elements >= _TILE_ELEMENTS else None


def _has_bytes(dtype: Any) -> bool:
    """Return whether elements are numbers of one, two or four whole bytes."""
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        return False
    return jnp.dtype(dtype).itemsize <= 4 and jnp.dtype(dtype).name not in SUB_BYTE


def zeros(capacity: int, packing: Packing, dtype: Any) -> PackedLeaf:
    """Return C rows of zeros."""
    stored = packing.stored
    shape = (capacity * stored[0],) if packing.form == "flat" else (capacity, *stored)
    return PackedLeaf(jnp.zeros(shape, dtype), packing)


def pack(values: Array, packing: Packing) -> Array:
    """Return rows `[..., item]` as they are stored."""
    lead = values.shape[: values.ndim - len(packing.shape)]
    flat = values.reshape((*lead, packing.elements))
    missing = math.prod(packing.stored) - packing.elements
    if missing:
        flat = lax.pad(flat, jnp.zeros((), flat.dtype), ((0, 0, 0),) * len(lead) + ((0, missing, 0),))
    return flat.reshape(lead + packing.stored)


def unpack(stored: Array, packing: Packing) -> Array:
    """Return stored rows as `[..., item]`."""
    lead = stored.shape[: stored.ndim - len(packing.stored)]
    flat = stored.reshape((*lead, math.prod(packing.stored)))
    return flat[..., : packing.elements].reshape(lead + packing.shape)


def pack_on_host(values: np.ndarray[Any, Any], packing: Packing) -> np.ndarray[Any, Any]:
    """Return rows `[N, item]` as the elements along the first axis of a packed leaf's array."""
    if packing.form == "flat":
        return values.reshape(-1)
    out = np.zeros((len(values), math.prod(packing.stored)), values.dtype)
    out[:, : packing.elements] = values.reshape(len(values), -1)
    return out.reshape(len(values), *packing.stored)


def unpack_on_host(stored: np.ndarray[Any, Any], packing: Packing) -> np.ndarray[Any, Any]:
    """Return rows `[N, item]` of a packed leaf's array, or of a part of it."""
    if packing.form == "flat":
        return stored.reshape(-1, *packing.shape)
    rows = stored.reshape(len(stored), -1)[:, : packing.elements]
    return rows.reshape(len(stored), *packing.shape)
