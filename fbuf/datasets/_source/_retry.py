"""When to try again: waits that double, with chance in them, so that many who failed together do not come back together.

Tries are counted between bytes that arrived: a long file may lose its connection many times, a server that gives nothing is
given up soon. A server that says when to come back (`Retry-After`) is obeyed, unless that is further off than `most`. Long
waits are told in a warning: without a word they look like a program that hangs.
"""

from __future__ import annotations

import random
import time
import warnings
from dataclasses import dataclass

from fbuf.datasets._source._errors import SourceError

_ENOUGH = 1 << 16  # bytes that make a try a success; a server that gives one byte a connection does not end otherwise
_LONG = 8.0  # seconds; of a wait that may be as long a word is said
_chance = random.Random()  # its own, so that a seed of the user's stays where it is


@dataclass(frozen=True)
class Retry:
    """How often, and how long to wait.

    Args:
      attempts: Failures in a row after which it is given up; 1: none is forgiven.
      first: Seconds before the second try, doubled for each that follows.
      most: Seconds that a wait never exceeds.
      timeout: Seconds in which a connection must give something.
    """

    attempts: int = 8
    first: float = 0.5
    most: float = 60.0
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not (0 <= self.first <= self.most) or not self.timeout > 0:
            raise ValueError(
                f"Retry: got attempts={self.attempts}, first={self.first}, most={self.most}, timeout={self.timeout}; expected "
                f"attempts of 1 or more, 0 <= first <= most and a timeout above 0."
            )


class Again(Exception):
    """This try failed and another may not. `wait`: seconds that the server asks for."""

    def __init__(self, what: str, wait: float | None = None) -> None:
        super().__init__(what)
        self.wait = wait


class Tries:
    """The failures of one file, in a row."""

    def __init__(self, retry: Retry, what: str) -> None:
        self._retry, self._what = retry, what
        self._failed = self._gained = 0

    def gained(self, size: int) -> None:
        """Bytes arrived."""
        self._gained += size
        if self._gained >= _ENOUGH:
            self._failed = 0

    def failed(self, error: Again, where: str = "") -> None:
        """Waits until it is time for the next try. Raises SourceError: there is none. `where`: in the file."""
        retry, self._gained = self._retry, 0
        self._failed += 1
        if self._failed >= retry.attempts:
            times = {1: "once", 2: "twice in a row"}.get(self._failed, f"{self._failed} times in a row")
            raise SourceError(
                f"{self._what}{where}: failed {times}; the last time: {error}. Try again later (what is on the disk is "
                f"kept), or name another mirror with source=."
            ) from None
        if error.wait is not None and error.wait > retry.most:
            raise SourceError(
                f"{self._what}{where}: {error}; the server asks to come back in {error.wait:.0f} s, waits are at most "
                f"{retry.most:.0f} s. Try again then."
            ) from None
        most = min(retry.most, retry.first * 2.0 ** (self._failed - 1))
        wait = max(most * _chance.uniform(0.5, 1.0), error.wait or 0.0)
        if max(most, wait) >= _LONG:
            warnings.warn(
                f"{self._what}{where}: {error}; trying again in {wait:.0f} s ({self._failed} of {retry.attempts})",
                stacklevel=2,
            )
        time.sleep(wait)
