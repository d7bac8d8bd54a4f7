"""The picture at the end of the demo: how it learnt, what the replay took, and what is in a batch.

Drawn on a `Figure` of its own, without pyplot: no window system, no state left behind in the user's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fbuf.demo import _dqn
from fbuf.demo._report import megabytes
from fbuf.demo._run import Result, raw_bytes_per_row

_COLORS = {"device": "#4c72b0", "host": "#dd8452", "compressed": "#2a9d5c", "deduplicated": "#8172b3"}
_INK, _FAINT = "#222222", "#9a9a9a"
_SHOWN = 8  # stacks in the contact sheet


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws the runs and writes a PNG.

    Args:
      results: Runs of one game and seed. Training is drawn of the first (of the others it is the same), memory of all.
      path: Where to.
    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    first = results[0]
    settings = first.settings
    figure = Figure(figsize=(13.5, 9.4), dpi=120, facecolor="white")
    grid = figure.add_gridspec(
        2, 1, height_ratios=(1.0, 1.3), hspace=0.2, left=0.055, right=0.975, top=0.895, bottom=0.01
    )
    figure.text(
        0.055,
        0.965,
        f"{settings.game.replace('_', ' ').title()}: Double DQN from a replay of {first.rows:,} rows",
        fontsize=16,
        fontweight="bold",
        color=_INK,
    )
    figure.text(
        0.055,
        0.94,
        f"{settings.steps:,} training steps, {_dqn.LANES} games, prioritized 3-step transitions of 4-frame stacks, "
        f"seed {settings.seed}, storage {', '.join(r.storage for r in results)}",
        fontsize=10,
        color=_INK,
    )
    top = grid[0].subgridspec(1, 3, wspace=0.24)
    _scores(figure.add_subplot(top[0]), first)
    _losses(figure.add_subplot(top[1]), first)
    _memory(figure.add_subplot(top[2]), results)
    _stacks(figure, grid[1], first)
    figure.savefig(path, format="png")


def _style(axes: Any, title: str, x: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel(x, fontsize=9, color=_INK)
    axes.tick_params(labelsize=9, colors=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def _scores(axes: Any, result: Result) -> None:
    _style(axes, "Score of finished games", "frames played (thousands, all games)")
    if not result.episodes:
        axes.text(0.5, 0.5, "no game has ended yet", transform=axes.transAxes, ha="center", color=_FAINT)
        return
    ends = np.asarray([e.end for e in result.episodes]) * _dqn.LANES / 1e3
    scores = np.asarray([e.score for e in result.episodes])
    axes.plot(ends, scores, ".", color=_FAINT, markersize=4, alpha=0.6, label="one game")
    width = min(20, len(scores))
    axes.plot(ends[width - 1 :], _mean(scores, width), color=_COLORS["device"], label=f"mean of {width}")
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _losses(axes: Any, result: Result) -> None:
    width = max(1, len(result.losses) // 50)
    _style(axes, f"Loss and TD error, mean of {width} steps", "training step")
    steps = np.arange(width, len(result.losses) + 1)
    floor = 1e-7  # a loss of exactly 0 has no logarithm
    axes.plot(steps, np.maximum(_mean(result.td_errors, width), floor), color=_COLORS["host"], label="mean |TD error|")
    axes.plot(
        steps, np.maximum(_mean(result.losses, width), floor), color=_COLORS["device"], label="loss (weighted Huber)"
    )
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend
    axes.legend(frameon=False, fontsize=9, loc="upper left", borderaxespad=0)


def _memory(axes: Any, results: Sequence[Result]) -> None:
    _style(axes, "Memory of the replay (MB, log scale)", "frames played (thousands, all games)")
    axes.set_yscale("log")
    played, held, _ = np.asarray(results[0].memory).T
    raw = held * raw_bytes_per_row()
    lines = [("raw stacks", raw, _FAINT, "--")]
    lines += [(r.storage, np.asarray(r.memory)[:, 2], _COLORS.get(r.storage, _INK), "-") for r in results]
    for _, size, color, style in lines:
        axes.plot(played / 1e3, size / 1e6, style, color=color, linewidth=1.8)
    # Labels beside the ends of their lines, pushed apart where lines meet.
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 2)
    gap = np.log10(4 * high / low) / 14
    at = -np.inf
    for name, size, color, _ in sorted(lines, key=lambda line: float(line[1][-1])):
        at = max(at + gap, np.log10(size[-1] / 1e6) + gap / 2)
        ratio = "" if name == "raw stacks" else f"  ({raw[-1] / size[-1]:.0f}x less)"
        axes.text(
            played[-1] / 1e3,
            10**at,
            f"{name} {megabytes(int(size[-1]))}{ratio}",
            color=color if name != "raw stacks" else _INK,
            fontsize=9,
            ha="right",
            va="bottom",
        )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _stacks(figure: Any, cell: Any, result: Result) -> None:
    """A contact sheet of sampled transitions: the four frames of obs, then those of next_obs."""
    batch = result.batch
    grid = cell.subgridspec((_SHOWN + 1) // 2, 2, hspace=0.32, wspace=0.04)
    for place, i in enumerate(_interesting(batch)):
        axes = figure.add_subplot(grid[place // 2, place % 2])
        axes.imshow(_strip(batch.data["obs"][i], batch.data["next_obs"][i]), cmap="gray", vmin=0, vmax=255)
        axes.set_axis_off()
        note = "" if batch.data["discount"][i] > 0 else " (episode over)"
        axes.set_title(
            f"obs | next_obs    action {batch.data['action'][i]}   3-step reward {batch.data['reward'][i]:.2f}   "
            f"discount {batch.data['discount'][i]:.2f}{note}   weight {batch.weight[i]:.2f}",
            loc="left",
            fontsize=8.5,
            color=_INK,
            pad=3,
        )


def _interesting(batch: Any) -> list[int]:
    """Rows of the batch worth seeing: an episode's end and start if there are any, rewards, then the rest."""
    data = batch.data
    over = np.flatnonzero(batch.mask & (data["discount"] == 0))[:1]
    start = np.flatnonzero(batch.mask & ~data["obs"][:, 0].any(axis=(1, 2)))[:1]
    rewarded = np.flatnonzero(batch.mask & (data["reward"] != 0))[:3]
    order = [*over, *start, *rewarded, *np.flatnonzero(batch.mask)]
    return [int(i) for i in dict.fromkeys(order)][:_SHOWN]


def _strip(obs: npt.NDArray[np.uint8], next_obs: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Eight frames in a row, white between them, more of it between the two stacks."""
    height = obs.shape[1]
    parts = []
    for i, frame in enumerate([*obs, *next_obs]):
        if i:
            parts.append(np.full((height, 10 if i == len(obs) else 2), 255, np.uint8))
        parts.append(frame)
    return np.concatenate(parts, axis=1)


def _mean(values: npt.NDArray[Any], width: int) -> npt.NDArray[np.float64]:
    """Running mean over the last `width` values, where there are so many."""
    sums = np.cumsum(np.concatenate([[0.0], values]), dtype=np.float64)
    result: npt.NDArray[np.float64] = (sums[width:] - sums[:-width]) / width
    return result
