"""Draws the picture of fbuf/WINDOWS.md: `python -m benchmarks.windows_picture [--out PATH]`.

One episode and all of its windows, as drawn from a buffer: for each boundary that stays within episodes, and two ways to end.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fbuf

OUT = Path(__file__).parent / "results" / "windows.png"
STEPS = 18
SETTINGS: dict[str, Any] = {"burn_in": 3, "bootstrap": 1, "stride": 4, "autoreset": "same_step"}
PANELS = (("stop", "terminated"), ("stop", "truncated"), ("mask", "terminated"))
COLORS = {"learnt": "#0072B2", "burn-in": "#BBD7E8", "bootstrap": "#F0E442", "missing, zeros": "white"}


def windows_of(boundary: Any, end: str) -> tuple[list[tuple[int, np.ndarray, np.ndarray]], int]:
    """Return first row, `mask` and `learning_mask` of each window, and how many rows no window learns."""
    buffer = fbuf.Buffer(STEPS, view=fbuf.views.Sequence(8, boundary=boundary, **SETTINGS))
    ends = {name: (np.arange(STEPS) == STEPS - 1) & (name == end) for name in ("terminated", "truncated")}
    rows = {"t": np.arange(STEPS, dtype=np.int32), **ends}
    state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], rows)), rows)
    batch = jax.device_get(buffer.peek(state, jax.random.key(0), 256))
    found = {int(data[0]): i for i, data in enumerate(batch.data["t"])}
    masks = batch.data["mask"], batch.data["learning_mask"]
    return [(t, masks[0][i], masks[1][i]) for t, i in sorted(found.items())], int(buffer.stats(state)["unlearnt"])


def main(arguments: list[str] | None = None) -> int:
    """Draws it; returns 0."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows_picture", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, metavar="PATH")
    options = parser.parse_args(arguments)
    figure = Figure(figsize=(12.8, 2.4), dpi=90, layout="constrained")
    for axes, (boundary, end) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        windows, missed = windows_of(boundary, end)
        for t in range(STEPS):
            axes.add_patch(Rectangle((t, 0.1), 1, 0.8, facecolor="#DDDDDD", edgecolor="white"))
            axes.text(t + 0.5, 0.5, str(t), ha="center", va="center", fontsize=7)
        for line, (first, mask, learn) in enumerate(windows, start=1):
            for place, (there, learnt) in enumerate(zip(mask, learn, strict=True)):
                part = "burn-in" if place < SETTINGS["burn_in"] else "bootstrap"
                color = COLORS["learnt" if learnt else part if there else "missing, zeros"]
                style = {"facecolor": color, "edgecolor": "#666666", "linewidth": 0.6}
                axes.add_patch(Rectangle((first + place, line + 0.1), 1, 0.8, **style))
        axes.axvline(STEPS, color="#D55E00", linewidth=1.6)
        axes.text(STEPS - 0.3, -0.15, end, color="#D55E00", fontsize=8, ha="right", va="bottom")
        axes.set(xlim=(-0.3, STEPS + 2.3), ylim=(5.1, -0.9), xticks=[], yticks=[])
        axes.set_title(f'"{boundary}": {f"{missed} row not learnt" if missed else "every row learnt"}', fontsize=10)
        axes.spines[:].set_visible(False)
    legend = [Patch(facecolor=color, edgecolor="#666666", label=name) for name, color in COLORS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
