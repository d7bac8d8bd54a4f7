"""Keyed permutations: one-to-one for every n, the same on every machine, and each value anywhere as often."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf._algorithms import random
from fbuf._algorithms.random import permute, shuffled
from tests.support.platforms import as_on_gpus
from tests.support.tables import by_tier
from tests.support.uniformity import chi_square_z

permute_jit = jax.jit(permute)
WORD = 2**32
LARGEST = 2**31 - 2**24 - 1


def key_of(seed):
    return jnp.asarray(np.random.default_rng(seed).integers(0, WORD, 2, np.uint32))


def order(seed, n):
    """All of it; of one shape for many n, so that it compiles once."""
    most = next(m for m in (2**17, 2**20 + 1, n) if m >= n)
    return np.asarray(permute_jit(key_of(seed), jnp.arange(most, dtype=jnp.int32), jnp.int32(n)))[:n]


def is_permutation(got):
    seen = np.zeros(len(got), bool)
    seen[got] = True
    return got.min() >= 0 and got.max() < len(got) and bool(seen.all())


def slow_permute(key, index, n):
    """One value, in Python's integers."""
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)

    def spread(x, by, multiplier):
        return (x ^ (x >> by)) * multiplier % WORD

    keys = []
    for i in range(1, 7):
        x = (i * 0x9E3779B9 + key[0]) % WORD
        for word in (key[1], key[0]):
            x = spread(x, 16, 0x21F0AAAD)
            x = (((x ^ (x >> 15)) + word) % WORD) * 0x735A2D97 % WORD
            x ^= x >> 15
        keys.append(x)

    def hashed(number, key, length):
        x = (number ^ key) * 0x21F0AAAD % WORD
        return spread(x, 15, 0x735A2D97) * length >> 32

    row, column = divmod(index, columns)
    while True:
        for i in range(0, 6, 2):
            row = (row + hashed(column, keys[i], rows)) % rows
            column = (column + hashed(row, keys[i + 1], columns)) % columns
        if row * columns + column < n:
            return row * columns + column


@pytest.mark.parametrize("n", [1, 2, 5, 1025, 65_537, 10**6, 2**24 + 1, 46_340**2 + 1, LARGEST])
def test_as_the_oracle(n):
    index = np.random.default_rng(n).integers(0, n, 60).astype(np.int32)
    key = key_of(n)
    got = permute_jit(key, index, np.int32(n))
    assert got.dtype == jnp.int32
    assert got.tolist() == [slow_permute(np.asarray(key).tolist(), int(i), n) for i in index]


def test_orders_never_change():
    """A state saved in the middle of an epoch continues it, in later versions too."""
    key = jnp.asarray([1, 2], jnp.uint32)
    got = [permute_jit(key, jnp.arange(5, dtype=jnp.int32), jnp.int32(n)).tolist() for n in (5, 2000, 10**6)]
    assert got == [[3, 1, 2, 0, 4], [1581, 685, 1754, 308, 1484], [845948, 794384, 718335, 368626, 25038]]


@pytest.mark.more
def test_one_to_one():
    index = jnp.arange(300, dtype=jnp.int32)
    every = jax.jit(jax.vmap(permute, (0, None, 0)))
    sizes = np.arange(1, 301, dtype=np.int32)
    for seed in range(3):
        keys = jnp.asarray(np.random.default_rng(seed).integers(0, WORD, (300, 2), np.uint32))
        got = np.asarray(every(keys, index, jnp.asarray(sizes)))
        assert all(is_permutation(one[:n]) for one, n in zip(got, sizes, strict=True))
    for n in (1023, 1024, 1025, 4095, 4096, 4097, 65_535, 65_536, 65_537):
        assert is_permutation(order(n, n))


def test_gpus_draw_the_same_orders_without_a_loop():
    """Of sizes with many cells outside: 15 of 256 for 241, 31 of 1,024 for 993."""
    sizes = np.array([2, 3, 5, 133, 183, 241, 993, 10_001, LARGEST], np.int32)
    index = jnp.arange(256, dtype=jnp.int32)

    @jax.jit
    def both(key, n):
        with as_on_gpus():
            other = permute(key, index, n)
        return permute(key, index, n), other

    for seed in range(30):
        key = key_of(seed)
        assert all(np.array_equal(*both(key, n)) for n in sizes)
    program = jax.jit(permute).trace(key, index, sizes[0]).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" not in program


