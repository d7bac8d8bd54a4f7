"""What goes wrong, side by side: each known defect of a peer replayed against the peer that is installed, and against fbuf.

    python -m benchmarks.defects [--only NAME] [--peer NAME] [--ours] [--json PATH] [--markdown PATH]

A row is two small programs that do the same with two libraries, and say in words what happened. Nothing is assumed of a
peer: a defect that does not show in the installed version is reported as not shown, a peer that is absent as absent. fbuf's
side of every row is a test (`tests/exhaustive/project/test_benchmarks.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened."""

    said: str
    right: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "right", bool(self.right))  # numpy's and JAX's are none to JSON


@dataclasses.dataclass(frozen=True)
class Defect:
    """A row."""

    name: str
    peer: str
    should: str  # what should happen
    theirs: Callable[[], Outcome]
    ours: Callable[[], Outcome]
    slow: bool = False
