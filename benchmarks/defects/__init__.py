"""Reproduce known defects of other libraries with the installed versions, and run the same cases with fbuf.

    python -m benchmarks.defects [--only NAME] [--peer NAME] [--ours] [--json PATH] [--markdown PATH]

A row is two small programs that do the same with two libraries and describe the result. A defect that does not appear in
the installed version is reported as not shown, and a library that is not installed as absent. fbuf's side of every row is a
test (`tests/project/test_benchmarks.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Describe what happened, and whether it is right."""

    said: str
    right: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "right", bool(self.right))  # JSON cannot write the booleans of NumPy and JAX


@dataclasses.dataclass(frozen=True)
class Defect:
    """One row of the table."""

    name: str
    peer: str
    should: str  # what should happen
    theirs: Callable[[], Outcome]
    ours: Callable[[], Outcome]
    slow: bool = False
