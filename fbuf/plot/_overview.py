"""Plot the memory of a buffer, and all plots that apply to it on one page."""

from __future__ import annotations

from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.frames import is_frames
from fbuf._core.text_table import human
from fbuf._interfaces.storage import LeafBytes
from fbuf._replay import Replay
from fbuf.plot import _style
from fbuf.plot._frames import frames
from fbuf.plot._histograms import SIZE, ages, draw_shares, episode_lengths, found_in, priorities


def overview(buffer: Buffer | Replay, state: BufferState | None = None, key: Any = None, *, figure: Any = None) -> Any:
    """Plot ages, priorities, episode lengths, memory, and frames if rows have some.

    Args:
      buffer, state: What to plot; or a `Replay`, alone.
      key: PRNG key of the draw that is shown; None: `jax.random.key(0)`.
      figure: Figure to draw into; None: a new one of pyplot.
    Returns:
      The axes of the ages. `axes.figure.axes` has all, each labelled with its name: "ages", "memory", and those of
      "priorities", "episode_lengths", "shards" (of `fbuf.sharded.Sharded`) and "frames" that apply.
    Raises:
      ImportError: matplotlib is missing.

    Example:
      >>> import fbuf, numpy as np
      >>> from matplotlib.figure import Figure
      >>> replay = fbuf.Replay(fbuf.prioritized(100), {"obs": np.zeros(3, np.float32), "reward": 0.0})
      >>> index = replay.extend({"obs": np.ones((50, 3), np.float32), "reward": np.ones(50, np.float32)})
      >>> figure = Figure(figsize=(10, 6))
      >>> axes = fbuf.plot.overview(replay, figure=figure)
      >>> [axes.get_label() for axes in figure.axes]
      ['ages', 'priorities', 'memory']
    """
    call = "plot.overview"
    buffer, state = _style.opened(call, buffer, state)
    of, whole_state = _style.whole(buffer, state)
    known = bool(of.ends) and of.writer.streams
    tops: list[tuple[str, Any]] = [("ages", ages)]
    tops += [("priorities", priorities)] if of.sampler.prioritized else []
    tops += [("episode_lengths", episode_lengths)] if known else []
    tops += [("shards", _shards)] if of is not buffer else []
    spec, _ = of.storage.spec(whole_state.rows)
    pictures = any(is_frames(leaf.shape) for leaf in spec.values())
    if figure is None:
        figure = _style.import_pyplot(call).figure(figsize=(13.0, 7.6 if pictures else 6.4))
    if not hasattr(figure, "add_gridspec"):
        raise TypeError(f"{call}: figure is {type(figure).__name__}; expected a matplotlib Figure, or None.")
    if figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")
    top, bottom = figure.add_gridspec(2, 1, height_ratios=(1.0, 1.25 if pictures else 0.9))
    grid = top.subgridspec(1, len(tops))
    made = [draw(buffer, state, ax=figure.add_subplot(grid[i], label=name)) for i, (name, draw) in enumerate(tops)]
    if not pictures:
        memory(buffer, state, ax=figure.add_subplot(bottom, label="memory"))
        return made[0]
    grid = bottom.subgridspec(1, 2, width_ratios=(1.0, 1.7))
    left, right = figure.add_subplot(grid[0], label="memory"), figure.add_subplot(grid[1], label="frames")
    figure.canvas.draw()  # their sizes are known only then
    memory(buffer, state, ax=left)
    frames(buffer, state, key, number=10, ax=right)
    return made[0]


def _shards(sharded: Any, state: Any, *, ax: Any) -> Any:
    """Plot the share of each shard in the anchors, and in the draws of the whole."""
    found, number = found_in(sharded, state), sharded.shards
    axes = _style.new_axes("plot.overview", ax, SIZE)
    _style.dress(axes, f"{number} shards, balance {found.stats['balance']:.2f}", "shard", "share")
    shard = np.nonzero(found.anchor)[1] // (found.anchor.shape[1] // number)
    draw_shares(axes, shard, found, np.arange(number + 1) - 0.5, "of mass")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return axes


def memory(buffer: Buffer | Replay, state: BufferState | None = None, *, ax: Any = None) -> Any:
    """Plot the bytes of each leaf on device, host and disk, and of the rest of the state.

    Labels state the bytes of each bar and, for a leaf, its compression ratio (`LeafSummary.ratio`).

    Args:
      buffer, state: What to plot; or a `Replay`, alone.
      ax: Axes to draw into; None: those of a new figure.
    Returns:
      The axes.
    Raises:
      ImportError: matplotlib is missing.

    Example:
      >>> import fbuf, numpy as np
      >>> from matplotlib.figure import Figure
      >>> replay = fbuf.Replay(fbuf.Buffer(100), {"obs": np.zeros(3, np.float32), "reward": 0.0})
      >>> [label.get_text() for label in fbuf.plot.memory(replay, ax=Figure().subplots()).get_yticklabels()]
      ['obs', 'reward', 'header']
    """
    call = "plot.memory"
    of, whole_state = _style.opened(call, buffer, state)
    summary = of.summary(whole_state, compare=0)
    bars = [(name, leaf.stored, leaf.ratio) for name, leaf in summary.leaves.items() if leaf.stored is not None]
    bars = sorted(bars, key=lambda bar: -sum(bar[1]))
    parts = sorted(summary.parts.items(), key=lambda part: -sum(part[1]))
    large = [(name, nbytes, None) for name, nbytes in parts if 200 * sum(nbytes) > sum(summary.nbytes.values())]
    small = [nbytes for _, nbytes in parts if 200 * sum(nbytes) <= sum(summary.nbytes.values())]
    bars += large
    if small:
        bars.append(("other", LeafBytes(*map(sum, zip(*small, strict=True))), None))
    axes = _style.new_axes(call, ax, (6.5, 1.1 + 0.28 * len(bars)))
    palette = _style.colors(axes)
    _style.dress(axes, f"Memory, {human(sum(summary.nbytes.values()))} for {summary.size:,} rows", "bytes", "")
    names = [name for name, *_ in bars]
    left = [0.0] * len(bars)
    for place, color in zip(LeafBytes._fields, (palette.first, palette.second, palette.third), strict=True):
        size = [getattr(nbytes, place) for _, nbytes, _ in bars]
        if any(size):
            axes.barh(range(len(bars)), size, 0.7, left=left, color=color, label=f"{place} {human(sum(size))}")
            left = [a + b for a, b in zip(left, size, strict=True)]
    most = max(max(left, default=0), 1)
    for i, (end, (*_, ratio)) in enumerate(zip(left, bars, strict=True)):
        smaller = ratio or 0.0
        note = f", {smaller:.{0 if smaller >= 10 else 1}f}x smaller than raw" if smaller >= 1.05 else ""
        axes.text(end + most * 0.01, i, f"{human(end)}{note}", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    inches = axes.get_window_extent().width / axes.get_figure().dpi
    axes.set_xlim(0, most / max(1 - 2.4 / max(inches, 1.0), 0.3))  # room for the words beside the longest
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.set_xlabel("")
    axes.spines["bottom"].set_visible(False)
    _style.legend(axes)
    return axes
