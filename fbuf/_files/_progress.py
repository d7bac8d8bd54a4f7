"""How far a long save or load is: a callable's business, or a bar."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, after each block."""


class Bar:
    """What `progress=` asks for. `bar(bytes)` adds to it; `close` ends it.

    Args:
      progress: None: nothing; True: a bar, tqdm's if it is installed; or a callable.
      unit: Of what is counted.
    """

    def __init__(self, progress: Progress | bool | None, what: str, total: int, unit: str = "B") -> None:
        self._total, self.done = total, 0
        self._tell: Progress | None = progress if callable(progress) else None
        self._bar: Any = None
        if progress and self._tell is None:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                self._tell = _line(what)
            else:
                self._bar = tqdm(desc=what, total=total, unit=unit, unit_scale=unit == "B")

    def __call__(self, size: int) -> None:
        self.done += size
        if self._tell is not None:
            self._tell(self.done, self._total)
        if self._bar is not None:
            self._bar.update(size)

    def close(self) -> None:
        """No more."""
        if self._bar is not None:
            self._bar.close()


def _line(what: str) -> Progress:
    shown = -1

    def tell(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(total, 1)
        if percent != shown:
            shown = percent
            print(f"\r{what}: {percent} %", end="\n" if percent == 100 else "", file=sys.stderr, flush=True)

    return tell
