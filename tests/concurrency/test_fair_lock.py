"""FairLock between threads: order of arrival, waiting for a change, and how signals and `StopToken` end both."""

import asyncio
import os
import signal
import sys
import threading

import jax
import numpy as np
import pytest

import fbuf
from fbuf import limits
from fbuf._concurrency import fair_lock, wakeup
from fbuf._concurrency.fair_lock import FairLock
from fbuf._concurrency.interrupts import DeferInterrupts, uninterrupted
from fbuf._concurrency.wakeup import Stopped, StopToken, WakeUp
from fbuf._host.columns.raw_file import RawFileFetch
from fbuf._replay import locked, programs
from tests.support.interrupts import at_every_moment
from tests.support.refusals import raises
from tests.support.replay import EXAMPLE, make, rows
from tests.support.tables import by_tier
from tests.support.threads import PATIENCE, Thread, handled, soon


def hold(lock, number, free):
    """Hold the lock until another thread waits for it; send a signal, and go on holding it."""
    with lock.acquire():
        soon(lambda: lock._waiters)
        os.kill(os.getpid(), number)
        assert free.wait(PATIENCE)


def test_threads_acquire_in_order_of_arrival():
    """Also a thread that has just released the lock: with a `threading.Lock` it may take it again and again."""
    lock, order = FairLock(), []

    def call(number):
        with lock.acquire():
            order.append(number)

    threads = []
    with lock.acquire():
        for number in range(8):
            threads.append(Thread(call, number))
            soon(lambda number=number: len(lock._waiters) == number + 1)
    call("self")
    for thread in threads:
        thread.ends()
    assert order == [*range(8), "self"]


def test_acquisitions_nest_and_waiting_releases_them_all():
    lock, seen = FairLock(), []

    def wait():
        with lock.acquire(), lock.acquire():
            lock.wait()
            seen.append(lock.depth())

    thread = Thread(wait)
    soon(lambda: lock._waiters and lock._waiters[0].asleep)
    with lock.acquire():
        with lock.acquire():
            assert not seen and lock.depth() == 2 and Thread(lock.depth).ends() == 0
        assert lock.depth() == 1
        lock.notify()
    thread.ends()
    assert seen == [2] and lock.depth() == 0 and not lock._waiters


def test_notified_threads_come_first_and_in_order():
    lock, order = FairLock(), []

    def wait(number):
        with lock.acquire():
            lock.wait()
            order.append(number)

    def call():
        with lock.acquire():
            order.append(-1)

    threads = []
    for number in range(4):
        threads.append(Thread(wait, number))
        soon(lambda number=number: sum(p.asleep for p in lock._waiters) == number + 1)
    with lock.acquire():
        threads.append(Thread(call))
        soon(lambda: len(lock._waiters) == 5)
        lock.notify()
    for thread in threads:
        thread.ends()
    assert order == [0, 1, 2, 3, -1]


def test_a_wait_times_out_while_another_thread_holds_the_lock(monkeypatch):
    """A thread that was woken before its time was up waits for the lock without a limit."""
    lock, came, now, waits, wait_for = FairLock(), [], [0.0], [], WakeUp.wait

    def watched(gate, seconds=None):
        waits.append(seconds)
        wait_for(gate, seconds)

    monkeypatch.setattr(wakeup, "clock", lambda: now[0])
    monkeypatch.setattr(WakeUp, "wait", watched)

    def wait():
        with lock.acquire():
            lock.wait(until=0.05)
            came.append(lock.depth())

    thread = Thread(wait)
    soon(lambda: waits)
    with lock.acquire():
        lock.notify()
        now[0] = 1.0
        soon(lambda: waits[-1] is None or not thread.is_alive())
        assert not came
    thread.ends()
    assert came == [1]


def test_waiting_until_a_time_that_has_passed_returns_at_once():
    WakeUp().wait(-1.0)


def test_waiting_and_entering_can_time_out():
    lock = FairLock()
    with lock.acquire():
        lock.wait(until=wakeup.clock())
        assert lock.depth() == 1
        raises(Stopped, None, lambda: Thread(lock.enter, None, wakeup.clock()).ends())
        assert not lock._waiters


@pytest.mark.parametrize("asleep", [False, True])
def test_stop_ends_a_thread_wherever_it_waits(asleep):
    lock, stop, inside = FairLock(), StopToken(), threading.Event()

    def work():
        with lock.acquire(stop):
            inside.set()
            lock.wait(stop=stop)

    with lock.acquire():
        thread = Thread(work)
        soon(lambda: lock._waiters)
        if not asleep:
            stop.request_stop()
            raises(Stopped, None, thread.ends)
            assert not inside.is_set()
    if asleep:
        soon(lambda: lock._waiters and lock._waiters[0].asleep)
        stop.request_stop()
        raises(Stopped, None, thread.ends)
        assert inside.is_set()
    assert not lock._waiters
    with lock.acquire():
        assert lock.depth() == 1


@pytest.mark.parametrize("asleep", [False, True])
def test_an_interrupt_leaves_nothing_behind(asleep):
    """The main thread waits for the lock, or for a change."""
    lock, free = FairLock(), threading.Event()

    def interrupt():
        soon(lambda: lock._waiters and lock._waiters[0].asleep)
        os.kill(os.getpid(), signal.SIGINT)

    with handled(signal.SIGINT, signal.default_int_handler):
        thread = Thread(interrupt) if asleep else Thread(hold, lock, signal.SIGINT, free)
        soon(lambda: asleep or lock._owner)
        with pytest.raises(KeyboardInterrupt), lock.acquire():
            lock.wait()
    free.set()
    thread.ends()
    assert not lock._waiters and not lock._owner
    with lock.acquire():
        pass


