"""`Replay` between threads: whose turn it is, who waits for a limit, batches drawn ahead, and how all of it ends.

What threads do is decided by locks and events, never by a sleep: `soon` waits for what must come.
"""

from __future__ import annotations

import copy
import dis
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf import _stop, limits
from fbuf._replay import _turns
from fbuf._replay._batches import Batches
from fbuf._replay._interrupts import Uninterrupted
from fbuf._replay._turns import Turns
from fbuf._stop import Gate, Stop, Stopped

ROOT = Path(__file__).parent.parent
EXAMPLE = {"t": np.int32(0)}
LIMIT = limits.samples_per_insert(2, min_size=10, rows=5, draws=10)  # surplus 0 to 40
PATIENCE = 20.0  # seconds in which what must come does


def rows(start: int, count: int = 5) -> dict[str, Any]:
    return {"t": np.arange(start, start + count, dtype=np.int32)}


def make(limit: Any = LIMIT, capacity: int = 64, **settings: Any) -> fbuf.Replay:
    return fbuf.Replay(fbuf.prioritized(capacity), EXAMPLE, seed=1, limit=limit, **settings)


def soon(condition: Callable[[], Any]) -> None:
    """Waits until it is so."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


class Thread(threading.Thread):
    """Keeps what its function gives or raises; `ends` waits for it."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        super().__init__(daemon=True)
        self.function, self.args = function, args
        self.value: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.function(*self.args)
        except BaseException as error:
            self.error = error

    def ends(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error
        return self.value


def waiting(replay: fbuf.Replay) -> int:
    """Calls that wait for the limit."""
    return sum(place.asleep for place in list(replay._turns._places))


def drawing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fbuf.Replay.batches"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    soon(lambda: not drawing())


# ---------------------------------------------------------------------------------------------------- turns


def test_turns_come_in_order_of_arrival() -> None:
    turns, order = Turns(), []

    def call(number: int) -> None:
        with turns.turn():
            order.append(number)

    threads = []
    with turns.turn():
        for number in range(8):
            threads.append(Thread(call, number))
            soon(lambda number=number: len(turns._places) == number + 1)
    for thread in threads:
        thread.ends()
    assert order == list(range(8))


def test_who_gave_the_turn_up_comes_after_those_who_wait() -> None:
    """With Python's locks one thread may have it again and again."""
    turns, order = Turns(), []

    def call() -> None:
        with turns.turn():
            order.append("other")

    turn = turns.turn()
    with turn:
        thread = Thread(call)
        soon(lambda: turns._places)
    for _ in range(3):
        with turns.turn():
            order.append("self")
    thread.ends()
    assert order[0] == "other"


def test_a_turn_within_a_turn() -> None:
    turns = Turns()
    with turns.turn():
        with turns.turn():
            assert turns.depth() == 2
        assert turns.depth() == 1
        other = Thread(lambda: turns.depth())
        assert other.ends() == 0
    assert turns.depth() == 0


def test_waiting_gives_the_turn_up_and_has_it_again() -> None:
    turns, seen = Turns(), []

    def wait() -> None:
        with turns.turn(), turns.turn():
            turns.wait()
            seen.append(turns.depth())

    thread = Thread(wait)
    soon(lambda: turns._places and turns._places[0].asleep)
    with turns.turn():
        assert not seen
        turns.changed()
    thread.ends()
    assert seen == [2] and turns.depth() == 0 and not turns._places


def test_those_who_wait_look_first_and_in_order() -> None:
    turns, order = Turns(), []

    def wait(number: int) -> None:
        with turns.turn():
            turns.wait()
            order.append(number)

    def call() -> None:
        with turns.turn():
            order.append(-1)

    threads = []
    for number in range(4):
        threads.append(Thread(wait, number))
        soon(lambda number=number: sum(p.asleep for p in turns._places) == number + 1)
    with turns.turn():
        threads.append(Thread(call))
        soon(lambda: len(turns._places) == 5)
        turns.changed()
    for thread in threads:
        thread.ends()
    assert order == [0, 1, 2, 3, -1]


def test_time_is_up_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5.0])
    monkeypatch.setattr(_stop, "clock", lambda: next(times))
    turns = Turns()
    with turns.turn():
        turns.wait(until=4.0)  # at once: it is 5 already
        assert turns.depth() == 1


def test_time_is_up_while_the_turn_is_another_s() -> None:
    """Who was woken before the time was up waits for the turn all the same."""
    turns, came = Turns(), []

    def wait() -> None:
        with turns.turn():
            turns.wait(until=_stop.clock() + 0.05)
            came.append(turns.depth())

    thread = Thread(wait)
    soon(lambda: turns._places and turns._places[0].asleep)
    with turns.turn():
        turns.changed()
        end = _stop.clock() + 0.1
        soon(lambda: _stop.clock() > end)
        assert not came
    thread.ends()
    assert came == [1]


def test_a_turn_that_does_not_come_in_time() -> None:
    turns = Turns()
    with turns.turn():
        with pytest.raises(Stopped):
            Thread(turns.enter, None, _stop.clock()).ends()
        assert not turns._places


