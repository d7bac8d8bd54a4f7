"""`storages.Deduplicated`: leaves of every kind, full tables, real games, growth, and in-place writes."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._buffer.state import COUNTERS
from fbuf.samplers import Prioritized
from fbuf.storages import Deduplicated
from fbuf.testing import assert_inplace
from fbuf.views import Row, Transition
from tests.support import deduplicated
from tests.support import deduplicated_device as support
from tests.support.deduplicated import check
from tests.support.tables import checks, pairwise
from tests.support.trees import same, x64

pytestmark = pytest.mark.exhaustive

EXACT = pairwise([support.check_masked_draws, support.check_retirement], support.SAMPLERS, support.VIEWS)
test_checks = checks(
    (deduplicated.check_leaves, itertools.product(deduplicated.LEAVES, [3, None])),
    *((check, [(sampler, view)]) for check, sampler, view in EXACT),
    (support.check_retirement, itertools.product(support.OTHERS, support.VIEWS)),
    (support.check_full_table, [(60, Row()), (300, Transition(autoreset="same_step"))]),
    (deduplicated.check_programs, [("refuse", 14, 33)]),  # two of three lanes at once
)
GAMES = ("Pong", "Breakout", "Seaquest", "MsPacman", "SpaceInvaders", "Qbert", "Freeway", "Enduro", "Asterix", "Krull")
STORAGE = Deduplicated(keys=("obs",))
FORMS = {
    "stream": (fbuf.Buffer(2048, storage=STORAGE), 250),
    "sixteen lanes": (fbuf.Buffer(2048, lanes=16, storage=dataclasses.replace(STORAGE, on_full="refuse")), 25),
}


@pytest.mark.parametrize(("game", "form"), list(zip(GAMES, itertools.cycle(FORMS))))
def test_frames_of_real_games_are_exact(game: str, form: str) -> None:
    """20,000 frames through a ring of 2,048, in a table of the default size; each lane plays a stretch of its own."""
    pytest.importorskip("ale_py")
    from benchmarks import _atari

    buffer, steps = FORMS[form]
    trial, rng, unread = deduplicated.Trial(buffer, {"obs": ((84, 84), np.uint8)}), np.random.default_rng(0), 0
    frames = _atari.frames(game, 20_000)[0].reshape(trial.lanes, -1, 84, 84).swapaxes(0, 1)
    for begin in range(0, len(frames) - steps + 1, steps):
        if unread + steps > trial.length:  # every frame that is stored is read at least once
            trial.compare()
            unread = 0
        mask = rng.random((steps, trial.lanes)) < 0.9 if buffer.lanes else None
        trial.extend({"obs": frames[begin : begin + steps]}, mask)
        unread += steps
    trial.compare()
    stats = jax.device_get(buffer.stats(trial.state))
    assert stats["blocks_load"] < 1 and (form == "stream" or stats["retired_rows"] == 0)
    if game in ("Breakout", "MsPacman"):
        assert stats["refused_rows"] == stats["retired_rows"] == 0 and trial.compared > 15_000


def _steps(buffer: fbuf.Buffer, state: Any, rows: Any) -> Any:
    def one(state: Any, given: Any) -> Any:
        rows, key = given
        state, batch = buffer.sample(buffer.extend(state, rows), key, 8)
        return buffer.update_priority(state, batch.index, batch.data["reward"]), batch.weight

    given = (support.shapes(rows, 3), jax.ShapeDtypeStruct((3, 2), jnp.uint32))
    return lambda s, g: lax.scan(one, s, g), state, given


def _vmapped(buffer: fbuf.Buffer, state: Any, rows: Any) -> Any:
    return jax.vmap(buffer.extend), support.shapes(state, 3), support.shapes(rows, 3)


@pytest.mark.in_place
@pytest.mark.parametrize(("form", "batches"), [(_steps, 5), (_vmapped, 12)])  # a turn's slice of the rows is one more
def test_steps_are_in_place(form: Any, batches: int) -> None:
    needed = []
    for capacity, blocks in support.SIZES:
        made = form(*support.atari(capacity, blocks, sampler=Prioritized()))
        needed.append(assert_inplace(*made, bound=batches * support.BATCH_BYTES).temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024


def test_64_bit_leaves_are_exact() -> None:
    with x64():
        leaves = {"real": ((3, 5), np.float64), "whole": ((7,), np.int64)}
        trial = deduplicated.Trial(fbuf.Buffer(8, storage=Deduplicated(keys=tuple(leaves), blocks=512)), leaves)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            trial.extend({name: deduplicated.values(rng, (5, 1), *leaf) for name, leaf in leaves.items()})
            trial.compare()
    assert trial.compared > 15


@pytest.mark.parametrize("on_full", ["refuse", "retire"])
def test_counters_wrap_at_2_to_the_32(on_full: str) -> None:
    """Nothing but noise, in a table far too small: some row can always be read."""
    trial, which = (
        deduplicated.Trial(deduplicated.small(on_full), deduplicated.SMALL),
        ("refuse", "retire").index(on_full),
    )
    counter = COUNTERS.index(("refused_rows", "retired_rows")[which])
    counters = trial.state.counters.at[counter].set(jnp.uint32(2**32 - 3))
    trial.state, went = trial.state.replace(counters=counters), 0
    for seed in range(8):
        before, rng = trial.counters(), np.random.default_rng(seed)
        noise = {
            name: rng.integers(0, 256, (4, 3, *shape), np.uint8) for name, (shape, _) in deduplicated.SMALL.items()
        }
        trial.extend(noise, np.ones((4, 3), bool))
        went += int((trial.counters() - before)[which])
        trial.compare()
        assert any(n not in trial.refused for lane in trial.arrived for n in lane)
    assert went > 6 and int(trial.counters()[which]) == (2**32 - 3 + went) % 2**32


def test_growing_keeps_rows_indices_priorities_and_batches() -> None:
    """A full table of two leaves, and one of a third; then rows come that had found no place before."""
    leaves = deduplicated.SMALL | {"c": ((6, 6), np.float32)}
    cut = {"a": (4, 4), "b": (4, 4), "c": (3, 3)}
    storage = Deduplicated(keys=("a", "b", "c"), block=cut, blocks={"a": 64, "b": 64, "c": 96}, on_full="refuse")
    buffer = fbuf.Buffer(36, lanes=3, storage=storage, sampler=Prioritized())
    trial, rng = deduplicated.Trial(buffer, leaves), np.random.default_rng(0)
    every = np.ones((4, 3), bool)

    def extend() -> None:
        numbers = rng.integers(0, 9, (4, 3, 6, 6)).astype(np.float32)
        numbers[rng.random(numbers.shape) < 0.1] = np.nan
        trial.extend(
            deduplicated.from_pool(rng, (4, 3)) | {"c": numbers}, every, rng.exponential(size=(4, 3)).astype(np.float32)
        )
        trial.compare()

    for _ in range(5):
        extend()
    assert trial.refused
    state = trial.state
    readable = [n for lane in trial.arrived for n in lane if n not in trial.refused]
    index, batch = trial.index_of(readable), buffer.peek(state, deduplicated.KEY, 64)
    for wanted, places in ((None, [192, 160]), ({"a": 608, "b": 416, "c": 96}, [1024, 96])):
        grown, larger = buffer.grow(state, wanted)
        assert [len(table.count) for table in larger.rows.tables] == places
        check(larger)
        same(grown.peek(larger, deduplicated.KEY, 64), batch)
        same(grown.rows(larger), buffer.rows(state))
        assert bool(grown.get(larger, index).mask.all())
        same(larger.sampler, state.sampler)
        stats, before = jax.device_get((grown.stats(larger), buffer.stats(state)))
        assert stats["blocks"] == before["blocks"]
        # of the fullest table: the one that stays as it is, the second time
        assert stats["blocks_load"] < before["blocks_load"] if wanted is None else stats["blocks_load"] > 0.8
        made, empty = (jax.tree.leaves(state) for state in (larger, jax.eval_shape(grown.init, trial.example)))
        assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in empty]
        same(buffer.peek(state, deduplicated.KEY, 64), batch)  # the old state has not changed
    trial.buffer, trial.methods, trial.state = grown, deduplicated.methods_of(grown), larger
    trial.compare()
    extend()
    extend()


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
