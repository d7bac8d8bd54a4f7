"""Processes that save together, as threads which take turns, on a disk in memory."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint import Disk
from tests.support.memory_disk import PATH, Killed, sources
from tests.support.threads import PATIENCE


class Together:
    """One of several processes."""

    def __init__(self, index: int, barrier: threading.Barrier, said: list[Any]) -> None:
        self.index, self.count, self._barrier, self._said = index, len(said), barrier, said

    def first(self, work: Callable[[], str]) -> str:
        return str(self._turn(work if self.index == 0 else lambda: self._said[0])[0])

    def each(self, work: Callable[[], Any]) -> Any:
        return self._turn(work)[self.index]

    def _turn(self, work: Callable[[], Any]) -> list[Any]:
        error: Exception | None = None
        self._said[self.index] = None
        self._barrier.wait(PATIENCE)
        for turn in range(self.count):
            if turn == self.index:
                try:
                    self._said[turn] = work()
                except Exception as raised:
                    error = raised
            self._barrier.wait(PATIENCE)
        found = list(self._said)
        self._barrier.wait(PATIENCE)
        if error is not None or None in found:
            raise error or RuntimeError("the other process failed")
        return found


def save_together(k: int, disks: Sequence[Disk], **how: Any) -> list[Any]:
    """Write save `k`, each process its arrays; return what the processes returned, raised, or Killed."""
    count = len(disks)
    barrier, said, out = threading.Barrier(count), [None] * count, [None] * count
    arrays = sources(k)
    mine = [{str(name): arrays[name] for name in names} for names in np.array_split(list(arrays), count)]

    def run(index: int) -> None:
        group, meta = Together(index, barrier, said), {"k": k, "process": index}
        try:
            out[index] = checkpoint.write_jointly(
                PATH, mine[index], meta, group, lambda parts: parts[0], disk=disks[index], **how
            )
        except (Exception, Killed) as raised:
            out[index] = raised
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return out