@pytest.mark.parametrize("asleep", [False, True])
def test_stop_ends_a_thread_wherever_it_waits(asleep: bool) -> None:
    turns, stop, inside = Turns(), Stop(), threading.Event()

    def work() -> None:
        with turns.turn(stop):
            inside.set()
            turns.wait(stop=stop)

    with turns.turn():
        thread = Thread(work)
        soon(lambda: turns._places)
        if not asleep:
            stop.ask()
            with pytest.raises(Stopped):
                thread.ends()
            assert not inside.is_set()
    if asleep:
        soon(lambda: turns._places and turns._places[0].asleep)
        stop.ask()
        with pytest.raises(Stopped):
            thread.ends()
        assert inside.is_set()
    assert not turns._places
    with turns.turn():
        assert turns.depth() == 1


def test_a_gate_opens_once_and_takes_no_lock() -> None:
    gate = Gate()
    gate.open()
    gate.open()
    gate.wait()  # at once
    gate.wait(0.0)  # shut again
    assert gate._lock.locked()


@pytest.mark.parametrize("asleep", [False, True])
def test_an_interrupt_leaves_nothing_behind(asleep: bool) -> None:
    """KeyboardInterrupt where the main thread waits: for its turn, or for a change."""
    turns, free = Turns(), threading.Event()

    def hold() -> None:
        with turns.turn():
            soon(lambda: turns._places)
            os.kill(os.getpid(), signal.SIGINT)
            assert free.wait(PATIENCE)

    def interrupt() -> None:
        soon(lambda: turns._places and turns._places[0].asleep)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if asleep:
            thread = Thread(interrupt)
            with pytest.raises(KeyboardInterrupt), turns.turn():
                turns.wait()
        else:
            thread = Thread(hold)
            soon(lambda: turns._owner)
            with pytest.raises(KeyboardInterrupt), turns.turn():
                pass
    finally:
        signal.signal(signal.SIGINT, before)
        free.set()
    thread.ends()
    assert not turns._places and not turns._owner
    with turns.turn():
        pass


