"""Replays shared by tests of threads, and actors and learners that check every row they draw."""

import contextlib
import gc
import os
import threading
import zlib
from typing import Any

import jax
import numpy as np

import fbuf
from fbuf import limits
from fbuf.samplers import Consume, Prioritized, Uniform
from fbuf.storages import Compressed, Device, Host, Memmap
from tests.support.processes import run_python
from tests.support.threads import Thread, soon

EXAMPLE = {"t": np.int32(0)}
LIMIT = limits.samples_per_insert(2, min_size=10, rows=5, draws=10)  # surplus 0 to 40


def rows(start, count=5):
    return {"t": np.arange(start, start + count, dtype=np.int32)}


def make(limit=LIMIT, capacity=64, **settings):
    return fbuf.Replay(fbuf.prioritized(capacity), EXAMPLE, seed=1, limit=limit, **settings)


def replay_of(capacity=8, **parts):
    return fbuf.Replay(fbuf.Buffer(capacity, **parts), {"t": np.int32(0)})


def rows_of(*numbers):
    return {"t": np.array(numbers, np.int32)}


def values(rows):
    return np.asarray(rows.data["t"]).tolist()


def compilations(replay, reopen, times, use):
    """The programs that are compiled each time a replay is opened again and used, while the one before is still there."""
    compiled, each = [], []
    jax.monitoring.register_event_duration_secs_listener(  # it stays: listeners cannot be taken away one by one
        lambda event, seconds, **_: compiled.append(event) if event.endswith("/backend_compile_duration") else None
    )
    for _ in range(times):
        compiled.clear()
        replay = reopen(replay)
        use(replay)
        jax.block_until_ready(jax.tree.leaves(replay.state))
        each.append(len(compiled))
    return each


def waiting(replay):
    return sum(place.asleep for place in list(replay._lock._waiters))


def drawing():
    return [thread for thread in threading.enumerate() if thread.name == "fbuf.Replay.batches"]


FRAME = {"obs": np.zeros((8, 8), np.uint8), "reward": np.float32(0)}


def frame_rows(start, count=8):
    number = np.arange(start, start + count)
    obs = np.broadcast_to((number % 256).astype(np.uint8)[:, None, None], (count, 8, 8))
    return {"obs": np.ascontiguousarray(obs), "reward": number.astype(np.float32)}


def make_frames(storage=None, **settings):
    return fbuf.Replay(fbuf.prioritized(16, storage=storage or Device()), FRAME, seed=3, **settings)


def same_batches_as_the_buffer(storage):
    replay, buffer = make_frames(storage), fbuf.prioritized(16, storage=storage)
    state, key = buffer.init(FRAME), jax.random.key(3)
    extend, update = jax.jit(buffer.extend), jax.jit(buffer.update_priority)
    sample = jax.jit(lambda state, key: buffer.sample(state, key, 4, beta=0.7))
    for start in range(0, 40, 8):
        replay.extend(frame_rows(start))
        state = extend(state, frame_rows(start))
        key, draw = jax.random.split(key)
        batch = replay.sample(4, beta=0.7)
        state, expected = sample(state, draw)
        jax.tree.map(np.testing.assert_array_equal, batch, expected)
        replay.update_priority(batch.index, batch.data["reward"])
        state = update(state, expected.index, expected.data["reward"])
    assert len(replay) == 16
    replay.add({"obs": np.full((8, 8), 7, np.uint8), "reward": 1.0})
    assert np.asarray(replay.rows(last=1).data["obs"])[0, 0, 0] == 7


CAPACITY, ROWS, BATCH, ACTORS = 2000, 8, 32, 3
NUMBERS = {"actor": np.int32(0), "id": np.int32(0), "crc": np.uint32(0), "end": np.bool_(False)}
FRAMES = {"obs": np.zeros((24, 24), np.uint8)} | NUMBERS
PACE = limits.samples_per_insert(4, min_size=200, rows=ROWS, draws=BATCH)


def _buffer(storage, sampler, **settings):
    return fbuf.Buffer(CAPACITY, storage=storage, sampler=sampler, **settings)


BUFFERS = {
    "device": (_buffer(Device(), Uniform()), PACE),
    "host": (_buffer(Host(keys=("obs",)), Prioritized()), PACE),
    "compressed": (_buffer(Compressed(keys=("obs",)), Prioritized(on="host")), PACE),
    "memmap": (_buffer(Memmap(keys=("obs",)), Prioritized()), PACE),
    "prefetch": (_buffer(Compressed(keys=("obs",)), Prioritized(), prefetch=1, batch_size=BATCH), PACE),
    "consumed": (_buffer(Compressed(keys=("obs",)), Consume()), limits.queue(1024)),
}


