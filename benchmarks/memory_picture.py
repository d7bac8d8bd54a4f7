"""Draws the README's picture of memory in Stable-Baselines3: `python -m benchmarks.memory_picture [--rows N] [--out PATH]`.

Each replay buffer is filled by SB3's `add` with the same 4-stacks of Breakout (a random policy) in a process of its own, one
after another, and the growth of the process's resident memory is drawn. The largest needs 5.7 GB for 100,000 rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _atari
from benchmarks._harness import measure_memory, process_memory

OUT = Path(__file__).parent / "results" / "sb3_memory.png"
STACK, POINTS = 4, 25
KINDS = {
    "fbuf": ("fbuf's CompressedReplayBuffer", "#D55E00"),
    "optimized": ("SB3, optimize_memory_usage", "#56B4E9"),
    "plain": ("SB3", "#999999"),
}


def steps(rows: int) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of `add`; the last frame of a game stands for its terminal observation."""
    nothing, stack = [dict[str, Any]()], np.zeros((1, STACK, 84, 84), np.uint8)
    action, reward = np.zeros(1, np.int64), np.ones(1, np.float32)
    last = None
    for frames, starts in _atari.blocks("Breakout", rows + 1):
        for frame, start in zip(frames, starts, strict=True):
            if last is not None:
                following = np.concatenate([stack[:, 1:], (last if start else frame)[None, None]], axis=1)
                yield stack, following, action, reward, np.array([start]), nothing
                stack = following
            if start:
                stack = np.zeros_like(stack)
                stack[:, -1] = frame
            last = frame


def fill(kind: str, rows: int) -> Iterator[Any]:
    """For `measure_memory`: resident bytes after each part of the rows."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    from fbuf.integrations.sb3 import CompressedReplayBuffer

    def buffer_of(size: int) -> Any:
        made = CompressedReplayBuffer if kind == "fbuf" else ReplayBuffer
        settings = {"optimize_memory_usage": kind == "optimized", "handle_timeout_termination": False}
        return made(size, spaces.Box(0, 255, (STACK, 84, 84), np.uint8), spaces.Discrete(4), "cpu", **settings)

    warm = buffer_of(64)
    for step in steps(63):
        warm.add(*step)
    warm.sample(32)
    del warm
    yield
    before, grown = process_memory()["rss"], [0]
    buffer = buffer_of(rows)
    for number, step in enumerate(steps(rows), 1):
        buffer.add(*step)
        if number % (rows // POINTS) == 0:
            grown.append(process_memory()["rss"] - before)
    result = {"grown": grown}
    yield result


def main(arguments: list[str] | None = None) -> int:
    """Draw it; return 0."""
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_picture", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=OUT, metavar="PATH")
    options = parser.parse_args(arguments)
    figure = Figure(figsize=(9.6, 3.0), dpi=90, layout="constrained")
    axes = figure.subplots()
    at = np.linspace(0, options.rows, POINTS + 1)
    for kind, (name, color) in KINDS.items():
        measured = measure_memory(fill, kind, options.rows, timeout=7200)
        gigabytes = np.array(measured["result"]["grown"]) / 1e9
        print(f"{name}: {gigabytes[-1]:.3f} GB at the end, {measured['peak'] / 1e9:.3f} GB at the peak", flush=True)
        axes.plot(at, gigabytes, color=color, linewidth=2.5)
        axes.annotate(
            f"{name}: {gigabytes[-1]:.2g} GB", (at[-1], gigabytes[-1]), (6, 0), textcoords="offset points", va="center"
        )
    axes.set(xlabel="transitions of Breakout added", ylabel="memory, GB", xlim=(0, options.rows), ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
