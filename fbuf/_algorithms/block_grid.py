"""Cut frames into blocks of 32-bit words and reassemble them, exactly for every dtype.

A leaf is seen as frames `[H, W, channels]`, a frame as a grid of blocks of `h` rows by `w` pixels. Frames that the grid does
not divide are padded with zeros at the right and the bottom. XLA moves tiles of words several times faster than tiles of bytes.
A word holds elements of several lines (`planes`), so that neighbouring words become neighbouring elements with one shift.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._core.component import component

LINE_BYTES, BLOCK_BYTES, BLOCK_ROWS = 12, 144, 12
"""Default block: 12 rows of 12 bytes, the smallest tables on ten Atari games that are fast to reassemble."""
MOST_BLOCKS = 2**14
"""Most blocks of a row; larger blocks are used beyond."""
STACKED_LAST = 4
"""`[H, W, 4]` counts as four stacked frames, as Atari wrappers make them; 1 to 3 as colours."""


@component
class Grid:
    """Describe how one row of a leaf is cut."""

    frames: int  # S, frames a row: a stack is cut frame by frame
    height: int  # H
    line: int  # bytes in one line of a frame
    rows: int  # h, lines a block
    words: int  # words of each line that a block covers
    size: int  # bytes of an element, as it is moved (1 for booleans)
    last: bool  # the last axis counts frames
    planes: int  # P, lines that share words: word [r, x] has element x of lines r, r + h / P, ...; 1: words of adjacent ones

    @property
    def down(self) -> int:
        """Return the blocks from top to bottom."""
        return -(-self.height // self.rows)

    @property
    def across(self) -> int:
        """Return the blocks from left to right."""
        return -(-self.line // (4 * self.words))

    @property
    def blocks(self) -> int:
        """Return the blocks of one row of the leaf."""
        return self.frames * self.down * self.across

    @property
    def block_words(self) -> int:
        """Return the uint32 words of a block."""
        return self.rows * self.words

    @property
    def tile(self) -> tuple[int, int]:
        """Return the lines and columns of a block as words."""
        return self.rows // self.planes, self.words * self.planes


def block_rows(height: int, rows: int) -> int:
    """Return about `rows` lines that divide a frame evenly, a multiple of 4 (see `Grid.planes`) unless that pads it much."""
    unit = 1 if height % 4 and height <= 32 else 4
    return -(-height // (unit * max(1, round(height / rows)))) * unit


def frame_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int, bool]:
    """Return frames, height, width and channels of a leaf of this shape, and whether the last axis counts frames."""
    if len(shape) < 2:
        return 1, 1, int(np.prod(shape, dtype=np.int64)), 1, False
    if len(shape) >= 3 and shape[-1] == STACKED_LAST and min(shape[-3:-1]) > STACKED_LAST:
        return int(np.prod(shape[:-3], dtype=np.int64)) * shape[-1], shape[-3], shape[-2], 1, True
    if len(shape) >= 3 and shape[-1] < STACKED_LAST:
        return int(np.prod(shape[:-3], dtype=np.int64)), shape[-3], shape[-2], shape[-1], False
    return int(np.prod(shape[:-2], dtype=np.int64)), shape[-2], shape[-1], 1, False


def grid(leaf: jax.ShapeDtypeStruct, block: tuple[int, int] | None) -> Grid:
    """Return the grid of a leaf under blocks of `(h, w)` pixels, or of the default size.

    Raises:
      ValueError: `w` pixels do not fill whole 32-bit words; the message names the next width that does.
    """
    frames, height, width, channels, last = frame_shape(tuple(leaf.shape))
    size = leaf.dtype.itemsize  # 1 of booleans and of sub-byte numbers
    line, pixel, planes = width * channels * size, channels * size, 1 if last else max(1, 4 // size)
    scale = 1
    while True:
        if block is None:
            rows = block_rows(height, BLOCK_ROWS * scale)
            least = max(LINE_BYTES, BLOCK_BYTES // rows) * scale
            nbytes, unit = -(-line // max(1, round(line / least))), math.lcm(4, pixel)
            nbytes = -(-nbytes // unit) * unit
        else:
            rows, nbytes = block[0], block[1] * pixel
        if nbytes % 4:
            fine = next(p for p in range(nbytes // pixel, nbytes // pixel + 5) if p * pixel % 4 == 0)
            raise ValueError(
                f"Deduplicated: a line of a block has {nbytes} bytes; expected a multiple of 4. Write block=({rows}, {fine})."
            )
        cut = Grid(frames, height, line, rows, nbytes // 4, size, last, 1 if rows % planes else planes)
        if block is not None or cut.blocks <= MOST_BLOCKS or (rows >= height and nbytes >= line):
            return cut
        scale *= 2


def to_words(values: jax.Array, cut: Grid) -> jax.Array:
    """Convert rows `[R, *shape]` to uint32[R, S * lines, columns], padded to whole blocks; see `Grid.tile`."""
    number = values.shape[0]
    bits = to_bits(values)
    if cut.last:
        bits = jnp.moveaxis(bits.reshape(number, -1, *bits.shape[-3:]), -1, 2)
    bits = bits.reshape(number, cut.frames, cut.height, cut.line // cut.size)
    lines, line = cut.down * cut.rows, cut.across * cut.words * 4
    pad = ((0, 0), (0, 0), (0, lines - cut.height), (0, (line - cut.line) // cut.size))
    bits, (height, columns) = jnp.pad(bits, pad), cut.tile
    if cut.size < 4:
        # Equal to `bitcast_convert_type`, for which XLA on CPU makes two passes.
        each = 4 // (cut.size * cut.planes)
        bits = bits.reshape(number, cut.frames * cut.down, cut.planes, height, cut.across * columns, each).astype(
            jnp.uint32
        )
        weights = jnp.asarray([1 << 8 * cut.size * i for i in range(4 // cut.size)], jnp.uint32)
        bits = jnp.sum(bits * weights.reshape(1, 1, cut.planes, 1, 1, each), axis=(2, 5), dtype=jnp.uint32)
    elif cut.size == 8:
        bits = lax.bitcast_convert_type(bits, jnp.uint32)
    return bits.reshape(number, cut.frames * cut.down * height, cut.across * columns)


def from_blocks(blocks: jax.Array, cut: Grid, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Assemble rows `[R, *shape]` from uint32[R, blocks, words of a block]."""
    number, (height, columns) = blocks.shape[0], cut.tile
    tiles = blocks.reshape(number * cut.frames * cut.down, cut.across, height, columns)
    lines = jnp.moveaxis(tiles, 1, 2).reshape(-1, 1, height, cut.across * columns)
    if cut.planes > 1:
        plane = jnp.arange(cut.planes, dtype=jnp.uint32)[None, :, None, None]
        lines = (lines >> (plane * jnp.uint32(8 * cut.size))).astype(f"uint{8 * cut.size}")
    elif cut.size < 4:
        lines = lax.bitcast_convert_type(lines, f"uint{8 * cut.size}")
    elif cut.size == 8:
        lines = lax.bitcast_convert_type(lines.reshape(*lines.shape[:-1], lines.shape[-1] // 2, 2), jnp.uint64)
    lines = lines.reshape(number, cut.frames, cut.down * cut.rows, cut.across * cut.words * 4 // cut.size)
    bits = lines[:, :, : cut.height, : cut.line // cut.size]
    if cut.last:
        stack = leaf.shape[-1]
        bits = bits.reshape(number, cut.frames // stack, stack, *leaf.shape[-3:-1])
        bits = jnp.moveaxis(bits, 2, -1)
    return _from_bits(bits.reshape(number, *leaf.shape), leaf)


def from_words_of_blocks(words: jax.Array, cut: Grid, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Assemble rows `[*shape, ...]` from uint32[words of a block, blocks, ...]: `from_blocks` with the rows last.

    TPUs pad the last axis of an array to 128, so that words of one line or block would take ten times their memory there.
    """
    rest, (height, columns), each = words.shape[2:], cut.tile, max(4 // cut.size, 1)
    # Stacked: a TPU stores the words once for each part if all shifts are one operation.
    parts = [words >> jnp.uint32(8 * cut.size * part) for part in range(each)]
    bits = jnp.stack([part.astype(f"uint{8 * min(cut.size, 4)}") for part in parts])  # [part, word, block, ...]
    planes, each = (each, 1) if cut.planes > 1 else (1, each)
    bits = bits.reshape(planes, each, height, columns, cut.frames, cut.down, cut.across, *rest)
    # [plane, part, line, column, frame, down, across, ...] to [frame, down, plane, line, across, column, part, ...]
    bits = bits.transpose(4, 5, 0, 2, 6, 3, 1, *range(7, bits.ndim))
    bits = bits.reshape(cut.frames, cut.down * cut.rows, cut.across * columns * each, *rest)
    if cut.size == 8:  # pairs of words along the line
        pairs = bits.reshape(*bits.shape[:2], bits.shape[2] // 2, 2, *rest)
        bits = lax.bitcast_convert_type(jnp.moveaxis(pairs, 3, -1), jnp.uint64)
    bits = bits[:, : cut.height, : cut.line // cut.size]
    if cut.last:
        stack = leaf.shape[-1]  # [frame, y, x, ...] to [lead, y, x, stack, ...]
        bits = jnp.moveaxis(bits.reshape(cut.frames // stack, stack, *leaf.shape[-3:-1], *rest), 1, 3)
    return _from_bits(bits.reshape(*leaf.shape, *rest), leaf)


def take(words: jax.Array, cut: Grid, item: jax.Array) -> jax.Array:
    """Gather blocks uint32[A, words of a block] of items int32[A] = row * blocks + block from `to_words`."""
    row, block = item // jnp.int32(cut.blocks), item % jnp.int32(cut.blocks)
    line = block // jnp.int32(cut.across) * jnp.int32(cut.tile[0])
    word = block % jnp.int32(cut.across) * jnp.int32(cut.tile[1])
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(0,), start_index_map=(0, 1, 2))
    start, mode = jnp.stack([row, line, word], axis=-1), lax.GatherScatterMode.PROMISE_IN_BOUNDS
    found = lax.gather(words, start, numbers, (1, *cut.tile), mode=mode)
    return found.reshape(item.shape[0], cut.block_words)


def differ(a: jax.Array, b: jax.Array, cut: Grid) -> jax.Array:
    """Return bool[R, blocks]: the blocks that differ between two sets of rows from `to_words`."""
    unequal = (a != b).reshape(a.shape[0], cut.frames * cut.down, cut.tile[0], cut.across, cut.tile[1])
    return jnp.any(unequal, axis=(2, 4)).reshape(a.shape[0], cut.blocks)


def differ_from_blocks(words: jax.Array, blocks: jax.Array, cut: Grid) -> jax.Array:
    """Return bool[R, blocks]: the blocks of rows from `to_words` that differ from uint32[R, blocks, words of a block]."""
    tiles = words.reshape(words.shape[0], cut.frames * cut.down, cut.tile[0], cut.across, cut.tile[1])
    ordered = jnp.moveaxis(tiles, 3, 2).reshape(blocks.shape)
    return jnp.any(ordered != blocks, axis=-1)


def to_bits(values: jax.Array) -> jax.Array:
    """Return the bits as unsigned integers of one to eight bytes."""
    dtype = values.dtype
    if dtype == jnp.bool_:
        return values.astype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.integer) and dtype.name.endswith(("int4", "int2")):
        return lax.bitcast_convert_type(values.astype(jnp.int8), jnp.uint8)
    if dtype.name.startswith("float4"):
        return lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.uint8)
    return lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * dtype.itemsize}"))


def _from_bits(bits: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    dtype = leaf.dtype
    if dtype == jnp.bool_:
        return bits != jnp.uint8(0)
    if jnp.issubdtype(dtype, jnp.integer) and dtype.name.endswith(("int4", "int2")):
        return lax.bitcast_convert_type(bits, jnp.int8).astype(dtype)
    if dtype.name.startswith("float4"):
        return lax.bitcast_convert_type(bits.astype(jnp.uint4), dtype)
    return lax.bitcast_convert_type(bits, dtype)
