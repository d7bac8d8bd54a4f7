"""Priorities that `Replay` sets with the next draw: batches, states and errors are those of setting them at once."""

import copy
import dataclasses
import inspect
import pickle
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf._host.store.reads import TicketReads
from fbuf._host_draws import anchors, draws, prioritized, row_block
from fbuf._host_draws.priority_update import PriorityUpdate
from fbuf._host_draws.reads import HeldRows
from fbuf._host_draws.row_block import RowBlock
from fbuf._replay import programs
from fbuf._replay.engine import Engine
from tests.support.refusals import raises
from tests.support.replay import counts
from tests.support.tables import by_tier
from tests.support.trees import same
from tests.support.two_replays import ROW, STORAGES, VIEWS, compare, leaves_of, make_pair, read, rows_of


def filled(view: str = "row", sampler: Any = None, storage: str = "device") -> fbuf.Replay:
    parts = {"sampler": sampler or fbuf.samplers.Prioritized(), "view": VIEWS[view], "storage": STORAGES[storage]}
    replay = fbuf.Replay(fbuf.Buffer(24, **parts), ROW)
    replay.extend(rows_of(np.random.default_rng(1), 9))
    return replay


@pytest.mark.parametrize("sampler", by_tier("distinct", more=["prioritized", "ranked"]))
def test_batches_and_states_are_those_of_setting_at_once(sampler: str) -> None:
    assert compare(make_pair("device", sampler, "row", 2, capacity=40), steps=50) > 1


STEPS = by_tier(
    ("row", None),
    more=[("row", fbuf.samplers.Ranked()), ("transition", None), ("row", fbuf.samplers.Prioritized(replace=False))],
)


