"""How far a long download is: two bars, bytes and rows, or a call of the user's own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

Progress = bool | None | Callable[[int, int], None]
"""True: bars on standard error; a callable: called with bytes done and bytes in all; None or False: nothing."""


class Bars:
    """Adds up what workers report.

    Args:
      total: Bytes in all, as listed; 0: not known.
    """

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._what, self._total, self._begun = what, total, time.monotonic()
        self.bytes = self.rows = 0
        self._call = progress if callable(progress) else None
        self._bars: list[Any] = []
        self._line = False
        if progress is True:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                self._line = True
            else:
                self._bars = [
                    tqdm(desc=what, total=total or None, unit="B", unit_scale=True),
                    tqdm(desc="rows", unit=" rows", unit_scale=True),
                ]

    def __call__(self, report: dict[str, Any]) -> None:
        """Bytes and rows since the last report."""
        self.bytes += report.get("bytes", 0)
        self.rows += report.get("rows", 0)
        if self._call is not None:
            self._call(self.bytes, max(self._total, self.bytes))
        for bar, number in zip(self._bars, (self.bytes, self.rows), strict=False):
            bar.update(number - bar.n)
        if self._line:
            seconds = max(time.monotonic() - self._begun, 1e-3)
            of = f" of {self._total / 1e6:.0f}" if self._total else ""
            print(
                f"\r{self._what}: {self.bytes / 1e6:.0f}{of} MB, {self.rows / seconds:.0f} rows/s ",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """No more."""
        for bar in self._bars:
            bar.close()
        if self._line:
            print(file=sys.stderr)
