"""The README's table of figures, as lines that say which row of a report each is read from.

A line is words and two patterns, for a row's question and case; figures and sizes come from the row alone, so that a table can
only say what a run printed. A line whose row is not in the report, or has no ratio, says why instead.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from benchmarks import _report
from benchmarks._report import Report, table


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table.

    Templates may name groups of `question` and `case`, and `{ratio}`; `{spread}`: its quartiles, or, where `among` is given,
    the least and the largest ratio of the rows of the same question whose case matches it.
    """

    benchmark: str
    question: str  # patterns, matched from the start
    case: str
    what: str
    against: str
    shows: str
    among: str | None = None


MEAN, EACH = r"geometric mean$", r"(?!geometric)[^,]+$"
LINES = (
    Line(
        "compression",
        r"Bytes of raw .* on the host, (?P<frames>[\d,]+) frames",
        MEAN,
        "bytes of {frames} Atari rows on the host, geometric mean of {games} games",
        "raw obs + next_obs stacks",
        "{ratio}x fewer ({spread})",
        EACH,
    ),
    *(
        Line(
            "compression",
            question,
            rf"geometric mean, {codec}",
            what,
            f"torchrl `CompressedListStorage`, {label}",
            shows,
            rf"(?!geometric).*, {codec}",
        )
        for question, what, shows in (
            (r"Bytes of torchrl's", "the same", "{ratio}x fewer ({spread})"),
            (r"Write of 1,024: ", "writing 1,024 frames under jit", "{ratio}x as fast ({spread})"),
            (r"Write of 1,024 that", "writing 1,024 stacks of frames under jit", "{ratio}x as fast ({spread})"),
            (r"Read of 256 pairs of stacks: ", "reading 256 pairs of stacks under jit", "{ratio}x as fast ({spread})"),
        )
        for codec, label in (("zlib", "zlib (its default)"), ("zstandard", "zstandard"))
    ),
    *(
        Line(
            "host_store",
            rf"Bytes of raw .* grew by, (?P<frames>[\d,]+) frames, {label}",
            MEAN,
            f"process memory of {{frames}} Atari frames on the host, {label}, geometric mean of {{games}} games",
            "raw obs + next_obs stacks",
            "{ratio}x fewer ({spread})",
            EACH,
        )
        for label in ("as written", "compressed again")
    ),
    Line(
        "host_store",
        r"Bytes of torchrl's payload .* (?P<frames>[\d,]+) frames",
        MEAN,
        "the same, compressed again",
        "torchrl's payload, zlib",
        "{ratio}x fewer ({spread})",
        EACH,
    ),
    *(
        Line(
            "host_store",
            r"Time with (?P<many>[\d,]+) frames over that with (?P<few>[\d,]+)",
            case,
            f"{verb} among {{many}} frames",
            "among {few}",
            "{ratio}x the time",
        )
        for case, verb in (("write", "writing"), ("read", "reading"))
    ),
    *(
        Line(
            "sample",
            r"Sample inside a scan",
            case,
            what,
            "a bare gather of the same frames",
            "{ratio}x the time ({spread})",
        )
        for case, what in (
            (r"256 rows, (?P<size>.*)", "256 frames from a cold buffer of {size}, in a scan"),
            (
                r"256 stacks of 4.*, (?P<size>.*)",
                "256 transitions of 4-stacks and 3 steps from one of {size}, in a scan",
            ),
        )
    ),
    Line(
        "sample",
        r"Bytes of 84x84",
        "",
        "what such a buffer holds, all of its state",
        "the same stacks with next stacks",
        "{ratio} of the bytes",
    ),
    Line(
        "slices",
        r"256 slices of 16 rows of (?P<rows>[\d,]+) held, ours in a scan",
        r"flashbax.* in a scan",
        "256 windows of 16 rows of {rows}, in a scan",
        "flashbax's trajectory buffer (which knows no episodes), in a scan",
        "{ratio}x as fast ({spread})",
    ),
    *(
        Line(
            "slices",
            r"256 slices of 16 rows of (?P<rows>[\d,]+) held, one call",
            case,
            "256 windows of 16 rows of {rows}, one call",
            f"torchrl's `SliceSampler`, {label}",
            "{ratio}x as fast ({spread})",
        )
        for case, label in (
            (r"torchrl's SliceSampler, cached", "cached"),
            (r"torchrl's SliceSampler(?!, cached)", "not cached"),
        )
    ),
    Line(
        "epoch",
        r"A batch without replacement: ",
        r"(?P<rows>[\d,]+) rows, B=(?P<batch>\d+), in a scan",
        "{batch} of {rows} without replacement, in a scan",
        "`jax.random.permutation`",
        "{ratio}x as fast ({spread})",
    ),
    Line(
        "deduplicated",
        r"Bytes of raw .* on the device, (?P<frames>[\d,]+) frames",
        r"geometric mean of (?P<number>\d+)$",
        "bytes of {frames} Atari rows on the device in `Deduplicated`, geometric mean of {number} games",
        "raw obs + next_obs stacks",
        "{ratio}x fewer ({spread})",
        EACH,
    ),
    Line(
        "deduplicated",
        r"256 transitions of 4-frame stacks",
        r"geometric mean of (?P<number>\d+)",
        "reading 256 transitions of stacks from it, in a scan, geometric mean of {number}",
        "a bare gather of the same frames",
        "{ratio}x the time ({spread})",
        EACH,
    ),
    Line(
        "deduplicated",
        r"Write of 256 frames, ring full: time",
        r"geometric mean of (?P<number>\d+)",
        "writing 256 frames to it, geometric mean of {number} games",
        "the same to `Compressed`",
        "{ratio}x as fast ({spread})",
        EACH,
    ),
    *(
        Line(
            "dqn_step",
            r"DQN step",
            rf"{name} / device, (?P<where>.*)",
            f"the DQN step of the demo ({{where}}) with {label}",
            "the same with `Device`",
            "{ratio}x the time ({spread})",
        )
        for name, label in (
            ("compressed", "`Compressed`"),
            ("memmap", "`Memmap`"),
            ("deduplicated", "`Deduplicated`"),
            ("compressed, prefetch=1", "`Compressed` and `prefetch=1`"),
        )
    ),
    *(
        Line(
            "priorities",
            r"Prioritized step in a scan: time of flashbax",
            rf"N=(?P<rows>[\d,]+) B={batch}$",
            f"sample, weights and update of {batch} priorities of {{rows}} in a scan",
            "flashbax's tree",
            "{ratio}x as fast ({spread})",
        )
        for batch in (32, 256, 4096)
    ),
)


