"""Frames are cut into blocks of words and put together again, as slices of numpy do."""

import ast
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as some

from fbuf._algorithms import block_grid
from tests.support.frame_blocks import cut_by_hand
from tests.support.trees import x64


def noise(shape, dtype, seed=0):
    """Every bit pattern of the dtype is as likely as every other: NaNs of all payloads, both zeros, denormals."""
    draw = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    if dtype == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    if dtype.endswith(("int2", "int4")):
        bits = int(dtype[-1])
        low = 0 if dtype.startswith("u") else -(2 ** (bits - 1))
        return draw.integers(low, low + 2**bits, shape).astype(np.int8).astype(kind)
    highest = 16 if dtype.startswith("float4") else 256
    drawn = draw.integers(0, highest, (int(np.prod(shape)), kind.itemsize), dtype=np.uint8)
    return drawn.view(kind).reshape(shape)


def raw(values):
    """The bytes of an array, which compare where NaNs do not."""
    return np.ascontiguousarray(np.asarray(values)).tobytes()


def in_planes(block, rows, size, last):
    """The bytes of a block in the order in which words hold them: four elements of one byte from four parts of its lines."""
    planes = max(1, 4 // size)
    if last or rows % planes:
        return block
    return np.moveaxis(np.frombuffer(block, f"u{size}").reshape(planes, -1), 0, 1).tobytes()


@functools.partial(jax.jit, static_argnums=(2, 3))
def use_all(values, other, grid, leaf):
    """Everything the module computes of two lots of rows."""
    number = values.shape[0]
    a, b = block_grid.to_words(values, grid), block_grid.to_words(other, grid)
    items = jnp.arange(number * grid.blocks, dtype=jnp.int32)
    taken = block_grid.take(a, grid, items).reshape(number, grid.blocks, grid.block_words)
    theirs = block_grid.take(b, grid, items[::-1]).reshape(taken.shape)[::-1, ::-1]
    return {
        "blocks": taken,
        "back": block_grid.from_blocks(taken, grid, leaf),
        "rows_last": jnp.moveaxis(block_grid.from_words_of_blocks(taken.T, grid, leaf), -1, 0),
        "differ": block_grid.differ(a, b, grid),
        "differ_from_blocks": block_grid.differ_from_blocks(a, theirs, grid),
    }


def changed(values, seed):
    """A copy with one bit of a few elements of some rows flipped."""
    draw = np.random.default_rng(seed)
    flat = values.reshape(values.shape[0], -1).copy()
    name = str(values.dtype)
    for row in range(values.shape[0]):
        for at in draw.integers(0, flat.shape[1], draw.integers(0, 4)):
            if name == "bool":
                flat[row, at] = not flat[row, at]
            elif name.endswith(("int2", "int4")):  # any other value of the type
                flat[row, at] = flat[row, at].astype(np.int8) ^ np.int8(1)
            elif name.startswith("float4"):
                flat[row].view(np.uint8)[at] ^= np.uint8(1)
            else:
                bits = flat[row].view(f"u{values.itemsize}")
                bits[at] ^= bits.dtype.type(1 << draw.integers(0, 8 * values.itemsize))
    return flat.reshape(values.shape)


def check(shape, dtype, block, rows=3, seed=0, values=None):
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    grid = block_grid.grid(leaf, block)
    values = noise((rows, *shape), dtype, seed) if values is None else values
    other = changed(values, seed)
    ours, theirs = (cut_by_hand(x, grid.rows, 4 * grid.words) for x in (values, other))
    differs = np.array([[x != y for x, y in zip(*pair, strict=True)] for pair in zip(ours, theirs, strict=True)])

    assert grid.blocks == len(ours[0]) and grid.block_words * 4 == len(ours[0][0])
    if block is not None:
        channels = shape[-1] if len(shape) >= 3 and shape[-1] < 4 else 1
        size = 1 if dtype.endswith(("int2", "int4")) else values.itemsize
        assert grid.rows == block[0] and 4 * grid.words == block[1] * channels * size
    got = use_all(jnp.asarray(values), jnp.asarray(other), grid, leaf)
    assert raw(got["blocks"]) == b"".join(
        in_planes(block, grid.rows, grid.size, grid.last) for row in ours for block in row
    )
    assert got["back"].dtype == leaf.dtype and got["back"].shape == (rows, *shape)
    assert raw(got["back"]) == raw(got["rows_last"]) == raw(values)
    assert got["rows_last"].dtype == leaf.dtype and got["rows_last"].shape == (rows, *shape)
    np.testing.assert_array_equal(got["differ"], differs)
    np.testing.assert_array_equal(got["differ_from_blocks"], differs)


shapes = some.one_of(
    some.lists(some.integers(1, 40), min_size=0, max_size=2),
    some.builds(
        lambda lead, frame, last: [*lead, *frame, *last],
        some.lists(some.integers(1, 3), max_size=2),
        some.tuples(some.integers(1, 14), some.integers(1, 14)),
        some.one_of(some.just(()), some.tuples(some.integers(1, 6))),
    ),
).map(tuple)


def test_rows_come_back_to_the_bit():
    for shape, dtype, block in (
        ((9, 11, 3), "uint8", None),
        ((5,), "bool", None),
        ((9, 7, 4), "int4", None),  # frames stacked last
        ((2, 9, 11), "bfloat16", (2, 6)),
        ((9, 11, 3), "uint8", (4, 4)),  # four lines share words
        ((5, 4, 4), "float32", None),  # too small for frames stacked last: five frames of 4 x 4
        ((31, 33), "uint8", (7, 28)),
        ((22, 17), "uint8", (12, 8)),  # four parts of three lines share words
        ((), "int16", None),
        ((2, 1, 3, 7, 3), "float16", (2, 2)),
        ((4, 9, 11), "uint32", (100, 200)),
    ):
        check(shape, dtype, block, rows=2)


def test_bits_and_not_values_are_compared():
    zero, nan, other = np.float32(0.0), np.uint32(0x7FC00001), np.uint32(0x7FC00002)
    a = np.array([[zero, nan.view(np.float32), nan.view(np.float32)]], np.float32)
    b = np.array([[-zero, nan.view(np.float32), other.view(np.float32)]], np.float32)
    grid = block_grid.grid(jax.ShapeDtypeStruct((3,), jnp.float32), (1, 1))
    words = [block_grid.to_words(jnp.asarray(x), grid) for x in (a, b)]
    np.testing.assert_array_equal(block_grid.differ(*words, grid), [[True, False, True]])
    blocks = words[1].reshape(1, 3, 1)
    np.testing.assert_array_equal(block_grid.differ_from_blocks(words[0], blocks, grid), [[True, False, True]])


@given(shape=shapes, dtype=some.sampled_from(["uint8", "int16", "float32"]))
@example(shape=(84, 85, 3), dtype="uint8")
@example(shape=(84, 85, 3), dtype="float32")
def test_the_default_fits_every_shape(shape, dtype):
    grid = block_grid.grid(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), None)
    channels = shape[-1] if len(shape) >= 3 and shape[-1] < 4 else 1
    assert 4 * grid.words % (channels * jnp.dtype(dtype).itemsize) == 0
    assert (grid.down - 1) * grid.rows < grid.height and (grid.across - 1) * 4 * grid.words < grid.line
    assert grid.rows <= 18 and 4 * grid.block_words <= 4 * block_grid.BLOCK_BYTES


def test_default_blocks_are_about_12_lines_of_12_bytes():
    for shape, dtype, high, wide in (
        ((84, 84, 4), "uint8", 12, 12),
        ((64, 64), "float32", 16, 16),
        ((30, 84), "uint8", 15, 12),  # 16 lines would pad it
        ((210, 85, 3), "uint8", 12, 24),  # 13 bytes would be enough: 16 fill words, 24 cut no pixel either
    ):
        grid = block_grid.grid(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), None)
        assert (grid.rows, 4 * grid.words) == (high, wide)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_widths_that_do_not_fill_words(dtype, channels):
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


@pytest.mark.more
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


@pytest.mark.more
def test_64_bit_dtypes_come_back_to_the_bit():
    with x64():
        check((9, 11, 3), "int64", None)
        check((9, 7, 4), "float64", (2, 3))
