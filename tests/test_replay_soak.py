"""Actors and learners that share a `Replay` for a while: every row of every batch is what was added, none is lost, and
memory stays as it is.

A few seconds by default, three minutes in all where slow tests run, half an hour with `FBUF_EXHAUSTIVE=1`.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import zlib
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf import limits
from fbuf.samplers import Consume, Prioritized, Uniform

CAPACITY, ROWS, BATCH, ACTORS = 2000, 8, 32, 3
EXAMPLE = {
    "obs": np.zeros((24, 24), np.uint8),
    "actor": np.int32(0),
    "id": np.int32(0),
    "crc": np.uint32(0),
    "end": np.bool_(False),
}
PACE = limits.samples_per_insert(4, min_size=200, rows=ROWS, draws=BATCH)
BUFFERS = {
    "device": (fbuf.Buffer(CAPACITY, sampler=Uniform()), PACE),
    "host": (fbuf.Buffer(CAPACITY, storage=fbuf.storages.Host(keys=("obs",)), sampler=Prioritized()), PACE),
    "compressed": (
        fbuf.Buffer(CAPACITY, storage=fbuf.storages.Compressed(keys=("obs",)), sampler=Prioritized(on="host")),
        PACE,
    ),
    "consumed": (
        fbuf.Buffer(CAPACITY, storage=fbuf.storages.Compressed(keys=("obs",)), sampler=Consume()),
        limits.queue(1024),
    ),
}
EXHAUSTIVE = os.environ.get("FBUF_EXHAUSTIVE", "") not in ("", "0")
LONG = 450.0 if EXHAUSTIVE else 45.0  # seconds for each of four


def frames(actor: int, ids: np.ndarray) -> np.ndarray:
    """What the observation of a row is: nothing of it can be confused with another's."""
    base = (ids[:, None].astype(np.uint32) * np.uint32(2654435761) + np.uint32(actor)) >> np.arange(
        0, 24, dtype=np.uint32
    )
    return (base[:, :, None] + np.arange(24, dtype=np.uint32) // np.uint32(6)).astype(np.uint8)


def rows(actor: int, start: int) -> dict[str, np.ndarray]:
    ids = np.arange(start, start + ROWS, dtype=np.int32)
    obs = frames(actor, ids)
    crc = np.array([zlib.crc32(frame) for frame in obs], np.uint32)
    return {"obs": obs, "actor": np.full(ROWS, actor, np.int32), "id": ids, "crc": crc, "end": np.zeros(ROWS, bool)}


def check(data: dict[str, np.ndarray], there: np.ndarray) -> None:
    """Every row is whole, and is the one that it says it is."""
    for obs, actor, number, crc in zip(*(data[n][there] for n in ("obs", "actor", "id", "crc")), strict=True):
        assert zlib.crc32(np.ascontiguousarray(obs)) == crc
        assert np.array_equal(obs, frames(int(actor), np.array([number]))[0])


def memory() -> float:
    """MB of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(name: str, seconds: float) -> None:
    buffer, limit = BUFFERS[name]
    replay = fbuf.Replay(buffer, EXAMPLE, limit=limit)
    threads_before, added, drawn = threading.active_count(), [0] * ACTORS, [list[Any]() for _ in range(2)]
    count, failures, lock = [0, 0], list[BaseException](), threading.Lock()

    def act(actor: int) -> None:
        while True:
            replay.extend(rows(actor, added[actor]))
            added[actor] += ROWS

    def keep(learner: int, batch: Any) -> None:
        check(batch.data, batch.mask)
        assert batch.mask.all() or name == "consumed"
        if name == "consumed":
            drawn[learner].append(np.stack([batch.data["actor"][batch.mask], batch.data["id"][batch.mask]]))
        elif buffer.sampler.prioritized:
            replay.update_priority(batch.index, batch.data["id"] % 7 + np.float32(1))
        with lock:
            count[learner] += 1

    def learn_ahead() -> None:
        with replay.batches(BATCH, prefetch=3, to="numpy") as batches:
            for batch in batches:
                keep(0, batch)

    def learn() -> None:
        while True:
            keep(1, replay.sample(BATCH, to="numpy"))

    def guarded(function: Any, *args: Any) -> None:
        try:
            function(*args)
        except fbuf.ReplayClosed:
            pass
        except BaseException as error:
            failures.append(error)
            replay.close()

    jobs = [(act, i) for i in range(ACTORS)] + [(learn_ahead,), (learn,)]
    threads = [threading.Thread(target=guarded, args=job, daemon=True) for job in jobs]
    sizes, arrays = list[float](), list[int]()
    for thread in threads:
        thread.start()
    end = time.monotonic() + 120
    while min(count) < 5 and time.monotonic() < end and not failures:  # everything is compiled then
        time.sleep(0.01)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not failures:
        time.sleep(seconds / 20)
        sizes.append(memory())
        arrays.append(len(jax.live_arrays()))
    if name == "consumed":  # what is left is to be drawn, too
        rest = drain(replay, threads[:ACTORS])
        drawn[1].append(np.stack([rest["actor"], rest["id"]]))
    replay.close()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "it hangs"
    assert not failures, failures[0]
    assert min(added) > 0 and min(count) > 0, f"somebody starved: {added}, {count}"
    pace = replay.pace
    assert pace.added == sum(added) and len(replay) == min(pace.added, CAPACITY)
    if name == "consumed":
        pairs = np.concatenate(drawn[0] + drawn[1], axis=1).T.tolist()
        assert sorted(map(tuple, pairs)) == [(a, i) for a in range(ACTORS) for i in range(added[a])]
    else:
        assert pace.drawn >= BATCH * sum(count)
        assert limit.min_diff <= pace.surplus <= limit.max_diff
    held = jax.device_get(replay.rows())
    check(held.data, held.mask)
    for actor in range(ACTORS):  # the newest of each, in order, none missing
        own = held.data["id"][held.mask & (held.data["actor"] == actor)]
        assert own.size == 0 or (own[-1] == added[actor] - 1 and (np.diff(own) == 1).all())
    assert threading.active_count() <= threads_before + 2  # a store's own
    half = len(sizes) // 2
    assert max(arrays[half:]) - min(arrays[half:]) < 400, arrays
    assert max(sizes[half:]) - sizes[half] < 48, sizes


def drain(replay: fbuf.Replay, actors: list[threading.Thread]) -> dict[str, np.ndarray]:
    """Ends the actors, between two calls of theirs, and draws what is too little for a batch."""

    def ends(*_: Any) -> None:
        raise fbuf.ReplayClosed

    replay._write = ends  # type: ignore[method-assign]
    for actor in actors:
        actor.join(120)
        assert not actor.is_alive()
    end = time.monotonic() + 120
    while replay.pace.surplus >= BATCH:
        assert time.monotonic() < end
        time.sleep(0.01)
    left = replay.pace.surplus
    return replay.sample(left, to="numpy").data if left else {"actor": np.zeros(0, int), "id": np.zeros(0, int)}


@pytest.mark.parametrize(
    "name", [n if n in ("host", "consumed") else pytest.param(n, marks=pytest.mark.slow) for n in BUFFERS]
)
def test_soak(name: str) -> None:
    soak(name, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUFFERS)
def test_long_soak(name: str) -> None:
    soak(name, LONG)
