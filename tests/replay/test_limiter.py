"""`Replay` with a limit: who waits for what, timeouts, closing, and saving the limit."""

import copy
import pickle
import time
import warnings
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fbuf
from fbuf import limits
from fbuf._checkpoint import replay as _replay
from fbuf._concurrency import wakeup
from fbuf._replay import limiter
from tests.support.refusals import raises
from tests.support.replay import EXAMPLE, LIMIT, make, rows, waiting
from tests.support.threads import Thread, soon


@settings(max_examples=15)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0, 1, 4])), min_size=8, max_size=30))
def test_a_call_waits_exactly_where_the_limit_says(calls):
    """With timeout=0, a call succeeds where `Limit` allows it."""
    limit = limits.Limit(Fraction(3, 2), 4, -1, 9)
    replay, pace = make(limit, 8), limit.init(host=True)
    for add, count in calls:
        held = min(pace.added, 8)
        allowed = limit.can_add(pace, count, size=held) if add else limit.can_sample(pace, count + 1, size=held)
        try:
            if add:
                replay.extend(rows(0, 6), mask=np.arange(6) < count, timeout=0)
                pace = limit.added(pace, count)
            else:
                replay.sample(count + 1, timeout=0)
                pace = limit.sampled(pace, count + 1)
            went = True
        except (TimeoutError, ValueError):
            went = False
        assert went == allowed or (add and count == 0)
        assert replay._limiter.pace == pace and replay.limit == limit
    held = min(pace.added, 8)
    assert replay.can_add(3) == limit.can_add(pace, 3, size=held)
    assert not replay.can_sample(3) or limit.can_sample(pace, 3, size=held)
    told = {"limit_added": pace.added, "limit_drawn": pace.drawn, "limit_surplus": pace.surplus / 2}
    assert replay.stats().items() >= told.items()


@pytest.mark.parametrize("lanes", [None, 2])
def test_masks_and_lanes_count_rows(lanes):
    limit = limits.min_size(1)
    replay = fbuf.Replay(fbuf.Buffer(64, lanes=lanes), EXAMPLE, limit=limit)
    lead = (5,) if lanes is None else (5, 2)
    replay.extend({"t": np.zeros(lead, np.int32)})
    mask = np.zeros(lead, bool)
    mask[1:3] = True
    replay.extend({"t": np.zeros(lead, np.int32)}, mask=mask)
    replay.add({"t": np.zeros(lead[1:], np.int32)})
    assert replay._limiter.pace.added == 8 * (lanes or 1) == len(replay)


def test_ragged_rows_count():
    buffer = fbuf.Buffer(4, storage=fbuf.storages.Ragged())
    replay = fbuf.Replay(buffer, {"text": "a", "t": 0}, unlimited=True, limit=limits.queue(6))
    for i in range(6):
        replay.add({"text": "ab" * i, "t": i}, timeout=0)
    raises(TimeoutError, "6 rows added and 0 drawn", replay.add, {"text": "", "t": 0}, timeout=0)
    assert replay.sample(2, timeout=0).mask.all() and len(replay) == 6


@pytest.mark.parametrize(("wake", "size"), [(lambda replay: replay.sample(10), 25), (fbuf.Replay.clear, 5)])
def test_a_draw_and_clear_wake_an_adder(wake, size):
    replay = make()
    replay.extend(rows(0, 20), timeout=0)
    thread = Thread(replay.extend, rows(20))
    soon(lambda: waiting(replay) == 1)
    assert len(replay) == 20
    wake(replay)
    thread.ends()
    assert len(replay) == size
    if size == 5:
        raises(TimeoutError, "5 rows held, but min_size is 10", replay.sample, 10, timeout=0)


def test_a_sampler_waits_for_an_adder():
    replay = make()
    thread = Thread(replay.sample, 10)
    soon(lambda: waiting(replay) == 1)
    replay.extend(rows(0))
    soon(lambda: waiting(replay) == 1)  # it looked: too few rows
    replay.extend(rows(5))
    assert thread.ends().mask.all() and replay._limiter.pace.drawn == 10


