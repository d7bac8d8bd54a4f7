"""Which steps windows reach: a plain enumeration of windows, compared with buffers, and with its own promises."""

import dataclasses

import jax
import numpy as np
import pytest

import fbuf
from fbuf._indexing import anchors
from fbuf.samplers import Prioritized, Ranked, Uniform
from fbuf.views import Episode, Sequence
from tests.support import same_step
from tests.support import windows as oracle
from tests.support.inplace import assert_order
from tests.support.tables import by_tier
from tests.support.trees import same
from tests.support.window_cases import ROW, check, check_chances, program, random_episodes, random_view
from tests.support.windows import Lane

SEEDS, LOGS = range(300), 20
VIEWS = [
    same_step.Sequence(5, burn_in=1, bootstrap=1, stride=3, episode="id"),
    Sequence(4, stride=4, burn_in=3, autoreset="next_step"),
    Sequence(4, burn_in=1, bootstrap=2, boundary="mask", at=3, stride=2, autoreset="next_step"),
    Sequence(2, bootstrap=1, boundary="cross", autoreset="next_step"),
]


@pytest.mark.parametrize("view", by_tier(VIEWS[2], more=[*VIEWS[:2], VIEWS[3]]), ids=repr)
def test_buffers_have_the_windows_of_the_oracle(view):
    found = [check(view, seed) for seed in range(LOGS)]
    assert all(sum(len(pair[i]) if i == 0 else pair[i] for pair in found) for i in (0, 1))


def lanes():
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        view = random_view(rng)
        yield rng, view, Lane(random_episodes(rng, view), view.autoreset == "next_step")


def test_every_step_of_an_ended_episode_is_learnt_but_those_of_the_formula():
    promised, ends = 0, set()
    for _, view, lane in lanes():
        missed = oracle.unlearnt(view, lane)
        for first in sorted(set(lane.first)):
            expected = oracle.missed(view, lane, first)
            if expected is not None and view.boundary != "cross":
                promised += 1
                ends.add((view.autoreset, view.boundary, lane.terminated[lane.last[first]]))
                rows = range(first, lane.last[first] + 1)
                assert {row for row in rows if row in missed} == {row for row in expected if not lane.reset[row]}
    assert promised > 300 and len(ends) >= 6


def test_the_newest_steps_of_a_running_episode_wait_for_more():
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        view, rows = random_view(rng), int(rng.integers(8, 40))
        if oracle.reaches_every_step(view):
            lane = Lane([oracle.Episode(rows, "running")], next_step=False)
            waiting = (rows - view.length + view.at) % view.stride + view.bootstrap
            assert oracle.unlearnt(view, lane) == set(range(rows - waiting, rows)), view


def test_no_windows_learn_nothing_and_longer_strides_skip_rows():
    for _, view, lane in lanes():
        assert all(window.learns for window in oracle.windows(view, lane))
    view = same_step.Sequence(6, burn_in=2, bootstrap=1, stride=7)
    missed = oracle.unlearnt(view, Lane([oracle.Episode(20, "terminated")], False))
    assert missed == {5, 6, 7, 8, 12, 13, 14, 15}  # 7 - (6 - 2 - 1) after each window but the last


def flags_of(view, lane, oldest):
    """The flags of the rows held, as uint8[L, 1], by the definition of each."""
    opened = {window.anchor for window in oracle.windows(view, lane, oldest)}
    flags = np.zeros((len(lane) - oldest + 3, 1), np.uint8)
    for i, row in enumerate(range(oldest, len(lane))):
        last = lane.ended[row] and lane.last[row] == row
        cut = last and not (lane.terminated[row] or lane.truncated[row] or lane.reset[row])
        ends = lane.terminated[row] or lane.truncated[row] or cut
        bits = {"START": lane.starts(row), "END": ends, "TERMINATED": lane.terminated[row], "ANCHOR": row in opened}
        bits |= {"RESET": lane.reset[row], "CUT": cut}
        flags[i] = sum(getattr(anchors, name) for name, there in bits.items() if there)
    return flags