@pytest.mark.parametrize("changes", [False, True])
def test_an_interrupt_at_any_moment_leaves_the_turn_to_others(changes: bool) -> None:
    """Also where a verb takes its turn and gives it up. Python looks for signals when a function begins and after calls."""
    replay = make(limits.queue(5))
    replay.extend(rows(0))
    files = {_turns.__file__, _stop.__file__, sys.modules[fbuf.Replay.__module__].__file__}
    verb = replay.clear if changes else replay.can_add
    left, errors, called = 0, [], {}

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call" or (event == "opcode" and called.get(frame)):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        if event == "opcode":
            called[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")
        return trace

    before = sys.gettrace()
    for at in itertools.count(1):
        left = at
        errors.clear()
        try:
            sys.settrace(trace)
            verb()
        except KeyboardInterrupt as error:
            errors.append(error)  # its traceback keeps all frames
        finally:
            sys.settrace(before)
        called.clear()
        assert not replay._turns._owner and not replay._turns._places, at
        Thread(len, replay).ends()
        if not errors:
            break
    assert at > 40


@pytest.mark.parametrize("verb", ["_add", "_extend", "_update_priority", "_update_rows"])
def test_an_interrupt_does_not_take_the_state_with_it(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[fbuf.Replay.__module__]
    replay = fbuf.Replay(fbuf.prioritized(64), EXAMPLE, seed=1)
    replay.extend(rows(0))
    index = replay.sample(4).index
    real, interrupted = getattr(module, verb), []

    def interrupt(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)  # the state that was given is gone
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.append(verb)
        return made

    monkeypatch.setattr(module, verb, interrupt)
    calls: dict[str, Callable[[], Any]] = {
        "_add": lambda: replay.add({"t": 5}),
        "_extend": lambda: replay.extend(rows(5)),
        "_update_priority": lambda: replay.update_priority(index, np.ones(4, np.float32)),
        "_update_rows": lambda: replay.update_rows(index, {"t": np.zeros(4, np.int32)}),
    }
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            calls[verb]()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted == [verb] and len(replay) >= 5
    assert replay.sample(4).mask.all()


def test_an_interrupt_goes_to_who_asked_for_it() -> None:
    """A handler of the user's is called, late; what is ignored stays so; other threads change nothing."""
    came: list[int] = []

    def handler(number: int, frame: Any) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with Uninterrupted():
            with Uninterrupted():
                os.kill(os.getpid(), signal.SIGINT)
                assert came == []
            assert came == []
        assert came == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Uninterrupted():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

        def inside() -> Any:
            with Uninterrupted():
                return signal.getsignal(signal.SIGINT)

        assert Thread(inside).ends() is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_handler_may_call_while_the_thread_waits() -> None:
    """The handler runs in the thread that waits; it must not wait for its own thread's turn."""
    turns, free, ran = Turns(), threading.Event(), []

    def handler(*_: Any) -> None:
        free.set()
        with turns.turn():
            ran.append("handler")

    def hold() -> None:
        with turns.turn():
            soon(lambda: turns._places)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert free.wait(PATIENCE)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        thread = Thread(hold)
        soon(lambda: turns._owner)
        with turns.turn():
            ran.append("call")
    finally:
        signal.signal(signal.SIGUSR1, before)
    thread.ends()
    assert sorted(ran) == ["call", "handler"] and not turns._places and not turns._owner


def test_many_threads_exclude_one_another() -> None:
    turns, inside, most = Turns(), [0], [0]

    def work(number: int) -> None:
        for i in range(200):
            with turns.turn():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                if i % 3 == number % 3:
                    inside[0] -= 1
                    turns.wait(until=_stop.clock())
                    inside[0] += 1
                turns.changed()
                inside[0] -= 1

    for thread in [Thread(work, n) for n in range(6)]:
        thread.ends()
    assert most == [1] and inside == [0] and not turns._places


# ---------------------------------------------------------------------------------------------------- limits


def test_the_limit_is_what_it_would_be_alone() -> None:
    replay, pace = make(), LIMIT.init(host=True)
    for start, draws in [(0, 0), (5, 0), (10, 10), (15, 20), (20, 10)]:
        replay.extend(rows(start), timeout=0)
        pace = LIMIT.added(pace, 5)
        for _ in range(draws // 10):
            replay.sample(10, timeout=0)
            pace = LIMIT.sampled(pace, 10)
    replay.add({"t": 99}, timeout=0)
    pace = LIMIT.added(pace, 1)
    assert replay.pace == pace and replay.limit == LIMIT
    stats = replay.stats()
    assert (stats["limit_added"], stats["limit_drawn"], stats["limit_surplus"]) == (26, 40, 12)
    assert replay.can_add(14) and not replay.can_add(15) and replay.can_sample(10) and not replay.can_sample(20)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30))
def test_it_waits_exactly_where_the_limit_says(calls: list[tuple[bool, int]]) -> None:
    """One thread, timeout=0: what goes through is what `Limit` allows of the rows held."""
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
        assert replay.pace == pace


@pytest.mark.parametrize("lanes", [None, 2])
def test_rows_count_by_mask_and_lanes(lanes: int | None) -> None:
    limit = limits.min_size(1)
    replay = fbuf.Replay(fbuf.Buffer(64, lanes=lanes), EXAMPLE, limit=limit)
    lead = (5,) if lanes is None else (5, 2)
    replay.extend({"t": np.zeros(lead, np.int32)})
    mask = np.zeros(lead, bool)
    mask[1:3] = True
    replay.extend({"t": np.zeros(lead, np.int32)}, mask=mask)
    replay.add({"t": np.zeros(lead[1:], np.int32)})
    assert replay.pace.added == 8 * (lanes or 1) == len(replay)


def test_ragged_rows_count_too() -> None:
    buffer = fbuf.Buffer(4, storage=fbuf.storages.Ragged())
    replay = fbuf.Replay(buffer, {"text": "a", "t": 0}, unlimited=True, limit=limits.queue(6))
    for i in range(6):
        replay.add({"text": "ab" * i, "t": i}, timeout=0)
    with pytest.raises(TimeoutError, match="6 rows were added and 0 drawn"):
        replay.add({"text": "", "t": 0}, timeout=0)
    assert replay.sample(2, timeout=0).mask.all() and len(replay) == 6


def test_an_adder_waits_for_a_sampler() -> None:
    replay = make()
    for start in range(0, 20, 5):
        replay.extend(rows(start), timeout=0)
    thread = Thread(replay.extend, rows(20))
    soon(lambda: waiting(replay) == 1)
    assert len(replay) == 20
    replay.sample(10)
    thread.ends()
    assert len(replay) == 25


def test_a_sampler_waits_for_an_adder() -> None:
    replay = make()
    thread = Thread(replay.sample, 10)
    soon(lambda: waiting(replay) == 1)
    replay.extend(rows(0))
    soon(lambda: waiting(replay) == 1)  # it looked, and there are too few still
    replay.extend(rows(5))
    assert thread.ends().mask.all() and replay.pace.drawn == 10


def test_it_waits_for_something_to_draw() -> None:
    """Rows are held, but of episodes none is over yet."""
    buffer = fbuf.Buffer(32, view=fbuf.views.Sequence(4, episode_end=()))
    replay = fbuf.Replay(buffer, EXAMPLE, limit=limits.min_size(1))
    replay.extend(rows(0, 3))
    with pytest.raises(TimeoutError, match="3 rows are held, but nothing of them can be drawn yet"):
        replay.sample(2, timeout=0)
    thread = Thread(replay.sample, 2)
    soon(lambda: waiting(replay) == 1)
    replay.extend(rows(3, 3))
    assert thread.ends().mask.all()


def test_consumed_rows_are_waited_for() -> None:
    replay = fbuf.Replay(fbuf.Buffer(32, sampler=fbuf.samplers.Consume()), EXAMPLE, limit=limits.queue(8))
    drawn: list[int] = []

    def learn() -> None:
        while len(drawn) < 40:
            drawn.extend(replay.sample(4, to="numpy").data["t"].tolist())

    thread = Thread(learn)
    for start in range(0, 40, 4):
        replay.extend(rows(start, 4))
    thread.ends()
    assert sorted(drawn) == list(range(40))


def test_clear_makes_room_and_takes_rows_away() -> None:
    replay = make()
    for start in range(0, 20, 5):
        replay.extend(rows(start))
    thread = Thread(replay.extend, rows(20))
    soon(lambda: waiting(replay) == 1)
    replay.clear()
    thread.ends()
    assert len(replay) == 5
    with pytest.raises(TimeoutError, match="5 rows are held, but min_size is 10"):
        replay.sample(10, timeout=0)


def test_adders_do_not_starve_a_sampler() -> None:
    """No limit makes them wait: it is the order of turns that lets the learner in."""
    replay, done = make(None), threading.Event()
    replay.extend(rows(0))
    counts = [0, 0, 0]

    def add(number: int) -> None:
        while not done.is_set():
            replay.extend(rows(0))
            counts[number] += 1

    threads = [Thread(add, n) for n in range(3)]
    soon(lambda: min(counts) > 5)
    most = 0
    for _ in range(20):
        before = sum(counts)
        with replay._turns.turn():
            most = max(most, sum(counts) - before)
    done.set()
    for thread in threads:
        thread.ends()
    assert most <= 2 * 3 + 1  # each is ahead once, and counts after its turn


def test_what_was_refused_takes_no_room() -> None:
    replay = make()
    for bad in ({"x": np.zeros(5, np.int32)}, {"t": np.zeros(5, np.float32)}, {"t": np.zeros((5, 2), np.int32)}):
        with pytest.raises((TypeError, ValueError), match=r"Replay\.extend"):
            replay.extend(bad)
    with pytest.raises(TypeError, match="batch_size"):
        replay.sample()
    assert replay.pace == LIMIT.init(host=True)


# --------------------------------------------------------------------------------------------- messages of limits


def test_time_is_up_for_an_adder(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = make()
    for start in range(0, 20, 5):
        replay.extend(rows(start))
    times = iter([0.0, 1.0, 9.0, 9.0])
    monkeypatch.setattr(_stop, "clock", lambda: next(times))
    with pytest.raises(
        TimeoutError,
        match=r"Replay\.extend: 5 rows have waited for 8 s; 20 rows were added and 0 drawn, so the surplus is 40 and would "
        r"be 50, but max_diff is 40\. Sample in another thread, or give it more time, timeout=None\.",
    ):
        replay.extend(rows(20), timeout=8)
    assert waiting(replay) == 0 and len(replay) == 20


def test_time_is_up_for_a_sampler() -> None:
    replay = make()
    with pytest.raises(
        TimeoutError,
        match=r"Replay\.sample: 10 draws have waited for 0 s; 0 rows are held, but min_size is 10\. Add rows in another "
        r"thread, or give it more time, timeout=None\.",
    ):
        replay.sample(10, timeout=0)
    replay.extend(rows(0, 10))
    replay.sample(10)
    replay.sample(10)
    with pytest.raises(
        TimeoutError, match=r"10 rows were added and 20 drawn, so the surplus is 0 and would be -10, but min_"
    ):
        replay.sample(10, timeout=0.001)


def test_what_will_never_be_allowed() -> None:
    replay = make()
    replay.extend(rows(0, 10))
    with pytest.raises(ValueError, match=r"a call of 41 draws moves the surplus by 41, .* room for 40: .*draws=41"):
        replay.sample(41)
    with pytest.raises(ValueError, match=r"a call of 21 rows moves the surplus by 42, .* room for 40: .*rows=21"):
        replay.extend(rows(0, 21))
    # The commonest slip: how much one call takes was not said.
    replay = make(limits.samples_per_insert(8, min_size=10))
    replay.extend(rows(0, 10))
    with pytest.raises(ValueError, match=r"it could never be allowed\. Use samples_per_insert\(\.\.\., draws=32\)"):
        replay.sample(32)


def test_two_that_wait_for_one_another_are_told() -> None:
    replay = make(limits.Limit(1, 1, 0, 10))
    replay.extend(rows(0, 5))
    thread = Thread(replay.sample, 8)
    soon(lambda: waiting(replay) == 1)
    with (
        warnings.catch_warnings(),
        pytest.raises(
            RuntimeWarning,
            match=r"Replay\.extend of 6 rows and Replay\.sample of 8 draws wait for one another.*5 rows were added.*rows=6, "
            r"draws=8\)",
        ),
    ):
        warnings.simplefilter("error")
        replay.extend(rows(5, 6))
    with pytest.raises(TimeoutError):  # said once
        replay.extend(rows(5, 6), timeout=0.001)
    replay.extend(rows(5, 3))  # a smaller call goes through, and the sampler with it
    assert thread.ends().mask.all()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: make(limits.min_size(65)),
            ValueError,
            r"min_size is 65, but capacity is 64: .* Use a min_size up to 64",
        ),
        (lambda: make(LIMIT.init()), TypeError, r"limit is LimitState; expected a Limit\. Write limit=fbuf\.limits"),
        (
            lambda: make(None).sample(4, timeout=1),
            ValueError,
            r"Replay\.sample: timeout is 1, but without a limit nothing",
        ),
        (
            lambda: make(None).extend(rows(0), timeout=1),
            ValueError,
            r"Replay\.extend: timeout is 1, but without a limit",
        ),
        (lambda: make(None).add({"t": 0}, timeout=1), ValueError, r"Replay\.add: timeout is 1, but without a limit"),
        (lambda: make().sample(4, timeout=-1), ValueError, r"timeout is -1; expected seconds >= 0, or None"),
        (lambda: make().sample(4, timeout=True), ValueError, r"timeout is True; expected seconds"),
        (lambda: make().sample(4, timeout=float("nan")), ValueError, r"timeout is nan; expected seconds"),
        (lambda: make().batches(4, timeout="1"), ValueError, r"Replay\.batches: timeout is '1'; expected seconds"),
        (
            lambda: make().batches(4, prefetch=0),
            ValueError,
            r"prefetch is 0; expected an int >= 1\. For none use replay\.sam",
        ),
        (lambda: make().batches(4, prefetch=True), ValueError, r"prefetch is True; expected an int"),
        (lambda: make().batches(4, to="tf"), ValueError, r"Replay\.batches: to is 'tf'; expected \"jax\""),
        (lambda: make().batches(4, device="cpu"), TypeError, r"device is 'cpu'; expected a jax\.Device or .*Sharding"),
        (lambda: make().batches(4, to="numpy", device="cpu"), ValueError, r"numpy's arrays are in memory"),
        (lambda: make().batches(), TypeError, "batch_size is given neither here nor"),
        (lambda: make().batches(4, gamma=1.0), ValueError, "has no number 'gamma'"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


# ---------------------------------------------------------------------------------------------------------- the end


def test_close_ends_all_who_wait() -> None:
    replay = make()
    threads = [Thread(replay.sample, 10) for _ in range(3)]
    soon(lambda: waiting(replay) == 3)
    replay.close()
    for thread in threads:
        with pytest.raises(fbuf.ReplayClosed, match=r"Replay\.sample: the replay was closed; expected an open one\."):
            thread.ends()
    replay.close()


def test_close_while_the_turn_is_taken() -> None:
    """Who is in the line is refused; `close` returns when the verb under way is done."""
    replay = make(None)
    with replay._turns.turn():
        adder = Thread(replay.extend, rows(0))
        soon(lambda: len(replay._turns._places) == 1)
        closer = Thread(replay.close)
        soon(lambda: len(replay._turns._places) == 2)
    with pytest.raises(fbuf.ReplayClosed):
        adder.ends()
    closer.ends()


def test_after_close_rows_can_be_read_and_saved(tmp_path: Path) -> None:
    with make(None) as replay:
        replay.extend(rows(0))
        batch = replay.sample(4)
    assert "5 rows, closed" in repr(replay)
    for call in (lambda: replay.add({"t": 0}), lambda: replay.extend(rows(0)), lambda: replay.sample(4)):
        with pytest.raises(
            fbuf.ReplayClosed, match=r"replay\.save\(path\); to go on make a new one, or Replay\.load\(path\)"
        ):
            call()
    with pytest.raises(fbuf.ReplayClosed, match=r"Replay\.batches: the replay was closed"):
        replay.batches(4)
    replay.update_priority(batch.index, np.ones(4, np.float32))
    assert len(replay) == 5 and replay.rows().mask.sum() == 5
    replay.save(tmp_path / "saved")
    again = fbuf.Replay.load(tmp_path / "saved")
    again.extend(rows(5))
    assert len(again) == 10


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_neither_pickled_nor_copied(how: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"Replay: it has threads .* Write replay.save\(path\)"):
        how(make())


def test_leaving_with_an_error_closes_too() -> None:
    with pytest.raises(KeyError), make() as replay:
        thread = Thread(replay.sample, 10)
        raise KeyError
    with pytest.raises(fbuf.ReplayClosed):
        thread.ends()


def test_who_waits_hears_of_a_state_that_is_gone() -> None:
    """A jitted step that donates `replay.state` takes it away; nobody waits for it for ever."""
    replay = make()
    replay.extend(rows(0))
    thread = Thread(replay.sample, 10)
    soon(lambda: waiting(replay) == 1)
    step = jax.jit(lambda state: state, donate_argnums=0)
    jax.block_until_ready(step(replay.state))
    with pytest.raises(
        RuntimeError, match=r"its state was donated, to a write that failed or to a step that was given"
    ):
        replay.extend(rows(5))
    with pytest.raises(RuntimeError, match=r"went with it; expected a state"):
        thread.ends()
    assert "its state is gone" in repr(replay)


# -------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "limit",
    [
        LIMIT,
        limits.Limit(Fraction(1, 3), 2, None, Fraction(17, 3)),
        limits.Limit(0.1, 1, min_diff=-2.5),
        limits.Limit(np.float32(0.5), 1),
    ],
)
def test_a_limit_is_saved_and_goes_on(limit: limits.Limit, tmp_path: Path) -> None:
    replay = make(limit)
    replay.extend(rows(0, 10))
    with warnings.catch_warnings():
        replay._pacing.pace = limit.init(added=2**60 + 1, drawn=2**59 + 7, host=True)
    replay.save(tmp_path / "saved")
    again = fbuf.Replay.load(tmp_path / "saved")
    assert again.limit == limit and again.pace == replay.pace and isinstance(again.pace.surplus, int)


def test_another_limit_begins_where_nothing_is_due(tmp_path: Path) -> None:
    replay = make(None)
    replay.extend(rows(0, 40))
    replay.save(tmp_path / "saved")
    assert fbuf.Replay.load(tmp_path / "saved").limit is None
    again = fbuf.Replay.load(tmp_path / "saved", limit=LIMIT)
    assert (again.pace.added, again.pace.drawn, again.pace.surplus) == (40, 60, 20)
    again.extend(rows(40), timeout=0)
    again.sample(10, timeout=0)
    again.save(tmp_path / "saved")
    assert fbuf.Replay.load(tmp_path / "saved", limit=LIMIT).pace == again.pace
    with pytest.raises(ValueError, match=r"Replay\.load: the limit's min_size is 100, but capacity is 64"):
        fbuf.Replay.load(tmp_path / "saved", limit=limits.min_size(100))


def test_resumed_rows_are_not_due(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(64, storage=fbuf.storages.Memmap(str(tmp_path / "rows")))
    replay = fbuf.Replay(buffer, EXAMPLE)
    replay.extend(rows(0, 40))
    len(replay)
    del replay
    again = fbuf.Replay(buffer, EXAMPLE, resume=True, limit=LIMIT)
    assert (again.pace.added, again.pace.drawn) == (40, 60)


def test_a_limit_that_makes_no_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fbuf._checkpoint import _shell

    replay = make()
    for part, value in [("samples_per_insert", "1/0"), ("samples_per_insert", "x"), ("added", -1), ("min_size", None)]:
        note = _shell._note(LIMIT, LIMIT.init(host=True))
        assert note is not None
        monkeypatch.setattr(_shell, "_note", lambda *_, note=note, part=part, value=value: note | {part: value})
        replay.save(tmp_path / "saved")
        monkeypatch.undo()
        with pytest.raises(fbuf.SchemaError, match=r"says of the limit makes no sense .* Load another checkpoint"):
            fbuf.Replay.load(tmp_path / "saved")


# ------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_are_those_of_sample(prefetch: int) -> None:
    one, other = make(None), make(None)
    for replay in (one, other):
        replay.extend(rows(0, 20))
    with one.batches(4, prefetch=prefetch, beta=0.7) as batches:
        for batch in itertools.islice(batches, 6):
            jax.tree.map(np.testing.assert_array_equal, batch, other.sample(4, beta=0.7))
            assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))


