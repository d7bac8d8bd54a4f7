"""The table at the end of the demo: one column a run, and how each figure was measured below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

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
