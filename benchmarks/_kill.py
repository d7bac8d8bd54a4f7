"""Kill processes that write to files at random instants, and look at what is left; see `benchmarks.faults`.

A child writes and confirms in shared memory what it wrote and flushed; the parent kills it after a random time, opens what is
there, reads every row, and lets the next child continue. Children are forked, so nothing here starts JAX.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
import zlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fbuf._formats import checkpoint, dataset
from fbuf._host.codecs import Zstd
from fbuf._host.io.directory import Folder
from fbuf._host.memory import file_arena
from fbuf._host.ragged import values
from fbuf._host.ragged.column import RaggedLeaf
from fbuf._host.ragged.store import Records
from fbuf._host.store.store import Column, Store
from fbuf._host.types import ranges

LANES, LENGTH, SLACK, ITEM, EVERY = 3, 240, 16, 512, 100
SHARES = (0.9, 0.5, 0.05)  # of the steps whose rows a lane stores
NOTHING = "no row lost or doubled"
_NOISE = np.random.default_rng(0).integers(0, 256, (4096, ITEM), np.uint8)


@dataclass(frozen=True)
class Deflate:
    """A codec of the user's."""

    chunk: int = 3

    def encode(self, rows: np.ndarray) -> bytes:
        return zlib.compress(rows.tobytes())

    def decode(self, data: Any, out: np.ndarray) -> None:
        out[...] = np.frombuffer(zlib.decompress(data), out.dtype).reshape(out.shape)


class Confirmed:
    """What a writing process did, in memory that outlives it."""

    def __init__(self) -> None:
        shared = np.frombuffer(mmap.mmap(-1, 8 * LANES * (2 + LENGTH)), np.int64)
        self.rows = shared[: 2 * LANES].reshape(2, LANES)  # of each lane when a write returned, and when a flush did
        self.updated = shared[2 * LANES :].reshape(LANES, LENGTH)  # numbers of updated rows from 1, at their positions

    def missing(self, count: np.ndarray) -> list[str]:
        """Return an error if a lane counts fewer rows than were written and flushed: int64[lanes]."""
        if (count >= self.rows).all():
            return []
        return [f"{count.tolist()} rows are counted; these were written and flushed: {self.rows.tolist()}"]


class Kind(Protocol):
    """What a child writes, and how the parent looks at it."""

    def work(self, path: str, resume: bool, seed: int, confirmed: Confirmed) -> None:
        """Write until killed."""

    def check(self, path: str, confirmed: Confirmed) -> list[str]:
        """Open what a killed process left, and return what is wrong."""


