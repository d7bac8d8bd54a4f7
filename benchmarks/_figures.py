"""The tables of figures, as lines that say which row of a report each is read from.

A line is words and two patterns, for a row's question and case; figures and sizes come from the row alone, so that a table can
only say what a run printed. A line whose row is not in the report, or has no ratio, says why instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks import _report
from benchmarks._lines import LINES, Line
from benchmarks._reasons import reason
from benchmarks._report import Report, table


def number(value: float) -> str:
    """Three digits, or with commas."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def figures(report: Report) -> str:
    """The table, in Markdown."""
    head = ("question", "against", "result", "target", "run", "script")
    return table(head, (_cells(line, report) for line in LINES))


def missed(report: Report) -> str:
    """The table of every row that misses its target, a line a question and target, each with its reason."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for name, run in report["benchmarks"].items():
        for row in run["rows"]:
            if row["met"] is False:
                found.setdefault((name, row["question"], row["target"]), []).append(row)
    head = ("question", "result", "target", "reason", "run", "script")
    return table(
        head,
        (
            (question, _results(rows), target, reason(name, question), _run(report["benchmarks"][name]), f"`{name}`")
            for (name, question, target), rows in found.items()
        ),
    )


def _results(rows: list[dict[str, Any]]) -> str:
    return "; ".join(f"{row['case']}: {number(_middle(row))}" if row["case"] else number(_middle(row)) for row in rows)


def _middle(row: Mapping[str, Any]) -> float:
    return row["ratio"]["median"] if isinstance(row["ratio"], Mapping) else row["ratio"]


def _run(run: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, ("quick" if run["quick"] else "full", run["time"][:10], _report.loaded(run))))


def headline(report: Report) -> str:
    """The README's table: the lines marked so that the report has, without how they were run."""
    head, runs = ("question", "against", "result", "target"), report["benchmarks"]
    lines = (line for line in LINES if line.headline)
    found = (line for line in lines if line.benchmark not in runs or _find(line, runs[line.benchmark]["rows"]))
    return table(head, (_cells(line, report)[:4] for line in found))


def _cells(line: Line, report: Report) -> tuple[str, ...]:
    run = report["benchmarks"].get(line.benchmark)
    found = None if run is None else _find(line, run["rows"])
    if found is None:
        words = {name: "N" for name in re.findall(r"{(\w+)}", line.what + line.against)}
        said = "not in this report" if run is None or not _absent(run) else f"absent: {_absent(run)}"
        return line.what.format(**words), line.against.format(**words), said, "", "", f"`{line.benchmark}`"
    row, words = found
    target = f"{row['target']}: {'met' if row['met'] else '**missed**'}" if row["target"] else ""
    texts = (text.format(**words, ratio=number(_middle(row))) for text in (line.what, line.against, line.shows))
    return *texts, target, _run(run), f"`{line.benchmark}`"


def _absent(run: Mapping[str, Any]) -> str:
    """What keeps the first absent peer of a run away."""
    return next((row["note"] for row in run["rows"] if row["peer"] == "absent"), "")


def _find(line: Line, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]] | None:
    """The last row of the line (the largest size), and what its templates name."""
    for row in reversed(rows):
        question, case = re.match(line.question, row["question"]), re.match(line.case, row["case"])
        if question is None or case is None or row["ratio"] is None:
            continue
        ratios = [
            _middle(other)
            for other in rows
            if line.among is not None
            and other["question"] == row["question"]
            and other["ratio"] is not None
            and re.match(line.among, other["case"])
        ]
        words = {**question.groupdict(), **case.groupdict(), "games": str(len(ratios)), "spread": ""}
        if ratios:
            words["spread"] = f"{number(min(ratios))} to {number(max(ratios))}"
        elif isinstance(row["ratio"], Mapping):
            words["spread"] = f"{number(row['ratio']['low'])} to {number(row['ratio']['high'])}"
        return row, words
    return None


# ------------------------------------------------------------------------------------------- all peers

PEER_TABLES = (
    ("peers_write", r"Writing one row of 25 bytes into a full uniform", "write 1"),
    ("peers_write", r"Writing 256 rows of 25 bytes into a full uniform", "write 256"),
    ("peers_sample", r"A uniform batch of 256,", "uniform batch of 256"),
    ("peers_write", r"Writing 256 rows of 25 bytes into a full prioritized", "write 256, prioritized"),
    ("peers_prioritized", r"A prioritized step of 256 ", "prioritized step of 256"),
    ("peers_memory", r"Peak of a process", "peak memory"),
)


def versus(report: Report) -> str:
    """A line a library: its time (and its peak of memory) over ours, at the most rows both were asked to hold."""
    runs = report["benchmarks"]
    libraries: dict[str, dict[str, str]] = {}
    for benchmark, question, column in PEER_TABLES:
        for row in runs.get(benchmark, {"rows": []})["rows"]:
            tags = row.get("tags", {})
            if (
                "growth" in tags
                or "library" not in tags
                or tags["library"] == "fbuf"
                or not re.match(question, row["question"])
            ):
                continue
            cell = libraries.setdefault(tags["library"], {})
            said = _versus_cell(row)
            if said is not None:
                cell[column] = said
            elif column not in cell:
                cell[column] = "absent" if row["peer"] == "absent" else row["note"].removeprefix("it has ")
    head = ("fbuf against", *(column for _, _, column in PEER_TABLES))
    lines = table(head, ([name, *(cells.get(c, "") for c in head[1:])] for name, cells in libraries.items()))
    used = dict.fromkeys(benchmark for benchmark, *_ in PEER_TABLES if benchmark in runs)
    return "\n".join([lines, "", *(f"`{name}`: {_report.how(runs[name])}." for name in used)])


def _versus_cell(row: Mapping[str, Any]) -> str | None:
    return None if row["ratio"] is None else f"{number(_middle(row))}x (of {row['tags']['size']:,})"


# ------------------------------------------------------------------------------------------- the long run


def long_run(report: Report) -> str:
    """What a long run took, beside what 50 million frames would."""
    run = report["benchmarks"].get("long_run")
    if run is None:
        return "Not in this report."
    rows = [
        (r["case"], *(number(r[k]) if r[k] is not None else "" for k in ("ours", "peer")), r["note"])
        for r in run["rows"]
    ]
    return (
        table(("", "measured", "at 50,000,000 frames (extrapolated)", ""), rows)
        + f"\n\n`long_run`: {_report.how(run)}."
    )
