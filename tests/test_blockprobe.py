"""Counting distinct blocks under many cuts, foretelling how many there will be, and `Deduplicated.fit`, which rests on both.

The oracle for a count keeps the bytes of every block in a Python set; that blocks are cut like this is for test_blocks.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import fbuf
from fbuf import _blockprobe, _blocks
from fbuf._blockprobe import Curve
from fbuf.storages import Deduplicated

GAMES = ("Pong", "Breakout", "Seaquest", "MsPacman", "SpaceInvaders", "Qbert", "Freeway", "Enduro", "Asterix", "Krull")


def blocks_of(array: Any, grid: _blocks.Grid) -> list[set[bytes]]:
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


def distinct(rows: list[set[bytes]], number: int) -> int:
    return len(set().union(*rows[:number]))


def sparse(shape: tuple[int, ...], rows: int, dtype: Any, seed: int = 0) -> np.ndarray:
    """Few values in small patches over zeros, and rows that mostly repeat: many equal blocks, and many new ones."""
    rng = np.random.default_rng(seed)
    out = np.zeros((rows, *shape), np.uint8)
    for i in range(1, rows):
        out[i] = out[i - 1] if i % 3 else out[rng.integers(i)]
        flat = out[i].reshape(-1)
        start = rng.integers(flat.size)
        flat[start : start + 3] = rng.integers(0, 2, len(flat[start : start + 3]))
    return out.astype(dtype)


def noise(rows: int, shape: tuple[int, ...] = (84, 84), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape), np.uint8)


def game(rows: int, seed: int = 0) -> np.ndarray:
    """Two sprites that walk at random over a fixed picture."""
    rng = np.random.default_rng(seed)
    out = np.repeat(rng.integers(0, 256, (1, 84, 84), np.uint8), rows, 0)
    at = np.cumsum(rng.integers(-2, 3, (rows, 2, 2)), 0) % 70
    for i in range(rows):
        for s in range(2):
            y, x = at[i, s]
            out[i, y : y + 8, x : x + 8] = 40 * s
    return out


# ------------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int16", "bfloat16", "float32", "int4"])
@pytest.mark.parametrize("shape", [(12, 12), (7, 9), (10, 8, 3), (9, 8, 4), (2, 6, 11), (17,)])
def test_counts_are_those_of_the_blocks_that_are_cut(dtype: str, shape: tuple[int, ...]) -> None:
    rows = sparse(shape, 40, jnp.dtype(dtype))
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    wide = _blocks.element_bytes(leaf.dtype) * _blocks.frame_shape(shape)[3]
    unit = 4 // math.gcd(4, wide)
    grids = [_blocks.grid(leaf, (h, unit * w)) for h in (1, 2, 5) for w in (1, 2)]
    cuts = [(grid.rows, grid.words) for grid in grids]
    curves = _blockprobe.count([(rows, grids[0])], cuts)
    assert curves == _blockprobe.count([(rows, grids[0])], cuts, lanes=4)
    for grid, curve in zip(grids, curves, strict=True):
        assert curve.rows == (5, 10, 20, 40)
        sets = blocks_of(rows, grid)
        assert curve.distinct == tuple(distinct(sets, number) for number in curve.rows)


def test_lots_smaller_than_the_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = game(300)
    grid = _blocks.grid(jax.ShapeDtypeStruct((84, 84), jnp.uint8), (12, 12))
    cuts = [(12, 3), (7, 3)]
    want = _blockprobe.count([(rows, grid)], cuts, 3)
    for size in (1, 7056 * 2, 7056 * 17):
        monkeypatch.setattr(_blockprobe, "_CHUNK_BYTES", size)
        assert _blockprobe.count([(rows, grid)], cuts, 3) == want
    assert want[0].distinct[-1] == distinct(blocks_of(rows, grid), 300)


def test_leaves_are_counted_together() -> None:
    frames = game(201)
    leaf = jax.ShapeDtypeStruct((84, 84), jnp.uint8)
    grid = _blocks.grid(leaf, (12, 12))
    both = _blockprobe.count([(frames[:-1], grid), (frames[1:], grid)], [(12, 3)])[0]
    assert both.distinct[-1] == distinct(blocks_of(frames, grid), 201)
    stack = np.stack([frames[:-3], frames[1:-2], frames[2:-1], frames[3:]], -1)
    stacked = _blocks.grid(jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8), (12, 12))
    assert _blockprobe.count([(stack, stacked)], [(12, 3)])[0].distinct[-1] == both.distinct[-1]


def test_blocks_that_are_alike_are_told_apart() -> None:
    """All 65,536 blocks of two by two words of sixteen values: words swapped, mirrored, crossed, of one bit."""
    values = np.array([0, 1, 2, 3, 4, 8, 2**8, 2**16, 2**31, 2**32 - 1, 2**32 - 2, 7, 11, 13, 255, 65535], np.uint32)
    rows = np.stack(np.meshgrid(*[values] * 4, indexing="ij"), -1).reshape(-1, 2, 2)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    grid = _blocks.grid(jax.ShapeDtypeStruct((2, 2), jnp.uint32), (2, 2))
    assert _blockprobe.count([(rows, grid)], [(2, 2)])[0].distinct[-1] == 16**4


# --------------------------------------------------------------------------------------------------------- choosing


@given(some.integers(1, 300), some.integers(1, 300), some.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
def test_candidates_can_be_cut_and_are_a_handful(height: int, width: int, pixel: int) -> None:
    tried = _blockprobe.candidates(height, width, pixel)
    assert 1 <= len(tried) <= len(_blockprobe.TRIED) and len(set(tried)) == len(tried)
    for rows, pixels in tried:
        assert rows <= height and pixels * pixel % 4 == 0
        assert pixels < width + 4
        down, across = -(-height // rows), -(-width // pixels)
        assert rows * pixels * pixel >= 64 or across == 1
        assert (down - 1) * rows < height and (across - 1) * pixels < width


def test_candidates_of_atari_frames() -> None:
    assert _blockprobe.candidates(84, 84, 1) == [(7, 12), (6, 12), (12, 28), (28, 28)]
    assert _blockprobe.candidates(210, 160, 3) == [(7, 4), (6, 4), (12, 12), (27, 12)]


def test_curves_go_through_what_was_counted_and_back() -> None:
    curve = Curve((250, 500, 1000, 2000), (297, 353, 694, 1093))
    seen = math.log2(1093 / 694)
    assert curve.power == pytest.approx((seen + 0.8) / 2)
    assert curve.at(2000) == 1093 and curve.at(1000) == 694 and curve.at(0) == 0
    assert curve.at(20_000) == pytest.approx(1093 * 10**curve.power)
    for distinct in (100, 500, 1093, 5000):
        assert curve.at(curve.until(distinct)) == pytest.approx(distinct, rel=1e-3)  # type: ignore[arg-type]
    values = [curve.at(number) for number in range(0, 30_000, 100)]
    assert values == sorted(values)


def test_noise_grows_in_proportion_and_nothing_faster() -> None:
    assert Curve((50, 100), (4900, 9800)).at(1000) == pytest.approx(98_000)
    assert Curve((50, 100), (10, 90)).at(1000) == pytest.approx(900)
    assert Curve((50, 100), (10, 10)).at(1000) == pytest.approx(10 * 10**0.4)
    assert Curve((64,), (10,)).at(640) == pytest.approx(100)


@given(some.floats(1, 1e10), some.integers(1, 2**32))
def test_places_are_of_a_legal_number(blocks: float, most: int) -> None:
    places = _blockprobe.places_for(blocks, most)
    assert Deduplicated(blocks=places).blocks == places
    if places < _blockprobe.MOST_PLACES:
        fits = min(blocks, most)
        assert fits <= 0.95 * places + 1
        assert places in (2**8, 2**16) or places <= max(64, fits / 0.83 + 32)


def test_places_stay_within_narrow_ids_where_they_nearly_do() -> None:
    assert _blockprobe.places_for(58_000, 10**9) == 65_536
    assert _blockprobe.places_for(59_000, 10**9) == 71_104
    assert _blockprobe.places_for(200, 10**9) == 256
    assert _blockprobe.places_for(231, 10**9) == 288
    assert _blockprobe.places_for(10**6, 972) == 1024
    assert _blockprobe.table_bytes(1000, 256, 36) == 1000 + 256 * 163
    assert _blockprobe.table_bytes(1000, 288, 36) == 2000 + 288 * 163
    assert _blockprobe.table_bytes(1000, 65_568, 36) == 4000 + 65_568 * 163


# -------------------------------------------------------------------------------------------------------------- fit


def held(storage: Deduplicated, rows: Any, capacity: int, lanes: int | None = None, step: int = 250) -> dict[str, Any]:
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


def device_bytes(storage: Deduplicated, rows: Any, capacity: int) -> int:
    buffer = fbuf.Buffer(capacity, storage=storage)
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    return buffer.nbytes(jax.eval_shape(buffer.init, row))["device"]


def test_what_fit_chose_holds_the_rows_and_is_smaller() -> None:
    rows = {"obs": game(3000), "action": np.arange(3000, dtype=np.int32)}
    storage = Deduplicated().fit(jax.tree.map(lambda x: x[:1000], rows), 3000)
    assert storage.block in _blockprobe.candidates(84, 84, 1) and isinstance(storage.blocks, int)
    assert storage.keys is None and storage.on_full == "retire"
    stats = held(storage, rows, 3000)
    assert stats["refused_rows"] == stats["retired_rows"] == 0
    assert 0.4 < stats["blocks_load"] < 0.95
    assert device_bytes(storage, rows, 3000) < 0.6 * device_bytes(Deduplicated(), rows, 3000)
    again = Deduplicated().fit(jax.tree.map(lambda x: jnp.asarray(x[:1000]), rows), 3000)
    assert again == storage and hash(again) == hash(storage)


def test_the_choice_is_the_smallest_of_all_candidates() -> None:
    frames = game(600)
    capacity = 6000
    chosen = Deduplicated(keys=("obs",)).fit({"obs": frames}, capacity)

    sizes = [
        device_bytes(Deduplicated(block=block).fit({"obs": frames}, capacity), {"obs": frames}, capacity)
        for block in _blockprobe.candidates(84, 84, 1)
    ]
    # Up to the ids of each lane's newest row, which are not weighed, and to what faster reading is worth.
    assert device_bytes(chosen, {"obs": frames}, capacity) <= min(sizes) / _blockprobe.WORTH + 500
    assert max(sizes) > 1.3 * min(sizes)


def test_a_block_that_reads_more_slowly_must_save_a_tenth() -> None:
    def curve(distinct: int) -> _blockprobe.Curve:
        return _blockprobe.Curve((500, 1000), (distinct // 2, distinct))

    cuts, blocks = [(7, 3), (7, 3)], [84, 84]
    assert _blockprobe.smallest([curve(20_000), curve(19_500)], cuts, blocks, 1000, None) == 0
    assert _blockprobe.smallest([curve(20_000), curve(10_000)], cuts, blocks, 1000, None) == 1
    assert _blockprobe.smallest([curve(19_500), curve(20_000)], cuts, blocks, 1000, None) == 0


def test_only_what_was_none_is_chosen() -> None:
    rows = {"obs": game(400)}
    block = Deduplicated(block=(14, 28)).fit(rows, 5000)
    assert block.block == (14, 28) and block.blocks is not None
    blocks = Deduplicated(blocks=4096, on_full="refuse").fit(rows, 5000)
    assert blocks.blocks == 4096 and blocks.block is not None and blocks.on_full == "refuse"
    both = Deduplicated(block=(14, 28), blocks=4096)
    assert both.fit(rows, 5000) is both
    assert block.fit(noise(400), 5000) is block


def test_a_given_table_gets_the_smallest_block_that_fits_it() -> None:
    rows = {"obs": game(400)}
    chosen = {places: Deduplicated(blocks=places).fit(rows, 4000).block for places in (10_240, 16_384, 24_576)}
    wanted = {block: Deduplicated(block=block).fit(rows, 4000).blocks for block in _blockprobe.candidates(84, 84, 1)}
    for places, block in chosen.items():
        fits = [b for b, number in wanted.items() if 0.83 * number <= 0.94 * places]
        assert fits and 0.83 * wanted[block] <= 0.96 * places
        sizes = {b: device_bytes(Deduplicated(block=b, blocks=places), rows, 4000) for b in fits}
        found = device_bytes(Deduplicated(block=block, blocks=places), rows, 4000)
        assert found <= min(sizes.values()) / _blockprobe.WORTH + 500
    assert Deduplicated(blocks=64).fit(rows, 4000).block == min(wanted, key=lambda b: wanted[b])


def test_leaves_of_the_same_frames_share_block_and_table() -> None:
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


def test_leaves_of_other_frames_get_their_own() -> None:
    rng = np.random.default_rng(0)
    rows = {"obs": game(100), "depth": rng.normal(size=(100, 40, 40)).astype(np.float32)}
    storage = Deduplicated(on_full="refuse").fit(rows, 100)
    block, places = dict(storage.block), dict(storage.blocks)
    assert set(block) == set(places) == {"obs", "depth"}
    grids = {name: _blocks.grid(jax.ShapeDtypeStruct(x.shape[1:], x.dtype), block[name]) for name, x in rows.items()}
    found = sum(distinct(blocks_of(x, grids[name]), 100) for name, x in rows.items())
    assert 0.7 * sum(places.values()) < found < 0.96 * sum(places.values())
    assert held(storage, rows, 100, step=20)["refused_rows"] == 0


def test_lanes() -> None:
    lanes = np.stack([game(500, seed) for seed in range(4)], 1)
    storage = Deduplicated(keys=("obs",)).fit({"obs": lanes}, 2000, lanes=4)
    stats = held(storage, {"obs": lanes}, 2000, lanes=4)
    assert stats["refused_rows"] == stats["retired_rows"] == 0 and stats["blocks_load"] > 0.6


def test_noise_is_given_room_for_all_of_it() -> None:
    frames = noise(300)
    storage = Deduplicated(keys=("obs",), on_full="refuse").fit({"obs": frames[:100]}, 300)
    stats = held(storage, {"obs": frames}, 300)
    assert stats["refused_rows"] == 0
    assert stats["blocks_load"] == pytest.approx(0.95, abs=0.02)


def test_only_the_first_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blockprobe, "MOST_BYTES", 200 * 7056)
    quiet = np.concatenate([game(200), noise(400)])
    storage = Deduplicated(keys=("obs",))
    assert storage.fit({"obs": quiet}, 2000) == storage.fit({"obs": quiet[:200]}, 2000)
    monkeypatch.undo()
    assert storage.fit({"obs": quiet}, 2000).blocks > 2 * storage.fit({"obs": quiet[:200]}, 2000).blocks


@pytest.mark.parametrize(
    ("rows", "settings", "error", "message"),
    [
        ({"obs": (63, 84, 84)}, {"capacity": 100}, ValueError, "63 rows are too few"),
        ({"obs": (64, 84, 84)}, {"capacity": 0}, TypeError, "capacity is 0; expected an int >= 1"),
        ({"obs": (64, 84, 84)}, {"capacity": 1.5}, TypeError, "capacity is 1.5"),
        ({"obs": (64, 4, 84, 84)}, {"capacity": 10, "lanes": 4}, ValueError, "not a multiple of lanes=4"),
        ({"obs": (64, 3, 84, 84)}, {"capacity": 12, "lanes": 4}, ValueError, r"\[64, 3, 84, 84\]; expected \[N, E"),
        ({"obs": ()}, {"capacity": 10}, ValueError, r"has shape \[\]; expected \[N"),
        (
            {"a": (64, 84, 84), "b": (65,)},
            {"capacity": 10},
            ValueError,
            r"'b' begins with axes \[65\], but 'a' with \[64",
        ),
        ({"obs": (64, 8)}, {"capacity": 10}, ValueError, "no leaf has 1024 bytes"),
        ({}, {"capacity": 10}, ValueError, "no leaves"),
    ],
)
def test_bad_arguments(rows: Any, settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Deduplicated().fit({name: np.zeros(shape, np.uint8) for name, shape in rows.items()}, **settings)


def test_traced_rows_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Deduplicated.fit: leaf 'obs' is traced.*outside jit"):
        jax.jit(lambda x: Deduplicated().fit({"obs": x}, 100).blocks)(np.zeros((64, 84, 84), np.uint8))


@pytest.mark.slow
def test_ten_games_from_their_first_2000_frames() -> None:
    """What the rule comes to at 20,000 frames, against 4-stacks and next 4-stacks; a table 90 % full grows by half."""
    atari = pytest.importorskip("benchmarks._atari")
    pytest.importorskip("ale_py")
    ratios = {}
    for name in GAMES:
        frames, _ = atari.frames(name, 20_000)
        storage = Deduplicated(keys=("obs",)).fit({"obs": frames[:2000]}, 20_000)
        grid = _blocks.grid(jax.ShapeDtypeStruct((84, 84), jnp.uint8), storage.block)
        found = _blockprobe.count([(frames, grid)], [(grid.rows, grid.words)])[0].distinct[-1]
        places, grown = storage.blocks, 0
        while found > 0.9 * places:
            places, grown = math.ceil(1.5 * places / 32) * 32, grown + 1
        assert grown <= 1 and found > 0.3 * places, name
        size = _blockprobe.table_bytes(20_000 * grid.blocks, places, grid.block_words)
        ratios[name] = 20_000 * 8 * 7056 / size
    means = [math.exp(sum(math.log(ratios[name]) for name in names) / len(names)) for names in (GAMES, GAMES[:6])]
    assert means[0] >= 100 and means[1] >= 120 and min(ratios.values()) >= 25, ratios
