"""`fbuf._blocks`: every dtype, shape and size of block."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from tests.support.blocks import check, x64

SMALL = ("bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32")


FLOATS = ("bfloat16", "float16", "float32") + tuple(
    f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
)


NARROW = tuple(name for name in SMALL + FLOATS if name == "bool" or hasattr(jnp, name))  # older releases lack some


WIDE = ("int64", "uint64", "float64")


SHAPES = [
    (),
    (1,),
    (3,),
    (1030,),
    (84, 84),
    (5, 7),
    (1, 1),
    (13, 1),
    (210, 160, 3),
    (9, 11, 3),
    (9, 11, 2),
    (9, 11, 1),
    (4, 84, 84),
    (4, 9, 11),
    (84, 84, 4),
    (9, 11, 4),
    (9, 5, 4),
    (5, 4, 4),  # too small for frames stacked last: five frames of 4 x 4
    (4, 9, 11, 3),
    (2, 9, 11, 4),
    (2, 3, 5, 6, 7),
    (2, 2, 9, 7, 4),
    (2, 1, 3, 7, 3),
]


@pytest.mark.parametrize("shape", [(9, 11, 3), (9, 7, 4), (5,)], ids=str)
@pytest.mark.parametrize("dtype", [*NARROW, "float4_e2m1fn"])
def test_every_dtype_comes_back_to_the_bit(dtype: str, shape: tuple[int, ...]) -> None:
    if not hasattr(jnp, dtype) and dtype != "bool":
        pytest.skip(f"this jax has no {dtype}")
    check(shape, dtype, None)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("shape", [(), (9, 11), (9, 11, 3), (9, 7, 4), (2, 3, 5)], ids=str)
def test_64_bit_dtypes_come_back_to_the_bit(dtype: str, shape: tuple[int, ...]) -> None:
    with x64():
        check(shape, dtype, None)
        check(shape, dtype, (2, 3))


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_comes_back_to_the_bit(shape: tuple[int, ...], dtype: str) -> None:
    check(shape, dtype, None, rows=2)


@pytest.mark.parametrize("block", [(1, 4), (5, 12), (7, 28), (84, 84), (100, 200), (1, 400), (83, 4)], ids=str)
@pytest.mark.parametrize("shape", [(84, 84), (2, 31, 33), (31, 33, 3), (31, 33, 4), (50,)], ids=str)
def test_blocks_of_a_size_asked_for(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    check(shape, "uint8", block, rows=2)
