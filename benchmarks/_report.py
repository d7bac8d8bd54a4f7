"""A report: what benchmarks found, when, on what machine, and how they were run, as JSON and as Markdown.

Each benchmark is a run of its own in it, for they take from seconds to an hour: running one again replaces that one, and the
others stay as they were, each with its versions, machine and date. `quick` ones say so wherever a figure of theirs is shown.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._harness import figure_text

Report = dict[str, Any]
FORMAT = 2


def empty() -> Report:
    """A report of nothing."""
    return {"format": FORMAT, "benchmarks": {}}


def load(path: Path) -> Report:
    """The report in a file; an empty one if there is none.

    Raises:
      ValueError: the file is something else.
    """
    if not path.exists():
        return empty()
    report = json.loads(path.read_text())
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"{path} is no report of format {FORMAT}. Remove it, or write to another path.")
    return report


def save(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def with_run(report: Report, name: str, run: Mapping[str, Any]) -> Report:
    """The report with one benchmark replaced (or added); in order of their names."""
    runs = {**report["benchmarks"], name: dict(run)}
    return {**report, "benchmarks": dict(sorted(runs.items()))}


def how(run: Mapping[str, Any]) -> str:
    """In words: how and when a benchmark was run."""
    parts = ["quick sizes" if run["quick"] else "full sizes", run["time"][:10], f"{run['seconds']:.0f} s"]
    return ", ".join(parts) + (f", **{loaded(run)}**" if loaded(run) else "")


def where(run: Mapping[str, Any]) -> str:
    """In words: on what a benchmark was run."""
    machine, versions = run["machine"], run["versions"]
    devices = ", ".join(sorted(set(machine["devices"]))) or "no device"
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    absent = ", ".join(name for name, version in versions.items() if not version)
    memory = f"{machine['memory'] / 2**30:.0f} GiB"
    text = f"{machine['cores']} cores of {machine['processor']}, {memory}, JAX on {devices}; {libraries}"
    return text + (f"; not installed: {absent}" if absent else "")


def runs(report: Report) -> str:
    """A list of all runs, those on one machine with one set of versions under it."""
    places: dict[str, list[str]] = {}
    for name, run in report["benchmarks"].items():
        places.setdefault(where(run), []).append(f"  * `{name}`: {how(run)}")
    return "\n".join(line for place, lines in places.items() for line in (f"* On {place}:", *lines))


def loaded(run: Mapping[str, Any]) -> str:
    """What makes a run's times doubtful, or nothing: other processes on the same cores, of which threaded sides suffer most."""
    share = run.get("elsewhere")
    return f"other processes took {share:.0%} of the cores" if share is not None and share >= 0.1 else ""


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    )


def markdown(report: Report, pictures: Sequence[str] = ()) -> str:
    """Everything, a section a benchmark, a table a question."""
    parts = ["# What the benchmarks found", "Written by `python -m benchmarks --report`; never by hand."]
    parts += [f"![{picture}]({picture})" for picture in pictures]
    for name, run in report["benchmarks"].items():
        parts += [f"## {name}", _docstring(name), f"*Run: {how(run)}; on {where(run)}.*"]
        for question in dict.fromkeys(r["question"] for r in run["rows"]):
            rows = [r for r in run["rows"] if r["question"] == question]
            parts += [
                f"**{question}**",
                table(("case", "ours", "peer", "ratio", "target", "met", "note"), map(_cells, rows)),
            ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    met = {None: "", True: "yes", False: "**no**"}[row["met"]]
    figures = [figure_text(row[name]) for name in ("ours", "peer", "ratio")]
    return [row["case"], *figures, row["target"] or "", met, row["note"]]


def _docstring(name: str) -> str:
    try:
        return (importlib.import_module(f"benchmarks.bench_{name.partition(':')[0]}").__doc__ or "").split("\n")[0]
    except ImportError:  # needs what is not installed
        return ""
