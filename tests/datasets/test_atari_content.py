"""What the files of the Atari DQN replay data set mean: rings, rows of zeros and boundaries, against the log behind them."""

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbuf.datasets._atari import plan, segment
from fbuf.datasets._atari.continuity import boundaries, pack, unpack
from fbuf.datasets._atari.plan import stretches
from fbuf.datasets._atari.segment import BEFORE, RUNS, convert, ring, schema
from fbuf.datasets._remote import FileCorrupted
from tests.support import atari_runs as made
from tests.support.atari_runs import BLANK, number_of
from tests.support.refusals import raises

BLOCK = 64


class InMemory(dict):
    """`Files` of a dump."""

    def whole(self, kind, dtypes, shape, most):
        assert self[kind].dtype.name in dtypes
        return self[kind]

    def blocks(self, kind, dtype, shape):
        array = self[kind]
        assert array.shape == shape and array.dtype == dtype
        for start in range(0, len(array), BLOCK):
            yield array[start : start + BLOCK]


class Writer(contextlib.ExitStack):
    """Keeps rows by number, with their metadata, where a `SegmentWriter` would write them."""

    kept = {}

    def __init__(self, path, number, schema):
        super().__init__()
        self.number, self.parts, self.rows = number, [], 0

    nbytes = property(lambda self: self.rows)

    def append(self, rows):
        self.parts.append({name: array.copy() for name, array in rows.items()})
        self.rows += len(rows["obs"])

    def commit(self, meta):
        rows = {name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}
        Writer.kept[self.number] = rows, meta


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.setattr(segment.dataset, "SegmentWriter", Writer)
    Writer.kept = {}
    return Writer


def read(run, numbers, change=None, partial="keep"):
    Writer.kept = {}
    metas = {}
    for dump in run.dumps:
        if dump.number in numbers:
            arrays = made.arrays(run, dump)
            if change is not None:
                change(dump.number, arrays)
            convert(InMemory(arrays), "", dump.number, schema(), {})
            kept = [meta for _, meta in Writer.kept.values() if meta["piece"] == dump.number]
            (metas[dump.number],) = [meta for meta in kept if "parts" in meta]
            assert len({meta["made"] for meta in kept}) == 1
    uses, found = boundaries([stretch for number in numbers for stretch in stretches(metas[number])], partial)
    parts = [part["pieces"] for meta in metas.values() for part in meta["parts"]]
    volumes, columns = {part[0][0]: part for part in parts if part}, {}
    for used in [one for use in uses for one in plan._volumes(use, volumes[use.number])]:
        rows, _ = Writer.kept[used.number]
        for name, array in rows.items():
            column = array[used.begin : used.stop].copy()
            if used.cut and name == "truncated":
                column[-1] = True
            columns.setdefault(name, []).append(column)
    return {name: np.concatenate(parts) for name, parts in columns.items()}, found, uses


def check(run, numbers):
    rows, found, _ = read(run, numbers)
    want, cut = run.expected(numbers)
    assert made.number_of(rows["obs"]).tolist() == want.tolist()
    for name, column in run.log.take(want).items():
        name, column = ("terminated", column.astype(bool)) if name == "terminal" else (name, column)
        np.testing.assert_array_equal(rows[name], column)
        assert rows[name].dtype == column.dtype
    assert np.flatnonzero(rows["truncated"]).tolist() == np.flatnonzero(cut).tolist()
    return found


@st.composite
def runs(draw):
    """A run, and the numbers of some of its dumps."""
    log = made.synthetic(450, draw(st.integers(0, 2**16)), draw(st.sampled_from([2, 7, 30, 100, 500])))
    blanks, final = draw(st.sampled_from([3, 3, 0])), draw(st.booleans())
    run = made.record(log, draw(st.integers(70, 160)), blanks=blanks, final=final)
    numbers = st.sampled_from([dump.number for dump in run.dumps])
    return run, sorted(draw(st.lists(numbers, min_size=1, unique=True)))


