"""`Replay.batches`: batches drawn ahead by a thread, its errors, and how it ends."""

import gc
import itertools
import os
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import limits
from tests.support.refusals import raises
from tests.support.replay import EXAMPLE, at_exit, drawing, make, rows, waiting
from tests.support.threads import PATIENCE, Thread, soon


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    soon(lambda: not drawing())


def full(limit=None):
    replay = make(limit)
    replay.extend(rows(0, 20))
    return replay


@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_are_those_of_sample(prefetch):
    one, other = full(), full()
    with one.batches(4, prefetch=prefetch, beta=0.7) as batches:
        for batch in itertools.islice(batches, 6):
            jax.tree.map(np.testing.assert_array_equal, batch, other.sample(4, beta=0.7))
            assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))


def test_prefetch_bounds_the_batches_drawn_ahead():
    replay = full(limits.min_size(1))
    with replay.batches(4, prefetch=3) as batches:
        for taken in range(4):
            soon(lambda taken=taken: replay.stats()["limit_drawn"] == 4 * (3 + taken))
            soon(lambda: repr(batches) == "Batches(3 of 3 ready)")
            next(batches)
    assert repr(batches) == "Batches(closed)"


def test_ragged_batches():
    replay = fbuf.Replay(fbuf.Buffer(8, storage=fbuf.storages.Ragged()), {"text": "a", "t": 0})
    replay.extend([{"text": "x" * i, "t": i} for i in range(6)])
    with replay.batches(4, device=jax.devices()[0]) as batches:
        batch = next(batches)
        assert [len(text) for text in batch.lazy["text"]] == np.asarray(batch.data["t"]).tolist()


def test_closing_the_replay_hands_out_what_was_drawn():
    replay = fbuf.Replay(fbuf.Buffer(32, sampler=fbuf.samplers.Consume()), EXAMPLE, limit=limits.queue(32))
    replay.extend(rows(0, 20))
    batches = replay.batches(4, prefetch=2, to="numpy")
    drawn = next(batches).data["t"].tolist()
    soon(lambda: replay.stats()["limit_drawn"] == 12)
    replay.close()
    drawn += [t for batch in batches for t in batch.data["t"].tolist()]
    assert len(set(drawn)) == 12
    assert next(batches, None) is None and repr(batches) == "Batches(ended)"


@pytest.mark.parametrize("closed", ["replay", "iterator"])
def test_another_thread_may_end_a_waiting_iterator(closed):
    replay = make()
    batches = replay.batches(10)
    thread = Thread(lambda: list(batches))
    soon(lambda: waiting(replay) == 1 and batches._ahead._filled._waiters)
    {"replay": replay, "iterator": batches}[closed].close()
    assert thread.ends() == []
    batches.close()
    if closed == "iterator":
        replay.extend(rows(0, 10))
    assert not batches._ahead._thread.is_alive() and next(batches, None) is None and replay.stats()["limit_drawn"] == 0


def test_threads_share_one_iterator():
    replay = fbuf.Replay(fbuf.Buffer(128, sampler=fbuf.samplers.Consume()), EXAMPLE, limit=limits.queue(128))
    replay.extend(rows(0, 120))
    with replay.batches(4, to="numpy") as batches:
        threads = [Thread(lambda: [next(batches).data["t"] for _ in range(10)]) for _ in range(3)]
        drawn = np.concatenate([np.concatenate(thread.ends()) for thread in threads])
    assert sorted(drawn.tolist()) == list(range(120))


def test_dropping_the_iterator_ends_its_thread():
    replay = full()
    for _ in replay.batches(4):
        break
    soon(lambda: not drawing())
    waits = make().batches(4)  # one that waits for rows
    soon(lambda: drawing())
    del waits
    soon(lambda: not drawing())


def test_a_closed_iterator_keeps_no_replay_alive():
    replay = full()
    gone = weakref.ref(replay)
    batches = replay.batches(4)
    next(batches)
    del replay
    assert gone() is not None
    batches.close()
    del batches
    soon(lambda: gone() is None)


class Garbage:
    """A cycle, which only the garbage collector frees, in any thread."""

    def __init__(self, batches):
        self.batches, self.own = batches, self


def test_the_finalizer_takes_no_lock():
    """The garbage collector may run in a thread that holds the mutex."""
    replay = make()
    Garbage(replay.batches(10))
    soon(lambda: waiting(replay) == 1)
    with replay._lock.mutex:
        Thread(gc.collect).ends()  # in another thread
    soon(lambda: not drawing())
    Garbage(replay.batches(10))
    soon(lambda: waiting(replay) == 1)
    with replay._lock.mutex:
        gc.collect()  # in this one
    soon(lambda: not drawing())


def fails(replay, monkeypatch, after):
    draw, calls = replay._sample, itertools.count()

    def failing(*args):
        if next(calls) >= after:
            raise OSError(5, "no disk")
        return draw(*args)

    monkeypatch.setattr(replay, "_sample", failing)


def test_an_error_is_raised_after_earlier_batches(monkeypatch):
    replay = full()
    fails(replay, monkeypatch, after=2)
    batches = replay.batches(4)
    assert next(batches).mask.all() and next(batches).mask.all()
    for _ in range(2):
        raises(OSError, "no disk", next, batches)
    batches.close()  # it was raised
    assert next(batches, None) is None


