"""Send blocks of rows to every device: leaves of few bytes in one packed array, because each `all_to_all` is a launch.

Leaves of up to `MOST` elements a row travel as words of 32 bits, bit for bit, without padding between them. Larger ones are
sent as they are, because packing would copy them, and so are elements of 64 bits, of less than a byte, and extended dtypes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._core.sub_byte import SUB_BYTE

MOST = 512  # elements of a row of a packed leaf
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def exchange(blocks: Any, axis: str) -> Any:
    """Return the blocks [D, K, ...] of each leaf that the devices along `axis` sent to this one."""
    leaves, structure = jax.tree.flatten(blocks)
    few = [number for number, leaf in enumerate(leaves) if _has_few_words(leaf)]
    if len(few) > 1:
        received = _exchange_packed([leaves[number] for number in few], axis)
        for number, leaf in zip(few, received, strict=True):
            leaves[number] = leaf
    for number in range(len(leaves)):
        if number not in few or len(few) == 1:
            leaves[number] = lax.all_to_all(leaves[number], axis, 0, 0)
    return jax.tree.unflatten(structure, leaves)


def _has_few_words(leaf: Array) -> bool:
    """Return whether the elements of a row are few, and have one, two or four whole bytes."""
    if not any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        return False
    return leaf.dtype.name not in SUB_BYTE and leaf.dtype.itemsize in _UNSIGNED and int(np.prod(leaf.shape[2:])) <= MOST


def _exchange_packed(leaves: list[Array], axis: str) -> list[Array]:
    """Exchange leaves in one array uint32[D, K, words], in which elements of one size are consecutive."""
    lead, words, numbers = leaves[0].shape[:2], [], {}
    for size, unsigned in _UNSIGNED.items():
        numbers[size] = [number for number, leaf in enumerate(leaves) if leaf.dtype.itemsize == size]
        parts = [_bits(leaves[number], unsigned) for number in numbers[size]]
        if parts:
            flat, each = jnp.concatenate(parts, axis=2), 4 // size
            flat = jnp.pad(flat, ((0, 0), (0, 0), (0, -flat.shape[2] % each)))
            flat = flat.reshape(*lead, -1, each) if each > 1 else flat
            words.append(lax.bitcast_convert_type(flat, jnp.uint32))
    packed = lax.all_to_all(jnp.concatenate(words, axis=2), axis, 0, 0)
    received, at = list(leaves), 0
    for size, unsigned in _UNSIGNED.items():
        total = sum(int(np.prod(leaves[number].shape[2:])) for number in numbers[size])
        end = at + -(-total * size // 4)
        flat = lax.bitcast_convert_type(packed[:, :, at:end], unsigned).reshape(*lead, -1)
        at, first = end, 0
        for number in numbers[size]:
            like = leaves[number]
            last = first + int(np.prod(like.shape[2:]))
            bits, first = flat[:, :, first:last].reshape(like.shape), last
            is_flag = like.dtype == np.bool_
            received[number] = bits != unsigned(0) if is_flag else lax.bitcast_convert_type(bits, like.dtype)
    return received


def _bits(leaf: Array, unsigned: Any) -> Array:
    """Return the bits of a leaf [D, K, ...] as unsigned integers [D, K, elements]."""
    flat = leaf.reshape(*leaf.shape[:2], int(np.prod(leaf.shape[2:])))
    return flat.astype(unsigned) if leaf.dtype == np.bool_ else lax.bitcast_convert_type(flat, unsigned)
