"""Run rows, and write the table as JSON and Markdown."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _harness, _report
from benchmarks.defects import Defect, Outcome
from benchmarks.defects._rows import LEFT_OUT
from benchmarks.peers._versions import version

MARKS = {True: "✅", False: "❌", None: "–"}


def run(rows: Sequence[Defect], peers: bool = True, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run every row and return the table.

    Args:
      rows: The rows to run.
      peers: Whether to run the other libraries too.
      say: Called with the text of each row.
    """
    found = []
    for row in rows:
        if not peers:
            theirs = None, "not run"
        elif version(row.peer) is None:
            theirs = None, "absent: not installed"
        else:
            theirs = outcome(row.theirs)
        ours = outcome(row.ours)
        found.append(
            {
                "name": row.name,
                "peer": row.peer,
                "should": row.should,
                "theirs": {"said": theirs[1], "right": theirs[0]},
                "ours": {"said": ours[1], "right": ours[0]},
            }
        )
        say(
            f"{row.peer}: {row.name}\n  {row.peer:<9}{MARKS[theirs[0]]} {theirs[1]}\n  {'fbuf':<9}{MARKS[ours[0]]} {ours[1]}"
        )
    names = ("fbuf", "jax", "flashbax", "brax", "torchrl", "tensordict", "torch", "numpy")
    return {"versions": {n: version(n) for n in names}, "time": _harness.environment()["time"], "rows": found}


def outcome(side: Callable[[], Outcome]) -> tuple[bool | None, str]:
    """Return (right, text). `right` is None if the library cannot be imported: then the defect was not shown."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shown = side()
    except ImportError as error:
        return None, f"could not be run: {str(error)[:160]}"
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error)[:160]}"
    return shown.right, shown.said


def load(path: Path) -> dict[str, Any]:
    """Read a table from a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(table: dict[str, Any]) -> str:
    """Return the table and the list of omitted defects as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in table["versions"].items() if number)
    lines = [
        (
            row["name"],
            row["should"],
            f"{row['peer']} {MARKS[row['theirs']['right']]} {_their_words(row)}",
            f"{MARKS[row['ours']['right']]} {row['ours']['said']}",
        )
        for row in table["rows"]
    ]
    parts = [
        f"Run on {table['time'][:10]} with {versions}.",
        _report.table(("case", "expected", "other library", "fbuf"), lines),
        "Not reproduced: " + "; ".join(f"{what} ({why})" for what, why in LEFT_OUT.items()) + ".",
    ]
    return "\n\n".join(parts)


def _their_words(row: dict[str, Any]) -> str:
    shown = row["theirs"]["right"]
    return f"(not shown with this version) {row['theirs']['said']}" if shown else row["theirs"]["said"]


def save(path: Path, table: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
