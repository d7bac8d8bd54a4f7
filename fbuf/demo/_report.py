"""The results of the demo: tables, with one column per storage, and a picture.

The picture is drawn on a `Figure` without pyplot, which needs no window system and leaves no global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from fbuf._core.text_table import counted
from fbuf.demo import _dqn
from fbuf.demo._compare_storages import READS, Blocks, Column
from fbuf.demo._run import Result, raw_bytes_per_row
from fbuf.plot._frames import draw_batch

_EPISODES = 20  # in a mean score
_COLORS = {"device": "#4c72b0", "host": "#dd8452", "compressed": "#2a9d5c", "deduplicated": "#8172b3"}
_INK, _GREY = "#222222", "#9a9a9a"
_SHOWN = 8  # transitions in the picture


def identical(one: Result, other: Result) -> bool:
    """Return whether two runs trained identically: every loss, every score, the final parameters."""
    arrays, others = (jax.tree.leaves((r.losses, r.params)) for r in (one, other))
    return [a.tobytes() for a in arrays] == [b.tobytes() for b in others] and one.episodes == other.episodes


def table(results: Sequence[Result]) -> str:
    """Return the runs of one game and seed as text; training is compared with the first."""
    first, settings = results[0], results[0].settings
    lines: dict[str, list[str]] = {
        "training steps/s": [f"{r.steps_per_second:.1f}" for r in results],
        "rows held": [f"{r.rows:,}" for r in results],
        "replay on the device": [megabytes(r.device_bytes) for r in results],
        "replay on the host": [megabytes(r.host_bytes) for r in results],
        "same rows as raw stacks": [megabytes(r.raw_bytes) for r in results],
        "raw / replay": [f"{r.raw_bytes / (r.device_bytes + r.host_bytes):.0f}x" for r in results],
        "step: with replay": [f"{1e3 * r.step_seconds[0]:.1f} ms" for r in results],
        "step: fixed batch": [f"{1e3 * r.step_seconds[1]:.1f} ms" for r in results],
        "share of step in replay": [_share(r) for r in results],
    }
    for part in dict.fromkeys(part for r in results for part in r.seconds):
        lines[f"loop: {part}"] = [f"{100 * r.seconds.get(part, 0) / sum(r.seconds.values()):.0f}%" for r in results]
    lines["score, first and last games"] = [_scores(r) for r in results]
    if len(results) > 1:
        lines["training"] = ["reference"] + ["identical" if identical(first, r) else "DIFFERENT" for r in results[1:]]
    title = (
        f"{settings.game}, seed {settings.seed}: {settings.steps:,} training steps, each "
        f"{_dqn.ROWS_PER_STEP} frames of {_dqn.LANES} games written and {_dqn.BATCH_SIZE} transitions learnt from"
    )
    return "\n".join([title, "", *_columns([r.storage for r in results], lines), "", *_notes(results)])


def storages(columns: Sequence[Column]) -> str:
    """Return all storages on the same frames as text; batches are compared with the first."""
    raw = [c.rows * raw_bytes_per_row() for c in columns]
    lines = {
        "on the device": [megabytes(c.device_bytes) for c in columns],
        "on the host": [megabytes(c.host_bytes) for c in columns],
        "raw stacks / all of it": [
            f"{size / (c.device_bytes + c.host_bytes):.0f}x" for size, c in zip(raw, columns, strict=True)
        ],
        "write, a row": [f"{1e6 * c.write:.1f} us" for c in columns],
        f"read, {_dqn.BATCH_SIZE} transitions": [f"{1e3 * c.read:.2f} ms" for c in columns],
        "batches for one key": ["reference"] + ["identical" if c.identical else "DIFFERENT" for c in columns[1:]],
    }
    title = (
        f"every storage on the newest {columns[0].rows:,} of these rows, raw stacks {megabytes(raw[0])}, "
        f"the {len(columns)} in turn"
    )
    notes = [
        f"write: {_dqn.ROWS_PER_STEP} frames of {_dqn.LANES} games at a time; read: median of {READS} batches; "
        "each a donated jit, alone.",
        "batches identical: every array of every batch, bit for bit.",
    ]
    notes += [_blocks_note(f"{c.storage} here", c.blocks) for c in columns if c.blocks is not None]
    return "\n".join([title, "", *_columns([c.storage for c in columns], lines), "", *notes])


def _columns(names: Sequence[str], lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of a table with a column for each name."""
    cells = [("storage", *names)] + [(name, *row) for name, row in lines.items()]
    widths = [max(len(cell[i]) for cell in cells) for i in range(len(names) + 1)]
    text = []
    for cell in cells:
        head, *rest = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cell, widths, strict=True)))
        text.append("  " + "   ".join([head, *rest]))
        if cell[0] == "storage":
            text.append("  " + "-" * (sum(widths) + 3 * len(names)))
    return text


def _blocks_note(storage: str, blocks: Blocks) -> str:
    """Describe a table of blocks."""
    times = {0: "never", 1: "once", 2: "twice"}.get(blocks.grown, f"{blocks.grown} times")
    gone = f"{blocks.evicted:,} rows gave way" if blocks.evicted else "no row gave way"
    return (
        f"{storage}: blocks of {blocks.block} fitted to the first rows; {100 * blocks.load:.0f}% of "
        f"{blocks.slots:,} places taken; grown {times}; {gone}."
    )


