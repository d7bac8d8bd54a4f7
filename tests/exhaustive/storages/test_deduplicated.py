"""`storages.Deduplicated`: leaves of every kind, full tables, real games, growth, and in-place writes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._algorithms import block_table
from fbuf._buffer.state import COUNTERS
from fbuf.samplers import Prioritized
from fbuf.storages import Deduplicated, _block_rows
from fbuf.testing import assert_inplace
from fbuf.views import Row, Transition
from tests.support import deduplicated_device as support
from tests.support.deduplicated import (
    KEY,
    LEAVES,
    SMALL,
    Fields,
    Trial,
    check,
    check_leaves,
    check_programs,
    from_pool,
    methods_of,
    small,
    values,
)
from tests.support.trees import same


@pytest.mark.parametrize("lanes", [3, None])
@pytest.mark.parametrize("kind", LEAVES)
def test_leaves_of_every_kind_are_exact(kind: str, lanes: int | None) -> None:
    check_leaves(kind, lanes)


def test_64_bit_leaves_are_exact() -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        leaves = {"real": ((3, 5), np.float64), "whole": ((7,), np.int64)}
        trial = Trial(fbuf.Buffer(8, storage=Deduplicated(keys=tuple(leaves), blocks=512)), leaves)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            trial.extend({name: values(rng, (5, 1), *leaf) for name, leaf in leaves.items()})
            trial.compare()
    assert trial.compared > 15


@pytest.mark.parametrize("view", support.VIEWS)
@pytest.mark.parametrize("sampler", support.SAMPLERS)
@pytest.mark.parametrize("check", [support.check_masked_draws, support.check_retirement])
def test_full_tables_are_exact(check: Any, sampler: str, view: str) -> None:
    check(sampler, view)


GAMES = ("Pong", "Breakout", "Seaquest", "MsPacman", "SpaceInvaders", "Qbert", "Freeway", "Enduro", "Asterix", "Krull")
FRAME = {"obs": ((84, 84), np.uint8)}
STREAM = fbuf.Buffer(2048, storage=Deduplicated(keys=("obs",)))
SIXTEEN = fbuf.Buffer(2048, lanes=16, storage=Deduplicated(keys=("obs",), on_full="refuse"))


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("form", ["stream", "sixteen lanes"])
def test_frames_of_real_games_are_exact(game: str, form: str) -> None:
    """20,000 frames through a ring of 2,048, in a table of the default size."""
    pytest.importorskip("ale_py")
    from benchmarks import _atari

    frames, _ = _atari.frames(game, 20_000)
    if form == "stream":
        trial = Trial(STREAM, FRAME)
        support.play(trial, frames, 250)
    else:
        trial = Trial(SIXTEEN, FRAME)
        support.play(trial, frames, 25, masked=True)
    stats = jax.device_get(STREAM.stats(trial.state) if form == "stream" else SIXTEEN.stats(trial.state))
    assert form == "stream" or stats["retired_rows"] == 0
    if game in ("Breakout", "MsPacman"):
        assert stats["refused_rows"] == stats["retired_rows"] == 0
        assert trial.compared > 15_000
    assert stats["blocks_load"] < 1


@pytest.mark.optimized
def test_a_scan_of_steps_is_in_place() -> None:
    needed = []
    for capacity, blocks in support.SIZES:
        buffer, state, rows = support.atari(capacity, blocks, sampler=Prioritized())

        def one(state: Any, given: Any, buffer: fbuf.Buffer = buffer) -> Any:
            rows, key = given
            state, batch = buffer.sample(buffer.extend(state, rows), key, 8)
            return buffer.update_priority(state, batch.index, batch.data["reward"]), batch.weight

        given = (support.shapes(rows, 3), jax.ShapeDtypeStruct((3, 2), jnp.uint32))
        scan = lambda s, g, one=one: lax.scan(one, s, g)  # noqa: E731
        # The slice of the rows that a turn takes is one more batch.
        needed.append(assert_inplace(scan, state, given, bound=5 * support.BATCH_BYTES).temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024


@pytest.mark.optimized
def test_vmapped_writes_are_in_place() -> None:
    needed = []
    for capacity, blocks in support.SIZES:
        buffer, state, rows = support.atari(capacity, blocks)
        memory = assert_inplace(
            jax.vmap(buffer.extend),
            support.shapes(state, 3),
            support.shapes(rows, 3),
            bound=3 * 4 * support.BATCH_BYTES,
        )
        needed.append(memory.temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024


@pytest.mark.parametrize("on_full", ["refuse", "retire"])
def test_counters_wrap_at_2_to_the_32(on_full: str) -> None:
    """Nothing but noise, in a table far too small: some row can always be read."""
    trial, which = Trial(small(on_full), SMALL), ("refuse", "retire").index(on_full)
    counter = COUNTERS.index(("refused_rows", "retired_rows")[which])
    counters = trial.state.counters.at[counter].set(jnp.uint32(2**32 - 3))
    trial.state, went = trial.state.replace(counters=counters), 0
    for seed in range(8):
        before, rng = trial.counters(), np.random.default_rng(seed)
        noise = {name: rng.integers(0, 256, (4, 3, *shape), np.uint8) for name, (shape, _) in SMALL.items()}
        trial.extend(noise, np.ones((4, 3), bool))
        went += int((trial.counters() - before)[which])
        trial.compare()
        assert any(n not in trial.refused for lane in trial.arrived for n in lane)
    assert went > 6 and int(trial.counters()[which]) == (2**32 - 3 + went) % 2**32


def test_growing_keeps_rows_indices_priorities_and_batches() -> None:
    """A full table of two leaves, and one of a third; then rows come that had found no place before."""
    leaves = SMALL | {"c": ((6, 6), np.float32)}
    cut = {"a": (4, 4), "b": (4, 4), "c": (3, 3)}
    storage = Deduplicated(keys=("a", "b", "c"), block=cut, blocks={"a": 64, "b": 64, "c": 96}, on_full="refuse")
    buffer = fbuf.Buffer(36, lanes=3, storage=storage, sampler=Prioritized())
    trial, rng = Trial(buffer, leaves), np.random.default_rng(0)
    every = np.ones((4, 3), bool)

    def extend() -> None:
        numbers = rng.integers(0, 9, (4, 3, 6, 6)).astype(np.float32)
        numbers[rng.random(numbers.shape) < 0.1] = np.nan
        trial.extend(from_pool(rng, (4, 3)) | {"c": numbers}, every, rng.exponential(size=(4, 3)).astype(np.float32))
        trial.compare()

    for _ in range(5):
        extend()
    assert trial.refused
    state = trial.state
    readable = [n for lane in trial.arrived for n in lane if n not in trial.refused]
    index, batch = trial.index_of(readable), buffer.peek(state, KEY, 64)
    for wanted, places in ((None, [192, 160]), ({"a": 608, "b": 416, "c": 96}, [1024, 96])):
        grown, larger = buffer.grow(state, wanted)
        assert [len(table.count) for table in larger.rows.tables] == places
        check(larger)
        same(grown.peek(larger, KEY, 64), batch)
        same(grown.rows(larger), buffer.rows(state))
        assert bool(grown.get(larger, index).mask.all())
        same(larger.sampler, state.sampler)
        stats, before = jax.device_get((grown.stats(larger), buffer.stats(state)))
        assert stats["blocks"] == before["blocks"]
        # of the fullest table: the one that stays as it is, the second time
        assert stats["blocks_load"] < before["blocks_load"] if wanted is None else stats["blocks_load"] > 0.8
        empty = jax.eval_shape(grown.init, trial.example)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(empty)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(larger)
        ]
        same(buffer.peek(state, KEY, 64), batch)  # the old state has not changed
    trial.buffer, trial.methods, trial.state = grown, methods_of(grown), larger
    trial.compare()
    extend()
    extend()


@pytest.mark.parametrize(("number", "view"), [(60, Row()), (300, Transition(autoreset="same_step"))])
def test_a_table_with_room_for_all_rows_gives_up_none(number: int, view: Any) -> None:
    support.check_full_table(number, view)


def test_masked_writes_do_not_change_the_forecast() -> None:
    """A write that is masked throughout changes nothing of what is foreseen; one that is padded counts what it brings."""
    buffer = fbuf.Buffer(2000, storage=Deduplicated(keys=("obs",), block=(8, 8), blocks=2048))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for number, brought, between in ((160, 160, True), (512, 8, False)):
        state = buffer.init(support.OBS)
        for i in range(30 if between else 200):
            state = extend(state, support.noise_rows(number, seed=i), mask=np.arange(number) < brought)
            if between:
                state = extend(state, support.noise_rows(number), mask=np.zeros(number, bool))
        stats = buffer.stats(state)
        assert int(stats["refused_rows"]) == 0 and int(stats["retired_rows"]) > 0
        assert 0.55 < float(stats["blocks_load"]) < 0.96, (number, stats)


def test_more_lanes_than_a_chunk_holds() -> None:
    lanes = _block_rows._CHUNK_BLOCKS // 4 + 3
    buffer = fbuf.Buffer(3 * lanes, lanes=lanes, storage=Deduplicated(keys=("obs",), block=(4, 4), blocks=2**13))
    trial, rng = Trial(buffer, {"obs": ((8, 8), np.uint8)}), np.random.default_rng(0)
    pool = rng.integers(0, 256, (400, 8, 8), np.uint8)
    for _ in range(3):
        trial.extend({"obs": pool[rng.integers(0, 400, (2, lanes))]})
    trial.compare()
    assert trial.counters().tolist() == [0, 0]


def test_rows_before_a_clear_do_not_count_after_convert() -> None:
    """The first two rows are the first of all: no stack reaches across the clear."""
    fields = {"reward": 0.0, "action": 0, "terminated": False, "truncated": False}
    rows = support.noise_rows(20) | {
        "reward": np.arange(20, dtype=np.float32),
        "action": np.zeros(20, np.int32),
        "terminated": np.zeros(20, bool),
        "truncated": np.zeros(20, bool),
    }
    buffer = fbuf.Buffer(64, storage=Deduplicated(keys=("obs",), blocks=1024))
    other = dataclasses.replace(buffer, view=Transition(stack=4, n_step=2, autoreset="same_step"))
    state = buffer.extend(buffer.clear(buffer.extend(buffer.init(support.OBS | fields), rows)), rows)
    converted = buffer.convert(other, state)
    assert int(other.stats(converted)["drawable"]) == 18
    check(converted)
    same(other.rows(converted).data, buffer.rows(state).data)


def _constant(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    zero = jnp.zeros(blocks.shape[:1], jnp.uint32)
    return zero, zero + jnp.uint32(5)


def test_equal_fingerprints_of_different_blocks_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_table, "digest", _constant)
    storage = Deduplicated(keys=("obs",), block=(4, 4), blocks=512, on_full="refuse")
    trial = Trial(fbuf.Buffer(37, storage=storage), {"obs": ((8, 8), np.uint8)})  # a capacity of this test alone
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (60, 4, 4), np.uint8)

    def rows(kinds: int) -> Fields:
        tiles = pool[rng.integers(0, kinds, (6, 1, 2, 2))]
        return {"obs": np.moveaxis(tiles, -3, -2).reshape(6, 1, 8, 8)}

    for _ in range(8):
        trial.extend(rows(40))
        trial.compare()
    assert trial.counters()[0] == 0  # two buckets hold 64 blocks (63 if one of them is the first)
    prints = np.asarray(trial.state.rows.tables[0].prints)
    assert len(set(prints[prints != 0])) == 1 and np.sum(prints != 0) <= 64
    for _ in range(8):  # more kinds than that: some rows are refused, the others are exact
        trial.extend({"obs": rng.integers(0, 256, (6, 1, 8, 8), np.uint8)})
        trial.extend(rows(60))
        trial.compare()
    assert trial.counters()[0] > 0


def test_rows_and_references_are_right_after_any_calls() -> None:
    check_programs("refuse", 14, 33)  # two of three lanes at once
