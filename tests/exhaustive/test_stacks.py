"""Stacks of every dtype, of real frames, and over many rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fbuf._host.codec import Zstd
from fbuf._host.store import Column, Store
from tests.support.stacks import DTYPES, Player, check_frames, check_recognised, make, stacked, write
from tests.test_store import fetch, same


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("axis", "depth"), [(1, 4), (-1, 4), (1, 2), (-1, 3)])
def test_stacks_are_recognised_and_round_trip(dtype: Any, axis: int, depth: int) -> None:
    check_recognised(dtype, axis, depth)


def test_real_frames_take_what_they_would_singly() -> None:
    from benchmarks._atari import frames as atari

    seen, starts = atari("Breakout", 4000)
    single = Store((Column("o", (84, 84), np.dtype(np.uint8), Zstd()),), lanes=1, length=4000, slack=0)
    write(single, seen[:, None], at_once=256)
    for axis in (1, -1):
        rows = stacked(seen, starts, axis=axis)
        store = make(rows.shape[1:], length=4000, codec=Zstd())
        got, ok = fetch(store, write(store, rows[:, None], at_once=256))
        assert ok.all() and same(got, rows[:, None])
        assert store.nbytes <= 1.3 * single.nbytes


def test_memory_is_flat_over_many_rows() -> None:
    rng = np.random.default_rng(0)
    store = make((4, 16, 16), lanes=2, length=1000, codec=Zstd())
    players = [Player(rng, (4, 16, 16), 0, 1, np.uint8) for _ in range(2)]
    sizes = []
    for turn in range(500):
        kinds = ["next", "next", "next", "next", "again", "first"] if turn % 50 else ["any"]
        rows = np.array([[p.next(str(rng.choice(kinds))) for p in players] for _ in range(100)])
        keep = rng.random((100, 2)) < 0.9 if turn % 3 else None
        tickets = store.write([rows], keep)
        sizes.append(store.nbytes)
    got, ok = fetch(store, tickets)
    there = tickets != 0
    assert ok.all() and same(got[there], rows[there])
    check_frames(store)
    assert max(sizes[250:]) <= 1.2 * max(sizes[50:250])
