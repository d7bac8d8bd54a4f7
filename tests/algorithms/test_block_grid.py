"""Frames are cut into blocks of words and put together again, as the oracle of `tests/support/block_grid.py` does."""

import ast
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from fbuf._algorithms import block_grid
from tests.support.block_grid import check, cut_by_hand, noise, raw, shapes

WITNESSES = [
    ((9, 11, 3), "uint8", None),
    ((5,), "bool", None),
    ((9, 7, 4), "int4", None),  # frames stacked last
    ((2, 9, 11), "bfloat16", (2, 6)),
    ((5, 4, 4), "float32", None),  # too small for frames stacked last: five frames of 4 x 4
    ((31, 33), "uint8", (7, 28)),
    ((), "int16", None),
    ((2, 1, 3, 7, 3), "float16", (2, 2)),
    ((4, 9, 11), "uint32", (100, 200)),
]


def test_rows_come_back_to_the_bit() -> None:
    for shape, dtype, block in WITNESSES:
        check(shape, dtype, block, rows=2)


def test_bits_and_not_values_are_compared() -> None:
    """Zeros of both signs differ; a NaN is like itself, and unlike a NaN of another payload."""
    zero, nan, other = np.float32(0.0), np.uint32(0x7FC00001), np.uint32(0x7FC00002)
    a = np.array([[zero, nan.view(np.float32), nan.view(np.float32)]], np.float32)
    b = np.array([[-zero, nan.view(np.float32), other.view(np.float32)]], np.float32)
    grid = block_grid.grid(jax.ShapeDtypeStruct((3,), jnp.float32), (1, 1))
    words = [block_grid.to_words(jnp.asarray(x), grid) for x in (a, b)]
    np.testing.assert_array_equal(block_grid.differ(*words, grid), [[True, False, True]])
    blocks = words[1].reshape(1, 3, 1)
    np.testing.assert_array_equal(block_grid.differ_from_blocks(words[0], blocks, grid), [[True, False, True]])


def test_items_are_taken_in_any_order() -> None:
    leaf = jax.ShapeDtypeStruct((2, 9, 11, 3), jnp.uint8)
    grid = block_grid.grid(leaf, (4, 4))
    values = noise((5, *leaf.shape), "uint8")
    expected = [block for row in cut_by_hand(values, 4, 12) for block in row]
    items = np.random.default_rng(1).integers(0, len(expected), 333).astype(np.int32)
    taken = block_grid.take(block_grid.to_words(jnp.asarray(values), grid), grid, jnp.asarray(items))
    assert [raw(block) for block in taken] == [expected[i] for i in items]


DEFAULTS = [
    ((84, 84), "uint8", 7, 12),
    ((4, 84, 84), "uint8", 7, 12),
    ((84, 84, 4), "uint8", 7, 12),
    ((96, 96, 3), "uint8", 7, 12),
    ((64, 64), "float32", 8, 16),
    ((84, 85, 3), "uint8", 7, 24),  # 13 bytes would be enough: 16 fill words, 24 cut no pixel either
]


def test_default_blocks_are_about_7_lines_of_12_bytes() -> None:
    for shape, dtype, high, wide in DEFAULTS:
        grid = block_grid.grid(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), None)
        assert (grid.rows, 4 * grid.words) == (high, wide)


@given(shape=shapes, dtype=some.sampled_from(["uint8", "int16", "float32"]))
@example(shape=(84, 85, 3), dtype="uint8")
@example(shape=(84, 85, 3), dtype="float32")
def test_the_default_fits_every_shape(shape: tuple[int, ...], dtype: str) -> None:
    """No block is out of proportion or outside the frame, and no element is cut in two."""
    grid = block_grid.grid(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), None)
    channels = shape[-1] if len(shape) >= 3 and shape[-1] < 4 else 1
    assert 4 * grid.words % (channels * jnp.dtype(dtype).itemsize) == 0
    assert (grid.down - 1) * grid.rows < grid.height and (grid.across - 1) * 4 * grid.words < grid.line
    assert grid.rows <= 10 and 4 * grid.block_words <= 4 * block_grid.BLOCK_BYTES


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_widths_that_do_not_fill_words(dtype: str, channels: int) -> None:
    """Refused with the next width that does; the code of the message works."""
    leaf = jax.ShapeDtypeStruct((30, 30, channels), jnp.dtype(dtype))
    pixel = channels * leaf.dtype.itemsize
    refused = 0
    for width in range(1, 13):
        if width * pixel % 4 == 0:
            assert 4 * block_grid.grid(leaf, (5, width)).words == width * pixel
            continue
        refused += 1
        with pytest.raises(ValueError) as error:
            block_grid.grid(leaf, (5, width))
        text = str(error.value)
        assert text.startswith(f"Deduplicated: a line of a block has {width * pixel} bytes; expected a multiple of 4")
        fix = re.search(r"Write block=(\(.*\))\.$", text)
        assert fix
        block = ast.literal_eval(fix[1])
        assert block == (5, next(w for w in range(width, 99) if w * pixel % 4 == 0))
        assert block_grid.grid(leaf, block).rows == 5
    assert refused == {1: 9, 2: 6, 4: 0, 6: 6, 3: 9, 8: 0, 12: 0}[pixel]