def test_close_raises_an_error_not_yet_raised(monkeypatch):
    replay = full()
    fails(replay, monkeypatch, after=1)
    with pytest.raises(OSError, match="no disk"), replay.batches(4) as batches:
        next(batches)
        soon(lambda: batches._ahead._error is not None)
    batches.close()
    fails(replay, monkeypatch, after=0)
    with pytest.raises(KeyError) as caught, replay.batches(4) as batches:  # the error of the block wins
        soon(lambda: batches._ahead._error is not None)
        batches._ahead.hear()
        raise KeyError
    assert caught.value.__context__ is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_a_dropped_iterator_is_printed(monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
    replay = full()
    fails(replay, monkeypatch, after=0)
    batches = replay.batches(4)
    ahead = batches._ahead
    soon(lambda: ahead._error is not None)
    assert not told
    del batches
    soon(lambda: told)
    assert isinstance(told[0], OSError)


def test_next_has_a_timeout():
    replay = make()
    with replay.batches(10, timeout=0) as batches:
        raises(TimeoutError, r"Replay\.batches: no batch in 0 s; 0 rows held, but min_size is 10", next, batches)
        replay.extend(rows(0, 10))
        soon(lambda: batches._ahead._ready)
        assert next(batches).mask.all()  # it goes on
        soon(lambda: replay.stats()["limit_drawn"] == 20 and waiting(replay) == 1 and batches._ahead._ready)
        next(batches)
        raises(TimeoutError, r"no batch in 0 s; 10 rows added and 20 drawn", next, batches)
    with full().batches(4, timeout=PATIENCE) as batches:
        assert next(batches).mask.all()  # which takes a while
    with make(None).batches(4, timeout=0) as batches, replay._lock.acquire():
        assert batches._explain() == "one is being drawn"
        batches._ahead.hear()
        soon(lambda: batches._ahead._error is not None)
        batches._ahead._raised = True


def test_a_forked_child_is_refused(monkeypatch):
    with make().batches(10) as batches:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        raises(RuntimeError, r"this process was forked, and the thread that draws is not in it", next, batches)
        monkeypatch.undo()


def test_stale_indices_are_counted_but_not_raised():
    replay = make(None, capacity=16)
    replay.extend(rows(0, 16))
    with replay.batches(4) as batches:
        batch = next(batches)
    replay.extend(rows(16, 16))
    replay.update_priority(batch.index, np.ones(4, np.float32))
    assert replay.stats()["refused_stale"] == 4
    index = replay.sample(4).index
    raises(ValueError, "4 priorities are NaN", replay.update_priority, index, np.full(4, np.nan))


def test_rows_that_closed_are_counted_but_not_raised():
    """A row whose frame before it was overwritten is still there, but its stack is not."""
    view = fbuf.views.Transition(stack=2, action=None, autoreset="same_step")
    row = {"obs": np.zeros(2, np.float32), "reward": np.float32(0), "terminated": False, "truncated": False}
    replay = fbuf.Replay(fbuf.Buffer(8, view=view, sampler=fbuf.samplers.Prioritized()), row)
    for _ in range(8):
        replay.add(row)
    with replay.batches(64) as batches:
        batch = next(batches)
        replay.add(row)
        replay.update_priority(batch.index, np.ones(64, np.float32))
    assert replay.stats()["refused_closed"] > 0 and replay.stats()["refused_stale"] > 0


@pytest.mark.more
def test_pending_donated_steps_do_not_block_actors():
    replay = fbuf.Replay(
        fbuf.prioritized(256, storage=fbuf.storages.Compressed(keys=("obs",))),
        {"obs": np.zeros((16, 16), np.uint8), "t": np.int32(0)},
        limit=limits.samples_per_insert(4, min_size=32, rows=8, draws=32),
    )

    @jax.jit
    def heavy(x):
        return jax.lax.fori_loop(0, 20, lambda _, x: x @ x / jnp.linalg.norm(x), x)

    step = jax.jit(lambda p, obs: heavy(p + obs.mean(dtype=jnp.float32)), donate_argnums=0)

    def act():
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
                params = step(params, batch.data["obs"])
                replay.update_priority(batch.index, batch.data["t"].astype(jnp.float32))
                np.testing.assert_array_equal(batch.data["obs"][:, 3, 3], batch.data["t"])
    assert all(actor.ends() > 0 for actor in actors) and np.isfinite(np.asarray(params)).all()


@pytest.mark.more
def test_the_interpreter_exits_while_the_thread_waits_for_rows():
    at_exit("rows")


@pytest.mark.parametrize("to", ["numpy", "torch"])
def test_prefetched_batches_are_drawn_in_numpy_and_leave_rows_collected(to):
    pytest.importorskip("torch")
    replays = [fbuf.Replay(fbuf.Buffer(100), {"t": np.int32(0)}, seed=3) for _ in range(3)]
    for replay in replays:
        replay.extend({"t": np.arange(50, dtype=np.int32)})
        replay.add({"t": np.int32(50)})
    iterators = [replays[0].batches(8, to=to), iter(fbuf.torch.Loader(replays[1], 8))]
    batches = [next(iterators[0]), next(iterators[1]), replays[2].sample(8, to=to)]
    for iterator, replay in zip(iterators, replays, strict=False):
        iterator.close()
        assert replay._engine.block.count == 1
    for batch in batches:
        np.testing.assert_array_equal(batch.data["t"], batches[2].data["t"])
