"""Counting distinct blocks under many cuts, extrapolating, and `Deduplicated.fit`, which rests on both."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from fbuf._algorithms import block_grid, block_stats
from fbuf._algorithms.block_stats import Curve
from fbuf.storages import Deduplicated
from tests.support.block_stats import blocks_of, check_counts, device_bytes, distinct, game, noise


def test_counts_are_those_of_the_blocks_that_are_cut() -> None:
    for dtype, shape in (
        ("uint8", (10, 8, 3)),
        ("bool", (17,)),
        ("float32", (7, 9)),
        ("int4", (9, 8, 4)),
        ("int16", (2, 6, 11)),
    ):
        check_counts(dtype, shape)


def test_lots_smaller_than_the_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = game(300)
    grid = block_grid.grid(jax.ShapeDtypeStruct((84, 84), jnp.uint8), (12, 12))
    cuts = [(12, 3), (7, 3)]
    want = block_stats.count([(rows, grid)], cuts, 3)
    for size in (1, 7056 * 2, 7056 * 17):
        monkeypatch.setattr(block_stats, "_CHUNK_BYTES", size)
        assert block_stats.count([(rows, grid)], cuts, 3) == want
    assert want[0].distinct[-1] == distinct(blocks_of(rows, grid), 300)


def test_leaves_are_counted_together() -> None:
    frames = game(201)
    leaf = jax.ShapeDtypeStruct((84, 84), jnp.uint8)
    grid = block_grid.grid(leaf, (12, 12))
    both = block_stats.count([(frames[:-1], grid), (frames[1:], grid)], [(12, 3)])[0]
    assert both.distinct[-1] == distinct(blocks_of(frames, grid), 201)
    stack = np.stack([frames[:-3], frames[1:-2], frames[2:-1], frames[3:]], -1)
    stacked = block_grid.grid(jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8), (12, 12))
    assert block_stats.count([(stack, stacked)], [(12, 3)])[0].distinct[-1] == both.distinct[-1]


def test_blocks_that_are_alike_are_told_apart() -> None:
    """All 65,536 blocks of two by two words of sixteen values: words swapped, mirrored, crossed, of one bit."""
    values = np.array([0, 1, 2, 3, 4, 8, 2**8, 2**16, 2**31, 2**32 - 1, 2**32 - 2, 7, 11, 13, 255, 65535], np.uint32)
    rows = np.stack(np.meshgrid(*[values] * 4, indexing="ij"), -1).reshape(-1, 2, 2)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    grid = block_grid.grid(jax.ShapeDtypeStruct((2, 2), jnp.uint32), (2, 2))
    assert block_stats.count([(rows, grid)], [(2, 2)])[0].distinct[-1] == 16**4


@given(some.integers(1, 300), some.integers(1, 300), some.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
def test_candidates_can_be_cut_and_are_a_handful(height: int, width: int, pixel: int) -> None:
    tried = block_stats.candidates(height, width, pixel)
    assert 1 <= len(tried) <= len(block_stats.TRIED) and len(set(tried)) == len(tried)
    for rows, pixels in tried:
        assert rows <= height and pixels * pixel % 4 == 0
        assert pixels < width + 4
        down, across = -(-height // rows), -(-width // pixels)
        assert rows * pixels * pixel >= 64 or across == 1
        assert (down - 1) * rows < height and (across - 1) * pixels < width


def test_curves_pass_through_the_counts() -> None:
    curve = Curve((250, 500, 1000, 2000), (297, 353, 694, 1093))
    seen = math.log2(1093 / 694)
    assert curve.power == pytest.approx((seen + 0.8) / 2)
    assert curve.at(2000) == 1093 and curve.at(1000) == 694 and curve.at(0) == 0
    assert curve.at(20_000) == pytest.approx(1093 * 10**curve.power)
    for blocks in (100, 500, 1093, 5000):
        assert curve.at(curve.until(blocks)) == pytest.approx(blocks, rel=1e-3)  # type: ignore[arg-type]
    values = [curve.at(number) for number in range(0, 30_000, 100)]
    assert values == sorted(values)


def test_noise_grows_in_proportion_and_nothing_faster() -> None:
    assert Curve((50, 100), (4900, 9800)).at(1000) == pytest.approx(98_000)
    assert Curve((50, 100), (10, 90)).at(1000) == pytest.approx(900)
    assert Curve((50, 100), (10, 10)).at(1000) == pytest.approx(10 * 10**0.4)
    assert Curve((64,), (10,)).at(640) == pytest.approx(100)


@given(some.floats(1, 1e10), some.integers(1, 2**32))
def test_numbers_of_places_are_legal(blocks: float, most: int) -> None:
    places = block_stats.places_for(blocks, most)
    assert Deduplicated(blocks=places).blocks == places
    if places < block_stats.MOST_PLACES:
        fits = min(blocks, most)
        assert fits <= 0.95 * places + 1
        assert places in (2**8, 2**16) or places <= max(64, fits / 0.83 + 32)


def test_places_stay_within_narrow_ids_where_they_nearly_do() -> None:
    assert block_stats.places_for(58_000, 10**9) == 65_536
    assert block_stats.places_for(59_000, 10**9) == 71_104
    assert block_stats.places_for(200, 10**9) == 256
    assert block_stats.places_for(231, 10**9) == 288
    assert block_stats.places_for(10**6, 972) == 1024
    assert block_stats.table_bytes(1000, 256, 36) == 1000 + 256 * 163
    assert block_stats.table_bytes(1000, 288, 36) == 2000 + 288 * 163
    assert block_stats.table_bytes(1000, 65_568, 36) == 4000 + 65_568 * 163


def test_a_fitted_storage_is_smaller() -> None:
    rows = {"obs": game(1000), "action": np.arange(1000, dtype=np.int32)}
    storage = Deduplicated().fit({name: x[:400] for name, x in rows.items()}, 1000)
    assert storage.block in block_stats.candidates(84, 84, 1) and isinstance(storage.blocks, int)
    assert storage.keys is None and storage.on_full == "retire"
    assert device_bytes(storage, rows, 1000) < 0.6 * device_bytes(Deduplicated(), rows, 1000)
    again = Deduplicated().fit({name: jnp.asarray(x[:400]) for name, x in rows.items()}, 1000)
    assert again == storage and hash(again) == hash(storage)


def test_a_block_that_reads_more_slowly_must_save_a_tenth() -> None:
    def curve(distinct: int) -> block_stats.Curve:
        return block_stats.Curve((500, 1000), (distinct // 2, distinct))

    cuts, blocks = [(7, 3), (7, 3)], [84, 84]
    assert block_stats.smallest([curve(20_000), curve(19_500)], cuts, blocks, 1000, None) == 0
    assert block_stats.smallest([curve(20_000), curve(10_000)], cuts, blocks, 1000, None) == 1
    assert block_stats.smallest([curve(19_500), curve(20_000)], cuts, blocks, 1000, None) == 0


def test_only_settings_that_are_none_are_chosen() -> None:
    rows = {"obs": game(400)}
    block = Deduplicated(block=(14, 28)).fit(rows, 5000)
    assert block.block == (14, 28) and block.blocks is not None
    blocks = Deduplicated(blocks=4096, on_full="refuse").fit(rows, 5000)
    assert blocks.blocks == 4096 and blocks.block is not None and blocks.on_full == "refuse"
    both = Deduplicated(block=(14, 28), blocks=4096)
    assert both.fit(rows, 5000) is both
    assert block.fit(noise(400), 5000) is block


REFUSALS = [
    ({"obs": (63, 84, 84)}, {"capacity": 100}, ValueError, "there are 63 rows; expected 64"),
    ({"obs": (64, 84, 84)}, {"capacity": 0}, TypeError, "capacity is 0; expected an int >= 1"),
    ({"obs": (64, 84, 84)}, {"capacity": 1.5}, TypeError, "capacity is 1.5"),
    ({"obs": (64, 4, 84, 84)}, {"capacity": 10, "lanes": 4}, ValueError, "not a multiple of lanes=4"),
    ({"obs": (64, 3, 84, 84)}, {"capacity": 12, "lanes": 4}, ValueError, r"\[64, 3, 84, 84\]; expected \[N, E"),
    ({"obs": ()}, {"capacity": 10}, ValueError, r"has shape \[\]; expected \[N"),
    ({"a": (64, 84, 84), "b": (65,)}, {"capacity": 10}, ValueError, r"'b' has leading axes \[65\]; expected \[64\]"),
    ({"obs": (64, 8)}, {"capacity": 10}, ValueError, "no leaf of obs has 1024 bytes"),
    ({}, {"capacity": 10}, ValueError, "no leaves"),
]


def test_invalid_arguments_are_refused() -> None:
    for rows, settings, error, message in REFUSALS:
        with pytest.raises(error, match=message):
            Deduplicated().fit({name: np.zeros(shape, np.uint8) for name, shape in rows.items()}, **settings)


def test_traced_rows_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Deduplicated.fit: leaf 'obs' is traced.*outside jit"):
        jax.jit(lambda x: Deduplicated().fit({"obs": x}, 100).blocks)(np.zeros((64, 84, 84), np.uint8))