def test_no_more_than_prefetch_are_ahead() -> None:
    replay = make(limits.min_size(1))
    replay.extend(rows(0, 20))
    with replay.batches(4, prefetch=3) as batches:
        for taken in range(4):
            soon(lambda taken=taken: replay.pace.drawn == 4 * (3 + taken))
            soon(lambda: repr(batches) == "Batches(3 of 3 ready)")
            next(batches)
    assert repr(batches) == "Batches(closed)"


@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_forms(form: str) -> None:
    kind: Any = np.ndarray
    if form == "torch":
        kind = pytest.importorskip("torch").Tensor
    replay = make(None)
    replay.extend(rows(0, 20))
    with replay.batches(4, to=form, device="cpu" if form == "torch" else None) as batches:
        batch = next(batches)
        assert all(isinstance(leaf, kind) for leaf in jax.tree.leaves(batch))
        replay.update_priority(batch.index, batch.weight)


def test_ragged_batches_are_read() -> None:
    replay = fbuf.Replay(fbuf.Buffer(8, storage=fbuf.storages.Ragged()), {"text": "a", "t": 0})
    replay.extend([{"text": "x" * i, "t": i} for i in range(6)])
    with replay.batches(4, device=jax.devices()[0]) as batches:
        batch = next(batches)
        assert [len(text) for text in batch.lazy["text"]] == np.asarray(batch.data["t"]).tolist()