def test_rows_that_no_window_learns_are_found_from_flags():
    for rng, view, lane in lanes():
        oldest = int(rng.integers(len(lane) // 2))
        learnt = view.learnt(flags_of(view, lane, oldest))[: len(lane) - oldest, 0]
        missed = {row for row in range(oldest, len(lane)) if not learnt[row - oldest] and not lane.reset[row]}
        assert missed == oracle.unlearnt(view, lane, oldest), view


BY_PRIORITY = Prioritized(alpha=1.0, eps=0.0, stratified=False)


MASKED = Sequence(5, burn_in=2, bootstrap=1, stride=2, boundary="mask", at=2, autoreset="next_step", episode="id")
CROSSING = same_step.Sequence(5, burn_in=2, bootstrap=1, stride=2, boundary="cross")


@pytest.mark.parametrize("view", by_tier(VIEWS[0], more=[MASKED, CROSSING], ids=lambda view: view.boundary))
@pytest.mark.parametrize("sampler", by_tier(Uniform(), more=[BY_PRIORITY]))
def test_draws_are_of_the_windows_of_the_oracle(view, sampler):
    check_chances(view, sampler)


def rows_of(lengths, terminated=True):
    end = np.zeros(sum(lengths), bool)
    end[np.cumsum(lengths) - 1] = True
    number = np.arange(len(end), dtype=np.int32)
    return {"number": number, "id": number * 0, "terminated": end & terminated, "truncated": end & (not terminated)}


def learnt_by(view, rows):
    """Return the windows of a buffer as lists of rows, None for missing ones, and of the learnt rows, by anchor."""
    buffer = fbuf.Buffer(len(rows["id"]), view=view)
    state = buffer.extend(buffer.init(ROW), rows)
    batch = jax.device_get(buffer.peek(state, jax.random.key(0), 256))
    found = {}
    for i, slot in enumerate(batch.index.slot.tolist()):
        mask, number = batch.data["mask"][i], batch.data["number"][i]
        found[slot] = [
            [int(n) if m else None for n, m in zip(number, mask, strict=True)],
            number[batch.data["learning_mask"][i]].tolist(),
        ]
    return [found[slot] for slot in sorted(found)]


@pytest.mark.more
def test_the_windows_of_acmes_r2d2_by_hand():
    """Burn-in 40, trace 80, period 40, one bootstrap row; an episode of 130 steps. Padding is masked."""
    view = same_step.Sequence(121, burn_in=40, bootstrap=1, stride=40, boundary="mask")
    rows = [list(range(first, min(first + 121, 130))) for first in (0, 40, 80, 120)]
    learnt = [list(range(0, 120)), list(range(80, 130)), list(range(120, 130))]
    found = learnt_by(view, rows_of([130]))
    assert [pair[1] for pair in found] == learnt  # the fourth window, of ten rows, would have burn-in rows only
    assert [[r for r in pair[0] if r is not None] for pair in found] == rows[:3]
    truncated = learnt_by(view, rows_of([130], terminated=False))
    assert [pair[1] for pair in truncated] == [learnt[0], learnt[1][:-1], learnt[2][:-1]]


@pytest.mark.more
def test_the_windows_of_dreamers_replay_by_hand():
    """Every 64 successive rows of a stream, across the ends of episodes, which `is_first` marks."""
    view = same_step.Sequence(64, boundary="cross")
    found = learnt_by(view, rows_of([50, 3, 20]))
    whole = [list(range(first, first + 64)) for first in range(10)]
    assert found == [[rows, rows] for rows in whole]
    buffer = fbuf.Buffer(73, view=view)
    state = buffer.extend(buffer.init(ROW), rows_of([50, 3, 20]))
    data = jax.device_get(buffer.peek(state, jax.random.key(0), 64).data)
    assert np.array_equal(data["is_first"], np.isin(data["number"], (0, 50, 53)))


@pytest.mark.more
def test_the_end_of_an_episode_is_learnt_by_hand():
    rows = rows_of([10])
    assert learnt_by(same_step.Sequence(4, stride=4), rows) == [
        [w, w] for w in ([0, 1, 2, 3], [4, 5, 6, 7], [6, 7, 8, 9])
    ]
    assert learnt_by(same_step.Sequence(4, burn_in=1, bootstrap=1, stride=2), rows) == [
        [[0, 1, 2, 3], [0, 1, 2]],
        [[2, 3, 4, 5], [3, 4]],
        [[4, 5, 6, 7], [5, 6]],
        [[6, 7, 8, 9], [7, 8, 9]],
    ]
    ended = same_step.Sequence(4, bootstrap=1, stride=3, episode_end=("truncated",), terminated="truncated")
    assert learnt_by(ended, rows_of([8], terminated=False))[-1] == [[4, 5, 6, 7], [4, 5, 6, 7]]


@pytest.mark.parametrize("by_id", by_tier(False, more=[True]))
def test_the_end_of_a_short_episode_closes_no_window_of_the_one_before(by_id):
    view = same_step.Sequence(5, stride=2, boundary="mask", at=1, episode="id" if by_id else None)
    buffer = fbuf.Buffer(20, view=view)
    state = buffer.init(ROW)
    for number, steps in enumerate((5, 1, 1)):
        rows = {name: np.full(steps, number if name == "id" else 0, leaf.dtype) for name, leaf in ROW.items()}
        state = buffer.cut(buffer.extend(state, rows))
    open_slots = np.flatnonzero(state.anchors.flags & anchors.ANCHOR)
    assert open_slots.tolist() == [0, 1, 2, 4, 5, 6] and state.anchors.count == 6


@pytest.mark.more
def test_short_episodes_are_counted():
    for view, expected in (
        (same_step.Sequence(4, stride=2), 3),
        (same_step.Sequence(4, stride=2, boundary="mask"), 0),
        (Episode(5, autoreset="same_step"), 7),
        (Episode(5, longer="cut", autoreset="same_step"), 2),
    ):
        buffer = fbuf.Buffer(20, view=view)
        state = buffer.extend(buffer.init(ROW), rows_of([3, 7, 5]))
        summary = buffer.summary(state)
        assert summary.unlearnt == buffer.stats(state)["unlearnt"] == summary.to_dict()["unlearnt"]
        assert summary.unlearnt == expected, view
        assert ("not learnt" in repr(summary)) == bool(expected)
        replay = fbuf.Replay(buffer, ROW)
        replay.extend(rows_of([3, 7, 5]))
        assert replay.stats()["unlearnt"] == summary.unlearnt
        assert "unlearnt" not in jax.eval_shape(buffer.stats, state)
        inside = jax.jit(lambda number, buffer=buffer, state=state: buffer.stats(state)["size"] + number)
        assert int(inside(1)) == int(buffer.stats(state)["size"]) + 1
    plain = fbuf.Buffer(20)
    state = plain.extend(plain.init(ROW), rows_of([3]))
    assert plain.summary(state).unlearnt is None and "unlearnt" not in plain.stats(state)


def test_a_row_that_ends_nothing_cannot_mark_termination():
    advice = r"terminated is 'done'; expected a name of episode_end.*Write episode_end=\('done', ...\)"
    with pytest.raises(ValueError, match=advice):
        same_step.Sequence(4, terminated="done")


def test_only_views_that_need_more_state_have_it():
    def size(**settings):
        state = jax.eval_shape(fbuf.Buffer(99, view=same_step.Sequence(9, **settings)).init, ROW)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.anchors))

    assert size() == size(stride=4) == size(burn_in=2, bootstrap=2, stride=4)
    assert size(boundary="mask", stride=4) == size(boundary="mask") + 4 == size(boundary="mask", burn_in=2)


