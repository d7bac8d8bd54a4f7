"""Test prefetched reads: `collect` returns the rows at the request, or reads again."""

import weakref
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fbuf._host.store import read_ahead
from fbuf._host.store.store import Column, Store, StoreClosed
from fbuf.storages import Zstd
from tests.support.prefetch import GATE, Gated, gate, wait_for_reads  # noqa: F401
from tests.support.refusals import raises
from tests.support.threads import PATIENCE, soon


def store(codec=None, length=16, slack=4):
    codec = Gated() if codec is None else codec
    columns = (Column("a", (5,), np.dtype(np.uint8), codec), Column("b", (), np.dtype(np.int32), None))
    return Store(columns, lanes=1, length=length, slack=slack)


def write(to, first, count):
    t = np.arange(first, first + count, dtype=np.int32)[:, None]
    return to.write([(t[..., None] + np.arange(5)).astype(np.uint8), t], None)[:, 0]


def wanted(tickets):
    garbage = np.full((len(tickets), 5), 171, np.uint8), np.full(len(tickets), 171, np.int32)
    return [(0, tickets, garbage[0]), (1, tickets, garbage[1])]


def ask(of, tickets):
    return of.request([(0, tickets), (1, tickets)])


def check(requests, ok, first):
    t = first + np.arange(len(requests[1][2]), dtype=np.int32)
    np.testing.assert_array_equal(requests[0][2], (t[:, None] + np.arange(5)).astype(np.uint8))
    np.testing.assert_array_equal(requests[1][2], t)
    assert ok.all()


def collected(of, number, tickets, first=0):
    requests = wanted(tickets)
    check(requests, of.collect(number, requests), first)


def filled(count=12, codec=None, **sizes):
    made = store(codec, **sizes)
    return made, write(made, 0, count)


def stopped(made):
    """Return a store and its tickets, after a request for all of them: the thread waits at the gate."""
    GATE.open.clear()
    number = ask(*made)
    assert GATE.entered.wait(PATIENCE)
    return *made, number


def test_the_thread_reads_a_request_once():
    s, tickets = filled()
    number = ask(s, tickets)
    wait_for_reads(s)
    GATE.fails = lambda: True  # a finished request needs no decoding
    for _ in range(2):
        collected(s, number, tickets)
    with pytest.raises(OSError):  # other tickets under this number
        s.collect(number, wanted(tickets[::-1].copy()))
    raises(OSError, None, lambda: s.collect(number + 1, wanted(tickets)))
    GATE.fails = lambda: False
    collected(s, number, tickets[3:7], 3)


def test_compressed_rows_may_expire_while_they_are_read():
    s, tickets = filled(16, slack=0)
    GATE.open.clear()
    number = s.request([(0, tickets)])
    assert GATE.entered.wait(PATIENCE)
    write(s, 100, 40)  # all rows are evicted
    GATE.open.set()
    out = np.zeros((16, 5), np.uint8)
    assert s.collect(number, [(0, tickets, out)]).all()
    np.testing.assert_array_equal(out, np.arange(16, dtype=np.uint8)[:, None] + np.arange(5, dtype=np.uint8))
    assert not s.read([(0, tickets, out)]).any() and not out.any()


def test_a_write_does_not_wait_for_other_rows():
    s, tickets, number = stopped(filled(16, slack=4))
    write(s, 16, 4)  # the ring beside the chunks has room
    assert s._ahead._thread.is_alive() and not s._ahead._requests[number].done.is_set()
    GATE.open.set()
    collected(s, number, tickets)


@pytest.mark.parametrize("count", [16, 1])
@pytest.mark.parametrize("codec", [None, Zstd(chunk=2)])
def test_a_write_waits_for_rows_that_it_overwrites(codec, count, monkeypatch):
    s = store(codec, slack=0)
    for begun in (True, False):
        if not begun:
            monkeypatch.setattr(read_ahead.ReadAhead, "_runs", lambda self: False)
        tickets = write(s, 0, 16)
        number = ask(s, tickets[:count])
        write(s, 100, count)
        collected(s, number, tickets[:count])


def test_two_requests_are_kept_and_their_arrays_reused():
    s, tickets = filled()
    empty, numbers, arrays = s.nbytes, [], set()
    for _ in range(6):
        numbers.append(ask(s, tickets))
        wait_for_reads(s)
        collected(s, numbers[-1], tickets)
        arrays |= {id(out) for request in s._ahead._requests.values() for out in request.outs}
    assert len(arrays) == 4 and s.nbytes - empty == 2 * (12 * 5 + 12 * 4)
    collected(s, numbers[0], tickets)  # dropped: read again


