"""Random words, integers and permutations from a key, cheaper than those of `jax.random`.

Words are those of Threefry2x32. On CPUs `jax.random.bits` runs its rounds as a loop over arrays and discards half of each
block; here it is elementwise on a counter per draw, so XLA fuses it, and both words of a block are used.

A *keyed permutation* is a bijection of [0, n) named by a key, O(1) a position, without storing the order. The n numbers fill a
nearly square rectangle of R rows and C columns. Six rounds of a Feistel network alternately rotate the row by a hash of the
column, and the column by a hash of the row. The few cells outside are permuted again (cycle walking). Only 2^64 of the n!
orders occur, so `samplers.Epoch` shuffles up to `SHUFFLED` items exactly. `permute` returns some positions,
`permutation` a whole order, `shuffled` an order of the first n of an array.

Sources: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Black and Rogaway 2002, "Ciphers with Arbitrary
Finite Domains"; Wellons 2018, "Prospecting for Hash Functions" (the constants).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._core import control_flow
from fbuf._core.control_flow import any_unbatched

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


def unit(words: jax.Array) -> jax.Array:
    """Return float32 in [0, 1) with 24 random bits; `jax.random.uniform` has 23."""
    return (words >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2**-24)


def at(words: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two independent words for each 64-bit counter, always the same for one counter.

    Args:
      words: uint32[2], a secret key used for nothing else.
      high, low: uint32[B], the counters.
    Returns:
      uint32[B] twice.
    """
    return _threefry(words[0], words[1], high, low)


def fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    """Return a key for each `number` int32[] >= 0, that of 0 being `key`: `jax.random.fold_in` without kernels on CPUs.

    Threefry gives independent words to keys that differ in any bit. Multiples of an odd constant keep the first words of keys
    apart, which for `jax.random.key(seed)` are 0.
    """
    if "threefry" not in str(jax.random.key_impl(key)):
        return jax.random.fold_in(key, number)
    words = jax.random.key_data(key) + number.astype(jnp.uint32) * np.array([0x9E3779B9, 0], np.uint32)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key)) if key.dtype != words.dtype else words


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
    return partial(jax.random.wrap_key_data, data, impl=kind)


def randint_below(key: jax.Array, shape: tuple[int, ...], bound: jax.Array) -> jax.Array:
    """Draw int32 uniformly from [0, bound) with 64 random bits each; 0 where bound is 0.

    It takes the high word of a 64 by 32 bit product. The bias is below 2^-32, and it is cheaper than `jax.random.randint`.
    """
    first, second = (words.reshape(shape) for words in pairs(key, math.prod(shape), BELOW))
    n = bound.astype(jnp.uint32)
    low = first * n
    total = low + multiply_high(second, n)
    return (multiply_high(first, n) + (total < low).astype(jnp.uint32)).astype(jnp.int32)