def test_they_end_with_the_replay_and_lose_nothing_that_was_drawn() -> None:
    replay = fbuf.Replay(fbuf.Buffer(32, sampler=fbuf.samplers.Consume()), EXAMPLE, limit=limits.queue(32))
    replay.extend(rows(0, 20))
    batches = replay.batches(4, prefetch=2, to="numpy")
    drawn = next(batches).data["t"].tolist()
    soon(lambda: replay.pace.drawn == 12)
    replay.close()
    drawn += [t for batch in batches for t in batch.data["t"].tolist()]
    assert len(set(drawn)) == 12
    assert next(batches, None) is None and repr(batches) == "Batches(ended)"


def test_close_ends_who_waits_for_a_batch() -> None:
    replay = make()
    batches = replay.batches(10)
    thread = Thread(lambda: list(batches))
    soon(lambda: waiting(replay) == 1)
    replay.close()
    assert thread.ends() == []


def test_another_thread_closes_the_iterator() -> None:
    replay = make()
    batches = replay.batches(10)
    thread = Thread(lambda: list(batches))
    soon(lambda: waiting(replay) == 1 and batches._ahead._filled._waiters)
    batches.close()
    assert thread.ends() == [] and not batches._ahead._thread.is_alive()
    batches.close()
    replay.extend(rows(0, 10))
    assert next(batches, None) is None and replay.pace.drawn == 0


