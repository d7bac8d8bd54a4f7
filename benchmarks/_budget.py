"""Run the sections of a benchmark one after another within a time budget, in a worker process.

Machines with an accelerator are lent for minutes. So no section starts that is expected to end after the deadline, each row
reaches the caller as soon as it is measured, and whatever ends a section (an error, a crash of the runtime, a hang) ends
that section alone: the caller replaces the worker. The caller never starts a backend, which would take the device's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import _harness

Row = dict[str, Any]
START = 25  # seconds that a worker is expected to take until it has a backend
PATIENCE = 3  # times its expected seconds after which a section is ended


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a benchmark.

    Attributes:
      run: Yields rows; takes `quick`.
      seconds: How long it is expected to take, compilation included.
    """

    run: Callable[[bool], Iterator[Row]]
    seconds: float


@dataclasses.dataclass
class Progress:
    """What is known of one section so far; yielded after each row, and when the section is over.

    Attributes:
      name: Of the section.
      rows: Those measured so far; why it failed or did not run is a row too.
      seconds: Since it started.
      over: Whether no row follows.
      complete: Whether it ran to its end.
      environment: Versions and machine, as the worker sees them.
    """

    name: str
    rows: list[Row]
    seconds: float
    over: bool
    complete: bool
    environment: dict[str, Any]


def run(module: str, sections: Mapping[str, Section], quick: bool, deadline: float) -> Iterator[Progress]:
    """Run the sections of a module in their order.

    Args:
      module: Its name; `SECTIONS` there holds the sections.
      sections: The same, by name.
      quick: For each section.
      deadline: By `time.monotonic`. A section that runs then is ended, and keeps its rows.
    """
    worker: _Worker | None = None
    environment = _harness.environment(devices=False)
    try:
        for name, section in sections.items():
            now = time.monotonic()
            left = deadline - now
            if now + section.seconds + (0 if worker else START) > deadline:
                why = f"not run: expected to take {section.seconds:.0f} s, and {max(left, 0):.0f} s are left"
                yield Progress(name, [_harness.row(name, "not run", note=why)], 0.0, True, False, environment)
                continue
            worker = worker or _Worker(module, quick, environment)
            yield from worker.section(name, min(deadline, now + START + PATIENCE * section.seconds))
            environment = worker.environment
            if worker.ended:
                worker.close()
                worker = None
    finally:
        if worker:
            worker.close()


class _Worker:
    """A process that runs the sections it is told to run."""

    def __init__(self, module: str, quick: bool, environment: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        # Where this process finds its modules, the worker does too.
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from benchmarks import _budget; _budget._work()",
                module,
                str(int(quick)),
                str(writing),
            ],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=(writing,),
        )
        os.close(writing)
        self._reading, self._text = reading, b""
        self.ended = False
        self.environment = environment  # until it tells its own

    def section(self, name: str, until: float) -> Iterator[Progress]:
        """Run one section; yield after each row and at the end."""
        start, rows = time.monotonic(), list[Row]()

        def progress(over: bool, complete: bool) -> Progress:
            return Progress(name, list(rows), time.monotonic() - start, over, complete, self.environment)

        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; reading says how
            self._process.stdin.write(f"{name}\n".encode())
            self._process.stdin.flush()
        while True:
            told = self._receive(until)
            if isinstance(told, str):
                self.ended = True
                told = {"failed": told}
            self.environment = told.get("environment", self.environment)
            if "row" in told:
                rows.append(told["row"])
                yield progress(over=False, complete=False)
            if "failed" in told:
                rows.append(_harness.row(name, "failed", note=f"failed: {told['failed']}"))
            if "failed" in told or "end" in told:
                yield progress(over=True, complete="end" in told)
                return

    def _receive(self, until: float) -> dict[str, Any] | str:
        """Return what the worker tells next, or why it tells nothing any more."""
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return "it took too long and was ended"
            text = os.read(self._reading, 2**16)
            if not text:
                return f"its process ended with {self._process.wait()}"
            self._text += text
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        os.close(self._reading)


def _work() -> None:
    """The worker: names of sections on stdin; rows, ends and failures to a pipe, as lines of JSON."""
    module, quick, writing = sys.argv[1:]
    with os.fdopen(int(writing), "w", buffering=1) as pipe:

        def tell(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")

        sections = None
        for line in sys.stdin:
            try:
                if sections is None:
                    sections = importlib.import_module(module).SECTIONS
                    tell(environment=_harness.environment())
                for row in sections[line.strip()].run(bool(int(quick))):
                    tell(row=row)
            except Exception as error:
                traceback.print_exc()
                tell(failed=f"{type(error).__name__}: {error}"[:500])
            else:
                tell(end=True)
