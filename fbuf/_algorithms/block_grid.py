"""Frames cut into blocks of 32-bit words, and put together again.

A leaf is seen as frames `[H, W, channels]`; a frame as a grid of blocks of `h` rows by `w` pixels, each a run of uint32
words. Everything is exact for every dtype, because only bits are moved. Frames that the grid does not divide are padded
with zeros at the right and at the bottom.

Words, not bytes: XLA moves tiles of bytes several times more slowly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._core.component import component

LINE_BYTES, BLOCK_BYTES, BLOCK_ROWS = 12, 84, 7
"""What a block measures when nobody says: 7 rows of 12 bytes, as small as any on ten Atari games and fast to put together."""
MOST_BLOCKS = 2**14
"""Blocks of a row before larger ones are taken."""
STACKED_LAST = 4
"""`[H, W, 4]` is taken for four frames stacked along the last axis, as Atari wrappers make them; 1 to 3 for colours."""


@component
class Grid:
    """How one row of a leaf is cut."""

    frames: int  # S, frames a row: a stack is cut frame by frame
    height: int  # H
    line: int  # bytes in one line of a frame
    rows: int  # h, lines a block
    words: int  # words of each line that a block covers
    size: int  # bytes of an element, as it is moved (1 for booleans)
    last: bool  # frames lie along the last axis

    @property
    def down(self) -> int:
        """Blocks from top to bottom."""
        return -(-self.height // self.rows)

    @property
    def across(self) -> int:
        """Blocks from left to right."""
        return -(-self.line // (4 * self.words))

    @property
    def blocks(self) -> int:
        """Blocks of one row of the leaf."""
        return self.frames * self.down * self.across

    @property
    def block_words(self) -> int:
        """uint32 words of a block."""
        return self.rows * self.words


def frame_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int, bool]:
    """Frames, height, width and channels of a leaf of this shape, and whether its frames lie along the last axis."""
    if len(shape) < 2:
        return 1, 1, int(np.prod(shape, dtype=np.int64)), 1, False
    if len(shape) >= 3 and shape[-1] == STACKED_LAST and min(shape[-3:-1]) > STACKED_LAST:
        return int(np.prod(shape[:-3], dtype=np.int64)) * shape[-1], shape[-3], shape[-2], 1, True
    if len(shape) >= 3 and shape[-1] < STACKED_LAST:
        return int(np.prod(shape[:-3], dtype=np.int64)), shape[-3], shape[-2], shape[-1], False
    return int(np.prod(shape[:-2], dtype=np.int64)), shape[-2], shape[-1], 1, False


def element_bytes(dtype: np.dtype) -> int:
    """Bytes an element takes when it is moved: sub-byte integers and booleans take one."""
    return max(1, jnp.dtype(dtype).itemsize)


def grid(leaf: jax.ShapeDtypeStruct, block: tuple[int, int] | None) -> Grid:
    """The grid of a leaf under blocks of `(h, w)` pixels, or of the size found best on average.

    Raises:
      ValueError: `w` pixels do not fill whole 32-bit words; the message names the next width that does.
    """
    frames, height, width, channels, last = frame_shape(tuple(leaf.shape))
    size = element_bytes(leaf.dtype)
    line = width * channels * size
    if block is None:
        scale = 1
        while True:
            number = max(1, round(height / (BLOCK_ROWS * scale)))
            rows = -(-height // number)
            least = max(LINE_BYTES, BLOCK_BYTES // rows) * scale
            wide = -(-line // max(1, round(line / least)))
            unit = int(np.lcm(4, channels * size))
            words = -(-wide // unit) * unit // 4
            cut = Grid(frames, height, line, rows, words, size, last)
            if cut.blocks <= MOST_BLOCKS or (rows >= height and 4 * words >= line):
                return cut
            scale *= 2  # large pictures, large blocks
    rows, pixels = block
    wide = pixels * channels * size
    if wide % 4:
        fine = next(p for p in range(pixels, pixels + 5) if p * channels * size % 4 == 0)
        raise ValueError(
            f"Deduplicated: block=({rows}, {pixels}) covers {wide} bytes of a line of {leaf.dtype}{list(leaf.shape)}; "
            f"expected a multiple of 4 (blocks are made of 32-bit words). Write block=({rows}, {fine})."
        )
    words = wide // 4
    return Grid(frames, height, line, rows, words, size, last)


def to_words(values: jax.Array, cut: Grid) -> jax.Array:
    """Rows `[R, *shape]` as uint32[R, S * lines, words of a line], padded to whole blocks; the layout of the frames stays."""
    number = values.shape[0]
    bits = to_bits(values)
    if cut.last:
        bits = jnp.moveaxis(bits.reshape(number, -1, *bits.shape[-3:]), -1, 2)
    bits = bits.reshape(number, cut.frames, cut.height, cut.line // cut.size)
    lines, line = cut.down * cut.rows, cut.across * cut.words * 4
    pad = ((0, 0), (0, 0), (0, lines - cut.height), (0, (line - cut.line) // cut.size))
    if any(high for _, high in pad):
        bits = jnp.pad(bits, pad)
    if cut.size < 4:
        # As `bitcast_convert_type` does it, which XLA on CPU makes two passes of.
        bits = bits.reshape(*bits.shape[:-1], -1, 4 // cut.size).astype(jnp.uint32)
        weights = jnp.asarray([1 << 8 * cut.size * i for i in range(4 // cut.size)], jnp.uint32)
        bits = jnp.sum(bits * weights.reshape((1,) * (bits.ndim - 1) + (-1,)), axis=-1, dtype=jnp.uint32)
    elif cut.size == 8:
        bits = lax.bitcast_convert_type(bits, jnp.uint32)
    return bits.reshape(number, cut.frames * lines, cut.across * cut.words)


def from_blocks(blocks: jax.Array, cut: Grid, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Rows `[R, *shape]` from uint32[R, blocks, words of a block]."""
    number = blocks.shape[0]
    tiles = blocks.reshape(number * cut.frames, cut.down, cut.across, cut.rows, cut.words)
    lines = jnp.moveaxis(tiles, 2, 3).reshape(number, cut.frames, cut.down * cut.rows, cut.across * cut.words)
    if cut.size < 4:
        lines = lax.bitcast_convert_type(lines, jnp.uint8 if cut.size == 1 else jnp.uint16)
    elif cut.size == 8:
        lines = lax.bitcast_convert_type(lines.reshape(*lines.shape[:-1], lines.shape[-1] // 2, 2), jnp.uint64)
    lines = lines.reshape(number, cut.frames, cut.down * cut.rows, cut.across * cut.words * 4 // cut.size)
    bits = lines[:, :, : cut.height, : cut.line // cut.size]
    if cut.last:
        stack = leaf.shape[-1]
        bits = bits.reshape(number, cut.frames // stack, stack, *leaf.shape[-3:-1])
        bits = jnp.moveaxis(bits, 2, -1)
    return _from_bits(bits.reshape(number, *leaf.shape), leaf)


def take(words: jax.Array, cut: Grid, item: jax.Array) -> jax.Array:
    """Blocks uint32[A, words of a block] of items int32[A] = row * blocks + block, out of `to_words`."""
    row, block = item // jnp.int32(cut.blocks), item % jnp.int32(cut.blocks)
    line = block // jnp.int32(cut.across) * jnp.int32(cut.rows)
    word = block % jnp.int32(cut.across) * jnp.int32(cut.words)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(0,), start_index_map=(0, 1, 2))
    found = lax.gather(
        words,
        jnp.stack([row, line, word], axis=-1),
        numbers,
        (1, cut.rows, cut.words),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return found.reshape(item.shape[0], cut.block_words)


def differ(a: jax.Array, b: jax.Array, cut: Grid) -> jax.Array:
    """bool[R, blocks]: where two lots of rows, as `to_words` gives them, have different blocks."""
    unequal = (a != b).reshape(a.shape[0], cut.frames * cut.down, cut.rows, cut.across, cut.words)
    return jnp.any(unequal, axis=(2, 4)).reshape(a.shape[0], cut.blocks)


def differ_from_blocks(words: jax.Array, blocks: jax.Array, cut: Grid) -> jax.Array:
    """The same against uint32[R, blocks, words of a block]."""
    tiles = words.reshape(words.shape[0], cut.frames * cut.down, cut.rows, cut.across, cut.words)
    ordered = jnp.moveaxis(tiles, 3, 2).reshape(blocks.shape)
    return jnp.any(ordered != blocks, axis=-1)


def _bits_dtype(dtype: np.dtype) -> np.dtype:
    return jnp.dtype(f"uint{8 * element_bytes(dtype)}")


def to_bits(values: jax.Array) -> jax.Array:
    """The same bits as unsigned integers of one to eight bytes."""
    dtype = values.dtype
    if dtype == jnp.bool_:
        return values.astype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.integer) and dtype.name.endswith(("int4", "int2")):
        return lax.bitcast_convert_type(values.astype(jnp.int8), jnp.uint8)
    if dtype.name.startswith("float4"):
        return lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.uint8)
    return lax.bitcast_convert_type(values, _bits_dtype(dtype))


def _from_bits(bits: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    dtype = leaf.dtype
    if dtype == jnp.bool_:
        return bits != jnp.uint8(0)
    if jnp.issubdtype(dtype, jnp.integer) and dtype.name.endswith(("int4", "int2")):
        return lax.bitcast_convert_type(bits, jnp.int8).astype(dtype)
    if dtype.name.startswith("float4"):
        return lax.bitcast_convert_type(bits.astype(jnp.uint4), dtype)
    return lax.bitcast_convert_type(bits, dtype)