def test_an_interrupt_of_a_call_that_was_just_granted_the_lock_releases_it(monkeypatch):
    lock, grant = FairLock(), FairLock._granted

    def interrupted(lock, waiter, depth):
        assert grant(lock, waiter, depth)
        raise KeyboardInterrupt

    lock.enter()
    monkeypatch.setattr(FairLock, "_granted", interrupted)
    waiter = fair_lock._Waiter(0, WakeUp(), asleep=False)
    raises(KeyboardInterrupt, None, lambda: lock._queue(waiter, 1, None))
    assert lock.is_free()


@pytest.mark.parametrize("changes", [False, True])
def test_an_interrupt_at_any_moment_releases_the_lock(changes):
    replay = make(limits.queue(5))
    replay.extend(rows(0))
    modules = {fair_lock, locked, wakeup, sys.modules[fbuf.Replay.__module__]}
    number = 0
    for number, _ in enumerate(at_every_moment(replay.clear if changes else replay.can_add, modules)):
        assert not replay._lock._owner and not replay._lock._waiters, number
        Thread(len, replay).ends()
    assert number > 25


@pytest.mark.parametrize("verb", ["add", "extend", "update_priority", "update_rows"])
def test_an_interrupt_keeps_the_new_state(verb, monkeypatch):
    replay = fbuf.Replay(fbuf.prioritized(64), EXAMPLE, seed=1)
    replay.extend(rows(0))
    index = replay.sample(4).index
    real, interrupted = getattr(programs, verb), []

    def interrupt(*args, **options):
        made = real(*args, **options)  # the donated state is gone
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.append(verb)
        return made

    monkeypatch.setattr(programs, verb, interrupt)
    calls = {
        "add": lambda: replay.add({"t": 5}, priority=1.0),
        "extend": lambda: replay.extend(rows(5)),
        "update_priority": lambda: replay.update_priority(index, np.ones(4, np.float32)),
        "update_rows": lambda: replay.update_rows(index, {"t": np.zeros(4, np.int32)}),
    }
    with handled(signal.SIGINT, signal.default_int_handler):
        raises(KeyboardInterrupt, None, lambda: calls[verb]())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupted == [verb] and len(replay) >= 5
    assert replay.sample(4).mask.all()


def test_a_deferred_interrupt_reaches_its_handler():
    """Ignored signals stay ignored, and other threads change nothing."""
    came = []

    def handler(number, frame):
        came.append(number)

    def inside():
        with DeferInterrupts():
            return signal.getsignal(signal.SIGINT)

    with handled(signal.SIGINT, handler):
        with DeferInterrupts():
            with DeferInterrupts():
                os.kill(os.getpid(), signal.SIGINT)
                assert came == []
            assert came == []
        assert came == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is handler
    with handled(signal.SIGINT, signal.SIG_IGN):
        assert inside() is Thread(inside).ends() is signal.SIG_IGN


def test_an_interrupt_of_a_callback_reaches_an_event_loop_once():
    came = []

    async def interrupt():
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, came.append, "came")
        uninterrupted(os.kill, os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.2)

    asyncio.run(interrupt())
    assert came == ["came"]


def test_a_signal_handler_may_take_the_lock():
    """It runs in the waiting thread, and must not wait for that thread."""
    lock, free, ran = FairLock(), threading.Event(), []

    def handler(*_):
        free.set()
        with lock.acquire():
            ran.append("handler")

    with handled(signal.SIGUSR1, handler):
        thread = Thread(hold, lock, signal.SIGUSR1, free)
        soon(lambda: lock._owner)
        with lock.acquire():
            ran.append("call")
    thread.ends()
    assert sorted(ran) == ["call", "handler"] and not lock._waiters and not lock._owner


def test_many_threads_exclude_one_another():
    lock, inside, most = FairLock(), [0], [0]

    def work(number):
        for i in range(200):
            with lock.acquire():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                if i % 3 == number % 3:
                    inside[0] -= 1
                    lock.wait(until=wakeup.clock())
                    inside[0] += 1
                lock.notify()
                inside[0] -= 1

    for thread in [Thread(work, n) for n in range(6)]:
        thread.ends()
    assert most == [1] and inside == [0] and not lock._waiters


@pytest.mark.parametrize("read", by_tier("sample", more=["rows", "get", "getitem"]))
def test_an_interrupt_within_a_read_of_a_host_store_is_an_interrupt(read, tmp_path, monkeypatch):
    replay = fbuf.Replay(fbuf.Buffer(100, storage=fbuf.storages.Memmap(str(tmp_path / "rows"))), {"t": np.int32(0)})
    replay.extend({"t": np.arange(50, dtype=np.int32)})
    index, run, interrupts = replay.rows(last=1).index, RawFileFetch.run, []
    reads = {
        "rows": lambda: replay.rows(last=2),
        "get": lambda: replay.get(index),
        "getitem": lambda: replay[-1],
        "sample": lambda: replay.sample(2),
    }
    reads[read]()

    def interrupted(self, outs):
        interrupts.append(read)
        os.kill(os.getpid(), signal.SIGINT)
        return run(self, outs)

    with handled(signal.SIGINT, signal.default_int_handler), monkeypatch.context() as patch:
        patch.setattr(RawFileFetch, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jax.block_until_ready(reads[read]().data)
    assert interrupts and replay.rows(last=2).data["t"].tolist() == [48, 49]
