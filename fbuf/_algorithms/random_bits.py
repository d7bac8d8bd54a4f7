"""Generate random 32-bit words with Threefry2x32, in one kernel with the code that reads them.

On CPUs `jax.random.bits` runs the rounds as a loop over arrays and discards half of each block. Here the cipher is elementwise
on a counter per draw, so XLA fuses it, and both words of a block are used.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Threefry2x32, 20 rounds).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms.uint64 import multiply_high

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# The first words of our counters: one for each use of a key, so that one key gives independent words to every use. JAX's
# counters begin with the high half of an index, which is 0 below 2^32 elements, so splitting, folding or drawing from the
# same key never encrypts one of our blocks.
QUERY, ORDER, BELOW, SHARE = range(0x66627566, 0x6662756A)


def pairs(key: jax.Array, number: int, use: int = QUERY) -> tuple[jax.Array, jax.Array]:
    """Return two independent words for each of `number` draws.

    Args:
      key: One PRNG key, typed or raw, of any implementation; consumed for this use.
      number: `B`, static.
      use: `QUERY`, `ORDER`, `BELOW` or `SHARE`.
    Returns:
      uint32[B] twice; entry i does not depend on B.
    Cost: about 70 integer operations a draw, fused with the reader.
    Example:
      >>> import jax
      >>> first, second = pairs(jax.random.key(0), 4)
      >>> first.shape, bool((first == pairs(jax.random.key(0), 9)[0][:4]).all())
      ((4,), True)
    """
    data = jax.random.key_data(key)
    if "threefry" not in str(jax.random.key_impl(key)):  # the data is no Threefry key
        data = jax.random.bits(jax.random.fold_in(key, use), (2,), jnp.uint32)
    counter = lax.iota(jnp.uint32, number)
    return _threefry(data[0], data[1], lax.full((number,), np.uint32(use)), counter)


def at(words: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two independent words for each 64-bit counter, always the same for one counter.

    Args:
      words: uint32[2], a secret key used for nothing else.
      high, low: uint32[B], the counters.
    Returns:
      uint32[B] twice.
    """
    return _threefry(words[0], words[1], high, low)


def consume(key: jax.Array) -> None:
    """Let `jax_debug_key_reuse` report another use of the key: it does not see that `pairs` reads the key's words."""
    if jax.config.jax_debug_key_reuse:  # type: ignore[attr-defined]
        jax.random.bits(key, (), jnp.uint32)


def fresh_key(key: jax.Array) -> Callable[[], jax.Array]:
    """Return a function that rebuilds the key from its words: for the body of a loop that uses it once.

    `jax_debug_key_reuse` reports a key from outside a loop as used by every iteration.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return lambda: key
    data, kind = jax.random.key_data(key), jax.random.key_impl(key)
    return lambda: jax.random.wrap_key_data(data, impl=kind)


def randint_below(key: jax.Array, shape: tuple[int, ...], bound: jax.Array) -> jax.Array:
    """Draw int32 uniformly from [0, bound) with 64 random bits each; 0 where bound is 0.

    It takes the high word of a 64 by 32 bit product. The bias is below 2^-32, and it is cheaper than `jax.random.randint`.
    """
    first, second = (words.reshape(shape) for words in pairs(key, math.prod(shape), BELOW))
    n = bound.astype(jnp.uint32)
    low = first * n
    total = low + multiply_high(second, n)
    return (multiply_high(first, n) + (total < low).astype(jnp.uint32)).astype(jnp.int32)


def _threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encrypt (x0, x1), uint32[B] each, with Threefry2x32 of 20 rounds."""
    schedule = (key0, key1, key0 ^ key1 ^ np.uint32(_PARITY))
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(distance)) | (x1 >> np.uint32(32 - distance)))
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