@settings(max_examples=20)
@given(runs(), st.sampled_from([1, 70, 10**6]))
def test_rows_are_those_of_the_log(writer, monkeypatch, case, most):
    """Pieces of the data set have about `most` rows here."""
    monkeypatch.setattr(segment, "MOST_BYTES", most)
    run, chosen = case
    check(run, chosen)
    check(run, [dump.number for dump in run.dumps])


@settings(max_examples=15)
@given(runs())
def test_without_partial_episodes_every_stack_is_what_the_agent_saw(writer, case):
    run, chosen = case
    kept, waiting, before = [], False, -2
    for place in run.held(chosen).tolist():
        step = int(run.added[place])
        if place != before + 1:  # after a gap: does an episode begin here, as far as the rows tell?
            waiting = place > 0 and step != BLANK
        if step != BLANK:
            if not waiting:
                kept.append(step)
            waiting &= not run.log.terminal[step]
        before = place
    if not kept:
        assert read(run, chosen, partial="drop")[2] == []
        return
    rows, _, _ = read(run, chosen, partial="drop")
    want, cut = run.expected(chosen)
    assert number_of(rows["obs"]).tolist() == kept
    assert np.flatnonzero(rows["truncated"]).tolist() == np.flatnonzero(cut[np.isin(want, kept)]).tolist()


def test_a_segment_that_grows_too_large_becomes_several(writer, monkeypatch):
    monkeypatch.setattr(segment, "MOST_BYTES", 100)
    run = made.record(made.synthetic(400, seed=2, episode=10**9), 300)
    for most, more in ((segment.MOST, [RUNS, 2 * RUNS]), (2, [RUNS])):
        monkeypatch.setattr(segment, "MOST", most)
        check(run, [0, 1])
        assert sorted(Writer.kept) == [0, 1, *more, BEFORE + 1]


def test_a_cycle_that_was_not_dumped_is_a_gap_though_numbers_follow(writer):
    """The zeros of a new episode jump over the ring's last place once."""
    log = made.synthetic(900, episode=10**9)
    log.terminal[:] = False
    log.terminal[294] = True  # three zeros so far: the next step makes 4 rows, from place 98 on
    run = made.record(log, 100)
    counts = [dump.add_count for dump in run.dumps[:-1]]
    assert 200 in np.diff(counts).tolist(), counts
    found = check(run, [dump.number for dump in run.dumps])
    assert [boundary.why for boundary in found if not boundary.joined] == ["100 rows are missing"]


@pytest.mark.parametrize(("head", "joined"), [(33, True), (91, True), (92, False), (97, False)])
def test_a_final_dump_that_holds_too_few_older_rows_is_cut_off(writer, head, joined):
    """Eight rows before the last place identify the dump before; with fewer, the row at the last place is dropped."""
    run = made.record(made.synthetic(300 - 3 + head, episode=10**9), 100)
    assert run.dumps[-1].final and run.dumps[-1].add_count == head
    assert check(run, [0, 1, 2, 3])[-1].joined == joined
    assert check(run, [3]) == [] and not check(run, [1, 3])[-1].joined  # alone, its last place may be of any cycle
    assert len(run.expected([0, 1, 2, 3])[0]) == len(run.log) - (not joined)


def test_a_final_dump_of_another_run_is_not_joined(writer):
    run = made.record(made.synthetic(330, episode=10**9), 100)
    other = made.record(made.synthetic(330, seed=5, episode=10**9), 100)
    mixed = dataclasses.replace(run, dumps=(*run.dumps[:-1], other.dumps[-1]))

    def change(number, arrays):
        if number == 3:
            arrays.update(made.arrays(other, other.dumps[-1]))

    _, found, uses = read(mixed, [2, 3], change)
    assert not found[-1].joined and BEFORE + 3 not in [use.number for use in uses]