def test_a_sampler_waits_for_a_window():
    """Rows are held, but no window of them is complete."""
    buffer = fbuf.Buffer(32, view=fbuf.views.Sequence(4, episode_end=()))
    replay = fbuf.Replay(buffer, EXAMPLE, limit=limits.min_size(1))
    replay.extend(rows(0, 3))
    raises(TimeoutError, "3 rows held, but too few of them can be sampled yet", replay.sample, 2, timeout=0)
    thread = Thread(replay.sample, 2)
    soon(lambda: waiting(replay) == 1)
    replay.extend(rows(3, 3))
    assert thread.ends().mask.all()


def test_refused_rows_do_not_count():
    replay = make()
    for bad in ({"x": np.zeros(5, np.int32)}, {"t": np.zeros(5, np.float32)}, {"t": np.zeros((5, 2), np.int32)}):
        raises((TypeError, ValueError), r"Replay\.extend", replay.extend, bad)
    raises(TypeError, "batch_size", replay.sample)
    assert replay._limiter.pace == LIMIT.init(host=True)


def test_a_timeout_ends_an_adder(monkeypatch):
    replay = make()
    replay.extend(rows(0, 20))
    times = iter([0.0, 1.0, 9.0, 9.0])
    monkeypatch.setattr(wakeup, "clock", lambda: next(times))
    said = r"Replay\.extend: waited 8 s for 5 rows; .*surplus is 40 and would be 50, but max_diff is 40.*raise timeout"
    raises(TimeoutError, said, replay.extend, rows(20), timeout=8)
    assert waiting(replay) == 0 and len(replay) == 20


def test_a_timeout_ends_a_sampler():
    replay = make()
    said = r"Replay\.sample: waited 0 s for 10 draws; 0 rows held, but min_size is 10\. Add rows"
    raises(TimeoutError, said, replay.sample, 10, timeout=0)
    replay.extend(rows(0, 10))
    replay.sample(10)
    replay.sample(10)
    said = r"10 rows added and 20 drawn, .* 0 and would be -10, but min_"
    raises(TimeoutError, said, replay.sample, 10, timeout=0.001)


def test_a_limit_may_ask_for_a_full_buffer():
    replay = fbuf.Replay(fbuf.Buffer(8), {"t": np.int32(0)}, limit=fbuf.limits.min_size(8))
    replay.extend({"t": np.arange(8)})
    assert replay.can_sample(4)


def test_calls_that_the_limit_can_never_allow_are_errors():
    replay = make()
    replay.extend(rows(0, 10))
    raises(ValueError, r"a call of 41 draws moves the surplus by 41, .* room for 40: .*draws=41", replay.sample, 41)
    with pytest.raises(ValueError, match=r"a call of 21 rows moves the surplus by 42, .* room for 40: .*rows=21"):
        replay.extend(rows(0, 21))
    replay = make(limits.samples_per_insert(8, min_size=10))
    replay.extend(rows(0, 10))
    raises(ValueError, r"it could never be allowed\. Use samples_per_insert\(\.\.\., draws=32\)", replay.sample, 32)


def test_a_deadlock_of_two_calls_is_warned_of_once():
    replay = make(limits.Limit(1, 1, 0, 10))
    replay.extend(rows(0, 5))
    thread = Thread(replay.sample, 8)
    soon(lambda: waiting(replay) == 1)
    message = r"Replay\.extend of 6 rows and Replay\.sample of 8 draws wait for each other.*rows=6, draws=8\)"
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning, match=message):
        warnings.simplefilter("error")
        replay.extend(rows(5, 6))
    raises(TimeoutError, None, lambda: replay.extend(rows(5, 6), timeout=0.001))
    replay.extend(rows(5, 3))  # a smaller call goes through, and the sampler with it
    assert thread.ends().mask.all()