def test_collect_runs_a_waiting_request():
    s, tickets, _ = stopped(filled())
    second = ask(s, tickets[:4])  # behind the first
    for _ in range(2):
        collected(s, second, tickets[:4])  # at once, with the gate closed
    GATE.open.set()


def test_a_thread_that_cannot_start_and_a_failed_allocation_are_no_errors():
    s, tickets = filled()
    with mock.patch.object(read_ahead.threading.Thread, "start", side_effect=RuntimeError):
        collected(s, ask(s, tickets), tickets)
    with mock.patch.object(read_ahead.np, "empty", side_effect=MemoryError):
        number = ask(s, tickets)
        wait_for_reads(s)
    collected(s, number, tickets)
    assert s._ahead._thread.is_alive()


def test_a_failed_decoding_is_retried():
    for n in range(5):
        s, tickets = filled()
        before = {name: np.asarray(array).tobytes() for name, array in s.to_arrays().items()}
        for times in (1, 99):
            calls = iter(range(100))
            GATE.fails = lambda calls=calls, n=n, times=times: n <= next(calls) < n + times
            number = ask(s, tickets)
            wait_for_reads(s)
            requests = wanted(tickets)
            if times == 1 or n > 2:  # three chunks; after those nothing is decoded again
                check(requests, s.collect(number, requests), 0)
            else:
                pytest.raises(OSError, s.collect, number, requests).match("no such luck")
            GATE.fails = lambda: False
            check(requests, s.read(requests), 0)
        assert before == {name: np.asarray(array).tobytes() for name, array in s.to_arrays().items()}
        s.close()


def test_a_closed_store_is_an_error():
    s, tickets = filled()
    number = ask(s, tickets)
    for _ in range(2):
        s.close()
    pytest.raises(StoreClosed, s.collect, number, wanted(tickets))
    pytest.raises(StoreClosed, ask, s, tickets)
    soon(lambda: not s._ahead._thread.is_alive())


def test_the_thread_keeps_no_store_alive():
    s, tickets, _ = stopped(filled())
    ask(s, tickets)
    ref, thread = weakref.ref(s), s._ahead._thread
    del s
    GATE.open.set()
    soon(lambda: ref() is None and not thread.is_alive())


PROGRAM = st.lists(st.tuples(st.sampled_from("wwrrcpd"), st.integers(0, 2**16)), min_size=1, max_size=25)


@pytest.mark.parametrize("codec", [Zstd(chunk=4), Gated()])
@example(program=[("w", 0), ("r", 0), ("c", 0), ("w", 0), ("c", 0)])  # collected again after eviction
@given(program=PROGRAM)
def test_collect_returns_the_rows_at_the_request(codec, program):
    s = store(codec, length=8, slack=2)
    tickets, asked, rows = np.zeros(1, np.uint64), [], 0
    for verb, seed in program:
        rng = np.random.default_rng(seed)
        if verb == "w":
            count = int(rng.integers(1, 7))
            tickets = np.concatenate([tickets, write(s, rows, count)])
            rows += count
        elif verb == "p":
            some = rng.choice(tickets[-8:], 3)
            new = s.update_rows(some, np.ones(3, bool), {0: rng.integers(0, 255, (3, 5), np.uint8)})
            tickets = np.concatenate([tickets, new])
        elif verb == "r":
            some = rng.choice(tickets[-14:], int(rng.integers(1, 10)))
            then = wanted(some)
            ok = s.read(then)
            asked.append((ask(s, some), some, then, ok))
        elif asked:
            number, some, then, ok = asked[-1 - int(rng.integers(0, min(2, len(asked))))]
            now = wanted(some)
            found = s.collect(number if verb == "c" else 0, now)
            now_there = s.read(wanted(some))
            whole = found == ok
            if verb == "c" and (number, some) == (asked[-1][0], some):
                assert whole.all()
            assert (whole | (found == now_there)).all()
            for one, two, there in zip(now, then, np.split(found, 2), strict=True):
                np.testing.assert_array_equal(one[2][there], two[2][there])
                assert not one[2][~there].any()
    s.close()