@pytest.mark.more
def test_the_chance_that_gpus_stop_too_early():
    """A cell has to be moved outside by the first move and all walks; as often as by a random permutation."""
    n = np.arange(2, 2**20, dtype=np.int64)
    rows = np.array([math.isqrt(i - 1) for i in n.tolist()]) + 1
    cells = rows * -(-n // rows)
    move = np.arange(random._WALKS + 1)[:, None]
    each = np.prod(np.maximum(cells - n - move, 0) / np.maximum(cells - move, 1), axis=0)
    assert 0 < (each * np.minimum(n, 256)).max() < 1e-16


def test_places_outside_are_taken_for_the_nearest_inside():
    index = jnp.asarray([-(2**31), -1, 0, 9, 10, 11, 2**31 - 1], jnp.int32)
    got = permute_jit(key_of(0), index, jnp.int32(10)).tolist()
    assert got[:3] == [got[0]] * 3 and got[3:] == [got[3]] * 4
    assert permute_jit(key_of(0), index, jnp.int32(0)).tolist() == [0] * 7


def test_roots_are_exact():
    """A float32 root is one off for some; the sides, and so the order, must not depend on who rounds."""
    root = np.arange(1, 46_341, dtype=np.int64)
    for number in (root**2 - 1, root**2, root**2 + 1):
        number = number[number < 2**31]
        got = np.asarray(jax.jit(random._root)(jnp.asarray(number, jnp.uint32)))
        assert (got.astype(np.int64) ** 2 <= number).all() and ((got.astype(np.int64) + 1) ** 2 > number).all()


@pytest.mark.more
@pytest.mark.parametrize("keys", ["random", "counting"])
def test_values_at_a_place_are_uniform_over_keys(keys, n=1025):
    """So are the differences of two that stand side by side, as those in one batch do; for keys 0, 1, 2, ... as well."""
    number = 60_000
    words = np.random.default_rng(n).integers(0, WORD, (number, 2), np.uint32)
    if keys == "counting":
        words = np.stack([np.zeros(number, np.uint32), np.arange(number, dtype=np.uint32)], axis=1)
    places = jnp.asarray([0, 1, 2, n // 2, n // 2 + 1, n - 1], jnp.int32)
    got = np.asarray(jax.jit(jax.vmap(permute, (0, None, None)))(jnp.asarray(words), places, jnp.int32(n)))
    for column in got.T:
        assert abs(chi_square_z(np.bincount(column, minlength=n), np.full(n, 1 / n))) < 4
    for i, j in ((0, 1), (1, 2), (3, 4), (0, 5)):
        apart = np.bincount((got[:, j] - got[:, i]) % n, minlength=n)
        assert abs(chi_square_z(apart, np.r_[0.0, np.full(n - 1, 1 / (n - 1))])) < 4


def shuffles(m, n, number):
    bits = jax.random.bits(jax.random.key(m), (number, m), jnp.uint32)
    return np.asarray(jax.jit(jax.vmap(shuffled, (0, None)))(bits, jnp.int32(n)))


def test_every_order_of_a_few_is_as_likely():
    keys = jax.random.split(jax.random.key(0), 48_000)
    permuted = np.asarray(jax.jit(jax.vmap(lambda key: random.permutation(key, 4)))(keys))
    for got in (shuffles(4, 4, 48_000), shuffles(7, 4, 48_000), permuted):
        assert (got[:, 4:] == np.arange(4, got.shape[1])).all()
        names, counts = np.unique(got[:, :4] @ (10 ** np.arange(4)), return_counts=True)
        assert len(names) == 24 and abs(chi_square_z(counts, np.full(24, 1 / 24))) < 4


@pytest.mark.parametrize("n", [0, 1, 1000, 1024])
def test_shuffles_are_one_to_one(n):
    (got,) = shuffles(1024, n, 1)
    assert is_permutation(got) and (got[n:] == np.arange(n, 1024)).all()


def test_shuffles_survive_bits_all_alike():
    for word in (0, WORD - 1):
        assert shuffled(jnp.full((9,), word, jnp.uint32), jnp.int32(5)).tolist() == list(range(9))


def test_folded_keys_differ_and_give_independent_words():
    key = jax.random.key(7)
    every = [random.fold_in(key, jnp.int32(number)) for number in range(8)]
    words = np.asarray([jax.random.key_data(each) for each in every])
    assert (words[0] == np.asarray(jax.random.key_data(key))).all()
    near = np.asarray([jax.random.key_data(jax.random.key(seed)) for seed in range(1000)])
    assert len({tuple(row) for row in (*words[1:].tolist(), *near.tolist())}) == 7 + 1000
    drawn = np.stack([np.asarray(random.pairs(each, 1 << 14)[0]) for each in every])
    for one in range(1, 8):  # words of two keys agree in half of all bits
        same = np.unpackbits((drawn[0] ^ drawn[one]).view(np.uint8)).mean()
        assert abs(same - 0.5) < 5 / np.sqrt(4 * drawn[0].size * 32)
    assert (np.asarray(random.fold_in(jax.random.PRNGKey(7), jnp.int32(3))) == words[3]).all()
    other = jax.random.key(7, impl="rbg")
    assert (random.fold_in(other, jnp.int32(3)) == jax.random.fold_in(other, 3)).all()


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_words_of_any_key(kind):
    keys = jax.random.split(jax.random.key(0, impl=kind), 3)
    first, second = map(jnp.stack, zip(*(random.pairs(key, 9) for key in keys), strict=True))
    words = np.concatenate([first, second]).ravel()
    assert words.dtype == np.uint32 and len(np.unique(words)) == 54
    for key, one, other in zip(keys, first, second, strict=True):
        short = jax.jit(lambda key: random.pairs(key, 4))(key)
        np.testing.assert_array_equal(short[0], one[:4])
        np.testing.assert_array_equal(short[1], other[:4])
    data = jax.random.key_data(keys[0])
    for at in range(data.size):
        changed = jax.random.wrap_key_data(data.at[at].add(1), impl=kind)
        assert (random.pairs(changed, 9)[0] != first[0]).all(), f"word {at} of a key does not count"


@pytest.mark.parametrize(
    "n",
    by_tier(
        more=[10**6, 2**20 + 1],
        exhaustive=[2**20 - 1, 2**24 - 1, 2**24 + 1, 5 * 10**7, 4999**2, 4999**2 + 1],
    ),
)
def test_large_orders_are_one_to_one(n):
    assert is_permutation(order(n, n))
