"""Runs rows, and writes the table as JSON and Markdown."""

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
    """The table: every row, run.

    Args:
      rows: Which.
      peers: Whether to run the peers' sides too.
      say: Given a line for each.
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
    """(right, said); None where it could not be tried: a library that does not load has not shown the defect."""
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
    """A table from a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(table: dict[str, Any]) -> str:
    """Side by side, and below it what is left out."""
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
        _report.table(("what", "should", "the peer", "fbuf"), lines),
        "Not replayed: " + "; ".join(f"{what} ({why})" for what, why in LEFT_OUT.items()) + ".",
    ]
    return "\n\n".join(parts)


def _their_words(row: dict[str, Any]) -> str:
    shown = row["theirs"]["right"]
    return f"(not shown with this version) {row['theirs']['said']}" if shown else row["theirs"]["said"]


def save(path: Path, table: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