@pytest.mark.parametrize(("view", "sampler"), STEPS, ids=str)
def test_a_step_is_one_call(view: str, sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, random = filled(view, sampler), np.random.default_rng(0)
    replay.sample(4)  # with `replace=False` it counts the rows
    monkeypatch.setattr(programs, "update_priority", None)
    monkeypatch.setattr(row_block, "write", None)
    for _ in range(3):
        replay.add(rows_of(random))
        batch = replay.sample(4, to="numpy")
        replay.update_priority(batch.index, np.ones(4, np.float32))


LATE = by_tier(
    ("host", "prioritized", "transition", 2),
    ("device", "prioritized", "row", None),
    more=[("host", "prioritized", "final", 3)],
    exhaustive=[("compressed", "prioritized", "sequence", None)],
)


@pytest.mark.parametrize(("storage", "sampler", "view", "lanes"), LATE)
def test_rows_may_be_added_before_an_update(storage: str, sampler: str, view: str, lanes: Any) -> None:
    """They have the largest priority from before it; updates are of the last batch, and of one before it."""
    pair, random = make_pair(storage, sampler, view, lanes), np.random.default_rng(0)
    lead = () if lanes is None else (lanes,)

    def add(number: int) -> None:
        for row in [rows_of(random, *lead) for _ in range(number)]:
            for replay in pair:
                replay.add(row)
        assert pair[1].state is not None  # writes each row

    add(12)
    late, kept = [replay.sample(3, to="numpy") for replay in pair], 0
    for step in range(30):
        drawn = [replay.sample(3, to="numpy") for replay in pair]
        add(step % 3)
        error = random.random(3).astype(np.float32) * 2 * step
        for batches in (drawn, late)[: 1 + step % 2]:
            for replay, batch in zip(pair, batches, strict=True):
                replay.update_priority(batch.index, error)
            kept += pair[0]._engine.deferred.update is not None
        add(step // 2 % 3)
        same(*map(read, drawn))
        same(*(batch.index for batch in drawn))
        late = drawn
        if step % 10 == 9:
            same(*(leaves_of(replay.state) for replay in pair))
            assert counts(pair[0]) == counts(pair[1])
    assert kept > 20


@pytest.mark.parametrize("view", by_tier("transition", more=["row"]))
def test_a_step_that_adds_before_its_update_is_one_call(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, random = filled(view), np.random.default_rng(0)
    batch = replay.sample(40, to="numpy")  # with rows that were added since the first
    monkeypatch.setattr(programs, "update_priority", None)
    monkeypatch.setattr(row_block, "write", None)
    monkeypatch.setattr(prioritized, "extend_keeping", None)
    for _ in range(3):
        before, batch = batch, replay.sample(40, to="numpy")
        replay.add(rows_of(random))
        replay.update_priority(before.index, np.ones(40, np.float32))


@pytest.mark.more
@pytest.mark.optimized
@pytest.mark.parametrize("normalize", ["batch", "buffer"])
def test_xla_runs_a_draw_in_the_calling_thread(normalize: Any) -> None:
    buffer = fbuf.Buffer(1_000_000, sampler=fbuf.samplers.Prioritized(normalize=normalize))
    arrays: Any = prioritized.arrays_of(buffer.init({"t": 0}).sampler)
    for changed, updated in ((0, 0), (16, 0), (16, 256)):
        words = np.zeros(2 + 2 * (256 + changed + updated), np.int32)
        lowered = prioritized.program(buffer, 256, changed, updated).lower(arrays, words, {})
        assert lowered.compile().cost_analysis()["flops"] < 1000  # as XLA's client decides


def test_options_of_xla_are_used_where_it_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options = prioritized.sequential_options.__wrapped__
    assert jax.__version_info__ < (0, 10) or options()

    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("No such compile option")

    monkeypatch.setattr(jax, "jit", refuse)
    assert options() is None


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


@pytest.mark.parametrize("replace", [True, False])
def test_what_is_refused_raises_at_once(replace: bool) -> None:
    replay = filled(sampler=fbuf.samplers.Prioritized(replace=replace))
    index = replay.sample(4, to="numpy").index
    with pytest.raises(ValueError, match="stale"):
        replay.update_priority(fbuf.Index(index.slot, index.generation + np.uint32(1)), np.ones(4, np.float32))
    for bad in (np.float32(np.nan), np.float64(np.inf)):
        with pytest.raises(ValueError, match="1 priorities are NaN"):
            replay.update_priority(index, np.array([1, bad, 1, 1], bad.dtype))
    with pytest.raises(ValueError, match="name no slot"):
        replay.update_priority(fbuf.Index(index.slot + np.int32(24), index.generation), np.ones(4, np.float32))
    raises(ValueError, "td_error has shape", lambda: replay.update_priority(index, np.ones(3, np.float32)))
    for _ in range(24):
        replay.add(ROW)
    raises(ValueError, "stale", lambda: replay.update_priority(index, np.ones(4, np.float32)))


def test_another_state_drops_new_priorities() -> None:
    replay = filled()
    before = copy.deepcopy(replay.state)
    replay.update_priority(replay.sample(4, to="numpy").index, np.full(4, 7, np.float32))
    replay.state = before
    assert replay.stats()["max_priority"] == 1


def test_magnitudes_too_small_for_xla_are_kept() -> None:
    replay = filled(sampler=fbuf.samplers.Prioritized(largest="held"))
    index = replay.sample(1, to="numpy").index
    replay.update_priority(index, np.full(1, 1e-40, np.float32))
    replay.sample(1, to="numpy")  # sets it
    top: Any = replay.state.sampler.top
    assert np.asarray(top)[index.slot] == np.float32(1e-40)


@pytest.mark.parametrize("to", ["numpy", "torch"])
def test_the_index_of_an_update_is_not_computed(to: Any) -> None:
    if to == "torch":
        pytest.importorskip("torch")
    replay = filled()
    batch = replay.sample(4, to=to)
    replay.update_priority(batch.index, np.full(4, 7, np.float32))
    replay.add(ROW)
    assert replay.sample(4, to=to).mask.all() and not {"slot", "generation"} & vars(batch.index).keys()
    assert np.allclose(replay.priorities(batch.index), 7, rtol=1e-3)


def test_an_index_that_was_not_read_is_an_index() -> None:
    replay = fbuf.Replay(fbuf.prioritized(24), {"t": np.zeros(50)})
    written = replay.extend({"t": np.zeros((4, 50))})
    batch = replay.sample(4, to="numpy")
    data, index = weakref.ref(batch.data["t"]), batch.index
    for other in (copy.copy(index), pickle.loads(pickle.dumps(index)), jax.jit(lambda x: x)(index)):
        same(other, index)
    assert type(index) is type(written) is fbuf.Index
    both = jax.tree.map(lambda *leaves: np.concatenate(leaves), index, written)
    replay.update_priority(both, np.ones(8))
    with pytest.raises(AttributeError, match="Index has no attribute 'slots'") as caught:
        _ = index.slots  # type: ignore[attr-defined]
    assert (caught.value.name, caught.value.obj) == ("slots", index)  # Python suggests slot
    assert {field.name for field in dataclasses.fields(index)} <= {*dir(replay.sample(4, to="numpy").index)}
    del batch
    assert data() is None  # the index does not keep it


def test_other_arrays_and_buffers_set_priorities_at_once() -> None:
    replay = filled()
    batch = replay.sample(4)
    replay.update_priority(batch.index, np.ones(4, np.float32))
    assert isinstance(replay._engine.deferred, PriorityUpdate) and replay._engine.deferred.update is None
    view = fbuf.views.Sequence(2, episode_end=(), episode="action")
    replay = fbuf.Replay(fbuf.Buffer(24, sampler=fbuf.samplers.Prioritized(), view=view), ROW)
    assert not isinstance(replay._engine.deferred, PriorityUpdate)
    raises(ValueError, "no row can be sampled", lambda: fbuf.Replay(fbuf.prioritized(24), ROW).sample(4, to="numpy"))


def test_rows_that_cannot_be_drawn_yet_are_refused_at_once() -> None:
    replay = filled("transition")
    replay.add(ROW)
    newest = jax.device_get(replay.rows(last=1).index)
    with pytest.raises(ValueError, match="1 indices name rows that can no longer be drawn"):
        replay.update_priority(newest, np.ones(1, np.float32))
    index = replay.sample(1, to="numpy").index
    index.slot[:], index.generation[:] = newest.slot, newest.generation  # arrays of the caller's own
    with pytest.raises(ValueError, match="1 indices name rows that can no longer be drawn"):
        replay.update_priority(index, np.ones(1, np.float32))


@pytest.mark.more
@pytest.mark.parametrize("lanes", by_tier(2, more=[None]))
def test_a_block_opens_more_rows_than_it_has(lanes: int | None) -> None:
    buffer = fbuf.Buffer(40 * (lanes or 1), lanes=lanes, sampler=fbuf.samplers.Prioritized(), view=VIEWS["transition"])
    pair = [fbuf.Replay(buffer, ROW, seed=1) for _ in range(2)]
    block, lead = pair[0]._engine.block, () if lanes is None else (lanes,)
    assert block is not None
    for n in range(3 * block.length):
        row = rows_of(np.random.default_rng(n), *lead) | {"done": np.full(lead, n == 2 * block.length - 2)[()]}
        for replay in pair:
            replay.add(row)
        assert pair[1].state is not None  # writes the row
        if n > 4:
            batches = [replay.sample(4, to="numpy") for replay in pair]
            same(*batches)
            for replay in pair:
                replay.update_priority(batches[0].index, np.full(4, 1 + n % 7, np.float32))
    same(*(replay.state for replay in pair))


def interrupted(call, code, text: str) -> None:
    """Press Ctrl-C before the line with `text` of a function, or where it begins."""

    lines, first = inspect.getsourcelines(code)
    at = first + next(n for n, line in enumerate(lines) if text in line)

    def trace(frame, event, _):
        if frame.f_code is code and (not text or event == "line" and frame.f_lineno == at):
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest-xdist ignore it
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)


INSIDE = [
    (anchors.HostAnchors._begin, "tail = _read", "device"),
    (anchors.HostAnchors._add, "self._seen, self.total = last", "device"),
    (prioritized.PriorityDraws._call, "self._opened.extend", "device"),
    (draws.HostDraws.draw, "self._key = after", "device"),
    (prioritized.PriorityDraws._note_leaves, "self._before.setdefault", "host"),
    (TicketReads._fill, "for out, is_present", "host"),
]


@pytest.mark.parametrize(
    ("method", "text", "storage"), by_tier(*INSIDE[1:4:2], more=INSIDE), ids=lambda part: getattr(part, "__name__", "")
)
def test_an_interrupt_waits_for_the_end_of_a_draw(method, text: str, storage: str) -> None:
    pair = [filled("transition", storage=storage) for _ in range(2)]
    index = [replay.sample(4, to="numpy").index for replay in pair][0]
    for replay in pair:
        replay.add(ROW)
        replay.stats()  # writes the row; the next draw begins with another state
        for n in range(5):
            replay.add(rows_of(np.random.default_rng(n)))
    interrupted(lambda: pair[0].sample(4, to="numpy"), method.__code__, text)
    pair[1].sample(4, to="numpy")
    for replay in pair:
        replay.update_priority(index, np.full(4, 0.01, np.float32))
    same(*(replay.sample(4, to="numpy") for replay in pair))
    for replay in pair:
        replay.add(ROW)
    same(*(leaves_of(replay.state) for replay in pair))


@pytest.mark.more
@pytest.mark.parametrize("view", ["row", "transition"])
def test_rows_that_a_draw_that_failed_closed_keep_no_new_priority(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree has what collected rows closed before the rows of a batch are read."""
    pair = make_pair("device", "prioritized", view)
    ours, theirs = pair

    def add(number: int) -> None:
        for n in range(number):
            for replay in pair:
                replay.add(rows_of(np.random.default_rng(n)))
        assert theirs.state is not None  # writes each row

    add(30)
    batches = [replay.sample(40, to="numpy") for replay in pair]
    add(3)  # over rows of the batch
    with monkeypatch.context() as patch:
        patch.setattr(HeldRows, "read", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours.sample(40, to="numpy")
    for replay, batch in zip(pair, batches, strict=True):
        replay.update_priority(batch.index, np.full(40, 50, np.float32))
    same(*(leaves_of(replay.state) for replay in pair))


@pytest.mark.parametrize("text", ["self.masked = True", "self._records[self.count] =", "self.count += 1"])
def test_an_interrupted_masked_row_hides_no_later_one(text: str) -> None:
    replay = fbuf.Replay(fbuf.Buffer(24), {"t": 0})
    interrupted(lambda: replay.add({"t": 1}, mask=False), RowBlock.append.__code__, text)
    replay.add({"t": 2})
    assert replay.rows().data["t"][:1].tolist() == [2]


def test_an_interrupted_read_loses_no_priorities() -> None:
    replay = filled()
    replay.update_priority(replay.sample(4, to="numpy").index, np.full(4, 7, np.float32))
    interrupted(replay.stats, Engine.set_priorities.__code__, "")
    assert replay.stats()["max_priority"] == pytest.approx(7, rel=1e-4)


def test_a_state_whose_priorities_a_draw_donated_is_refused() -> None:
    replay = filled()
    state = replay.state
    replay.add(ROW)
    replay.sample(4, to="numpy")
    with pytest.raises(RuntimeError, match="the state was donated"):
        replay.state = state
    with pytest.raises(RuntimeError, match="Buffer: the state was donated"):
        replay.buffer.sample(state, jax.random.key(0), 4)


@pytest.mark.more
@pytest.mark.parametrize("which", ["last", "before", "twice"])
def test_rows_that_closed_after_they_were_drawn_are_not_drawn_again(which: str) -> None:
    """A row whose frame before it was overwritten is still there, but its stack is not."""
    view = fbuf.views.Transition(stack=2, action=None, autoreset="same_step")
    row = {"obs": np.zeros(2, np.float32), "reward": np.float32(0), "terminated": False, "truncated": False}
    replay = fbuf.Replay(fbuf.Buffer(8, view=view, sampler=fbuf.samplers.Prioritized()), row, strict=False)
    for number in range(8):
        replay.add({**row, "obs": np.full(2, number, np.float32)})
    batch = replay.sample(6, to="numpy")
    for number in range(8, 60):
        last, batch = batch, replay.sample(6, to="numpy")
        before, now = np.moveaxis(batch.data["obs"][..., 0], 1, 0)
        assert (now - before == (now > 0)).all() and (before >= number - 8).all()
        replay.add({**row, "obs": np.full(2, number, np.float32)})
        batches = {"last": batch, "before": last, "twice": batch}
        index, now = batches[which].index, batches[which].data["obs"][:, 1, 0]
        oldest = now <= number - 7  # its earlier frame is overwritten now
        if which == "twice":
            others = fbuf.Index(index.slot[~oldest], index.generation[~oldest])
            replay.update_priority(others, np.ones(sum(~oldest), np.float32))
        replay.update_priority(index, np.where(oldest, 1e6, 1).astype(np.float32))
