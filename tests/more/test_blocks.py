"""`fbuf._blocks`: any shape and block, 64 bits, `vmap` and strict flags."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, example, given
from hypothesis import strategies as some

from fbuf import _blocks
from tests.support.blocks import check, noise, raw, shapes, use_all, x64


@given(
    shape=shapes,
    dtype=some.sampled_from(["uint8", "bool", "bfloat16", "float32"]),
    block=some.one_of(some.none(), some.tuples(some.integers(1, 20), some.integers(1, 20))),
    seed=some.integers(0, 2**32 - 1),
)
@example(shape=(1, 1, 4), dtype="uint8", block=(3, 4), seed=0)
@example(shape=(5, 5, 4), dtype="uint8", block=(3, 4), seed=0)
@example(shape=(5, 4, 4), dtype="uint8", block=(3, 4), seed=0)
def test_any_shape_and_block(shape: tuple[int, ...], dtype: str, block: tuple[int, int] | None, seed: int) -> None:
    channels = shape[-1] if len(shape) >= 3 and shape[-1] < 4 else 1
    assume(block is None or block[1] * channels * jnp.dtype(dtype).itemsize % 4 == 0)
    check(shape, dtype, block, rows=2, seed=seed)


def test_64_bit_dtypes_come_back_to_the_bit() -> None:
    with x64():
        check((9, 11, 3), "int64", None)
        check((9, 7, 4), "float64", (2, 3))


def test_eager_and_vmapped_are_the_same() -> None:
    leaf = jax.ShapeDtypeStruct((9, 11, 3), jnp.uint8)
    grid = _blocks.grid(leaf, None)
    values, other = (jnp.asarray(noise((4, 2, *leaf.shape), "uint8", seed)) for seed in (0, 1))
    at_once = jax.vmap(lambda a, b: use_all(a, b, grid, leaf))(values, other)
    with jax.disable_jit():
        one_by_one = [use_all(a, b, grid, leaf) for a, b in zip(values, other, strict=True)]
    for name, stacked in at_once.items():
        assert raw(stacked) == raw(jnp.stack([result[name] for result in one_by_one])), name


def test_rows_under_strict_flags() -> None:
    """Finite values: words that look like NaNs are integers, and the way there makes none."""
    values = np.random.default_rng(0).integers(0, 2, (3, 9, 11, 3)).astype(np.float32)
    with jax.numpy_dtype_promotion("strict"), jax.debug_nans(True), jax.debug_infs(True):
        check((9, 11, 3), "float32", None, values=values)
    with x64(), jax.numpy_dtype_promotion("strict"):
        check((9, 11, 3), "float32", None, values=values)
