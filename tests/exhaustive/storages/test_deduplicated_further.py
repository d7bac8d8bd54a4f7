"""Further cases of deduplicated, which take long: see `tests/more/storages/test_deduplicated.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._buffer.state import COUNTERS
from fbuf.samplers import Prioritized
from fbuf.storages import Deduplicated
from fbuf.views import Row, Transition
from tests.support.deduplicated import KEY, SMALL, Trial, check, from_pool, methods_of, small
from tests.support.deduplicated_device import (
    OBS,
    check_full_table,
    check_masked_draws,
    noise_rows,
)
from tests.support.trees import same


def test_draws_of_refused_rows_are_masked() -> None:
    check_masked_draws("prioritized", "transition")


@pytest.mark.parametrize("on_full", ["refuse", "retire"])
def test_counters_wrap_at_2_to_the_32(on_full: str) -> None:
    """Nothing but noise, in a table far too small: some row can always be read."""
    trial, which = Trial(small(on_full), SMALL), ("refuse", "retire").index(on_full)
    counter = COUNTERS.index(("refused_rows", "retired_rows")[which])
    counters = trial.state.counters.at[counter].set(jnp.uint32(2**32 - 3))
    trial.state, went = dataclasses.replace(trial.state, counters=counters), 0
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


@pytest.mark.parametrize(("number", "view"), [(60, Row()), (300, Transition())])
def test_a_table_with_room_for_all_rows_gives_up_none(number: int, view: Any) -> None:
    check_full_table(number, view)


def test_masked_writes_do_not_change_the_forecast() -> None:
    """A write that is masked throughout changes nothing of what is foreseen; one that is padded counts what it brings."""
    buffer = fbuf.Buffer(2000, storage=Deduplicated(keys=("obs",), block=(8, 8), blocks=2048))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for number, brought, between in ((160, 160, True), (512, 8, False)):
        state = buffer.init(OBS)
        for i in range(30 if between else 200):
            state = extend(state, noise_rows(number, seed=i), mask=np.arange(number) < brought)
            if between:
                state = extend(state, noise_rows(number), mask=np.zeros(number, bool))
        stats = buffer.stats(state)
        assert int(stats["refused_rows"]) == 0 and int(stats["retired_rows"]) > 0
        assert 0.55 < float(stats["blocks_load"]) < 0.96, (number, stats)