def frames(actor, ids):
    base = ids[:, None].astype(np.uint32) * np.uint32(2654435761) + np.uint32(actor)
    base = base >> np.arange(24, dtype=np.uint32)
    return (base[:, :, None] + np.arange(24, dtype=np.uint32) // np.uint32(6)).astype(np.uint8)


def numbered(actor, start):
    ids = np.arange(start, start + ROWS, dtype=np.int32)
    obs = frames(actor, ids)
    crc = np.array([zlib.crc32(frame) for frame in obs], np.uint32)
    return {"obs": obs, "actor": np.full(ROWS, actor, np.int32), "id": ids, "crc": crc, "end": np.zeros(ROWS, bool)}


def check(data, mask):
    """Every row is whole, and has the observation of its actor and number."""
    for obs, actor, number, crc in zip(*(data[n][mask] for n in ("obs", "actor", "id", "crc")), strict=True):
        assert zlib.crc32(np.ascontiguousarray(obs)) == crc
        assert np.array_equal(obs, frames(int(actor), np.array([number]))[0])


def resident():
    """Return the resident memory of this process in MiB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(name, batches):
    """Actors and two learners share a replay until each learner drew `batches`: no row is lost, doubled or torn."""
    buffer, limit = BUFFERS[name]
    # Otherwise a test that fails leaves its threads.
    with contextlib.closing(fbuf.Replay(buffer, FRAMES, limit=limit)) as replay:
        _share(name, batches, replay, limit)


def _share(name, batches, replay, limit):
    buffer = replay.buffer
    threads_before, added, drawn = threading.active_count(), [0] * ACTORS, [list[Any]() for _ in range(2)]
    count, failures = [0, 0], list[BaseException]()

    def act(actor):
        while True:
            replay.extend(numbered(actor, added[actor]))
            added[actor] += ROWS

    def keep(learner, batch):
        check(batch.data, batch.mask)
        assert batch.mask.all() or name == "consumed"
        if name == "consumed":
            drawn[learner].append(np.stack([batch.data["actor"][batch.mask], batch.data["id"][batch.mask]]))
        elif buffer.sampler.prioritized:
            replay.update_priority(batch.index, batch.data["id"] % 7 + np.float32(1))
        count[learner] += 1

    def learn_ahead():
        with replay.batches(BATCH, prefetch=3, to="numpy") as ahead:
            for batch in ahead:
                keep(0, batch)

    def learn():
        while True:
            keep(1, replay.sample(BATCH, to="numpy"))

    def guarded(function, *args):
        try:
            function(*args)
        except fbuf.ReplayClosed:
            pass
        except BaseException as error:
            failures.append(error)
            replay.close()

    jobs = [(act, i) for i in range(ACTORS)] + [(learn_ahead,), (learn,)]
    threads = [Thread(guarded, *job) for job in jobs]
    sizes, arrays = list[float](), list[int]()
    for part in range(1, 21):
        soon(lambda part=part: failures or min(count) >= max(batches * part // 20, 5))
        sizes.append(resident())
        arrays.append(len(jax.live_arrays()))
    if name == "consumed" and not failures:  # draw the rest, too
        rest = drain(replay, threads[:ACTORS])
        drawn[1].append(np.stack([rest["actor"], rest["id"]]))
    replay.close()
    for thread in threads:
        thread.ends()
    assert not failures, failures[0]
    assert min(added) > 0, f"an actor starved: {added}"
    stats = replay.stats()
    assert stats["limit_added"] == sum(added) and len(replay) == min(sum(added), CAPACITY)
    if name == "consumed":
        pairs = np.concatenate(drawn[0] + drawn[1], axis=1).T.tolist()
        assert sorted(map(tuple, pairs)) == [(a, i) for a in range(ACTORS) for i in range(added[a])]
    else:
        assert stats["limit_drawn"] >= BATCH * sum(count)
        assert limit.min_diff <= stats["limit_surplus"] <= limit.max_diff
    held = jax.device_get(replay.rows())
    check(held.data, held.mask)
    for actor in range(ACTORS):  # the newest of each, in order, none missing
        own = held.data["id"][held.mask & (held.data["actor"] == actor)]
        assert own.size == 0 or (own[-1] == added[actor] - 1 and (np.diff(own) == 1).all())
    assert threading.active_count() <= threads_before + 2  # a store's own
    assert max(arrays[10:]) - min(arrays[10:]) < 400, arrays
    assert max(sizes[10:]) - sizes[10] < 48, sizes


def drain(replay, actors):
    """End the actors between two calls, and draw what is less than a batch."""

    def ends(*_):
        raise fbuf.ReplayClosed

    replay._write = ends
    for actor in actors:
        actor.ends()
    soon(lambda: replay.stats()["limit_surplus"] < BATCH)
    left = int(replay.stats()["limit_surplus"])
    return replay.sample(left, to="numpy").data if left else {"actor": np.zeros(0, int), "id": np.zeros(0, int)}


_AT_EXIT = """
import sys, threading
import numpy as np
import fbuf
limit = fbuf.limits.samples_per_insert(2, min_size=10, rows=5, draws=10)
buffer = fbuf.Buffer(64, storage=fbuf.storages.Compressed(keys=("x",)))
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


def at_exit(how):
    """Let the interpreter exit while the thread waits for rows or room, an actor for a draw, or with an error not raised."""
    done = run_python(_AT_EXIT, how)
    assert done.stdout == "end of the script\n", done.stderr
    assert ("no disk" in done.stderr) == (how == "error"), done.stderr


def counts(replay):
    """Return `replay.stats()` without bytes, which depend on how rows arrived."""
    return {name: value for name, value in replay.stats().items() if not name.endswith("_bytes")}
