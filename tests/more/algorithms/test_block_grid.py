"""`fbuf._algorithms.block_grid`: any shape and block, 64 bits, `vmap` and strict flags."""

import jax.numpy as jnp
from hypothesis import assume, example, given
from hypothesis import strategies as some

from tests.support.block_grid import check, shapes
from tests.support.trees import x64


@given(
    shape=shapes,
    dtype=some.sampled_from(["uint8", "bool", "bfloat16", "float32"]),
    block=some.one_of(some.none(), some.tuples(some.integers(1, 20), some.integers(1, 20))),
    seed=some.integers(0, 2**32 - 1),
)
@example(shape=(1, 1, 4), dtype="uint8", block=(3, 4), seed=0)
@example(shape=(5, 5, 4), dtype="uint8", block=(3, 4), seed=0)
@example(shape=(5, 4, 4), dtype="uint8", block=(3, 4), seed=0)
def test_any_shape_and_block(shape, dtype, block, seed):
    channels = shape[-1] if len(shape) >= 3 and shape[-1] < 4 else 1
    assume(block is None or block[1] * channels * jnp.dtype(dtype).itemsize % 4 == 0)
    check(shape, dtype, block, rows=2, seed=seed)


def test_64_bit_dtypes_come_back_to_the_bit():
    with x64():
        check((9, 11, 3), "int64", None)
        check((9, 7, 4), "float64", (2, 3))
