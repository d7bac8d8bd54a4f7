"""Priorities that `Replay` sets with the next draw: batches, states and errors are those of setting them at once."""

import copy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf import samplers
from fbuf._replay import programs

EXAMPLE = {"x": np.zeros(2, np.float32), "n": np.int32(0)}
SAMPLERS = {
    "proportional": samplers.Prioritized(),
    "held": samplers.Prioritized(largest="held", normalize="buffer", uniform=0.2),
    "without replacement": samplers.Prioritized(replace=False),
    "ranked": samplers.Ranked(),
}


def rows(random: np.random.Generator, *axes: int) -> dict[str, np.ndarray]:
    return {"x": random.random((*axes, 2)).astype(np.float32), "n": np.asarray(random.integers(0, 99, axes), np.int32)}


def make(sampler: str = "proportional", capacity: int = 24, lanes: int | None = None, **settings: Any) -> fbuf.Replay:
    return fbuf.Replay(fbuf.Buffer(capacity, sampler=SAMPLERS[sampler], lanes=lanes), EXAMPLE, seed=5, **settings)


def same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def filled(**settings: Any) -> fbuf.Replay:
    replay = make(**settings)
    replay.extend(rows(np.random.default_rng(1), 9))
    return replay


@pytest.mark.parametrize(
    ("sampler", "lanes"), [("proportional", None), ("held", 2), ("without replacement", None), ("ranked", None)]
)
def test_batches_and_states_are_those_of_setting_at_once(sampler: str, lanes: int | None) -> None:
    ours, theirs = pair = [make(sampler, lanes=lanes, strict=False) for _ in range(2)]
    assert ours._update is not None and ours._form == "drawn"
    theirs._update, theirs._form = None, "packed"
    random, axes, batch, kept = np.random.default_rng(0), () if lanes is None else (lanes,), None, 0
    for step in range(70):
        kind = int(random.integers(0, 12))
        if kind < 4 or not len(ours):
            for _ in range(int(random.integers(1, 4 if step % 9 else 22))):
                row, mask = rows(random, *axes), random.random(axes) < 0.7 if kind == 0 else None
                for replay in pair:
                    replay.add(row, mask=mask)
        elif kind < 8:
            batch, other = (replay.sample(5, to="numpy") for replay in pair)
            same(batch, other)
        elif kind < 10 and batch is not None:  # of rows that may be overwritten by now
            error = random.normal(size=5)
            error[random.integers(0, 5)] *= 1 if random.random() < 0.8 else np.inf
            for replay in pair:
                replay.update_priority(batch.index, error if kind == 8 else error.astype(np.float32))
            kept += ours._update.packed is not None
        elif kind == 10:
            same(*(jax.device_get(replay.sample(3)) for replay in pair))
        else:
            more = rows(random, 2, *axes)
            for replay in pair:
                replay.extend(more)
        if step % 10 == 9:
            same(ours.state, theirs.state)
    assert kept > 3


def test_a_step_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "update_priority", None)
    monkeypatch.setattr(programs, "extend_packed", None)
    replay, random = filled(), np.random.default_rng(0)
    for _ in range(3):
        replay.add(rows(random))
        batch = replay.sample(4, to="numpy")
        replay.update_priority(batch.index, np.ones(4, np.float32))


READS = {
    "state": lambda replay, _: replay.state.sampler.max_priority,
    "stats": lambda replay, _: replay.stats()["max_priority"],
    "priorities": lambda replay, _: np.nanmax(replay.priorities()),
    "load": lambda replay, path: (replay.save(path / "r"), fbuf.Replay.load(path / "r").stats()["max_priority"])[1],
}


@pytest.mark.parametrize("read", READS)
def test_every_read_sees_new_priorities(read: str, tmp_path: Path) -> None:
    replay = filled()
    error = np.full(4, 7, np.float32)
    replay.update_priority(replay.sample(4, to="numpy").index, error)
    error[:] = 99  # the caller's array is copied
    assert READS[read](replay, tmp_path) == pytest.approx(7, rel=1e-4)


def test_what_is_refused_raises_at_once() -> None:
    replay = filled()
    index = replay.sample(4, to="numpy").index
    for changed, message in (
        (np.array([1, np.nan, 1, 1], np.float32), "not finite"),
        (np.array([1, 1e300, 1, 1]), "not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            replay.update_priority(index, changed)
    with pytest.raises(ValueError, match="out of range"):
        replay.update_priority(fbuf.Index(index.slot + np.int32(24), index.ticket), np.ones(4, np.float32))
    with pytest.raises(ValueError, match="stale"):
        replay.update_priority(fbuf.Index(index.slot, index.ticket + np.uint32(1)), np.ones(4, np.float32))
    with pytest.raises(ValueError, match="td_error has shape"):
        replay.update_priority(index, np.ones(3, np.float32))
    for n in range(24):
        replay.add({"x": np.zeros(2, np.float32), "n": np.int32(n)})
    with pytest.raises(ValueError, match="stale"):
        replay.update_priority(index, np.ones(4, np.float32))


def test_another_state_drops_new_priorities() -> None:
    replay = filled()
    before = copy.deepcopy(replay.state)
    replay.update_priority(replay.sample(4, to="numpy").index, np.full(4, 7, np.float32))
    replay.state = before
    assert replay.stats()["max_priority"] == 1


def test_other_arrays_and_buffers_set_priorities_at_once() -> None:
    replay = filled()
    batch = replay.sample(4)
    replay.update_priority(batch.index, np.ones(4, np.float32))
    assert replay._update is not None and replay._update.packed is None
    view = fbuf.views.Sequence(2, episode_end=())
    assert fbuf.Replay(fbuf.Buffer(24, sampler=samplers.Prioritized(), view=view), EXAMPLE)._update is None
    with pytest.raises(ValueError, match="nothing to draw"):
        make().sample(4, to="numpy")
