"""Counting distinct blocks under many cuts, extrapolating, and `Deduplicated.fit`, which rests on both."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import fbuf
from fbuf._algorithms import block_grid, block_stats
from fbuf._algorithms.block_stats import Curve
from fbuf.storages import Deduplicated
from tests.support import refusals
from tests.support.frame_blocks import cut_by_hand


def blocks_of(array, grid):
    """The distinct blocks of each row, its bytes cut by slices."""
    return [set(row) for row in cut_by_hand(np.asarray(array), grid.rows, 4 * grid.words)]


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


def held(storage, rows, capacity, lanes=None, step=250):
    """`stats` of a buffer of `storage` after all `rows`, whose rows are checked to have come back."""
    buffer = fbuf.Buffer(capacity, storage=storage, lanes=lanes)
    lead = 1 if lanes is None else 2
    state = buffer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), rows))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    number = jax.tree.leaves(rows)[0].shape[0]
    for start in range(0, number, step):
        state = extend(state, jax.tree.map(lambda x, at=start: x[at : at + step], rows))
    back = buffer.rows(state, last=number).data
    jax.tree.map(np.testing.assert_array_equal, back, rows)
    return {name: float(value) for name, value in buffer.stats(state).items()}


def device_bytes(storage, rows, capacity):
    buffer = fbuf.Buffer(capacity, storage=storage)
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    return buffer.nbytes(jax.eval_shape(buffer.init, row))["device"]


COUNTED = [("uint8", (10, 8, 3)), ("bool", (17,)), ("float32", (7, 9)), ("int4", (9, 8, 4)), ("int16", (2, 6, 11))]


@pytest.mark.parametrize(("dtype", "shape"), COUNTED)
def test_counts_are_those_of_the_blocks_that_are_cut(dtype, shape):
    rows = sparse(shape, 40, jnp.dtype(dtype))
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    wide = leaf.dtype.itemsize * block_grid.frame_shape(shape)[3]
    unit = 4 // math.gcd(4, wide)
    grids = [block_grid.grid(leaf, (h, unit * w)) for h in (1, 2, 5) for w in (1, 2)]
    cuts = [(grid.rows, grid.words) for grid in grids]
    curves = block_stats.count([(rows, grids[0])], cuts)
    assert curves == block_stats.count([(rows, grids[0])], cuts, lanes=4)
    for grid, curve in zip(grids, curves, strict=True):
        assert curve.rows == (5, 10, 20, 40)
        sets = blocks_of(rows, grid)
        assert curve.distinct == tuple(distinct(sets, number) for number in curve.rows)


def test_lots_smaller_than_the_rows_change_nothing(monkeypatch):
    rows = game(300)
    grid = block_grid.grid(jax.ShapeDtypeStruct((84, 84), jnp.uint8), (12, 12))
    cuts = [(12, 3), (7, 3)]
    want = block_stats.count([(rows, grid)], cuts, 3)
    for size in (1, 7056 * 2, 7056 * 17):
        monkeypatch.setattr(block_stats, "_CHUNK_BYTES", size)
        assert block_stats.count([(rows, grid)], cuts, 3) == want
    assert want[0].distinct[-1] == distinct(blocks_of(rows, grid), 300)


def test_leaves_are_counted_together():
    frames = game(201)
    leaf = jax.ShapeDtypeStruct((84, 84), jnp.uint8)
    grid = block_grid.grid(leaf, (12, 12))
    both = block_stats.count([(frames[:-1], grid), (frames[1:], grid)], [(12, 3)])[0]
    assert both.distinct[-1] == distinct(blocks_of(frames, grid), 201)
    stack = np.stack([frames[:-3], frames[1:-2], frames[2:-1], frames[3:]], -1)
    stacked = block_grid.grid(jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8), (12, 12))
    assert block_stats.count([(stack, stacked)], [(12, 3)])[0].distinct[-1] == both.distinct[-1]


def test_blocks_that_are_alike_are_told_apart():
    values = np.array([0, 1, 2, 3, 4, 8, 2**8, 2**16, 2**31, 2**32 - 1, 2**32 - 2, 7, 11, 13, 255, 65535], np.uint32)
    rows = np.stack(np.meshgrid(*[values] * 4, indexing="ij"), -1).reshape(-1, 2, 2)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    grid = block_grid.grid(jax.ShapeDtypeStruct((2, 2), jnp.uint32), (2, 2))
    assert block_stats.count([(rows, grid)], [(2, 2)])[0].distinct[-1] == 16**4


def test_curves_pass_through_the_counts():
    curve = Curve((250, 500, 1000, 2000), (297, 353, 694, 1093))
    seen = math.log2(1093 / 694)
    assert curve.power == pytest.approx((seen + 0.8) / 2)
    assert curve.at(2000) == 1093 and curve.at(1000) == 694 and curve.at(0) == 0
    assert curve.at(20_000) == pytest.approx(1093 * 10**curve.power)
    for blocks in (100, 500, 1093, 5000):
        assert curve.at(curve.until(blocks)) == pytest.approx(blocks, rel=1e-3)
    values = [curve.at(number) for number in range(0, 30_000, 100)]
    assert values == sorted(values)


def test_blocks_grow_no_faster_than_rows():
    assert Curve((10, 20), (10, 40)).power == 1


def test_of_cuts_that_fit_the_given_places_the_smallest_is_best():
    curves = [Curve((100,), (distinct,)) for distinct in (10, 20)]
    cuts, blocks = [(8, 2), (4, 1)], [1, 4]
    assert block_stats.smallest(curves, cuts, blocks, 100, 1024) == 1
    assert block_stats.smallest(curves, cuts, blocks, 100, 10) == 0  # the other exceeds them by more


@given(some.floats(1, 1e10), some.integers(1, 2**32))
def test_numbers_of_places_are_legal(blocks, most):
    places = block_stats.places_for(blocks, most)
    assert Deduplicated(blocks=places).blocks == places
    if places < block_stats.MOST_PLACES:
        fits = min(blocks, most)
        assert fits <= 0.95 * places + 1
        assert places in (2**8, 2**16) or places <= max(64, fits / 0.83 + 32)


def test_places_stay_within_narrow_ids_where_they_nearly_do():
    assert block_stats.places_for(58_000, 10**9) == 65_536
    assert block_stats.places_for(59_000, 10**9) == 71_104
    assert block_stats.places_for(200, 10**9) == 256
    assert block_stats.places_for(231, 10**9) == 288
    assert block_stats.places_for(10**6, 972) == 1024
    assert block_stats.table_bytes(1000, 256, 36) == 1000 + 256 * 163
    assert block_stats.table_bytes(1000, 288, 36) == 2000 + 288 * 163
    assert block_stats.table_bytes(1000, 65_568, 36) == 4000 + 65_568 * 163


def test_a_fitted_storage_is_smaller():
    rows = {"obs": game(1000), "action": np.arange(1000, dtype=np.int32)}
    storage = Deduplicated().fit({name: x[:400] for name, x in rows.items()}, 1000)
    assert storage.block in block_stats.candidates(84, 84, 1) and isinstance(storage.blocks, int)
    assert storage.keys is None and storage.on_full == "retire"
    assert device_bytes(storage, rows, 1000) < 0.6 * device_bytes(Deduplicated(), rows, 1000)
    again = Deduplicated().fit({name: jnp.asarray(x[:400]) for name, x in rows.items()}, 1000)
    assert again == storage and hash(again) == hash(storage)


def test_only_settings_that_are_none_are_chosen():
    rows = {"obs": game(400)}
    block = Deduplicated(block=(14, 28)).fit(rows, 5000)
    assert block.block == (14, 28) and block.blocks is not None
    assert block.blocks > Deduplicated(block=(14, 28)).fit(rows, 400).blocks
    blocks = Deduplicated(blocks=4096, on_full="refuse").fit(rows, 5000)
    assert blocks.blocks == 4096 and blocks.block is not None and blocks.on_full == "refuse"
    both = Deduplicated(block=(14, 28), blocks=4096)
    assert both.fit(rows, 5000) is both
    assert block.fit(noise(400), 5000) is block


def fit(capacity, lanes=None, **shapes):
    Deduplicated().fit({name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}, capacity, lanes)


REFUSALS = """
fit(100, obs=(63, 84, 84)) => ValueError there are 63 rows; expected 64
fit(0, obs=(64, 84, 84)) => TypeError capacity is 0; expected an int >= 1
fit(1.5, obs=(64, 84, 84)) => TypeError capacity is 1.5
fit(10, 4, obs=(64, 4, 84, 84)) => ValueError not a multiple of lanes=4
fit(12, 4, obs=(64, 3, 84, 84)) => ValueError [64, 3, 84, 84]; expected [N, E
fit(10, obs=()) => ValueError has shape []; expected [N
fit(10, a=(64, 84, 84), b=(65,)) => ValueError 'b' has leading axes [65]; expected [64]
fit(10, obs=(64, 8)) => ValueError no leaf of obs has 1024 bytes
fit(10) => ValueError no leaves
jax.jit(lambda x: Deduplicated().fit({"obs": x}, 100).blocks)(np.zeros((64, 84, 84), np.uint8)) => TypeError
    Deduplicated.fit: leaf 'obs' is traced | outside jit
"""


def test_invalid_arguments_are_refused():
    refusals.check_all(REFUSALS, globals())


@pytest.mark.more
def test_the_choice_is_the_smallest_of_all_candidates():
    frames = game(600)
    capacity = 6000
    chosen = Deduplicated(keys=("obs",)).fit({"obs": frames}, capacity)

    fits = [Deduplicated(block=block).fit({"obs": frames}, capacity) for block in block_stats.candidates(84, 84, 1)]
    sizes = [device_bytes(fit, {"obs": frames}, capacity) for fit in fits]
    # Up to the ids of each lane's newest row, which are not weighed.
    assert device_bytes(chosen, {"obs": frames}, capacity) <= min(sizes) + 500
    assert max(sizes) > 1.3 * min(sizes)


@pytest.mark.exhaustive
def test_leaves_of_the_same_frames_share_block_and_table():
    frames = game(1001)
    rows = {"obs": frames[:-1], "next": {"obs": frames[1:]}, "reward": np.zeros(1000, np.float32)}
    storage = Deduplicated().fit(rows, 1000)
    block, places = dict(storage.block), dict(storage.blocks)
    assert set(block) == set(places) == {"obs", "next/obs"}
    assert block["obs"] == block["next/obs"]
    stats = held(storage, rows, 1000)
    assert stats["refused_rows"] == stats["retired_rows"] == 0
    alone = Deduplicated(block=block["obs"]).fit({"obs": frames}, 1001)
    assert sum(places.values()) <= alone.blocks + 32
    known = Deduplicated(block={"obs": (14, 28)}, blocks={"obs": 640}).fit(rows, 1000)
    assert dict(known.block) == {"obs": (14, 28), "next/obs": (14, 28)}
    assert dict(known.blocks)["obs"] == 640
    for_all = Deduplicated(block=(14, 28)).fit(rows, 1000)
    assert sum(dict(known.blocks).values()) == sum(dict(for_all.blocks).values())
