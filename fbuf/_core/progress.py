"""Progress of long work: a tqdm bar, or a call of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Progress = bool | Callable[[int, int], None] | None
"""True: a bar on standard error; a callable: called with how much is done and the total; None or False: nothing."""


class Bar:
    """Report what is done: `bar(amount)` adds to it, `close` ends it.

    Args:
      progress: As the user gave it.
      what: Shown before the bar.
      total: 0 where it is not known.
      unit: Of what is counted; "B": bytes, shown with a prefix.
    """

    def __init__(self, progress: Progress, what: str, total: int, unit: str = "B") -> None:
        self.total, self.done = total, 0
        self._call = progress if callable(progress) else None
        self._bar: Any = None
        self._line = ""  # without tqdm: what is shown
        self._what, self._unit = what, unit
        if progress and self._call is None:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                self._line = " "
            else:
                self._bar = tqdm(desc=what, total=total or None, unit=unit, unit_scale=unit == "B")

    def __call__(self, amount: int) -> None:
        self.done += amount
        if self._call is not None:
            self._call(self.done, self.total)
        elif self._bar is not None:
            self._bar.update(amount)
        elif self._line:
            line = f"{100 * self.done // self.total} %" if self.total else f"{self.done} {self._unit.strip()}"
            if line != self._line:
                self._line = line
                print(f"\r{self._what}: {line}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
        elif self._line:
            print(file=sys.stderr)
