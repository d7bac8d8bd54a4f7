"""What does it cost that files which a flush waited for are kept until the next one?

Stores in files, as `Memmap` and `Compressed(path=...)` keep them, of rows of 4 KiB in two lanes. Compared are files that are
kept until the next flush, and files that are removed at once, which a power failure could take flushed rows with. Both sides
flush as often, outside the measurement. "compaction" writes to one lane while another gets few rows, so that chunks are moved
from segment to segment; "updates" changes rows until the log is rewritten.

Expected: 5 % more CPU time at most. The longest single write is reported for both, by the clock.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from benchmarks._harness import interleave, ratio, row, spread
from fbuf._host.codecs import Zstd
from fbuf._host.io import directory
from fbuf._host.io.directory import Folder
from fbuf._host.io.file import unlink
from fbuf._host.store.store import Column, Store

LANES, ITEM, WRITE = 2, 4096, 200
TIME = "CPU time with flushed files kept until the next flush over that with files removed at once"
LONGEST = "Longest single write, files kept until the next flush"
SIDES = ("kept", "removed")
CODECS = {"writes, raw": None, "writes, compressed": Zstd(), "compaction": Zstd(), "updates": None}


@contextlib.contextmanager
def removing_at_once(removes: bool) -> Iterator[None]:
    """Let stores remove what they no longer use, flushed or not."""
    if not removes:
        yield
        return
    at_once = {
        "retire": lambda folder, name: unlink(folder.file(name)),
        "replace": lambda folder, name, write, size: directory.replace(folder.file(name), write, size),
    }
    with mock.patch.multiple(Folder, **at_once):
        yield


class Work:
    """A store in files, and one kind of work on it."""

    def __init__(self, kind: str, side: str, path: str, length: int) -> None:
        self.kind, self.removes, self.longest = kind, side == "removed", 0.0
        columns = (Column("obs", (ITEM,), np.dtype(np.uint8), CODECS[kind]), Column("t", (), np.dtype(np.int64), None))
        described = [
            {"name": c.name, "shape": list(c.shape), "dtype": str(c.dtype), "codec": c.codec and repr(c.codec)}
            for c in columns
        ]
        sizes = {"lanes": LANES, "length": length, "slack": 64}
        folder = Folder("Memmap", f"{path}/{side}-{kind}".replace(" ", "-"), {**sizes, "columns": described})
        self.store = Store(columns, **sizes, folder=folder)
        folder.publish()
        self._random = np.random.default_rng(0)
        self._rows = self._random.integers(0, 4, (WRITE, LANES, ITEM), np.uint8)
        self._keep = np.ones((WRITE, LANES), bool)
        for number in range(2 * length // WRITE if kind != "updates" else length // WRITE):
            if kind == "compaction":
                self._keep[:, 0] = False
                self._keep[:: 25 if number * WRITE < length else WRITE, 0] = True
            self._write()
        self.store.flush()

    def _write(self) -> None:
        at = int(self._random.integers(WRITE))
        rows = [np.roll(self._rows, at, axis=0), np.zeros((WRITE, LANES), np.int64)]
        start = time.perf_counter()
        self.store.write(rows, None if self._keep.all() else self._keep)
        self.longest = max(self.longest, time.perf_counter() - start)

    def _update(self) -> None:
        tickets = self.store.newest()[1][: WRITE // 2, 0]
        values = {0: self._rows[: len(tickets), 0]}
        start = time.perf_counter()
        self.store.update_rows(tickets, np.ones(len(tickets), bool), values)
        self.longest = max(self.longest, time.perf_counter() - start)

    def run(self) -> None:
        """Work for one measurement."""
        with removing_at_once(self.removes):
            for _ in range(8):
                (self._update if self.kind == "updates" else self._write)()


def measure(kind: str, path: str, length: int, rounds: int, judged: bool) -> list[dict[str, Any]]:
    """Rows of one kind of work."""
    work = {side: Work(kind, side, path, length) for side in SIDES}
    thunks: dict[str, Callable[[], Any]] = {side: functools.partial(Work.run, w) for side, w in work.items()}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for w in work.values():
            w.store.flush()
        for side, measured in interleave(thunks, rounds=2, warmup=0, clock=time.process_time).items():
            seconds[side] += measured
    kept, removed = (seconds[side] for side in SIDES)
    for w in work.values():
        w.store.close()
    target = "<= 1.05" if judged else None
    shown = ratio(kept, removed)
    return [
        row(TIME, kind, ours=spread(kept), peer=spread(removed), ratio=shown.median, target=target, note="CPU time"),
        row(LONGEST, kind, ours=work["kept"].longest * 1e3, peer=work["removed"].longest * 1e3, note="ms"),
    ]


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for 16,000 rows a lane; `quick`: 800."""
    length, rounds = (800, 3) if quick else (16_000, 30)
    path = tempfile.mkdtemp(prefix="fbuf-bench-")
    try:
        return [r for kind in CODECS for r in measure(kind, path, length, rounds, not quick)]
    finally:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