def test_several_threads_take_from_one() -> None:
    replay = fbuf.Replay(fbuf.Buffer(128, sampler=fbuf.samplers.Consume()), EXAMPLE, limit=limits.queue(128))
    replay.extend(rows(0, 120))
    with replay.batches(4, to="numpy") as batches:
        threads = [Thread(lambda: [next(batches).data["t"] for _ in range(10)]) for _ in range(3)]
        drawn = np.concatenate([np.concatenate(thread.ends()) for thread in threads])
    assert sorted(drawn.tolist()) == list(range(120))


def test_forgetting_ends_the_thread() -> None:
    replay = make(None)
    replay.extend(rows(0, 20))
    for _ in replay.batches(4):
        break
    soon(lambda: not drawing())
    waits = make().batches(4)  # one that waits for rows
    soon(lambda: drawing())
    del waits
    soon(lambda: not drawing())


def test_the_thread_does_not_keep_a_replay() -> None:
    replay = make(None)
    replay.extend(rows(0, 20))
    gone = weakref.ref(replay)
    batches = replay.batches(4)
    next(batches)
    del replay
    assert gone() is not None
    batches.close()
    del batches
    soon(lambda: gone() is None)


class Garbage:
    """In a cycle, so that only the garbage collector lets it go, in whichever thread it runs."""

    def __init__(self, batches: Batches):
        self.batches, self.own = batches, self


