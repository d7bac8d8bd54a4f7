"""The results of the demo: two tables and a picture.

The picture is drawn on a `Figure` without pyplot, which needs no window system and leaves no global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from fbuf._core.text_table import Section, counted, text
from fbuf.demo import _dqn
from fbuf.demo._compare_storages import READS, Blocks, Column
from fbuf.demo._run import Result, raw_bytes_per_row
from fbuf.plot._frames import draw_batch
from fbuf.plot._style import dress, legend

_EPISODES = 20  # in a mean score
_BLUE, _ORANGE, _GREEN, _GREY = "#4c72b0", "#dd8452", "#2a9d5c", "#9a9a9a"
_SHOWN = 8  # transitions in the picture


def table(result: Result) -> str:
    """Return a run as text."""
    settings, raw = result.settings, result.rows * raw_bytes_per_row()
    lines = {
        "training steps/s": f"{result.steps_per_second:.1f}",
        "rows held": f"{result.rows:,}",
        "replay on the device": megabytes(result.device_bytes),
        "replay on the host": megabytes(result.host_bytes),
        "same rows as raw stacks": megabytes(raw),
        "raw / replay": f"{raw / (result.device_bytes + result.host_bytes):.0f}x",
    }
    for part, seconds in result.seconds.items():
        lines[f"loop: {part}"] = f"{100 * seconds / sum(result.seconds.values()):.0f}%"
    scores = [episode.score for episode in result.episodes]
    first, last = (f"{np.mean(some):.1f}" if some else "" for some in (scores[:_EPISODES], scores[-_EPISODES:]))
    lines["score, first and last games"] = f"{first} -> {last}" if scores else "none ended"
    title = (
        f"{settings.game}, seed {settings.seed}: {settings.steps:,} training steps, each "
        f"{_dqn.ROWS_PER_STEP} frames of {_dqn.LANES} games written and {_dqn.BATCH_SIZE} transitions learnt from"
    )
    notes = [
        "raw stacks: obs and next_obs of every row, 4 frames of 84x84 bytes both; 1 MB is 10^6 bytes.",
        f"score: mean of the first and of the last {_EPISODES} games; so short a run is no benchmark of DQN.",
    ]
    notes += [] if result.blocks is None else [_blocks_note(result.storage, result.blocks)]
    return "\n".join([title, "", _columns([result.storage], {n: [cell] for n, cell in lines.items()}), "", *notes])


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
    return "\n".join([title, "", _columns([c.storage for c in columns], lines), "", *notes])


def _columns(names: Sequence[str], lines: Mapping[str, Sequence[str]]) -> str:
    """Return a table with a column for each name."""
    return text("", [Section("storage", tuple(names), tuple((name, *cells) for name, cells in lines.items()))])


def _blocks_note(storage: str, blocks: Blocks) -> str:
    """Describe a table of blocks."""
    times = {0: "never", 1: "once", 2: "twice"}.get(blocks.grown, f"{blocks.grown} times")
    gone = f"{blocks.evicted:,} rows were evicted" if blocks.evicted else "no row was evicted"
    return (
        f"{storage}: blocks of {blocks.block} fitted to the first rows; {100 * blocks.load:.0f}% of "
        f"{blocks.slots:,} places taken; grown {times}; {gone}."
    )


def megabytes(count: int) -> str:
    """Return a number of bytes in MB, as text."""
    value = count / 1e6
    return f"{value:,.0f} MB" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f} MB"


def plot(result: Result, path: Path) -> None:
    """Draw a run and write a PNG. Raises OSError if it cannot be written."""
    from matplotlib.figure import Figure

    settings = result.settings
    figure = Figure(figsize=(13.5, 9.4), dpi=120, facecolor="white", layout="constrained")
    game = settings.game.replace("_", " ").title()
    figure.suptitle(
        f"{game}: Double DQN from a replay of {result.rows:,} rows\n{settings.steps:,} training steps, {_dqn.LANES} games, "
        f"prioritized 3-step transitions of 4-frame stacks, seed {settings.seed}, storage {result.storage}",
        fontsize=11,
    )
    grid = figure.add_gridspec(2, 1, height_ratios=(1.0, 1.3))
    top = grid[0].subgridspec(1, 3)
    _draw_scores(figure.add_subplot(top[0]), result)
    _draw_losses(figure.add_subplot(top[1]), result)
    _draw_memory(figure.add_subplot(top[2]), result)
    shown = _interesting(result.batch)
    batch = jax.tree.map(lambda leaf: leaf[shown], result.batch)
    draw_batch("demo", batch, "obs", "next_obs", _SHOWN, figure.add_subplot(grid[1]))
    figure.savefig(path, format="png")


def _style(axes: Any, title: str, x: str) -> None:
    dress(axes, title, x, "")
    if axes.get_legend_handles_labels()[1]:
        legend(axes)


def _draw_scores(axes: Any, result: Result) -> None:
    if result.episodes:
        ends = np.asarray([e.end for e in result.episodes]) * _dqn.LANES / 1e3
        scores = np.asarray([e.score for e in result.episodes])
        axes.plot(ends, scores, ".", color=_GREY, markersize=4, alpha=0.6, label="one game")
        width = min(20, len(scores))
        axes.plot(ends[width - 1 :], _running_mean(scores, width), color=_BLUE, label=f"mean of {width}")
    title = "Score of finished games" if result.episodes else "No game has ended yet"
    _style(axes, title, "frames played (thousands, all games)")


def _draw_losses(axes: Any, result: Result) -> None:
    width = max(1, len(result.losses) // 50)
    steps = np.arange(width, len(result.losses) + 1)
    for values, color, label in (
        (result.td_errors, _ORANGE, "mean |TD error|"),
        (result.losses, _BLUE, "loss (weighted Huber)"),
    ):
        mean = np.maximum(_running_mean(values, width), 1e-7)  # a loss of exactly 0 has no logarithm
        axes.plot(steps, mean, color=color, label=label)
    axes.set_yscale("log")
    _style(axes, f"Loss and TD error, mean of {counted(width, 'step')}", "training step")


def _draw_memory(axes: Any, result: Result) -> None:
    axes.set_yscale("log")
    played, rows, size = np.asarray(result.memory).T
    raw = rows * raw_bytes_per_row()
    axes.plot(played / 1e3, raw / 1e6, "--", color=_GREY, label=f"raw stacks {megabytes(int(raw[-1]))}")
    label = f"{result.storage} {megabytes(int(size[-1]))} ({raw[-1] / size[-1]:.0f}x less)"
    axes.plot(played / 1e3, size / 1e6, color=_GREEN, linewidth=1.8, label=label)
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
