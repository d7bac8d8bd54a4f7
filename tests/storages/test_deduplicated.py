"""`storages.Deduplicated`: every row is what was given, or is counted as gone (`tests/support/deduplicated.py`)."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._algorithms import block_table
from fbuf._buffer.state import COUNTERS
from fbuf._core import control_flow
from fbuf.samplers import Prioritized
from fbuf.storages import Deduplicated, Device
from fbuf.testing import assert_inplace
from fbuf.views import Row, Transition
from tests.support import deduplicated, refusals
from tests.support import deduplicated_device as support
from tests.support.deduplicated import SMALL, check, check_leaves, check_programs
from tests.support.deduplicated_device import BATCH_BYTES, OBS, SIZES, atari, noise_rows
from tests.support.refusals import raises
from tests.support.tables import by_tier, checks, pairwise
from tests.support.trees import row_with, same, x64


def test_rows_and_references_are_right_after_any_calls() -> None:
    check_programs("retire", 63, 39)  # three steps of all lanes at once


@pytest.mark.parametrize("platform", by_tier("default", more=["cpu"]))
def test_stacks_are_those_of_the_device(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*args: Any, **branches: Any) -> Any:
        return branches.get(platform, branches["default"])(*args)

    monkeypatch.setattr(control_flow, "platform_dependent", choose)
    random, batches = np.random.default_rng(0), []
    ends = {"terminated": random.random(40) < 0.2, "truncated": np.zeros(40, bool)}
    rows = row_with(random.integers(0, 256, (40, 8, 8), np.uint8), 40, **ends)
    view = Transition(n_step=2, stack=3, autoreset="same_step")
    blocks = {"cpu": 512, "default": 544}[platform]  # what was traced for one is not used for the other
    for storage in (Device(), Deduplicated(keys=("obs",), block=(8, 4), blocks=blocks)):
        buffer = fbuf.Buffer(32, storage=storage, view=view)
        state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], rows)), rows)
        batches.append(buffer.peek(state, jax.random.key(0), 64))
    same(*batches)


@pytest.mark.more
def test_changes_that_find_no_room_are_counted() -> None:
    rows = {"obs": np.random.default_rng(0).integers(0, 256, (6, 16, 16), np.uint8)}
    buffer = fbuf.Buffer(8, storage=Deduplicated(keys=("obs",), block=(4, 4), blocks=64, on_full="refuse"))
    state = buffer.extend(buffer.init({"obs": rows["obs"][0]}), {"obs": rows["obs"][:3]})
    state = buffer.update_rows(state, buffer.rows(state, last=3).index, {"obs": rows["obs"][3:]})
    assert buffer.stats(state)["refused_rows"] == 3
    np.testing.assert_array_equal(buffer.rows(state, last=3).data["obs"], rows["obs"][:3])


@pytest.mark.more
def test_a_block_that_was_dropped_does_not_keep_its_place_where_another_may_take_it() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (70, 4, 4), np.uint8)
    buffer = fbuf.Buffer(2, lanes=2, storage=Deduplicated(keys=("obs",), block=(4, 4), blocks=64))
    state, extend = buffer.init({"obs": blocks[0]}), jax.jit(buffer.extend)
    for first in range(0, 68):  # lane 0 keeps its block; those of lane 1 go round the table
        rows = blocks[None, [0, first + 1]]
        state = extend(state, {"obs": rows})
        np.testing.assert_array_equal(buffer.rows(state).data["obs"], rows)


PICTURE = {"obs": np.zeros((84, 84), np.uint8), "small": np.zeros((3,), np.uint8)}
INVALID = """
init(keys="obs") => TypeError keys is 'obs'; | Write keys=('obs',)
init(keys=("pixels",)) => ValueError keys names 'pixels', but rows have obs, small
init(keys=()) => ValueError keys is empty; expected names of leaves (obs, small)
init(block=(12, 3)) => ValueError has 3 bytes; | Write block=(12, 4)
init(block=12) => ValueError block is 12; expected (rows, pixels)
init(block=(0, 4)) => ValueError expected (rows, pixels), two ints >= 1
init(blocks=100) => ValueError blocks is 100; expected a multiple of 32 below 2^30. Use 128.
init(blocks=0) => ValueError blocks is 0; expected an int >= 64
init(blocks=2**30) => ValueError below 2^30
init(blocks="many") => ValueError blocks is 'many'; expected an int
init(blocks={"small": 64}) => ValueError blocks names 'small', but leaves are obs.
init(block={"small": (1, 4)}) => ValueError block names 'small', but leaves are obs.
init(on_full="drop") => ValueError on_full is 'drop'; expected "retire" or "refuse"
init({"x": np.zeros(9, np.complex64)}, keys=("x",)) => TypeError leaf 'x' is complex64 | expected one or more integers
init({"x": np.zeros((0, 4), np.uint8)}, keys=("x",)) => TypeError leaf 'x' is uint8[0, 4]
init({"x": np.zeros(9, np.uint8)}) => ValueError no leaf of x has 1024 bytes a row. Name some: keys=(...).
"""


def init(example: Any = PICTURE, **settings: Any) -> Any:
    return fbuf.Buffer(100, storage=Deduplicated(**settings)).init(example)


def test_invalid_settings_are_refused_with_the_fix() -> None:
    refusals.check_all(INVALID, globals())
    one = Deduplicated(keys=("obs",), block={"obs": (12, 12)}, blocks={"obs": 64})
    assert one == Deduplicated(keys=["obs"], block={"obs": [12, 12]}, blocks={"obs": np.int64(64)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"references; expected less than 2\^32. Use larger blocks"):
        jax.eval_shape(fbuf.Buffer(10**9, storage=Deduplicated(keys=("obs",))).init, PICTURE)


def test_growing_asks_for_more_places_and_a_concrete_state() -> None:
    both = fbuf.Buffer(36, lanes=3, storage=Deduplicated(keys=("a", "b"), block=(4, 4), blocks=96))
    example = {n: np.zeros(*x) for n, x in SMALL.items()}
    empty = both.init(example)
    other = dataclasses.replace(both, storage=Deduplicated(keys=("a", "b"), blocks=4096))
    pytest.raises(ValueError, lambda: both.convert(other, empty)).match("other.storage")
    pytest.raises(ValueError, both.grow, empty, 64).match(r"blocks is 64; expected at least the present 96")
    pytest.raises(ValueError, both.grow, empty, 100).match("expected a multiple of 32")
    raises(TypeError, r"the state is traced.*outside jit", lambda: jax.jit(lambda s: both.grow(s)[1])(empty))
    with pytest.raises(TypeError, match="cannot grow"):
        device = fbuf.Buffer(4)
        device.grow(device.init(jnp.float32(0)))
    raises(ValueError, r"without 'b'.*Give one number, or one for each of: a, b", both.grow, empty, {"a": 960})


@pytest.mark.more
def test_retired_rows_are_not_drawn_when_every_priority_is_zero():
    storage = Deduplicated(keys=("obs",), block=(4, 4), blocks=64, on_full="retire")
    view = fbuf.views.Transition(autoreset="same_step")
    buffer = fbuf.Buffer(64, storage=storage, sampler=fbuf.samplers.Prioritized(eps=0.0), view=view)
    obs = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    rows = row_with(obs, 40, reward=np.arange(40, dtype=np.float32))
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    extend = jax.jit(lambda s, part: buffer.extend(s, part, priority=jnp.zeros(4)))
    for at in range(0, 40, 4):
        state = extend(state, jax.tree.map(lambda x, at=at: x[at : at + 4], rows))
    size, retired = (int(buffer.stats(state)[name]) for name in ("size", "retired_rows"))
    assert retired and size + retired == 40
    batch = buffer.peek(state, jax.random.key(0), 256)
    assert batch.mask.all()
    assert set(np.asarray(batch.data["reward"]).astype(int)) == set(range(retired, 39))


@pytest.mark.more
@pytest.mark.parametrize("kind", by_tier(more=["one table"], exhaustive=["frames, colour, stacks"]))
def test_leaves_of_every_kind_are_exact(kind):
    check_leaves(kind, 3)


@pytest.mark.more
def test_rows_of_very_many_blocks_keep_the_count_of_blocks():
    """More blocks a row than `release` may take at once."""
    blocks = 4 * block_table.CHUNK_ITEMS
    try:
        buffer = fbuf.Buffer(1, storage=Deduplicated(keys=("obs",), block=(1, 1), blocks=2 * blocks))
        state = buffer.init({"obs": np.zeros((4, blocks // 4), np.uint32)})
    except ValueError as error:
        assert "Use larger ones" in str(error)
        return
    for turn in range(3):
        rows = np.arange(turn * blocks, (turn + 1) * blocks, dtype=np.uint32).reshape(1, 4, -1)
        state = buffer.extend(state, {"obs": rows})
        same(buffer.rows(state).data["obs"], rows)
        check(state)


@pytest.mark.more
@pytest.mark.in_place
def test_a_write_needs_less_than_four_times_its_frames():
    needed = []
    for capacity, blocks in SIZES:
        buffer, state, rows = atari(capacity, blocks)
        needed.append(assert_inplace(buffer.extend, state, rows, bound=4 * BATCH_BYTES).temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024


@pytest.mark.more
def test_arrays_load_only_where_their_ids_mean_the_same():
    """Other blocks of the same size, or a table of another size (the buffer before it grew), would show other frames."""
    buffer = fbuf.Buffer(64, storage=Deduplicated(keys=("obs",), block=(8, 8), blocks=512))
    state = buffer.extend(buffer.init(OBS), noise_rows(64))
    arrays = buffer.storage.to_arrays(state.rows)
    structure = jax.tree.structure(OBS)
    same(buffer.storage.from_arrays(arrays, buffer.geometry, OBS, structure), state.rows)
    for block, blocks, message in (((4, 16), 512, "blocks differ"), ((8, 8), 256, "expected uint8")):
        other = Deduplicated(keys=("obs",), block=block, blocks=blocks)
        with pytest.raises(ValueError, match=message):
            other.from_arrays(arrays, buffer.geometry, OBS, structure)


EXACT = pairwise([support.check_masked_draws, support.check_retirement], support.SAMPLERS, support.VIEWS)
test_checks = checks(
    exhaustive=[
        (deduplicated.check_leaves, itertools.product(deduplicated.LEAVES, [3, None])),
        *((check, [(sampler, view)]) for check, sampler, view in EXACT),
        (support.check_retirement, itertools.product(support.OTHERS, support.VIEWS)),
        (support.check_full_table, [(60, Row()), (300, Transition(autoreset="same_step"))]),
        (deduplicated.check_programs, [("refuse", 14, 33)]),  # two of three lanes at once
    ]
)
GAMES = ("Pong", "Breakout", "Seaquest", "MsPacman", "SpaceInvaders", "Qbert", "Freeway", "Enduro", "Asterix", "Krull")
STORAGE = Deduplicated(keys=("obs",))
FORMS = {
    "stream": (fbuf.Buffer(2048, storage=STORAGE), 250),
    "sixteen lanes": (fbuf.Buffer(2048, lanes=16, storage=dataclasses.replace(STORAGE, on_full="refuse")), 25),
}


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
@pytest.mark.in_place
@pytest.mark.parametrize(("form", "batches"), [(_steps, 5), (_vmapped, 12)])  # a turn's slice of the rows is one more
def test_steps_are_in_place(form: Any, batches: int) -> None:
    needed = []
    for capacity, blocks in support.SIZES:
        made = form(*support.atari(capacity, blocks, sampler=Prioritized()))
        needed.append(assert_inplace(*made, bound=batches * support.BATCH_BYTES).temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024


@pytest.mark.exhaustive
def test_64_bit_leaves_are_exact() -> None:
    with x64():
        leaves = {"real": ((3, 5), np.float64), "whole": ((7,), np.int64)}
        trial = deduplicated.Trial(fbuf.Buffer(8, storage=Deduplicated(keys=tuple(leaves), blocks=512)), leaves)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            trial.extend({name: deduplicated.values(rng, (5, 1), *leaf) for name, leaf in leaves.items()})
            trial.compare()
    assert trial.compared > 15


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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
