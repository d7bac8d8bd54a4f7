"""Processes that do jobs, one each at a time: what they tell arrives here, and nothing of them outlives an exception.

Each is a program of its own (`_boot`), talked to in lines of JSON over pipes: it starts the same way from a script without a guard,
a notebook or an interpreter, inherits no thread of JAX, and a damaged piece or a lack of memory ends a process that can be spared.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from fbuf.datasets import _boot
from fbuf.datasets._source import FileCorrupted, SourceChanged, SourceError
from fbuf.datasets._worker import do

Job = dict[str, Any]
Tell = Callable[[dict[str, Any]], None]
_KINDS = {kind.__name__: kind for kind in (ValueError, TypeError, FileExistsError, MemoryError, NotImplementedError)}


class Outcome(NamedTuple):
    """A job that ended."""

    job: Job
    error: BaseException | None
    peak: int  # bytes of memory that its process has had at most; 0: it was this one


class WorkerError(RuntimeError):
    """A worker process ended, or failed in a way that is nobody's but its own."""


def work(jobs: Sequence[Job], workers: int, tell: Tell, held: Sequence[int] = ()) -> Iterator[Outcome]:
    """Does jobs, and gives each as it ends.

    Args:
      workers: Processes; 0: this one.
      tell: Called in this thread with what jobs report.
      held: Open files that workers hold too, so that a lock on one is held until the last of them has ended.
    """
    if not workers:
        for job in jobs:
            yield Outcome(job, do(job, tell), 0)
        return
    waiting, events = list(jobs)[::-1], queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]]()
    running: list[_Worker] = []
    try:
        for _ in range(min(workers, len(waiting))):
            running.append(_Worker(events, held))
            running[-1].give(waiting.pop())
        while running:
            worker, message = events.get()
            if message is None:
                running.remove(worker)
                if worker.job is None:
                    continue
                yield Outcome(worker.job, worker.ended(), 0)
                if waiting:
                    running.append(_Worker(events, held))
                    running[-1].give(waiting.pop())
            elif message.get("done"):
                job, worker.job = worker.job, None
                assert job is not None
                yield Outcome(job, None if message["error"] is None else error_of(message["error"]), message["peak"])
                if waiting:
                    worker.give(waiting.pop())
                else:
                    worker.dismiss()
            else:
                tell(message)
    finally:
        for worker in running:
            worker.end()


class _Worker:
    """One process."""

    def __init__(self, events: queue.SimpleQueue[Any], held: Sequence[int]) -> None:
        self.job: Job | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", _boot.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=tuple(held),
        )
        self._send(sys.path)
        threading.Thread(target=self._listen, args=(events,), daemon=True).start()

    def give(self, job: Job) -> None:
        """A job to do."""
        self.job = job
        self._send(job)

    def dismiss(self) -> None:
        """There are no more."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def end(self) -> None:
        """At once, whatever it does; a piece in work is lost."""
        self._process.kill()
        self.dismiss()
        self._process.wait()
        self._errors.close()

    def ended(self) -> BaseException:
        """Why it ended in the middle of a job."""
        code = self._process.wait()
        self._errors.seek(max(0, os.fstat(self._errors.fileno()).st_size - 2000))
        said = self._errors.read().decode(errors="replace").strip()
        self._errors.close()
        memory = "; memory may have run out (fewer workers= need less)" if code == -9 else ""
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return WorkerError(f"its process {how}{memory}" + (f". It said: {said}" if said else ""))

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `_listen` tells
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self, events: queue.SimpleQueue[Any]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    events.put((self, json.loads(line)))
        events.put((self, None))


def error_of(said: dict[str, Any]) -> BaseException:
    """An error that a worker told of."""
    kind, text = said["type"], said["text"]
    if kind == "FileCorrupted":
        return FileCorrupted(text, file=said["file"], at=said["at"])
    if kind in ("SourceError", "SourceChanged"):
        return (SourceChanged if kind == "SourceChanged" else SourceError)(text)
    if kind == "Damaged":
        from fbuf.datasets._atari_piece import Damaged

        return Damaged(text)
    if kind in _KINDS:
        return _KINDS[kind](text)
    if said["errno"] is not None:
        return OSError(said["errno"], text, said["filename"])
    return WorkerError(f"{kind}: {text}\n{said['trace']}")
