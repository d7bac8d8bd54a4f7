"""A number of 64 bits for each row of a leaf: rows that are alike have the same, and others, in practice, another.

Each word of a row is mixed with its place, and the results are added up, so that nothing is done one after another and XLA
makes one pass of it. Bits are compared, not values: two NaNs are alike, and 0 and -0 are not. Nobody is kept from making two
rows with one number; among a million that come by chance two agree with probability 3e-8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms.block_grid import to_bits


def hashed(rows: jax.Array) -> jax.Array:
    """uint32[N, 2] of rows `[N, ...]` of any dtype but keys."""
    if jnp.issubdtype(rows.dtype, jnp.complexfloating):
        rows = jnp.stack([rows.real, rows.imag], axis=-1)
    words = to_bits(rows).reshape(rows.shape[0], -1)
    if words.dtype.itemsize == 8:
        words = jnp.concatenate([words.astype(jnp.uint32), (words >> words.dtype.type(32)).astype(jnp.uint32)], axis=1)
    elif words.dtype.itemsize < 4 and words.shape[1]:
        words = _joined(words)
    words = words.astype(jnp.uint32)
    place = jnp.arange(words.shape[1], dtype=jnp.uint32)[None, :]
    first = mixed(words ^ mixed(place + jnp.uint32(0x9E3779B9)))
    second = mixed(first + (place + jnp.uint32(1)) * jnp.uint32(0x85EBCA6B))
    return jnp.stack([jnp.sum(half, axis=1, dtype=jnp.uint32) for half in (first, second)], axis=-1)


def _joined(words: jax.Array) -> jax.Array:
    """uint32[N, M] of bytes or pairs of them, padded with zeros."""
    several = 4 // words.dtype.itemsize
    padded = jnp.pad(words, ((0, 0), (0, -words.shape[1] % several)))
    parts = padded.reshape(words.shape[0], -1, several).astype(jnp.uint32)
    shift = jnp.arange(several, dtype=jnp.uint32) * jnp.uint32(8 * words.dtype.itemsize)
    return jnp.sum(parts << shift[None, None, :], axis=2, dtype=jnp.uint32)


def mixed(word: jax.Array) -> jax.Array:
    """uint32, every bit of which depends on every bit of `word` (the end of MurmurHash3)."""
    word = (word ^ (word >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> jnp.uint32(16))


def distinct(hashes: np.ndarray) -> int:
    """How many different ones there are among uint32[N, 2]."""
    return int(np.unique(_whole(hashes)).size)


def together(parts: list[np.ndarray]) -> np.ndarray:
    """uint32[N, 2] of rows from those of their leaves, in order."""
    whole = np.zeros(len(parts[0]), np.uint64)
    for part in parts:
        whole = (whole ^ (whole >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) + _whole(part)
    return whole.view(np.uint32).reshape(-1, 2)


def _whole(hashes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(hashes, np.uint32).view(np.uint64)[:, 0]