def _notes(results: Sequence[Result]) -> list[str]:
    notes = [
        "raw stacks: obs and next_obs of every row, 4 frames of 84x84 bytes both; 1 MB is 10^6 bytes.",
        "share: the whole step and the same step on a fixed batch (no extend, sample, update_priority), in turn after",
        "  training; median of 1 - fixed / whole, and quartiles.",
        f"score: mean of the first and of the last {_EPISODES} games; so short a run is no benchmark of DQN.",
    ]
    notes += [_blocks_note(r.storage, r.blocks) for r in results if r.blocks is not None]
    if len(results) > 1:
        notes.append("training identical: every loss, every score and all parameters at the end, bit for bit.")
    return notes


def megabytes(count: int) -> str:
    """Return a number of bytes in MB, as text."""
    value = count / 1e6
    return f"{value:,.0f} MB" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f} MB"


def _share(result: Result) -> str:
    low, median, high = (100 * x for x in result.share)
    return f"{median:.0f}% [{low:.0f}, {high:.0f}]"


def _scores(result: Result) -> str:
    if not result.episodes:
        return "none ended"
    scores = [episode.score for episode in result.episodes]
    return f"{np.mean(scores[:_EPISODES]):.1f} -> {np.mean(scores[-_EPISODES:]):.1f}"


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw the runs and write a PNG.

    Args:
      results: Runs of one game and seed. Training is that of the first (the others train identically), memory of all.
      path: The file to write.
    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    first = results[0]
    settings = first.settings
    figure = Figure(figsize=(13.5, 9.4), dpi=120, facecolor="white", layout="constrained")
    game = settings.game.replace("_", " ").title()
    figure.suptitle(
        f"{game}: Double DQN from a replay of {first.rows:,} rows\n{settings.steps:,} training steps, {_dqn.LANES} games, "
        f"prioritized 3-step transitions of 4-frame stacks, seed {settings.seed}, storage "
        f"{', '.join(r.storage for r in results)}",
        fontsize=11,
        color=_INK,
    )
    grid = figure.add_gridspec(2, 1, height_ratios=(1.0, 1.3))
    top = grid[0].subgridspec(1, 3)
    _draw_scores(figure.add_subplot(top[0]), first)
    _draw_losses(figure.add_subplot(top[1]), first)
    _draw_memory(figure.add_subplot(top[2]), results)
    shown = _interesting(first.batch)
    batch = jax.tree.map(lambda leaf: leaf[shown], first.batch)
    draw_batch("demo", batch, "obs", "next_obs", _SHOWN, figure.add_subplot(grid[1]))
    figure.savefig(path, format="png")


def _style(axes: Any, title: str, x: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel(x, fontsize=9, color=_INK)
    axes.tick_params(labelsize=9, colors=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9, loc="upper left")


def _draw_scores(axes: Any, result: Result) -> None:
    if result.episodes:
        ends = np.asarray([e.end for e in result.episodes]) * _dqn.LANES / 1e3
        scores = np.asarray([e.score for e in result.episodes])
        axes.plot(ends, scores, ".", color=_GREY, markersize=4, alpha=0.6, label="one game")
        width = min(20, len(scores))
        axes.plot(ends[width - 1 :], _running_mean(scores, width), color=_COLORS["device"], label=f"mean of {width}")
    title = "Score of finished games" if result.episodes else "No game has ended yet"
    _style(axes, title, "frames played (thousands, all games)")


def _draw_losses(axes: Any, result: Result) -> None:
    width = max(1, len(result.losses) // 50)
    steps = np.arange(width, len(result.losses) + 1)
    for values, storage, label in (
        (result.td_errors, "host", "mean |TD error|"),
        (result.losses, "device", "loss (weighted Huber)"),
    ):
        mean = np.maximum(_running_mean(values, width), 1e-7)  # a loss of exactly 0 has no logarithm
        axes.plot(steps, mean, color=_COLORS[storage], label=label)
    axes.set_yscale("log")
    _style(axes, f"Loss and TD error, mean of {counted(width, 'step')}", "training step")


def _draw_memory(axes: Any, results: Sequence[Result]) -> None:
    axes.set_yscale("log")
    played, rows, _ = np.asarray(results[0].memory).T
    raw = rows * raw_bytes_per_row()
    axes.plot(played / 1e3, raw / 1e6, "--", color=_GREY, label=f"raw stacks {megabytes(int(raw[-1]))}")
    for result in results:
        size = np.asarray(result.memory)[:, 2]
        label = f"{result.storage} {megabytes(int(size[-1]))} ({raw[-1] / size[-1]:.0f}x less)"
        axes.plot(played / 1e3, size / 1e6, color=_COLORS.get(result.storage, _INK), linewidth=1.8, label=label)
    _style(axes, "Memory of the replay (MB, log scale)", "frames played (thousands, all games)")


def _interesting(batch: Any) -> list[int]:
    """Return the rows to show: an episode's end and start if there are any, rewards, then the rest."""
    data = batch.data
    over = np.flatnonzero(batch.mask & (data["discount"] == 0))[:1]
    start = np.flatnonzero(batch.mask & ~data["obs"][:, 0].any(axis=(1, 2)))[:1]
    rewarded = np.flatnonzero(batch.mask & (data["reward"] != 0))[:3]
    order = [*over, *start, *rewarded, *np.flatnonzero(batch.mask)]
    return [int(i) for i in dict.fromkeys(order)][:_SHOWN]


def _running_mean(values: npt.NDArray[Any], width: int) -> npt.NDArray[np.float64]:
    """Return the mean of every `width` values in sequence."""
    return np.convolve(values, np.full(width, 1 / width), "valid")