INVALID = [
    (lambda: make(limits.min_size(65)), ValueError, r"min_size is 65, but capacity is 64\. Use .*up to 64"),
    (lambda: make(LIMIT.init()), TypeError, r"limit is LimitState; expected a Limit\. Write limit=fbuf\.limits"),
    (lambda: make(None).sample(4, timeout=1), ValueError, r"Replay\.sample: timeout is 1, but without a limit"),
    (lambda: make(None).extend(rows(0), timeout=1), ValueError, r"Replay\.extend: timeout is 1, but without a limit"),
    (lambda: make(None).add({"t": 0}, timeout=1), ValueError, r"Replay\.add: timeout is 1, but without a limit"),
    (lambda: make().sample(4, timeout=-1), ValueError, r"timeout is -1; expected seconds >= 0, or None"),
    (lambda: make().sample(4, timeout=True), ValueError, r"timeout is True; expected seconds"),
    (lambda: make().sample(4, timeout=float("nan")), ValueError, r"timeout is nan; expected seconds"),
    (lambda: make().batches(4, timeout="1"), ValueError, r"Replay\.batches: timeout is '1'; expected seconds"),
    (lambda: make().batches(4, prefetch=0), ValueError, r"prefetch is 0; expected an int >= 1.*replay\.sam"),
    (lambda: make().batches(4, prefetch=True), ValueError, r"prefetch is True; expected an int"),
    (lambda: make().batches(4, to="tf"), ValueError, r"Replay\.batches: to is 'tf'; expected \"jax\""),
    (lambda: make().batches(4, device="cpu"), TypeError, r"device is 'cpu'; expected a jax\.Device or .*Sharding"),
    (lambda: make().batches(4, to="numpy", device="cpu"), ValueError, r"numpy's arrays are in memory"),
    (lambda: make().batches(), TypeError, "batch_size is missing"),
    (lambda: make().batches(4, gamma=1.0), ValueError, "has no number 'gamma'"),
]
LIMITS = [
    LIMIT,
    limits.Limit(Fraction(1, 3), 2, None, Fraction(17, 3)),
    limits.Limit(0.1, 1, min_diff=-2.5),
    limits.Limit(np.float32(0.5), 1),
]


@pytest.mark.parametrize(("call", "kind", "message"), INVALID)
def test_invalid_arguments_are_refused(call, kind, message):
    raises(kind, message, call)


def test_close_ends_all_waiting_calls():
    replay = make()
    threads = [Thread(replay.sample, 10) for _ in range(3)]
    soon(lambda: waiting(replay) == 3)
    replay.close()
    for thread in threads:
        raises(fbuf.ReplayClosed, r"Replay\.sample: the replay was closed; its rows can still be read", thread.ends)
    replay.close()


def test_close_while_the_lock_is_held():
    """A queued call is refused; `close` returns when the running call is done."""
    replay = make(None)
    with replay._lock.acquire():
        adder = Thread(replay.extend, rows(0))
        soon(lambda: len(replay._lock._waiters) == 1)
        closer = Thread(replay.close)
        soon(lambda: len(replay._lock._waiters) == 2)
    raises(fbuf.ReplayClosed, None, adder.ends)
    closer.ends()


def test_a_closed_replay_can_be_read_and_saved(tmp_path):
    with make(None) as replay:
        replay.extend(rows(0))
        batch = replay.sample(4)
    assert "5 rows, closed" in repr(replay)
    for call in (lambda: replay.add({"t": 0}), lambda: replay.extend(rows(0)), lambda: replay.sample(4)):
        raises(fbuf.ReplayClosed, r"Replay\.load\(path\)", call)
    raises(fbuf.ReplayClosed, r"Replay\.batches: the replay was closed", replay.batches, 4)
    replay.update_priority(batch.index, np.ones(4, np.float32))
    assert len(replay) == 5 and replay.rows().mask.sum() == 5
    replay.save(tmp_path / "saved")
    again = fbuf.Replay.load(tmp_path / "saved")
    again.extend(rows(5))
    assert len(again) == 10


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_replay_is_neither_pickled_nor_copied(how):
    raises(TypeError, r"Replay: it has threads .* Write replay.save\(path\)", lambda: how(make()))


def test_an_error_in_the_block_closes_the_replay():
    with pytest.raises(KeyError), make() as replay:
        thread = Thread(replay.sample, 10)
        raise KeyError
    raises(fbuf.ReplayClosed, None, thread.ends)


