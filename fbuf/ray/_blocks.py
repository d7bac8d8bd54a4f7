"""Arrays of a call as views of one contiguous block, and sizes that are powers of two."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from fbuf._core.pytree import PyTree

_ALIGNED = 64  # bytes; JAX shares aligned memory


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array is in a block."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def pack(tree: PyTree) -> tuple[PyTree, np.ndarray[Any, Any]]:
    """Return the places of the arrays of `tree`, and uint8[bytes] that holds them. Cost: one copy."""
    leaves = jax.tree.leaves(tree)
    structure: Any = jax.tree.structure(tree)
    arrays = [np.asarray(leaf) for leaf in leaves]
    places, end = [], 0
    for array in arrays:
        places.append(Place(end, array.dtype, array.shape))
        end += -(-array.nbytes // _ALIGNED) * _ALIGNED
    block = np.empty(end, np.uint8)
    for place, array in zip(places, arrays, strict=True):
        np.copyto(_view(block, place), array)
    return structure.unflatten(places), block


def unpack(places: PyTree, block: np.ndarray[Any, Any]) -> PyTree:
    """Return the arrays of a block as views of it."""
    return jax.tree.map(lambda place: _view(block, place), places)


def _view(block: np.ndarray[Any, Any], place: Place) -> np.ndarray[Any, Any]:
    size = place.dtype.itemsize * math.prod(place.shape)
    return block[place.start : place.start + size].view(place.dtype).reshape(place.shape)


def rounded(size: int) -> int:
    """Return the next power of two, so that sizes that vary compile few programs."""
    return 1 << max(size - 1, 0).bit_length()