def test_the_garbage_collector_may_run_while_the_mutex_is_held() -> None:
    """A finalizer takes no lock, so it matters not which one the thread holds that it runs in."""
    replay = make()
    Garbage(replay.batches(10))
    soon(lambda: waiting(replay) == 1)
    with replay._turns._mutex:
        Thread(gc.collect).ends()  # in another thread
    soon(lambda: not drawing())
    Garbage(replay.batches(10))
    soon(lambda: waiting(replay) == 1)
    with replay._turns._mutex:
        gc.collect()  # in this one
    soon(lambda: not drawing())


def fails(replay: fbuf.Replay, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """From batch `after` on, drawing fails."""
    draw, calls = replay._sample, itertools.count()

    def failing(*args: Any) -> Any:
        if next(calls) >= after:
            raise OSError(5, "no disk")
        return draw(*args)

    monkeypatch.setattr(replay, "_sample", failing)


def test_an_error_comes_after_the_batches_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = make(None)
    replay.extend(rows(0, 20))
    fails(replay, monkeypatch, after=2)
    batches = replay.batches(4)
    assert next(batches).mask.all() and next(batches).mask.all()
    for _ in range(2):
        with pytest.raises(OSError, match="no disk"):
            next(batches)
    batches.close()  # it was raised
    assert next(batches, None) is None


def test_close_raises_what_nobody_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = make(None)
    replay.extend(rows(0, 20))
    fails(replay, monkeypatch, after=1)
    with pytest.raises(OSError, match="no disk"), replay.batches(4) as batches:
        next(batches)
        soon(lambda: batches._ahead._error is not None)
    batches.close()
    fails(replay, monkeypatch, after=0)
    with pytest.raises(KeyError) as caught, replay.batches(4) as batches:  # the user's own error is not hidden
        soon(lambda: batches._ahead._error is not None)
        batches._ahead.hear()
        raise KeyError
    assert caught.value.__context__ is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_nobody_could_see_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
    replay = make(None)
    replay.extend(rows(0, 20))
    fails(replay, monkeypatch, after=0)
    batches = replay.batches(4)
    ahead = batches._ahead
    soon(lambda: ahead._error is not None)
    assert not told
    del batches
    soon(lambda: told)
    assert isinstance(told[0], OSError)


def test_nothing_to_draw_without_a_limit() -> None:
    with (
        make(None).batches(4) as batches,
        pytest.raises(ValueError, match=r"Replay\.batches: there is nothing to draw now"),
    ):
        next(batches)


def test_next_has_a_time_too() -> None:
    replay = make()
    with replay.batches(10, timeout=0) as batches:
        with pytest.raises(
            TimeoutError, match=r"Replay\.batches: no batch in 0 s; 0 rows are held, but min_size is 10"
        ):
            next(batches)
        replay.extend(rows(0, 10))
        soon(lambda: batches._ahead._ready)
        assert next(batches).mask.all()  # it goes on
        soon(lambda: replay.pace.drawn == 20 and waiting(replay) == 1 and batches._ahead._ready)
        next(batches)
        with pytest.raises(TimeoutError, match=r"no batch in 0 s; 10 rows were added and 20 drawn"):
            next(batches)
    with make(None).batches(4, timeout=0) as batches, replay._turns.turn():
        assert batches._explain() == "one is being drawn"
        batches._ahead.hear()
        soon(lambda: batches._ahead._error is not None)
        batches._ahead._raised = True


def test_a_forked_child_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with make().batches(10) as batches:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match=r"this process was forked, and the thread that draws is not in it"):
            next(batches)
        monkeypatch.undo()


