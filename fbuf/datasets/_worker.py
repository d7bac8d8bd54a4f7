"""What a worker process does: one job after another, each a line of JSON; what became of it is told in lines of JSON.

It ends with its parent, whatever ended that one: the parent holds the other end of a pipe through which nothing ever comes,
and the system sends SIGIO, whose default is to end, when it is closed. Nothing half-written counts, so nothing need be tidied.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from fbuf.datasets._atari_job import run
from fbuf.datasets._source import FileCorrupted

Told = Callable[[dict[str, Any]], None]
_EVERY = 0.1  # seconds between two reports


class Reports:
    """Adds up bytes and rows, and tells of them from time to time."""

    def __init__(self, tell: Told) -> None:
        self._tell, self._last = tell, 0.0
        self._waiting = {"bytes": 0, "rows": 0}

    def __call__(self, *, nbytes: int = 0, rows: int = 0) -> None:
        self._waiting["bytes"] += nbytes
        self._waiting["rows"] += rows
        if time.monotonic() - self._last >= _EVERY:
            self.flush()

    def flush(self) -> None:
        """Tells of what is left."""
        self._last = time.monotonic()
        if any(self._waiting.values()):
            self._tell(dict(self._waiting))
            self._waiting = {"bytes": 0, "rows": 0}


def do(job: dict[str, Any], tell: Told) -> BaseException | None:
    """One job, in this process. Returns what went wrong with it."""
    reports = Reports(tell)
    try:
        run(job, reports)
    except Exception as error:
        return error
    finally:
        reports.flush()
    return None


def end_with(life: int) -> None:
    """Ends this process when the other end of a pipe is closed."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    try:
        closed = not os.read(life, 1)  # before it was asked for the signal
    except BlockingIOError:
        closed = False
    if closed:
        os._exit(1)


def serve(life: int) -> None:
    """Does jobs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    end_with(life)
    out = os.dup(1)
    os.dup2(2, 1)  # what anything prints goes elsewhere

    def tell(message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]

    for line in iter(sys.stdin.buffer.readline, b""):
        error = do(json.loads(line), tell)
        tell({"done": True, "peak": peak(), "error": None if error is None else said(error)})


def peak() -> int:
    """Bytes of memory that this process has had at most; 0: the system does not say.

    Not by `getrusage`: what the parent had when it started this process counts there.
    """
    try:
        with open("/proc/self/status") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0


def said(error: BaseException) -> dict[str, Any]:
    """An error as JSON."""
    return {
        "type": type(error).__name__,
        "text": str(error.strerror if isinstance(error, OSError) and error.strerror else error),
        "errno": error.errno if isinstance(error, OSError) else None,
        "filename": str(error.filename) if isinstance(error, OSError) and error.filename is not None else None,
        "file": error.file if isinstance(error, FileCorrupted) else "",
        "at": error.at if isinstance(error, FileCorrupted) else None,
        "trace": "".join(traceback.format_exception(error))[-4000:],
    }