def test_a_donated_state_ends_waiting_calls():
    replay = make()
    replay.extend(rows(0))
    thread = Thread(replay.sample, 10)
    soon(lambda: waiting(replay) == 1)
    step = jax.jit(lambda state: state, donate_argnums=0)
    jax.block_until_ready(step(replay.state))
    raises(
        RuntimeError, r"its state was donated\. Assign the state that your step returns", lambda: replay.extend(rows(5))
    )
    raises(RuntimeError, r"its state was donated\. Assign", thread.ends)
    assert "its state was donated" in repr(replay)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_saved_and_loaded(limit, tmp_path):
    replay = make(limit)
    replay.extend(rows(0, 10))
    replay._limiter.pace = limit.init(added=2**60 + 1, drawn=2**59 + 7, host=True)
    replay.save(tmp_path / "saved")
    again = fbuf.Replay.load(tmp_path / "saved")
    assert (
        again.limit == limit
        and again._limiter.pace == replay._limiter.pace
        and isinstance(again._limiter.pace.surplus, int)
    )


def test_a_new_limit_starts_with_no_debt(tmp_path):
    replay = make(None)
    replay.extend(rows(0, 40))
    replay.save(tmp_path / "saved")
    assert fbuf.Replay.load(tmp_path / "saved").limit is None
    again = fbuf.Replay.load(tmp_path / "saved", limit=LIMIT)
    assert (again._limiter.pace.added, again._limiter.pace.drawn, again._limiter.pace.surplus) == (40, 60, 20)
    again.extend(rows(40), timeout=0)
    again.sample(10, timeout=0)
    again.save(tmp_path / "saved")
    assert fbuf.Replay.load(tmp_path / "saved", limit=LIMIT)._limiter.pace == again._limiter.pace
    with pytest.raises(ValueError, match=r"Replay\.load: the limit's min_size is 100, but capacity is 64"):
        fbuf.Replay.load(tmp_path / "saved", limit=limits.min_size(100))


def test_resumed_rows_start_with_no_debt(tmp_path):
    buffer = fbuf.Buffer(64, storage=fbuf.storages.Memmap(str(tmp_path / "rows")))
    replay = fbuf.Replay(buffer, EXAMPLE)
    replay.extend(rows(0, 40))
    len(replay)
    del replay
    again = fbuf.Replay(buffer, EXAMPLE, resume=True, limit=LIMIT)
    assert (again._limiter.pace.added, again._limiter.pace.drawn) == (40, 60)


def test_an_invalid_saved_limit_is_refused(tmp_path, monkeypatch):
    replay = make()
    for part, value in [("samples_per_insert", "1/0"), ("samples_per_insert", "x"), ("added", -1), ("min_size", None)]:
        note = _replay._limit_json(LIMIT, LIMIT.init(host=True))
        assert note is not None
        monkeypatch.setattr(_replay, "_limit_json", lambda *_, note=note, part=part, value=value: note | {part: value})
        replay.save(tmp_path / "saved")
        monkeypatch.undo()
        raises(fbuf.SchemaError, "is invalid", lambda: fbuf.Replay.load(tmp_path / "saved"))


def test_a_wait_that_no_thread_can_end_says_what_it_waits_for(monkeypatch, capsys):
    monkeypatch.setattr(limiter, "PATIENCE", 0.05)
    replay = fbuf.Replay(fbuf.Buffer(10), {"t": 0}, limit=fbuf.limits.min_size(5))
    thread = Thread(replay.sample, 4)
    said = []

    def told():
        said.append(capsys.readouterr().err)
        return "waits" in "".join(said)

    soon(told)
    replay.extend({"t": np.arange(2)})  # it waits on, silently
    time.sleep(0.2)
    replay.extend({"t": np.arange(3)})
    thread.ends()
    assert "".join(said) + capsys.readouterr().err == (
        "fbuf: Replay.sample waits, and nothing has changed in 0.05 s; 0 rows held, but min_size is 5. Add rows in another "
        "thread, or pass timeout= to raise an error.\n"
    )
