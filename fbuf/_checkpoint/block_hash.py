r"""Marks of an array's blocks: equal marks, equal bytes. What a save did not change it need neither fetch nor write.

On an accelerator they are worked out where the array is, in one call a shape, so that only marks cross: eight sums
:math:`\sum_j k_j c_j \bmod 2^{32}` over the block's 16-bit words :math:`c_j`, with keys of their own from the generator of
`jax.random`. The upper 17 bits of each are strongly universal (Lemire and Kaser 2014, "Strongly universal string hashing is
fast"): two blocks that differ agree in one sum with a chance of :math:`2^{-17}` at most, in all eight with :math:`2^{-136}`.
That a billion blocks, each saved a thousand times, ever hide one change has a chance below :math:`2^{-96}`.

Of what lies on the host a mark is a SHA-256 digest, cut to 128 bits: ten times as fast there as those sums.

Arithmetic modulo 2^64 was rejected, since JAX has no 64-bit integers by default; and a sum of mixed words, which is as fast,
since nobody can prove what it promises. The keys are the same in every process: whoever made frames to collide on purpose
could; marks stand against accidents, not against one's own data.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SUMS = 8
_SEED = 0x6662_7566


def of_bytes(block: np.ndarray) -> str:
    """The mark of a block on the host."""
    data: Any = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    return f"s{hashlib.sha256(data).hexdigest()[:32]}"


def of_device(array: jax.Array, rows: int, block: int) -> list[str]:
    """Marks of the first `rows` of an array, `block` rows each; one jitted call a shape, whatever `rows`."""
    sums = np.asarray(_sums(array, block))
    number = -(-rows // block)
    held = [min(block, rows - i * block) for i in range(number)]
    return [f"m{n:x}-{bytes(each.astype('>u4')).hex()}" for n, each in zip(held, sums[:number], strict=True)]


def last_differing(array: jax.Array) -> int:
    """Rows up to the last that does not consist of the array's last element alone."""
    return int(_last_differing(array))


@functools.partial(jax.jit, static_argnums=1)
def _sums(array: jax.Array, block: int) -> jax.Array:
    """uint32[blocks, 8]."""
    words = _words(array)
    rows, width = words.shape
    key = jax.random.key(_SEED, impl="threefry2x32")
    keys = [jax.random.bits(jax.random.fold_in(key, i), (min(block, rows), width), jnp.uint32) for i in range(_SUMS)]

    def of(part: jax.Array) -> jax.Array:
        return jnp.stack(
            [jnp.sum(part * k[None, : part.shape[1]], axis=(1, 2), dtype=jnp.uint32) for k in keys], axis=-1
        )

    whole = rows // block * block
    out = [of(words[:whole].reshape(-1, block, width))] if whole else []
    out += [of(words[None, whole:])] if whole < rows else []
    return jnp.concatenate(out)


@jax.jit
def _last_differing(array: jax.Array) -> jax.Array:
    bits = _bits(array)
    differs = jnp.any(bits != bits[-1, -1][None, None, :], axis=(1, 2))
    return jnp.max(jnp.where(differs, lax.iota(jnp.int32, differs.shape[0]) + jnp.int32(1), jnp.int32(0)))


def _words(array: jax.Array) -> jax.Array:
    """uint32[C, n]: each row's bits, 16 to a word, or 8 where a row has an odd number of bytes."""
    bits = _bits(array)
    flat = bits.reshape(bits.shape[0], -1)
    if flat.dtype == jnp.uint8 and flat.shape[1] % 2 == 0:
        flat = lax.bitcast_convert_type(flat.reshape(flat.shape[0], -1, 2), jnp.uint16)
    return flat.astype(jnp.uint32)


def _bits(array: jax.Array) -> jax.Array:
    """uint8 or uint16[C, elements of a row, words of an element]."""
    rows, name = array.shape[0], jnp.dtype(array.dtype).name
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if name == "bool":
        array = array.astype(jnp.uint8)
    elif name.startswith(("int2", "int4", "uint2", "uint4", "float4")):  # an element has no byte of its own
        half = getattr(jnp, "uint2" if "int2" in name else "uint4")
        array = lax.bitcast_convert_type(array, half).astype(jnp.uint8)
    narrow = array.dtype.itemsize == 1
    bits = lax.bitcast_convert_type(array, jnp.uint8 if narrow else jnp.uint16)
    each = {"complex64": 4, "complex128": 8}.get(name, 1 if narrow else array.dtype.itemsize // 2)
    return bits.reshape(rows, -1, each)
