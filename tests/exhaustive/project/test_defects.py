"""Both sides of every row of the table of defects."""

from collections.abc import Callable

import jax
import pytest

from benchmarks.defects import Defect, Outcome, _table
from benchmarks.defects._rows import ROWS
from benchmarks.peers._versions import version

SIDES = {row.ours: row for row in ROWS}  # a side of several rows runs once


@pytest.mark.parametrize("side", SIDES, ids=lambda side: f"{side.__module__.rsplit('.', 1)[1]}.{side.__name__}")
def test_fbuf_does_what_it_should(side: Callable[[], Outcome]) -> None:
    shown = side()
    assert shown.right, shown.said


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.peer}: {row.name}")
def test_the_other_side_runs(row: Defect) -> None:
    if version(row.peer) is None:
        pytest.skip(f"{row.peer} is not installed")
    with jax.numpy_rank_promotion("allow"):  # which flashbax needs
        right, said = _table.outcome(row.theirs)
    assert right in (True, False, None) and said
    assert not said.startswith(("AttributeError", "TypeError", "NameError", "KeyError")), said
