"""Use every storage for a long time, and report what grows: memory, descriptors, threads, files.

Each round writes beyond the capacity, samples, updates priorities and rows, saves (also in a thread), and now and then loads,
resumes or clears; a second thread draws. Memory is what Python allocated (`tracemalloc`), what C allocated and what it keeps
(`mallinfo2`), and the live arrays of JAX; the rest is code, compiled programs and memory of NumPy and XLA. Compilations are
counted: a program that is compiled again for each load would stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fbuf

CAPACITY, WRITE = 2048, 64  # less than the rows that a store keeps for a prefetched batch
ROW = {"t": np.int32(0), "obs": np.zeros((42, 42), np.uint8)}
WARM = 600  # seconds, in which caches fill; memory is judged afterwards, and counts in the second half of any run
GROWTH = 1.02  # that is still called flat
_compiled: list[str] = []


def _on_duration(event: str, seconds: float, **_: Any) -> None:
    if event.endswith("/backend_compile_duration"):
        _compiled.append(event)


class Mallinfo(ctypes.Structure):
    """What `mallinfo2` of glibc returns."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def measured(folder: str) -> dict[str, int]:
    """Return what may grow: bytes, and numbers of descriptors, threads and files."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        info = ctypes.CDLL(None).mallinfo2
        info.restype = Mallinfo
        c = info()
        heap = {"c_used": c.uordblks + c.hblkhd, "c_kept": c.fordblks}
    rss = int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) * 1024
    return {
        "rss": rss,
        "python": tracemalloc.get_traced_memory()[0],
        **heap,
        "jax": sum(array.nbytes for array in jax.live_arrays()),
        "arrays": len(jax.live_arrays()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "compiled": len(_compiled),
        "files": sum(len(names) for _, _, names in os.walk(folder)),
    }


def rows(first: int) -> dict[str, np.ndarray]:
    """Return rows whose frames compress, and change."""
    t = np.arange(first, first + WRITE, dtype=np.int32)
    obs = np.zeros((WRITE, 42, 42), np.uint8)
    obs[np.arange(WRITE), t % 42] = (t % 251)[:, None]
    return {"t": t, "obs": obs}


def ragged_rows(first: int) -> dict[str, Any]:
    """Return the rows with frames of different heights."""
    given = rows(first)
    return {"t": given["t"], "obs": [frame[: 1 + t % 42] for t, frame in zip(given["t"], given["obs"], strict=True)]}


class Member:
    """One `Replay`, and its checkpoint."""

    def __init__(self, name: str, folder: str, **options: Any) -> None:
        self.name, self.path, self.options = name, f"{folder}/{name}-saved", options
        self.buffer = fbuf.Buffer(CAPACITY, **options)
        self.replay = fbuf.Replay(self.buffer, ROW)
        self.next = 0

    def round(self, number: int) -> None:
        """Write, draw, update, save and load once."""
        ragged = isinstance(self.buffer.storage, fbuf.storages.Ragged)
        self.replay.extend((ragged_rows if ragged else rows)(self.next))
        self.next += WRITE
        for _ in range(3):
            batch = self.replay.sample(64)
            if ragged:
                assert all(len(frame) for frame in batch.lazy["obs"])  # type: ignore[index]
            drawn = np.asarray(batch.data["t"])[np.asarray(batch.mask)]  # the last batch of an epoch is short
            assert (drawn >= self.next - CAPACITY - WRITE).all()  # a prefetched batch is older
            if self.buffer.sampler.prioritized:
                self.replay.update_priority(batch.index, np.abs(np.sin(np.asarray(batch.data["t"], np.float32))))
        last = self.replay.rows(last=2)
        self.replay.update_rows(last.index, {"t": np.asarray(last.data["t"])})
        if number % 3 == 0:
            self.replay.save(self.path, wait=number % 2 == 0).result()
        in_files = getattr(self.buffer.storage, "path", None) is not None
        if number % 9 == 0 and in_files:
            self.buffer.flush(self.replay.state)
            self.replay.close()
            self.replay = None  # type: ignore[assignment]
            gc.collect()
            self.replay = fbuf.Replay(self.buffer, ROW, resume=True)
        elif number % 9 == 0:
            self.replay.close()
            self.replay = fbuf.Replay.load(self.path, self.buffer)
        if number % 50 == 49:
            self.replay.clear()


class DataSet:
    """A data set that is opened and read, and now and then written again."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._write(0)

    def _write(self, number: int) -> None:
        self.replay: Any = None
        path = f"{self.folder}/dataset"
        shutil.rmtree(path, ignore_errors=True)
        fbuf.interop.from_arrays(rows(number * WRITE), episode_end=()).save(path, segment_rows=WRITE // 2)
        self.replay = fbuf.Replay(*fbuf.datasets.open(path))

    def round(self, number: int) -> None:
        """Draw; open or write the data set again."""
        for _ in range(3):
            assert np.asarray(self.replay.sample(64).mask).all()
        assert sum(np.count_nonzero(np.asarray(batch.mask)) for batch in self.replay.epoch(16)) == WRITE
        if number % 9 == 0:
            self._write(number)
        elif number % 3 == 0:
            self.replay = fbuf.Replay(*fbuf.datasets.open(f"{self.folder}/dataset"))


def main(seconds: float, every: float = 60) -> int:
    """Run for so long; print what is measured; return 1 if something grew in the second half."""
    folder = tempfile.mkdtemp(prefix="fbuf-soak-")
    tracemalloc.start()
    jax.monitoring.register_event_duration_secs_listener(_on_duration)
    begun, found, number = time.monotonic(), list[tuple[float, dict[str, int]]](), 0
    stop = threading.Event()
    try:
        storages = fbuf.storages
        members: list[Any] = [
            Member("device", folder, sampler=fbuf.samplers.Prioritized()),
            Member("deduplicated", folder, storage=storages.Deduplicated(keys=("obs",)), sampler=fbuf.samplers.Epoch()),
            Member("compressed", folder, storage=storages.Compressed(keys=("obs",)), prefetch=1, batch_size=64),
            Member("host", folder, storage=storages.Host(), sampler=fbuf.samplers.Ranked()),
            Member("memmap", folder, storage=storages.Memmap(f"{folder}/memmap")),
            Member("files", folder, storage=storages.Compressed(path=f"{folder}/files")),
            Member("ragged", folder, storage=storages.Ragged()),
            DataSet(folder),
        ]

        def draw() -> None:  # another thread of the process, as a learner is
            while not stop.wait(0.5):
                with contextlib.suppress(fbuf.ReplayClosed, AttributeError, RuntimeError):
                    replay = members[number % len(members)].replay
                    if replay.can_sample():  # it may have been cleared
                        replay.sample(64)
                replay = None

        learner = threading.Thread(target=draw)
        learner.start()
        due = min(every, seconds / 10)
        while time.monotonic() < begun + seconds:
            for member in members:
                member.round(number)
            number += 1
            if time.monotonic() > begun + due * (len(found) + 1):
                found.append((time.monotonic() - begun, measured(folder)))
                now = found[-1][1]
                said = ", ".join(f"{n} {v / 2**20:.1f} MB" if v > 2**20 else f"{n} {v}" for n, v in now.items())
                print(f"{found[-1][0]:.0f} s, {number} rounds: {said}", flush=True)
    finally:
        stop.set()
        learner.join()
        members.clear()
        shutil.rmtree(folder, ignore_errors=True)
    late = [now for at, now in found if at >= min(WARM, seconds / 2)]
    counts = ("arrays", "descriptors", "threads", "files", "compiled")
    soon = counts[:-1]  # in a short run programs are still compiled
    watched = [*late[0]] if late and seconds >= 2 * WARM else soon if late else ()
    grown = []
    for name in watched:
        first, last = (
            min(now[name] for now in part) for part in (late[: (len(late) + 1) // 2], late[len(late) // 2 :])
        )
        if last > first * GROWTH + (2 if name in counts else 8 << 20):
            grown.append(f"{name}: {first} to {last}")
    print("; ".join(grown) or f"nothing grew: {', '.join(watched)}")
    return int(bool(grown))