def test_stale_indices_are_only_counted_where_batches_are_ahead() -> None:
    replay = make(None, capacity=16)
    replay.extend(rows(0, 16))
    with replay.batches(4) as batches:
        batch = next(batches)
    replay.extend(rows(16, 16))
    replay.update_priority(batch.index, np.ones(4, np.float32))
    assert replay.stats()["refused_stale"] == 4
    with pytest.raises(ValueError, match="4 nonfinite"):
        replay.update_priority(replay.sample(4).index, np.full(4, np.nan))


def test_a_pending_donated_step_keeps_nobody_waiting() -> None:
    """Learner's steps that donate its parameters queue up, actors write in place, the thread draws ahead."""
    replay = fbuf.Replay(
        fbuf.prioritized(256, storage=fbuf.storages.Compressed(keys=("obs",))),
        {"obs": np.zeros((16, 16), np.uint8), "t": np.int32(0)},
        limit=limits.samples_per_insert(4, min_size=32, rows=8, draws=32),
    )

    @jax.jit
    def heavy(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 20, lambda _, x: x @ x / jnp.linalg.norm(x), x)

    step = jax.jit(lambda p, obs: heavy(p + obs.mean(dtype=jnp.float32)), donate_argnums=0)

    def act() -> int:
        try:
            for i in itertools.count():
                obs = np.full((8, 16, 16), i % 251, np.uint8)
                replay.extend({"obs": obs, "t": np.full(8, i % 251, np.int32)})
        except fbuf.ReplayClosed:
            return i
        return 0

    params = jnp.eye(200)
    with replay:
        actors = [Thread(act) for _ in range(2)]
        with replay.batches(32) as batches:
            for batch in itertools.islice(batches, 30):
                params = step(params, batch.data["obs"])  # not waited for
                replay.update_priority(batch.index, batch.data["t"].astype(jnp.float32))
                np.testing.assert_array_equal(batch.data["obs"][:, 3, 3], batch.data["t"])
    assert all(actor.ends() > 0 for actor in actors) and np.isfinite(np.asarray(params)).all()


_AT_THE_END = """
import sys, threading
import numpy as np
import fbuf
limit = fbuf.limits.samples_per_insert(2, min_size=10, rows=5, draws=10)
buffer = fbuf.uniform(64, storage=fbuf.storages.Compressed(keys=("x",)))
replay = fbuf.Replay(buffer, {"x": np.zeros(64, np.uint8)}, limit=limit)
def add(count, size):
    for _ in range(count):
        replay.extend({"x": np.zeros((size, 64), np.uint8)})
how = sys.argv[1]
if how != "rows":
    add(1, 10)
batches = replay.batches(10, prefetch=1)
if how != "rows":
    next(batches)
if how == "actor":
    threading.Thread(target=add, args=(100, 5), daemon=True).start()
if how == "error":
    def fail(*args):
        raise OSError(5, "no disk")
    while not batches._ahead._ready:
        pass  # drawn before it fails
    replay._sample = fail
    next(batches)
    while batches._ahead._error is None:
        pass
print("end of the script")
"""


@pytest.mark.parametrize(
    "how", ["rows", "actor", *(pytest.param(how, marks=pytest.mark.slow) for how in ("room", "error"))]
)
def test_the_interpreter_ends(how: str) -> None:
    """While the thread waits for rows, for room, an actor for a batch to be drawn; and with an error that nobody saw."""
    done = subprocess.run(
        [sys.executable, "-c", _AT_THE_END, how], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout == "end of the script\n", done.stderr
    assert ("no disk" in done.stderr) == (how == "error"), done.stderr


_DEVICES = """
import jax, numpy as np, fbuf
one, two = jax.devices()
replay = fbuf.Replay(fbuf.prioritized(64), {"t": np.float32(0)})
replay.extend({"t": np.arange(20, dtype=np.float32)})
with replay.batches(4, device=two) as batches:
    batch = next(batches)
    assert all(leaf.devices() == {two} for leaf in jax.tree.leaves(batch))
    replay.update_priority(batch.index, batch.data["t"] + 1)
    replay.update_rows(batch.index, {"t": batch.data["t"]})
assert replay.state.token.devices() == {one} and replay.stats()["max_priority"] > 1
mesh = jax.sharding.Mesh(np.array([one, two]), "x")
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
with replay.batches(4, device=sharding) as batches:
    batch = next(batches)
    assert batch.data["t"].sharding == sharding
    replay.update_priority(batch.index, batch.data["t"])
print("well")
"""


@pytest.mark.slow
def test_batches_go_to_another_device_and_come_back() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", _DEVICES], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.stdout == "well\n", done.stderr
