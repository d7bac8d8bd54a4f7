"""Random 32-bit words for a batch, in one kernel with what uses them.

`jax.random.bits` on a CPU runs Threefry's rounds as a loop over arrays, five times through memory, and throws half of each
block away: 8 ns a word, a fifth of a prioritized step of 4,096 rows. The same cipher written out, on a counter per draw, is
arithmetic that XLA fuses with its reader, and both words of a block are used: 0.5 to 1 ns. Weaker mixers (a hash of the
counter) were rejected: what is drawn must pass a chi-square test over 25 million draws, and nobody should have to ask why.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Threefry2x32, 20 rounds).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms.uint64 import multiply_high

__all__ = ["anew", "at", "pairs", "randint_below"]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# The first word of our counters. JAX's own begin with the high half of an index, 0 below 2^32 elements, so a key may be
# split, folded or drawn from elsewhere without any of these blocks appearing there.
_OURS = 0x66627566


def pairs(key: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Two independent words for each of `number` draws.

    Args:
      key: one PRNG key, typed or raw, of any implementation; consumed.
      number: `B`, static.
    Returns:
      uint32[B] twice; entry i is the same whatever B.
    Cost: about 70 integer operations a draw, where it is used.
    Example:
      >>> import jax
      >>> first, second = pairs(jax.random.key(0), 4)
      >>> first.shape, bool((first == pairs(jax.random.key(0), 9)[0][:4]).all())
      ((4,), True)
    """
    data = jax.random.key_data(key)
    if "threefry" not in str(jax.random.key_impl(key)):  # its data is then a key of the cipher
        data = jax.random.bits(key, (2,), jnp.uint32)
    counter = lax.iota(jnp.uint32, number)
    return _threefry(data[0], data[1], jnp.full((number,), _OURS, jnp.uint32), counter)


def at(words: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two independent words for each 64-bit counter: of the same counter always the same.

    Args:
      words: uint32[2], what is secret; of a key that serves nothing else.
      high, low: uint32[B], the counters.
    Returns:
      uint32[B] twice.
    """
    return _threefry(words[0], words[1], high, low)


def anew(key: jax.Array) -> Callable[[], jax.Array]:
    """The key, made of its words by each call: for the body of a loop that uses it once, in whichever turn.

    `jax_debug_key_reuse` takes a key from outside a loop for one that each turn uses again.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return lambda: key
    data, kind = jax.random.key_data(key), jax.random.key_impl(key)
    return lambda: jax.random.wrap_key_data(data, impl=kind)


def randint_below(key: jax.Array, shape: tuple[int, ...], bound: jax.Array) -> jax.Array:
    """Draw int32 uniformly from [0, bound), of 64 random bits each; 0 where bound is 0.

    The high word of a 64 by 32 bit product: a bias below 2^-32, and cheaper than `jax.random.randint`.
    """
    bits = jax.random.bits(key, (2, *shape), jnp.uint32)
    n = bound.astype(jnp.uint32)
    carry_in = multiply_high(bits[1], n)
    low = bits[0] * n
    total = low + carry_in
    return (multiply_high(bits[0], n) + (total < low).astype(jnp.uint32)).astype(jnp.int32)


def _threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry2x32 of (x0, x1), uint32[B] each, 20 rounds."""
    schedule = (key0, key1, key0 ^ key1 ^ np.uint32(_PARITY))
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(distance)) | (x1 >> np.uint32(32 - distance)))
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