@partial(jax.jit, inline=True)  # traced once for each shape
def multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the high 32 bits of a product of uint32s."""
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    a1, a0, b1, b0 = a >> half, a & mask, b >> half, b & mask
    middle = a1 * b0 + (a0 * b0 >> half)
    return a1 * b1 + (middle >> half) + ((middle & mask) + a0 * b1 >> half)


@partial(jax.jit, inline=True)  # traced once for each shape
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


ROUNDS = 6
_WALKS = 12  # on GPUs; a cell of a batch is still outside with a chance below 1e-16 (tests/algorithms/test_random.py)
SHUFFLED = 1024
"""Most items that samplers shuffle exactly; more items use the keyed permutation."""


def permute(key_data: jax.Array, index: jax.Array, n: jax.Array) -> jax.Array:
    """Return the elements at positions `index` of the order of [0, n) that `key_data` names.

    Args:
      key_data: uint32[2], random bits.
      index: int32[B], clipped to [0, n).
      n: int32[], in [1, 2^31 - 2^24).
    Returns:
      int32[B], in [0, n); all different if the positions are.
    Cost: O(B).
    """
    size = jnp.maximum(n, jnp.int32(1)).astype(jnp.uint32)
    rows = _root(size - jnp.uint32(1)) + jnp.uint32(1)  # at most 46,341
    columns = (size + rows - jnp.uint32(1)) // rows
    keys = _round_keys(key_data)

    def move(row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        for i in range(0, ROUNDS, 2):
            row = _round(row, _hash(column, keys[i]), rows)
            column = _round(column, _hash(row, keys[i + 1]), columns)
        return row, column

    def outside(row: jax.Array, column: jax.Array) -> jax.Array:
        return row * columns + column >= size

    def walk(cell: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out = outside(*cell)
        row, column = move(*cell)
        return jnp.where(out, row, cell[0]), jnp.where(out, column, cell[1])

    def walk_until_inside(cell: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return control_flow.while_loop(lambda cell: any_unbatched(outside(*cell)), walk, cell)

    def walk_often(cell: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:  # the host waits for such a loop
        return control_flow.fori_loop(0, _WALKS, lambda _, cell: walk(cell), cell, unroll=True)

    place = jnp.clip(index, jnp.int32(0), size.astype(jnp.int32) - jnp.int32(1)).astype(jnp.uint32)
    cell = move(place // columns, place % columns)
    row, column = control_flow.platform_dependent(cell, gpu=walk_often, default=walk_until_inside)
    return (row * columns + column).astype(jnp.int32)


def permutation(key: jax.Array, number: int) -> jax.Array:
    """Return a random order of [0, number), int32[number].

    Up to 32 items, every order is equally likely. More items use the keyed permutation.
    """
    if number > 32:
        sides = _rectangle(number)
        if sides is not None:
            return _fill(key, *sides)
        return permute(key_words(key), jnp.arange(number, dtype=jnp.int32), jnp.int32(number))
    # A key names the orders of few items unevenly. Counting smaller words costs a tenth of a sort.
    word, place = pairs(key, number, ORDER)[0], jnp.arange(number, dtype=jnp.int32)
    before = (word[None, :] < word[:, None]) | ((word[None, :] == word[:, None]) & (place[None, :] < place[:, None]))
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def key_words(key: jax.Array) -> jax.Array:
    """Return the random bits of `key` that name an order for `permute`, uint32[2]."""
    return jnp.concatenate(pairs(key, 1, ORDER))


def _rectangle(number: int) -> tuple[int, int] | None:
    """Return the two most similar factors; None if one is more than four times the other."""
    rows = next(side for side in range(math.isqrt(number), 0, -1) if number % side == 0)
    return (rows, number // rows) if number <= 4 * rows**2 else None


def _fill(key: jax.Array, rows: int, columns: int) -> jax.Array:
    """Return a random order of [0, rows * columns): the network without spare cells, so nothing walks."""
    hashed = pairs(key, ROUNDS // 2, ORDER)
    cell = np.arange(rows * columns, dtype=np.uint32)
    row, column = jnp.asarray(cell // np.uint32(columns)), jnp.asarray(cell % np.uint32(columns))
    for i in range(ROUNDS // 2):
        of_row, of_column = (lax.index_in_dim(words, i, keepdims=False) for words in hashed)
        row = _round(row, _hash(column, of_row), jnp.uint32(rows))
        column = _round(column, _hash(row, of_column), jnp.uint32(columns))
    return (row * jnp.uint32(columns) + column).astype(jnp.int32)


def shuffled(bits: jax.Array, n: jax.Array) -> jax.Array:
    """Shuffle [0, n) and keep the rest of [0, M) in place; every order is equally likely.

    Args:
      bits: uint32[M], random. Two equal words (chance M^2 / 2^33) keep their order, so M is small.
      n: int32[].
    Cost: O(M log M).
    """
    place = jnp.arange(bits.shape[0], dtype=jnp.int32)
    last = jnp.where(place < n, bits, jnp.uint32(2**32 - 1))  # the sort is stable, so the rest stays last
    return lax.sort((last, place), num_keys=1, is_stable=True)[1]


def _root(number: jax.Array) -> jax.Array:
    """Return the integer square root of uint32[] below 2^31, exact on every backend."""
    near = jnp.sqrt(number.astype(jnp.float32)).astype(jnp.uint32)  # at most one off
    near = near - (near * near > number).astype(jnp.uint32)
    above = near + jnp.uint32(1)
    return near + (above * above <= number).astype(jnp.uint32)


def _round(side: jax.Array, hashed: jax.Array, length: jax.Array) -> jax.Array:
    """Rotate `side` by a hash scaled to [0, length): the high word of a 32 by 16 bit product."""
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    offset = ((hashed >> half) * length + ((hashed & mask) * length >> half)) >> half
    moved = side + offset
    return lax.select(moved >= length, moved - length, moved)


def _hash(number: jax.Array, key: jax.Array) -> jax.Array:
    """Return uint32 whose high bits depend on every bit of `number` (16 bits) and of the key."""
    x = (number ^ key) * jnp.uint32(0x21F0AAAD)
    return (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x735A2D97)


def _round_keys(key_data: jax.Array) -> jax.Array:
    """Return uint32[ROUNDS], each a hash of both words."""
    number = jnp.arange(1, ROUNDS + 1, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    x = number + key_data[0]
    for word in (key_data[1], key_data[0]):
        x = x ^ (x >> jnp.uint32(16))
        x = x * jnp.uint32(0x21F0AAAD)
        x = x ^ (x >> jnp.uint32(15))
        x = (x + word) * jnp.uint32(0x735A2D97)
        x = x ^ (x >> jnp.uint32(15))
    return x