def test_counters_of_one_cycle_only_prove_nothing(writer):
    """`add_count` as some describe it: the same in every dump. Then every dump ends in a cut."""
    run = made.record(made.synthetic(330, episode=10**9), 100, final=False)

    def change(number, arrays):
        arrays["add_count"] = np.array(99)

    rows, found, _ = read(run, [0, 1, 2], change)
    assert [boundary.joined for boundary in found] == [False, False]
    assert rows["truncated"].sum() == 3
    assert len(rows["obs"]) == 96 + 99 + 99  # the last places are of nobody knows which cycle


def test_frames_contradict_counters(writer):
    log, other = made.synthetic(300, episode=10**9), made.synthetic(300, seed=9, episode=10**9)
    run = made.record(made.swap(log, 196, other), 100, final=False)
    rows, found, _ = read(run, [0, 1])
    assert found[0].joined  # no row is missing within dump 1; the boundary is before row 96
    assert [boundary.joined for boundary in read(run, [1, 2])[1]] == [False]
    rows, found, _ = read(run, [0, 1, 2])
    assert [boundary.joined for boundary in found] == [True, False] and "pixels change" in found[1].why
    assert np.flatnonzero(rows["truncated"]).tolist() == [195, len(rows["obs"]) - 1]


def test_what_invalid_range_names_elsewhere_ends_an_episode(writer):
    run = made.record(made.synthetic(150, episode=10**9), 100, final=False)

    def change(number, arrays):
        arrays["invalid_range"] = np.array([40, 41])

    rows, _, _ = read(run, [0], change)
    assert np.flatnonzero(rows["truncated"]).tolist() == [37, 38, 95]  # three zeros before


def test_settings_of_the_agent_are_read_from_invalid_range():
    around = ring(3, 1000, 3999, np.array([998, 999, 0, 1, 2]))
    assert (around.stack, around.horizon, around.cuts) == (4, 1, frozenset())
    three = ring(3, 1000, 3999, np.array([996, 997, 998, 999, 0, 1, 2]))
    assert (three.stack, three.horizon) == (4, 3)
    assert ring(3, 1000, 3999, np.array([5, 6, 7])).cuts == {5, 6, 7}
    assert ring(0, 1000, 999, np.zeros(4, np.int64)).stack is None


def test_what_cannot_be_is_damage(writer):
    run = made.record(made.synthetic(120), 100, final=False)
    for kind, value, words in (
        ("add_count", np.array(-1), "add_count is -1"),
        ("invalid_range", np.array([98, 99, 100]), "places from 0 to 99"),
        ("$store$_terminal", np.full(100, 7, np.uint8), "values up to 7"),
    ):
        change = {kind: value}
        raises(FileCorrupted, words, read, run, [0], lambda _, arrays, change=change: arrays.update(change))
        assert not Writer.kept


def test_one_episode_without_zeros_does_not_make_steps_of_all_others(writer):
    run = made.record(made.synthetic(1200, episode=5), 2400)
    rows = run.dumps[0].rows
    third = int(np.flatnonzero(rows == made.BLANK)[8])
    rows[third - 2 : third + 1] = rows[third + 1] + 20  # what some other writer left there
    assert (rows == made.BLANK).sum() > 300
    assert read(run, [0])[0]["obs"].any(axis=(1, 2)).all()


def test_a_dark_beginning_is_a_step_where_the_writer_has_no_zeros(writer):
    log = made.synthetic(300, episode=20)
    ends = np.flatnonzero(log.terminal)
    dark = ends[2] + 1 + np.arange(3)
    log.obs[dark], log.action[dark], log.reward[dark], log.terminal[dark] = 0, 0, 0, False
    rows, _, _ = read(made.record(log, 299, blanks=0, final=False), [0])
    assert len(rows["obs"]) == 298 and not rows["obs"][dark].any()


def test_frames_as_text():
    frame = np.arange(84 * 84, dtype=np.uint32).astype(np.uint8).reshape(84, 84)
    assert (unpack(pack(frame), (84, 84)) == frame).all()
    for text, shape, match in ((pack(frame), (80, 80), "bytes; expected"), ("0000000000", (84, 84), "damaged")):
        pytest.raises(ValueError, unpack, text, shape).match(match)
