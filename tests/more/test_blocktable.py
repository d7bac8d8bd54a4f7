"""`fbuf._blocktable`: bad hashes, load, loops and rebuilding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fbuf import _blocktable
from fbuf._blocktable import WAYS
from tests.support.blocktable import (
    CONTENTS,
    SIZE,
    WORDS,
    Cycle,
    Model,
    check_in_place,
    check_load,
    check_rebuild,
    check_sequences,
    check_turnover,
    cycle,
    hashing,
    some_blocks,
    start,
)


@pytest.mark.parametrize(("digest", "places", "lot"), [("good", 160, 7), ("constant", 64, SIZE), ("equal", 160, 7)])
def test_any_sequence_of_calls(digest: str, places: int, lot: int) -> None:
    check_sequences(digest, places, lot)


@pytest.mark.parametrize("content", CONTENTS)
def test_nothing_is_refused_before_every_place_is_taken(content: str) -> None:
    check_load(4096, content)


@pytest.mark.parametrize(("places", "lot"), [(64, 16), (320, 64)])
def test_nothing_is_refused_while_blocks_come_and_go(places: int, lot: int) -> None:
    check_turnover(places, lot)


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_eager_jit_scan_and_vmap_are_the_same() -> None:
    """Three tables, seven steps, different numbers of blocks: one after the other, in loops, and all at once."""
    turns, size, lot = 7, 30, 8
    draw = np.random.default_rng(0)
    blocks = np.stack([[some_blocks(size, a, turn) for turn in range(turns)] for a in (12, 90, 2**32)])
    number = np.array([[0, 1, 8, 30, 30, 0, 17], draw.integers(0, 31, turns), [30] * turns], np.int32)
    one = jax.jit(lambda now, blocks, number: cycle(now, blocks, number, lot))
    ends, outs = [], []
    for i in range(3):
        now, out = start(96, size, WORDS), []
        for turn in range(turns):
            now, made = one(now, blocks[i, turn], number[i, turn])
            out.append(made)
        ends.append(now)
        outs.append(jax.tree.map(lambda *a: np.stack(a), *out))
    assert [int(end.table.count.astype(bool).sum()) - 1 for end in ends][2] > 30

    eager = start(96, size, WORDS)
    for turn in range(2):
        eager, made = cycle(eager, jnp.asarray(blocks[1, turn]), jnp.asarray(number[1, turn]), lot)
        same(made, jax.tree.map(lambda a, turn=turn: a[turn], outs[1]))

    def loop(now: Cycle, blocks: jax.Array, number: jax.Array) -> Any:
        return lax.scan(lambda now, xs: cycle(now, *xs, lot), now, (blocks, number))

    scanned = jax.jit(loop)
    for i in range(3):
        same(scanned(start(96, size, WORDS), blocks[i], number[i]), (ends[i], outs[i]))

    starts = jax.tree.map(lambda a: jnp.stack([a] * 3), start(96, size, WORDS))
    together = jax.tree.map(lambda *a: np.stack(a), *ends), jax.tree.map(lambda *a: np.stack(a), *outs)
    same(jax.jit(jax.vmap(loop))(starts, blocks, number), together)


@pytest.mark.optimized
@pytest.mark.parametrize(("loop", "tables"), [(False, None), (True, 3)])
def test_cycles_are_in_place(loop: bool, tables: int | None) -> None:
    check_in_place(loop, tables)


def test_rebuilding_keeps_blocks_that_are_referred_to() -> None:
    check_rebuild("good", 64)
    check_rebuild("good", 1024)
    check_rebuild("constant", 64)


def test_rebuilding_a_full_table_into_one_hardly_larger_loses_nothing() -> None:
    model = Model(1024, 64)
    blocks = some_blocks(1023, 2**32, 0)
    model.table, placed, _ = model.calls.insert(model.table, blocks, np.arange(1023, dtype=np.int32), 1023)
    assert np.asarray(placed.place).all()
    made, moved, lost = _blocktable.rebuild(model.table, 1056)
    assert int(lost) == 0 and int(made.live) == 1023
    np.testing.assert_array_equal(np.asarray(made.words)[np.asarray(moved)[1:]], np.asarray(model.table.words)[1:])


def test_one_bucket_pair_is_used_to_its_last_place() -> None:
    """All blocks want the same 64 slots: they get every one and no other, and again when nothing refers to their blocks."""
    with hashing("constant"):
        model = Model(320, 16)
        room = WAYS * 2 - (0 in model.buckets(np.zeros((1, WORDS), np.uint32)))
        placed = model.write(some_blocks(100, 2**32, 0), 100, 0)
        assert np.asarray(placed.won).sum() == room and model.refused == 100 - room
        model = Model(320, 16)
        for seed in range(9):
            refused = model.refused
            model.write(some_blocks(100, 2**32, seed), 16, seed)
            if refused:  # the lot before found few slots free; now there is none
                assert model.refused == refused
            for _ in range(3):
                model.release(1.0, seed, 100)
        assert model.live == 0 and len(model.contents()) < 65 and model.refused < 16
