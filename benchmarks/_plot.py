"""Pictures of a report: how costs grow with the rows held, and what processes take, library by library.

Only rows with tags are drawn, those of the benchmarks against all peers. Colours stay with a library from picture to picture.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure  # noqa: E402

from benchmarks._report import Report  # noqa: E402

COLOURS = {
    "fbuf": "#c1272d",
    "flashbax": "#0000a7",
    "torchrl": "#eecc16",
    "cpprb": "#008176",
    "brax": "#b3b3b3",
    "dopamine": "#8e44ad",
    "NumPy list": "#5d4037",
}
GROWTH = ("peers_write", "peers_sample", "peers_prioritized")


def draw(folder: Path, report: Report) -> list[str]:
    """Writes what there is to draw, and returns the files' names."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name in GROWTH:
        figure = growth(report["benchmarks"].get(name, {"rows": []})["rows"])
        made += _saved(folder, f"{name}.png", figure)
    memory = report["benchmarks"].get("peers_memory", {"rows": []})["rows"]
    return made + _saved(folder, "peers_memory.png", bars(memory))


def _saved(folder: Path, name: str, figure: Figure | None) -> list[str]:
    if figure is None:
        return []
    figure.savefig(folder / name, dpi=100, metadata={"Software": None})
    return [name]


def series(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Question to library to rows held to median seconds; ours is beside every peer, and the same in all of them."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        tags = row.get("tags", {})
        if "size" not in tags or not isinstance(row["ours"], Mapping):
            continue
        of = found.setdefault(row["question"].split(": time of")[0], {})
        of.setdefault("fbuf", {})[tags["size"]] = row["ours"]["median"]
        of.setdefault(tags["library"], {})[tags["size"]] = row["peer"]["median"]
    return found


def growth(rows: Iterable[Mapping[str, Any]]) -> Figure | None:
    """A panel a question, a line a library; None if nothing can be drawn."""
    found = series(rows)
    if not found:
        return None
    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.6 * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, sharex=True, squeeze=False)
    for axis, (question, libraries) in zip(axes.flat, found.items(), strict=False):
        for library, points in libraries.items():
            size = sorted(points)
            width = 2.5 if library == "fbuf" else 1.2
            colour = COLOURS.get(library, "#000000")
            axis.plot(size, [points[n] * 1e6 for n in size], "o-", label=library, color=colour, linewidth=width)
        axis.set(xscale="log", yscale="log", xlabel="rows held", ylabel="microseconds a call")
        axis.set_title(textwrap.fill(question, 56), fontsize=8)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(found) :]:
        axis.remove()
    handles = {
        label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8)
    return figure


def bars(rows: Iterable[Mapping[str, Any]]) -> Figure | None:
    """Peak megabytes of every library; None if nothing can be drawn."""
    peaks = {}
    for row in rows:
        library = row.get("tags", {}).get("library")
        figure = row["ours"] if library == "fbuf" else row["peer"]
        if library is not None and isinstance(figure, float):
            peaks[library] = figure
    if not peaks:
        return None
    picture = Figure(figsize=(6, 0.4 * len(peaks) + 1), layout="constrained")
    axis = picture.subplots()
    axis.barh(list(peaks), list(peaks.values()), color=[COLOURS.get(name, "#000000") for name in peaks])
    axis.invert_yaxis()
    axis.set(xlabel="MB, peak of the process")
    axis.grid(axis="x", alpha=0.3)
    return picture
