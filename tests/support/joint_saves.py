"""Two processes that save together, as threads which take turns, on a disk in memory."""

import threading
from collections.abc import Callable
from typing import Any

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint import Disk
from tests.support.memory_disk import PATH, Killed, sources
from tests.support.threads import PATIENCE


class Together:
    """One of two processes."""

    count = 2

    def __init__(self, index: int, barrier: threading.Barrier, said: list[Any]) -> None:
        self.index, self._barrier, self._said = index, barrier, said

    def first(self, work: Callable[[], str]) -> str:
        return str(self._turn(work if self.index == 0 else lambda: self._said[0])[0])

    def each(self, work: Callable[[], Any]) -> Any:
        return self._turn(work)[self.index]

    def _turn(self, work: Callable[[], Any]) -> list[Any]:
        error: Exception | None = None
        self._said[self.index] = None
        self._barrier.wait(PATIENCE)
        for turn in range(2):
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


def save_together(k: int, disks: tuple[Disk, Disk], **how: Any) -> list[Any]:
    """Write save `k`, each process its arrays; return what the processes returned, raised, or Killed."""
    barrier, said, out = threading.Barrier(2), [None, None], [None, None]
    arrays = sources(k)
    mine = [dict(list(arrays.items())[:2]), dict(list(arrays.items())[2:])]

    def run(index: int) -> None:
        group, meta = Together(index, barrier, said), {"k": k, "process": index}
        try:
            out[index] = checkpoint.write_jointly(
                PATH, mine[index], meta, group, lambda parts: parts[0], disk=disks[index], **how
            )
        except (Exception, Killed) as raised:
            out[index] = raised
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return out
