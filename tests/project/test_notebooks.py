"""Every notebook runs in a kernel, and shows what is stored in it, but for numbers and pixels."""

import json
import re

import pytest

from benchmarks.notebooks import FOLDER, execute
from tests.support.tables import one_of

pytestmark = pytest.mark.more

LONG = {"sharded_dqn", "prioritized_dqn", "sequences_r2d2"}  # they take longest
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
path = one_of(*(p for p in NOTEBOOKS if p.stem not in LONG), exhaustive=[p for p in NOTEBOOKS if p.stem in LONG])


def shown(cell):
    """Return what a cell prints, numbers masked, and the kinds of its other outputs."""
    if cell["cell_type"] != "code":
        return []
    printed = "".join("".join(o["text"]) for o in cell["outputs"] if o.get("name") == "stdout")
    kinds = [sorted(o["data"]) for o in cell["outputs"] if o["output_type"] != "stream"]
    return [" ".join(re.sub(r"\d[\d,.e+-]*", "0", printed).split()), *kinds]


def test_runs_and_shows_what_is_stored(path):
    stored = json.loads(path.read_text())["cells"]
    # A stored notebook is made by: python -m benchmarks.notebooks NAME
    assert [shown(cell) for cell in execute(path)["cells"]] == [shown(cell) for cell in stored]
