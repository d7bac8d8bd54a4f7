"""Convert dumps of a run, in this process or in several.

Processes are spawned, so none inherits a thread of JAX. They watch a pipe of the caller's process and end when it closes:
after an error, an interrupt or a kill. The commit of a dump's last segment completes it, so unfinished ones do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import types
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._formats import dataset
from fbuf.datasets._atari.segment import INVALID_RANGE, KINDS, convert
from fbuf.datasets._remote import File, FileCorrupted, Report, fetch, is_local, read_npy

Array = np.ndarray[Any, Any]

DOWNLOADS = "arrivals"
"""The folder of downloaded files, until they are converted."""
_BLOCK_ROWS = 512  # 3.6 MB of frames
_EVERY = 0.1  # seconds between two reports
_nbytes: Any = None  # that all worker processes have read, shared with the caller


class WorkerEnded(RuntimeError):
    """A worker process ended, and all others with it."""


class _ReportFailed(BaseException):
    """The caller's report raised its cause. Not an Exception, which would count as a failure of the file."""


@dataclass(frozen=True)
class Job:
    """One dump to convert: its files by kind, and the data set to write."""

    path: Path
    number: int
    files: Mapping[str, File]
    schema: dataset.Schema


def run_jobs(
    jobs: Sequence[Job], workers: int, report: Report
) -> Generator[tuple[Job, BaseException | None], None, None]:
    """Convert dumps. Yield each job with its error, or None, as it ends. If closed early, stop the running ones.

    Args:
      workers: Processes; 0: this one.
      report: Called in this thread.
    """
    if not workers or not jobs:

        def checked(number: int) -> None:
            try:
                report(number)
            except Exception as error:
                raise _ReportFailed from error

        for job in jobs:
            failure: BaseException | None = None
            try:
                run(job, checked)
            except _ReportFailed as wrapped:
                assert wrapped.__cause__ is not None
                raise wrapped.__cause__ from wrapped.__cause__.__cause__
            except Exception as error:
                failure = error
            yield job, failure
        return
    context = multiprocessing.get_context("spawn")
    alive, stop = context.Pipe(duplex=False)
    nbytes, reported = context.Value("q"), 0
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, _start, (alive, nbytes))
    try:
        with _without_main():
            waiting: dict[Future[None], Job] = {pool.submit(_run, job): job for job in jobs}
        while waiting:
            done, _ = wait(waiting, _EVERY, FIRST_COMPLETED)
            now = nbytes.get_obj().value  # without its lock, which a killed worker may hold
            if now != reported:
                report(now - reported)
                reported = now
            for future in done:
                failed = future.exception()
                yield waiting.pop(future), WorkerEnded() if isinstance(failed, BrokenExecutor) else failed
    except BaseException:
        stop.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        stop.close()
        alive.close()


def run(job: Job, report: Report) -> None:
    """Convert one dump.

    Raises:
      FileCorrupted: a file is missing or damaged. SourceError: it is not available now. OSError: the disk fails.
    """
    if missing := [kind for kind in KINDS if kind not in job.files and kind != INVALID_RANGE]:
        raise FileCorrupted(f"{missing[0]}_ckpt.{job.number}.gz is missing; expected six files of each dump.")
    arrivals = job.path / DOWNLOADS / str(job.number)
    meta = {"files": {kind: dataclasses.asdict(file) for kind, file in job.files.items()}}
    try:
        files = _Files(job.files, arrivals, report)
        convert(files, str(job.path), job.number, job.schema, meta)
    finally:
        shutil.rmtree(arrivals, ignore_errors=True)


class _Files:
    """The files of a dump: local ones are read in place, others are downloaded first."""

    def __init__(self, files: Mapping[str, File], arrivals: Path, report: Report) -> None:
        self._files, self._arrivals, self._report = files, arrivals, report

    def whole(self, kind: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...], most: int) -> Array:
        if kind not in self._files:  # `invalid_range`, which says nothing that `add_count` does not
            return np.zeros(0, dtypes[0])
        (array,) = self._read(kind, dtypes, shape, most)
        return array

    def blocks(self, kind: str, dtype: str, shape: tuple[int, ...]) -> Generator[Array, None, None]:
        return self._read(kind, (dtype,), shape, _BLOCK_ROWS)

    def _read(
        self, kind: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...], rows: int
    ) -> Generator[Array, None, None]:
        file = self._files[kind]
        if is_local(file.url):
            return read_npy(Path(file.url), dtypes, shape, rows, self._report)
        self._arrivals.mkdir(parents=True, exist_ok=True)
        path = self._arrivals / file.name.rpartition("/")[2]
        fetch(file, path, self._report)
        return read_npy(path, dtypes, shape, rows)


def _start(alive: Connection, nbytes: Any) -> None:
    """Prepare a worker process."""
    global _nbytes
    _nbytes = nbytes
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller's process too, which ends this one
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: Connection) -> None:
    """End this process when the caller's process closes its end of the pipe, or ends itself."""
    with contextlib.suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(1)


def _run(job: Job) -> None:
    run(job, _count)


def _count(number: int) -> None:
    with _nbytes.get_lock():
        _nbytes.value += number


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep spawned processes from importing the caller's program, which may have no guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
