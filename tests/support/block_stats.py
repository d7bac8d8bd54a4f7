"""Blocks counted in Python sets, pictures of games, and buffers of a fitted storage."""

import math

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf._algorithms import block_grid, block_stats


def blocks_of(array, grid):
    """The distinct blocks of each row, its bytes cut by slices."""
    array = np.asarray(array)
    if grid.last:
        array = np.moveaxis(array, -1, -3)
    lines = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), grid.frames, grid.height, grid.line)
    wide, down, across = 4 * grid.words, grid.down * grid.rows, grid.across * 4 * grid.words
    lines = np.pad(lines, ((0, 0), (0, 0), (0, down - grid.height), (0, across - grid.line)))
    return [
        {
            frame[y : y + grid.rows, x : x + wide].tobytes()
            for frame in row
            for y in range(0, down, grid.rows)
            for x in range(0, across, wide)
        }
        for row in lines
    ]


def distinct(rows, number):
    return len(set().union(*rows[:number]))


def sparse(shape, rows, dtype, seed=0):
    """Few values in small patches over zeros, and rows that mostly repeat: many equal blocks, and many new ones."""
    rng = np.random.default_rng(seed)
    out = np.zeros((rows, *shape), np.uint8)
    for i in range(1, rows):
        out[i] = out[i - 1] if i % 3 else out[rng.integers(i)]
        flat = out[i].reshape(-1)
        start = rng.integers(flat.size)
        flat[start : start + 3] = rng.integers(0, 2, len(flat[start : start + 3]))
    return out.astype(dtype)


def noise(rows, shape=(84, 84), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape), np.uint8)


def game(rows, seed=0):
    """Two sprites that walk at random over a fixed picture."""
    rng = np.random.default_rng(seed)
    out = np.repeat(rng.integers(0, 256, (1, 84, 84), np.uint8), rows, 0)
    at = np.cumsum(rng.integers(-2, 3, (rows, 2, 2)), 0) % 70
    for i in range(rows):
        for s in range(2):
            y, x = at[i, s]
            out[i, y : y + 8, x : x + 8] = 40 * s
    return out


def check_counts(dtype, shape):
    """Counts are those of the blocks that are cut, whatever the cut."""

    rows = sparse(shape, 40, jnp.dtype(dtype))
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    wide = block_grid.element_bytes(leaf.dtype) * block_grid.frame_shape(shape)[3]
    unit = 4 // math.gcd(4, wide)
    grids = [block_grid.grid(leaf, (h, unit * w)) for h in (1, 2, 5) for w in (1, 2)]
    cuts = [(grid.rows, grid.words) for grid in grids]
    curves = block_stats.count([(rows, grids[0])], cuts)
    assert curves == block_stats.count([(rows, grids[0])], cuts, lanes=4)
    for grid, curve in zip(grids, curves, strict=True):
        assert curve.rows == (5, 10, 20, 40)
        sets = blocks_of(rows, grid)
        assert curve.distinct == tuple(distinct(sets, number) for number in curve.rows)


def held(storage, rows, capacity, lanes=None, step=250):
    """`stats` of a buffer of `storage` after all `rows`, whose rows are checked to have come back."""
    buffer = fbuf.Buffer(capacity, storage=storage, lanes=lanes)
    lead = 1 if lanes is None else 2
    state = buffer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), rows))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    number = jax.tree.leaves(rows)[0].shape[0]
    for start in range(0, number, step):
        state = extend(state, jax.tree.map(lambda x, at=start: x[at : at + step], rows))
    back = buffer.last(state, number).data
    jax.tree.map(np.testing.assert_array_equal, back, rows)
    return {name: float(value) for name, value in buffer.stats(state).items()}


def device_bytes(storage, rows, capacity):
    buffer = fbuf.Buffer(capacity, storage=storage)
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    return buffer.nbytes(jax.eval_shape(buffer.init, row))["device"]