@dataclass(frozen=True)
class Live:
    """A store in files, of rows, updates and flushes."""

    codec: Any = None
    noise: bool = False

    def content(self, lane: np.ndarray, count: np.ndarray, changed: np.ndarray) -> list[np.ndarray]:
        """Return the columns of rows `[M]`: bytes that follow from their number, and the number."""
        number = (count * LANES + lane) * 2 + changed
        if self.noise:
            return [_NOISE[number % 4096], number.astype(np.int64)]
        return [np.repeat(number[:, None].astype("<u4"), ITEM // 4, 1).view(np.uint8), number.astype(np.int64)]

    def opened(self, path: str, resume: bool) -> Store:
        """Return the store at a path."""
        columns = (
            Column("obs", (ITEM,), np.dtype(np.uint8), self.codec),
            Column("number", (), np.dtype(np.int64), None),
        )
        described = [
            {"name": c.name, "shape": list(c.shape), "dtype": str(c.dtype), "codec": c.codec and repr(c.codec)}
            for c in columns
        ]
        sizes = {"lanes": LANES, "length": LENGTH, "slack": SLACK}
        folder = Folder("Memmap", path, {**sizes, "columns": described}, resume=resume)
        store = Store(columns, **sizes, folder=folder)
        if not resume:
            folder.publish()
        return store

    def work(self, path: str, resume: bool, seed: int, confirmed: Confirmed) -> None:
        store, rng, pending = self.opened(path, resume), np.random.default_rng(seed), 0
        while True:
            n = int(rng.integers(1, 20))
            keep = rng.random((n, LANES)) < SHARES
            count = store._count + np.cumsum(keep, axis=0) - 1
            lane = np.broadcast_to(np.arange(LANES), count.shape)
            rows = self.content(lane.reshape(-1), count.reshape(-1), np.zeros(count.size, np.int64))
            store.write([r.reshape(n, LANES, *r.shape[1:]) for r in rows], keep)
            confirmed.rows[0] = store._count
            if rng.random() < 0.2:
                lane, row, tickets = newest(store)
                pick = rng.permutation(len(row))[:5]
                changed = self.content(lane[pick], row[pick], np.ones(len(pick), np.int64))
                store.update_rows(tickets[pick], np.ones(len(pick), bool), dict(enumerate(changed)))
                confirmed.updated[lane[pick], row[pick] % LENGTH] = row[pick] + 1
            pending += int(keep.sum())
            if pending >= EVERY:
                store.flush()
                confirmed.rows[1], pending = store._count, 0

    def check(self, path: str, confirmed: Confirmed) -> list[str]:
        store = self.opened(path, resume=True)
        try:
            count = store._count
            wrong = confirmed.missing(count) + ([store.warning] if store.warning else [])
            lane, row, tickets = newest(store)
            numbers = np.empty(len(row), np.int64)
            obs = np.empty((len(row), ITEM), np.uint8)
            there = store.read([(0, tickets, obs), (1, tickets, numbers)])
            if not there.all() or len(row) != np.minimum(count, LENGTH).sum():
                wrong.append(f"{len(row)} rows of {count.tolist()} are there")
            changed = numbers % 2
            expected = self.content(lane, row, changed)
            if (expected[1] != numbers).any() or (expected[0] != obs).any():
                wrong.append("rows are doubled, changed or in another order")
            updated = confirmed.updated[lane, row % LENGTH] == row + 1
            if not changed[updated].all():
                wrong.append(f"{int((changed[updated] == 0).sum())} row updates are missing")
            return wrong
        finally:
            store.close()


def newest(store: Store) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return lane, count and ticket of the newest rows."""
    count, tickets, _ = store.newest()
    place, lane = np.nonzero(tickets)
    return lane, place + (count[lane] - 1 - place) // LENGTH * LENGTH, tickets[place, lane]


class Saved:
    """Ragged rows in memory, saved as a checkpoint after each 100 rows."""

    leaves = (RaggedLeaf("obs", "bytes"), RaggedLeaf("number", "array", values.dtype_code(np.dtype(np.int64))))

    def content(self, lane: np.ndarray, count: np.ndarray) -> list[list[Any]]:
        """Return values by leaf: bytes whose length and text follow from their number, and the number."""
        numbers = (count * LANES + lane).tolist()
        return [[str(number).encode() * (number % 50) for number in numbers], [np.array(n) for n in numbers]]

    def opened(self, path: str, resume: bool) -> Records:
        """Return the records of the newest checkpoint."""
        sizes = {"lanes": LANES, "length": LENGTH, "slack": SLACK}
        if not resume:
            return Records(self.leaves, **sizes)
        with checkpoint.read(path) as saved:
            return Records.from_arrays(saved.arrays, **sizes)

    def work(self, path: str, resume: bool, seed: int, confirmed: Confirmed) -> None:
        store, rng, pending = self.opened(path, resume), np.random.default_rng(seed), 0
        while True:
            n = int(rng.integers(1, 20))
            keep = rng.random((n, LANES)) < SHARES
            count = store._count + np.cumsum(keep, axis=0) - 1
            lane = np.broadcast_to(np.arange(LANES), count.shape)
            store.put(self.content(lane.reshape(-1), count.reshape(-1)), n, keep)
            pending += int(keep.sum())
            if pending >= EVERY:
                checkpoint.write(path, store.to_arrays(), {}, sync=bool(rng.random() < 0.5))
                confirmed.rows[:], pending = store._count, 0

    def check(self, path: str, confirmed: Confirmed) -> list[str]:
        store = self.opened(path, True)
        wrong = confirmed.missing(store._count)
        lane, count = ranges(np.maximum(store._count - LENGTH, 0), store._count)
        tickets = store._tickets.of(lane, count)
        for leaf, expected in enumerate(self.content(lane, count)):
            found, there = store.values(leaf, tickets)
            if not there.all() or found != expected:
                wrong.append("rows are missing, doubled, changed or in another order")
        return wrong


class DataSet:
    """Segments of a data set, of 100 rows each."""

    schema = dataset.Schema({"obs": ((ITEM,), "uint8"), "number": ((), "int64")}, codec={"obs": Zstd(chunk=4)})

    def content(self, segment: int) -> dict[str, np.ndarray]:
        """Return the rows of a segment."""
        obs, number = Live().content(np.zeros(EVERY, int), segment * EVERY + np.arange(EVERY), np.zeros(EVERY, int))
        return {"obs": obs, "number": number}

    def work(self, path: str, resume: bool, seed: int, confirmed: Confirmed) -> None:
        for segment in itertools.count(len(dataset.committed(path))):
            with dataset.SegmentWriter(path, segment, self.schema, sync=segment % 2 == 0) as writer:
                writer.append(self.content(segment))
                writer.commit()
            confirmed.rows[:, 0] += EVERY

    def check(self, path: str, confirmed: Confirmed) -> list[str]:
        whole = sorted(dataset.committed(path))
        wrong = confirmed.missing(np.array([len(whole) * EVERY, 0, 0]))
        if whole != [*range(len(whole))]:
            wrong.append(f"segments {whole} are there")
        dataset.finish(path, [dataset.SegmentRows(number) for number in whole], sync=False)
        with dataset.DataSet.open(path, verify="full") as opened:
            found = opened.read_rows(0, opened.rows)
        for segment in whole:
            for name, expected in self.content(segment).items():
                if (found[name][segment * EVERY : (segment + 1) * EVERY] != expected).any():
                    wrong.append(f"rows of segment {segment} changed")
        confirmed.rows[:, 0] = len(whole) * EVERY
        if len(whole) > 40:  # begin again, so that each check takes as long
            shutil.rmtree(path)
            confirmed.rows[:] = 0
        return wrong


KINDS: dict[str, Kind] = {
    "rows": Live(),
    "chunks": Live(Zstd(chunk=4)),
    "own codec": Live(Deflate()),
    "noise": Live(Zstd(chunk=4), noise=True),  # which turns out not to compress
    "ragged, saved": Saved(),
    "data set": DataSet(),
}


def campaign(kind: str, kills: int, until: float) -> tuple[int, int, list[str]]:
    """Return how many processes were killed, how many rows were written, and what was wrong."""
    folder = tempfile.mkdtemp(prefix="fbuf-kill-")
    path, wrong, killed, rows = f"{folder}/store", list[str](), 0, 0
    confirmed, rng = Confirmed(), np.random.default_rng(kills)
    try:
        while killed < kills and time.monotonic() < until and not wrong:
            before, ended, first = confirmed.rows[0].sum(), 0, not os.path.exists(path)
            child = os.fork()
            if child == 0:
                try:
                    KINDS[kind].work(path, not first, killed, confirmed)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            while not ended and confirmed.rows[0].sum() == before and (first or rng.random() > 0.01):
                ended = os.waitpid(child, os.WNOHANG)[0]  # some are killed while they resume
                time.sleep(0.001)
            time.sleep(float(rng.exponential(0.03)))
            if not ended:
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)[1] != signal.SIGKILL
            rows += int(confirmed.rows[0].sum() - before)
            wrong += ["the writing process ended by itself"] if ended else KINDS[kind].check(path, confirmed)
            killed += 1
        return killed, rows, wrong
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(kills: int, seconds: float) -> int:
    """Kill so many processes, over all kinds, or until that time; return 1 if a row was lost, doubled or changed."""
    file_arena.FileArena.small = 16_384  # segments that are emptied and removed
    warnings.filterwarnings("ignore", "os.fork")  # JAX warns, though it was not started
    begun, failed = time.monotonic(), False
    for at, kind in enumerate(KINDS, 1):
        until = begun + seconds * at / len(KINDS) if seconds else float("inf")
        killed, rows, wrong = campaign(kind, -(-kills // len(KINDS)), until)
        failed = failed or bool(wrong)
        print(f"{kind}: {killed} processes killed, {rows} rows written; {'; '.join(wrong) or NOTHING}", flush=True)
    return int(failed)
