"""Numbers of 64 bits are rounded once to float32, as NumPy rounds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf._algorithms.rounding import to_float32

COUNT = 100_000


def floats(rng):
    """Return float64s of all sizes, ties and their neighbours among them, also where float32 has fewer digits."""
    exponent = rng.integers(1023 - 155, 1023 + 130, COUNT).astype(np.uint64) << np.uint64(52)
    fraction = rng.integers(0, 2**52, COUNT, dtype=np.uint64)
    short = (fraction >> np.uint64(29)) << np.uint64(29)
    few = (fraction >> np.uint64(44)) << np.uint64(44)
    half = short | np.uint64(2**28)
    fractions = (fraction, short, half, half + np.uint64(1), half - np.uint64(1), few, few | np.uint64(1))
    numbers = np.concatenate([exponent | part for part in fractions]).view(np.float64)
    edges = [
        0,
        np.inf,
        np.nan,
        np.finfo(np.float32).max,
        3.4028235677973366e38,
        3.4028235677973362e38,
        2.0**-150,
        5e-324,
    ]
    numbers = np.concatenate([numbers, edges, rng.integers(0, 2**64, COUNT, dtype=np.uint64).view(np.float64)])
    return np.concatenate([numbers, -numbers])


def integers(rng):
    """Return uint64s of all sizes, ties and their neighbours among them."""
    size = rng.integers(0, 40, COUNT).astype(np.uint64)
    tie = rng.integers(2**24, 2**25, COUNT).astype(np.uint64) << size
    any_size = rng.integers(0, 2**64, COUNT, dtype=np.uint64) >> rng.integers(0, 64, COUNT).astype(np.uint64)
    edges = np.array([0, 1, 2**63, 2**64 - 1, 2**32, 2**32 - 1, 2**31], np.uint64)
    return np.concatenate([tie, tie + np.uint64(1), tie - np.uint64(1), any_size, edges])


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_numbers_are_rounded_as_numpy_rounds_them(dtype):
    rng = np.random.default_rng(0)
    numbers = floats(rng) if dtype == "float64" else integers(rng).view(dtype)
    pairs = jnp.asarray(numbers[:, None].view(np.uint32))
    got = np.asarray(jax.jit(to_float32, static_argnums=1)(pairs, numbers.dtype))
    with np.errstate(all="ignore"):
        wanted = numbers.astype(np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))
    assert to_float32(pairs.reshape(1, -1, 2), numbers.dtype).shape == (1, len(numbers))
