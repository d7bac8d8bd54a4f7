"""What a worker process does: one job after another, each a line of JSON; what became of it is told in lines of JSON.

It ends with its parent: a thread waits for the end of standard input, which comes whatever ended the parent.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import sys
import threading
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


def serve() -> None:
    """Does jobs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    out = os.dup(1)
    os.dup2(2, 1)  # what anything prints goes elsewhere
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            jobs.put(json.loads(line))
        os._exit(1)

    def tell(message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]

    threading.Thread(target=listen, daemon=True).start()
    while True:
        error = do(jobs.get(), tell)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        tell({"done": True, "peak": peak, "error": None if error is None else said(error)})


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
