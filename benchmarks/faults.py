"""Kill processes that write to stores in files, fuzz files, or use every storage for a long time.

`python -m benchmarks.faults [kill] [--kills 500] [--seconds 0]`; `fuzz [--seconds 120] [--seed 0]` (`_fuzz.py`); `soak
[--seconds 1200]` (`_soak.py`). Of `kill`: a child writes rows and row updates to a store in files and flushes
after each 100 rows; the parent kills it after a random time, resumes the store, reads every row, and lets the next child
continue. Every row that a flush waited for, and every row of a write that returned, must be there, once and in order.
Kinds: rows as they are, compressed chunks, a codec of the user's, and rows that turn out not to compress. With `--seconds` a
run ends after that time. The exit status is 1 if a row was lost, doubled or changed.
"""

from __future__ import annotations

import argparse
import collections
import mmap
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.codecs import Zstd
from fbuf._host.io.directory import Folder
from fbuf._host.memory import file_arena
from fbuf._host.store.store import Column, Store

LANES, LENGTH, SLACK, ITEM, EVERY = 3, 240, 16, 512, 100
_NOISE = np.random.default_rng(0).integers(0, 256, (4096, ITEM), np.uint8)


@dataclass(frozen=True)
class Deflate:
    """A codec of the user's."""

    chunk: int = 3

    def encode(self, rows: np.ndarray) -> bytes:
        return zlib.compress(rows.tobytes())

    def decode(self, data: Any, out: np.ndarray) -> None:
        out[...] = np.frombuffer(zlib.decompress(data), out.dtype).reshape(out.shape)


CODECS = {"raw": None, "chunks": Zstd(chunk=4), "own": Deflate(), "noise": Zstd(chunk=4)}


