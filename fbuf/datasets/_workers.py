"""Processes that do jobs, one each at a time: what they tell arrives here, and nothing of them outlives an exception.

Each is a program of its own (`_boot`), talked to in lines of JSON over pipes: it starts the same way from a script without
a guard, a notebook or an interpreter, inherits no thread of JAX, and a lack of memory ends a process that can be spared.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fbuf.datasets import _boot
from fbuf.datasets._source import FileCorrupted, SourceChanged, SourceError, SpaceError
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
    """Does jobs, and gives each as it ends. Closed early, it ends what is under way.

    Args:
      workers: Processes; 0: this one.
      tell: Called in this thread with what jobs report.
      held: Open files that workers hold too, so that a lock on one is held until the last of them has ended.
    """
    if not workers:
        for job in jobs:
            yield Outcome(job, do(job, tell), 0)
        return
    waiting = list(jobs)[::-1]
    with contextlib.ExitStack() as stack:
        life, ours = os.pipe()  # what workers watch
        stack.callback(os.close, ours)
        stack.callback(os.close, life)
        events = stack.enter_context(selectors.DefaultSelector())
        for _ in range(min(workers, len(waiting))):
            stack.enter_context(_Worker(events, life, held)).give(waiting.pop())
        while events.get_map():
            for key, _ in events.select():
                worker: _Worker = key.data
                for message in worker.read():
                    if not message.get("done"):
                        tell(message)
                        continue
                    assert worker.job is not None
                    error = None if message["error"] is None else error_of(message["error"])
                    yield Outcome(worker.job, error, message["peak"])
                    worker.job = None
                    if waiting:
                        worker.give(waiting.pop())
                    else:
                        worker.dismiss()
                if worker.gone and worker.job is not None:
                    yield Outcome(worker.job, worker.ended(), 0)
                    if waiting:
                        stack.enter_context(_Worker(events, life, held)).give(waiting.pop())


class _Worker:
    """One process."""

    def __init__(self, events: selectors.BaseSelector, life: int, held: Sequence[int]) -> None:
        self.job: Job | None = None
        self.gone = False
        self._begun = b""  # a line that has not ended yet
        self._events = events
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", _boot.__file__, str(life)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=(life, *held),
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._jobs, self._told = self._process.stdin, self._process.stdout
        events.register(self._told, selectors.EVENT_READ, self)
        self._send(sys.path)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it at once, whatever it does; a piece in work is lost."""
        self._process.kill()
        self.dismiss()
        self._process.wait()
        self._told.close()
        self._errors.close()

    def give(self, job: Job) -> None:
        """A job to do."""
        self.job = job
        self._send(job)

    def dismiss(self) -> None:
        """There are no more."""
        with contextlib.suppress(OSError):
            self._jobs.close()

    def read(self) -> list[dict[str, Any]]:
        """What it said; after the last, `gone`."""
        data = os.read(self._told.fileno(), 1 << 16)
        if not data:
            self.gone = True
            self._events.unregister(self._told)
            return []
        *lines, self._begun = (self._begun + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def ended(self) -> BaseException:
        """Why it ended in the middle of a job."""
        code = self._process.wait()
        self._errors.seek(max(0, os.fstat(self._errors.fileno()).st_size - 2000))
        words = self._errors.read().decode(errors="replace").strip()
        memory = "; memory may have run out (fewer workers= need less)" if code == -9 else ""
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return WorkerError(f"its process {how}{memory}" + (f". It said: {words}" if words else ""))

    def _send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended: `read` tells
            while data:
                data = data[os.write(self._jobs.fileno(), data) :]


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
    if kind == "SpaceError":
        return SpaceError(said["errno"], text, said["filename"])
    if kind in _KINDS:
        return _KINDS[kind](text)
    if said["errno"] is not None:
        return OSError(said["errno"], text, said["filename"])
    return WorkerError(f"{kind}: {text}\n{said['trace']}")
