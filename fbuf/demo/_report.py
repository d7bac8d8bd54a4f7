"""The table at the end of the demo: one column a run, and how each figure was measured below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from fbuf.demo import _dqn
from fbuf.demo._compare_storages import READS, Blocks, Column
from fbuf.demo._run import Result, raw_bytes_per_row

_EPISODES = 20  # in a mean score


def identical(one: Result, other: Result) -> bool:
    """Whether two runs trained alike, bit for bit: every loss, every game's score, the parameters at the end."""
    same_losses = one.losses.tobytes() == other.losses.tobytes()
    same_params = [a.tobytes() for a in jax.tree.leaves(one.params)] == [
        b.tobytes() for b in jax.tree.leaves(other.params)
    ]
    return same_losses and same_params and one.episodes == other.episodes


def table(results: Sequence[Result]) -> str:
    """The runs of one game and seed as text; the first is what the others' training is compared with."""
    first = results[0]
    settings = first.settings
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
    """All storages on the same frames as text; the first is what the others' batches are compared with."""
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
    """A head and a line a figure, with a column for each name."""
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
    """How a table of blocks fared."""
    times = {0: "never", 1: "once", 2: "twice"}.get(blocks.grown, f"{blocks.grown} times")
    gone = f"{blocks.gone:,} rows gave way" if blocks.gone else "no row gave way"
    return (
        f"{storage}: blocks of {blocks.block} fitted to the first rows; {100 * blocks.load:.0f}% of "
        f"{blocks.places:,} places taken; grown {times}; {gone}."
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
    """Bytes for people, in MB."""
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
    _draw_scores(figure.add_subplot(top[0]), first)
    _draw_losses(figure.add_subplot(top[1]), first)
    _draw_memory(figure.add_subplot(top[2]), results)
    _draw_stacks(figure, grid[1], first)
    figure.savefig(path, format="png")


def _style(axes: Any, title: str, x: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel(x, fontsize=9, color=_INK)
    axes.tick_params(labelsize=9, colors=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def _draw_scores(axes: Any, result: Result) -> None:
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


def _draw_losses(axes: Any, result: Result) -> None:
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


def _draw_memory(axes: Any, results: Sequence[Result]) -> None:
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


def _draw_stacks(figure: Any, cell: Any, result: Result) -> None:
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