def content(kind: str, lane: np.ndarray, count: np.ndarray, changed: np.ndarray) -> list[np.ndarray]:
    """Return the columns of rows `[M]`: their number, and bytes that follow from it."""
    number = (count * LANES + lane) * 2 + changed
    if kind == "noise":
        return [_NOISE[number % 4096], number.astype(np.int64)]
    return [np.repeat(number[:, None].astype("<u4"), ITEM // 4, 1).view(np.uint8), number.astype(np.int64)]


def opened(kind: str, path: str, resume: bool) -> Store:
    """Return the store at a path."""
    columns = (
        Column("obs", (ITEM,), np.dtype(np.uint8), CODECS[kind]),
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


class Confirmed:
    """What a writing process did, in memory that outlives it."""

    def __init__(self) -> None:
        shared = np.frombuffer(mmap.mmap(-1, 8 * LANES * (2 + LENGTH)), np.int64)
        self.rows = shared[: 2 * LANES].reshape(2, LANES)  # of each lane when a write returned, and when a flush did
        self.updated = shared[2 * LANES :].reshape(LANES, LENGTH)  # numbers of updated rows from 1, at their positions


def work(kind: str, path: str, resume: bool, seed: int, confirmed: Confirmed) -> None:
    """Write until killed."""
    store, rng, pending = opened(kind, path, resume), np.random.default_rng(seed), 0
    while True:
        n = int(rng.integers(1, 20))
        keep = rng.random((n, LANES)) < (0.9, 0.5, 0.05)
        count = store._count + np.cumsum(keep, axis=0) - 1
        lane = np.broadcast_to(np.arange(LANES), count.shape)
        rows = content(kind, lane.reshape(-1), count.reshape(-1), np.zeros(count.size, np.int64))
        store.write([r.reshape(n, LANES, *r.shape[1:]) for r in rows], keep)
        confirmed.rows[0] = store._count
        if rng.random() < 0.2:
            lane, row, tickets = newest(store)
            pick = rng.permutation(len(row))[:5]
            changed = content(kind, lane[pick], row[pick], np.ones(len(pick), np.int64))
            store.patch(tickets[pick], np.ones(len(pick), bool), dict(enumerate(changed)))
            confirmed.updated[lane[pick], row[pick] % LENGTH] = row[pick] + 1
        pending += int(keep.sum())
        if pending >= EVERY:
            store.flush()
            confirmed.rows[1], pending = store._count, 0


def newest(store: Store) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return lane, count and ticket of the newest rows."""
    count, tickets, _ = store.newest()
    place, lane = np.nonzero(tickets)
    return lane, place + (count[lane] - 1 - place) // LENGTH * LENGTH, tickets[place, lane]


def check(kind: str, path: str, confirmed: Confirmed) -> list[str]:
    """Resume the store of a killed process, and return what is wrong."""
    wrong = []
    store = opened(kind, path, resume=True)
    try:
        if store.warning:
            wrong.append(store.warning)
        count = store._count
        if (count < confirmed.rows).any():
            wrong.append(
                f"{count.tolist()} rows are counted; these were written and flushed: {confirmed.rows.tolist()}"
            )
        lane, row, tickets = newest(store)
        numbers = np.empty(len(row), np.int64)
        obs = np.empty((len(row), ITEM), np.uint8)
        there = store.read([(0, tickets, obs), (1, tickets, numbers)])
        if not there.all() or len(row) != np.minimum(count, LENGTH).sum():
            wrong.append(f"{len(row)} rows of {count.tolist()} are there")
        changed = numbers % 2
        expected = content(kind, lane, row, changed)
        if (expected[1] != numbers).any() or (expected[0] != obs).any():
            wrong.append("rows are doubled, changed or in another order")
        updated = confirmed.updated[lane, row % LENGTH] == row + 1
        if not changed[updated].all():
            wrong.append(f"{int((changed[updated] == 0).sum())} row updates are missing")
    finally:
        store.close()
    return wrong


def campaign(kind: str, kills: int, until: float) -> tuple[int, int, list[str]]:
    """Return how many processes were killed, how many rows were written, and what was wrong."""
    folder = tempfile.mkdtemp(prefix="fbuf-kill-")
    path, wrong, killed = f"{folder}/store", list[str](), 0
    confirmed, rng = Confirmed(), np.random.default_rng(kills)
    try:
        while killed < kills and time.monotonic() < until and not wrong:
            child = os.fork()
            if child == 0:
                try:
                    work(kind, path, killed > 0, killed, confirmed)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            before, ended = confirmed.rows[0].sum(), 0
            while not ended and confirmed.rows[0].sum() == before and (killed == 0 or rng.random() > 0.01):
                ended = os.waitpid(child, os.WNOHANG)[0]  # some are killed while they resume
                time.sleep(0.001)
            time.sleep(float(rng.exponential(0.03)))
            if not ended:
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)[1] != signal.SIGKILL
            wrong += ["the writing process ended by itself"] if ended else check(kind, path, confirmed)
            killed += 1
        return killed, int(confirmed.rows[0].sum()), wrong
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """Run one of the campaigns, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("kill", "fuzz", "soak"), default="kill", help="what to do")
    parser.add_argument("--seed", type=int, default=0, help="of the first input of fuzz")
    parser.add_argument("--kills", type=int, default=500, help="processes to kill, over all kinds of stores")
    parser.add_argument(
        "--seconds", type=float, default=0, help="end after this time; 0: when all are killed, or the default"
    )
    options = parser.parse_args(arguments)
    if options.what == "fuzz":
        from benchmarks import _fuzz  # they start JAX, and processes that are to be killed are forked

        return _fuzz.main(options.seconds or 120, options.seed)
    if options.what == "soak":
        from benchmarks import _soak

        return _soak.main(options.seconds or 1200)
    file_arena.FileArena.small = 16_384  # segments that are emptied and removed
    until = time.monotonic() + (options.seconds or float("inf"))
    found: collections.Counter[str] = collections.Counter()
    for at, kind in enumerate(CODECS):
        share = until if not options.seconds else until - options.seconds * (len(CODECS) - 1 - at) / len(CODECS)
        killed, rows, wrong = campaign(kind, -(-options.kills // len(CODECS)), share)
        found["wrong"] += len(wrong)
        print(f"{kind}: {killed} processes killed, {rows} rows written; {'; '.join(wrong) or 'no row lost or doubled'}")
    return int(found["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