def number(value: float) -> str:
    """Three digits, or with commas."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def figures(report: Report) -> str:
    """The table, in Markdown."""
    head = ("question", "against", "result", "target", "run", "script")
    return table(head, (_cells(line, report) for line in LINES))


def _cells(line: Line, report: Report) -> tuple[str, ...]:
    run = report["benchmarks"].get(line.benchmark)
    found = None if run is None else _find(line, run["rows"])
    if found is None:
        words = {name: "N" for name in re.findall(r"{(\w+)}", line.what + line.against)}
        said = "not in this report" if run is None or not _absent(run) else f"absent: {_absent(run)}"
        return line.what.format(**words), line.against.format(**words), said, "", "", f"`{line.benchmark}`"
    row, words = found
    middle = row["ratio"]["median"] if isinstance(row["ratio"], Mapping) else row["ratio"]
    target = f"{row['target']}: {'met' if row['met'] else '**missed**'}" if row["target"] else ""
    texts = (text.format(**words, ratio=number(middle)) for text in (line.what, line.against, line.shows))
    how = ", ".join(filter(None, ("quick" if run["quick"] else "full", run["time"][:10], _report.loaded(run))))
    return *texts, target, how, f"`{line.benchmark}`"


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
            other["ratio"]["median"] if isinstance(other["ratio"], Mapping) else other["ratio"]
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
    if row["ratio"] is None:
        return None
    middle = row["ratio"]["median"] if isinstance(row["ratio"], Mapping) else row["ratio"]
    size = row["tags"]["size"]
    return f"{number(middle)}x (of {size:,})"