SETTINGS = range(11)  # with those that are quick 300 logs


@pytest.mark.more
@pytest.mark.parametrize("seed", SETTINGS)
def test_buffers_of_random_views_have_the_windows_of_the_oracle(seed):
    view = random_view(np.random.default_rng(seed))
    for log in range(LOGS):
        check(view, 1000 * seed + log)


@pytest.mark.more
@pytest.mark.parametrize("storage", [fbuf.storages.Compressed(keys=("number",)), fbuf.storages.Host()], ids=repr)
def test_host_storages_have_the_windows_of_the_oracle(storage):
    for log in range(3):
        check(MASKED, log, storage)


@pytest.mark.more
@pytest.mark.parametrize("view", [MASKED, same_step.Sequence(5, stride=2, bootstrap=1)], ids=["mask", "stop"])
def test_converted_rows_have_the_windows_of_rows_that_were_added(view):
    rng = np.random.default_rng(0)
    rows = {name: np.repeat(np.asarray(leaf), 60) for name, leaf in ROW.items()}
    rows |= {
        "number": np.arange(60, dtype=np.int32),
        "terminated": rng.random(60) < 0.1,
        "truncated": rng.random(60) < 0.1,
    }
    plain, windows = (fbuf.Buffer(60, view=v) for v in (fbuf.views.Row(), view))
    state = plain.extend(plain.init(ROW), rows)
    added = windows.extend(windows.init(ROW), rows)
    converted = plain.convert(windows, plain.cut(state))
    full = dataclasses.replace(windows, capacity=61)  # its oldest row is known to begin an episode
    state = dataclasses.replace(plain, capacity=61)
    state = state.convert(full, state.extend(state.init(ROW), rows))
    same(full.stats(state)["anchors"], windows.stats(added)["anchors"])
    assert windows.stats(converted)["anchors"] > 0


@pytest.mark.more
@pytest.mark.in_place
@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), Ranked()], ids=["uniform", "prioritized", "ranked"])
def test_steps_are_in_place(sampler):
    for view in (same_step.Sequence(6, stride=3, bootstrap=1, episode="id"), MASKED):
        assert_order(fbuf.Buffer(400_000, lanes=2, view=view, sampler=sampler), "es", ROW, steps=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(100))
def test_buffers_of_500_random_views_have_the_windows_of_the_oracle(part):
    for seed in range(100 + 5 * part, 105 + 5 * part):
        view = random_view(np.random.default_rng(seed))
        for log in range(LOGS):
            check(view, 1000 * seed + log)
    program.cache_clear()
    jax.clear_caches()
