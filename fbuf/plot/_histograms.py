"""Histograms of priorities, ages and episode lengths, and their evolution over a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._buffer.summary.collect import Seen, seen
from fbuf._buffer.summary.statistics import WIDE, Quantiles, bin_edges
from fbuf._core.arguments import check_choice, check_int
from fbuf._replay import Replay
from fbuf.plot import _style
from fbuf.sharded import ShardedState
from fbuf.sharded._inspect import seen as of_shards

SIZE = (6.0, 3.6)


def priorities(buffer: Buffer | Replay, state: BufferState | None = None, *, bins: int = 40, ax: Any = None) -> Any:
    """Plot a histogram of the priorities |p| of anchors, and of those sampled; see `Summary.priorities`.

    Args:
      buffer, state: What to plot; or a `Replay`, alone.
      bins: Number of bins; even on a logarithmic axis if priorities differ by a factor of 30 or more.
      ax: Axes to draw into; None: those of a new figure.
    Returns:
      The axes.
    Raises:
      ValueError: the sampler has no priorities; `bins` < 1.
      ImportError: matplotlib is missing.

    Example:
      >>> import fbuf, numpy as np
      >>> from matplotlib.figure import Figure
      >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
      >>> index = replay.extend({"t": np.arange(50), "done": np.arange(50) % 10 == 9})
      >>> fbuf.plot.priorities(replay, ax=Figure().subplots()).get_xlabel()
      '|p|'
    """
    call = "plot.priorities"
    buffer, state = _style.opened(call, buffer, state)
    check_int(call, "bins", bins)
    found = found_in(buffer, state)
    sampler = _style.whole(buffer, state)[0].sampler
    if not sampler.prioritized:
        raise ValueError(f"{call}: {sampler!r} has no priorities. Use fbuf.plot.ages(buffer, state).")
    axes = _style.new_axes(call, ax, SIZE)
    _style.dress(axes, "Priorities", "|p|", "share")
    known = found.priority is not None and not (found.priority[found.anchor] < 0).any()
    if not known or found.priority is None or not found.anchor.any():
        return _style.nothing(axes, "nothing can be drawn yet" if not found.anchor.any() else "alpha is 0: all alike")
    values = found.priority[found.anchor].astype(np.float64)
    edges, is_log = bin_edges(values, bins)
    if is_log:
        axes.set_xscale("log")
        if zeros := float((values <= 0).mean()):
            axes.text(0.01, 0.98, f"{zeros:.0%} are 0", transform=axes.transAxes, va="top", fontsize=9)
    draw_shares(axes, values, found, edges)
    return axes


def ages(buffer: Buffer | Replay, state: BufferState | None = None, *, bins: int = 40, ax: Any = None) -> Any:
    """Plot a histogram of the ages of anchors, and of those sampled: how much the sampler prefers new rows.

    Args:
      buffer, state: What to plot; or a `Replay`, alone.
      bins: Largest number of bins.
      ax: Axes to draw into; None: those of a new figure.
    Returns:
      The axes.
    Raises:
      ValueError: `bins` < 1.
      ImportError: matplotlib is missing.

    Example:
      >>> import fbuf, numpy as np
      >>> from matplotlib.figure import Figure
      >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
      >>> index = replay.extend({"t": np.arange(50), "done": np.arange(50) % 10 == 9})
      >>> fbuf.plot.ages(replay, ax=Figure().subplots()).get_xlabel()
      'age: later rows of the lane'
    """
    call = "plot.ages"
    buffer, state = _style.opened(call, buffer, state)
    check_int(call, "bins", bins)
    found = found_in(buffer, state)
    axes = _style.new_axes(call, ax, SIZE)
    later = "later rows of the lane" if _style.whole(buffer, state)[0].writer.streams else "rows added later"
    _style.dress(axes, "Ages", f"age: {later}", "share")
    if not found.anchor.any():
        return _style.nothing(axes, "nothing can be drawn yet")
    values = found.age[found.anchor]
    draw_shares(axes, values, found, bin_edges(values, bins)[0])
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return axes


def episode_lengths(
    buffer: Buffer | Replay, state: BufferState | None = None, *, bins: int = 40, ax: Any = None
) -> Any:
    """Plot a histogram of the lengths of complete episodes.

    Args:
      buffer, state: What to plot; or a `Replay`, alone.
      bins: Largest number of bins.
      ax: Axes to draw into; None: those of a new figure.
    Returns:
      The axes.
    Raises:
      ValueError: the buffer does not know where episodes end; `bins` < 1.
      ImportError: matplotlib is missing.

    Example:
      >>> import fbuf, numpy as np
      >>> from matplotlib.figure import Figure
      >>> replay = fbuf.Replay(fbuf.prioritized(100, episode_end=("done",)), {"t": 0, "done": False})
      >>> index = replay.extend({"t": np.arange(50), "done": np.arange(50) % 10 == 9})
      >>> fbuf.plot.episode_lengths(replay, ax=Figure().subplots()).get_xlabel()
      'rows'
    """
    call = "plot.episode_lengths"
    buffer, state = _style.opened(call, buffer, state)
    check_int(call, "bins", bins)
    found = found_in(buffer, state)
    known = found.episode_lengths()
    if known is None:
        fix = "Use Buffer(..., episode_end=('terminated', 'truncated')), with writers.Ring()."
        raise ValueError(f"{call}: {buffer!r} does not know where episodes end. {fix}")
    axes = _style.new_axes(call, ax, SIZE)
    lengths, cut = known
    note = f" ({cut:,} more are cut)" if cut else ""
    _style.dress(axes, f"Lengths of {lengths.size:,} episodes", f"rows{note}", "episodes")
    if not lengths.size:
        return _style.nothing(axes, "no episode is complete")
    edges, palette = bin_edges(lengths, bins)[0], _style.colors(axes)
    axes.stairs(np.histogram(lengths, edges)[0], edges, fill=True, color=palette.first, label="episodes")
    axes.axvline(np.median(lengths), color=palette.second, linewidth=2, label=f"median {np.median(lengths):,.0f}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    _style.legend(axes)
    return axes


def found_in(buffer: Any, state: Any) -> Seen:
    """Return the arrays about every row."""
    return of_shards(buffer, state) if isinstance(state, ShardedState) else seen(buffer, state)


def draw_shares(axes: Any, values: np.ndarray, found: Seen, edges: np.ndarray, drawn: str = "of draws") -> None:
    """Draw the shares of anchors, filled, and of what is drawn, as a line."""
    palette = _style.colors(axes)
    of_anchors = np.histogram(values, edges)[0] / values.size
    axes.stairs(of_anchors, edges, fill=True, color=palette.first, alpha=0.75, label="of anchors")
    chance = None if found.probability is None else found.probability[found.anchor].astype(np.float64)
    if chance is not None and chance.sum() > 0:
        shares = np.histogram(values, edges, weights=chance)[0] / chance.sum()
        axes.stairs(shares, edges, color=palette.second, linewidth=1.8, label=drawn)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    _style.legend(axes)


OF = {"priorities": "|p|", "ages": "age", "drawn_ages": "age of what is drawn", "draws": "draws a row"}


class Evolution:
    """Collect quantiles of priorities (or ages) over a run: call `record` in the loop, then `plot`.

    Args:
      of: "priorities", "ages", "drawn_ages" or "draws", as in `Summary`.

    Cost: a record is one `Buffer.summary` that compares no rows, and stores nine numbers.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> buffer, evolution = fbuf.prioritized(100), fbuf.plot.Evolution()
      >>> state = buffer.init(jnp.float32(0))
      >>> for step in range(3):
      ...     state = buffer.extend(state, jnp.arange(10.0), priority=jnp.arange(10.0) + step)
      ...     evolution.record(buffer, state, step)
      >>> [round(quantiles.max, 3) for quantiles in evolution.quantiles]
      [9.0, 10.0, 11.0]
    """

    def __init__(self, of: str = "priorities") -> None:
        check_choice("plot.Evolution", "of", of, tuple(OF))
        self.of = of
        self.steps: list[float] = []
        self.quantiles: list[Quantiles] = []

    def record(self, buffer: Buffer | Replay, state: BufferState | None = None, step: float | None = None) -> None:
        """Record the quantiles of a state; skip a state without anchors.

        Args:
          step: Position on the x-axis; None: one after the last.
        Raises:
          ValueError: the buffer has no priorities to record.
        """
        call = "plot.Evolution.record"
        of, whole_state = _style.opened(call, buffer, state)
        sampler = _style.whole(of, whole_state)[0].sampler
        if self.of == "priorities" and not sampler.prioritized:
            raise ValueError(f"{call}: {sampler!r} has no priorities. Use Evolution('ages').")
        found: Quantiles | None = getattr(of.summary(whole_state, compare=0), self.of)
        step = step if step is not None else (self.steps[-1] + 1 if self.steps else 0)
        if found is not None:
            self.steps.append(float(step))
            self.quantiles.append(found)

    def plot(self, *, ax: Any = None) -> Any:
        """Plot the median, the middle 50 % and 90 %, and the largest value over steps.

        Args:
          ax: Axes to draw into; None: those of a new figure.
        Returns:
          The axes.
        Raises:
          ImportError: matplotlib is missing.

        Example:
          >>> import fbuf, numpy as np
          >>> from matplotlib.figure import Figure
          >>> replay, evolution = fbuf.Replay(fbuf.Buffer(100), {"t": 0}), fbuf.plot.Evolution("ages")
          >>> for step in range(3):
          ...     index = replay.extend({"t": np.arange(10)})
          ...     evolution.record(replay, step=step)
          >>> evolution.plot(ax=Figure().subplots()).get_title(loc="left")
          'Age over time'
        """
        axes = _style.new_axes("plot.Evolution.plot", ax, SIZE)
        _style.dress(axes, f"{OF[self.of][0].upper()}{OF[self.of][1:]} over time", "step", OF[self.of])
        if not self.steps:
            return _style.nothing(axes, "nothing was recorded")
        palette = _style.colors(axes)
        lines = {n: [getattr(q, n) for q in self.quantiles] for n in ("q05", "q25", "median", "q75", "q95", "max")}
        band = {"color": palette.first, "linewidth": 0}
        axes.fill_between(self.steps, lines["q05"], lines["q95"], alpha=0.22, label="5 to 95 %", **band)
        axes.fill_between(self.steps, lines["q25"], lines["q75"], alpha=0.4, label="25 to 75 %", **band)
        alone = {"marker": "o"} if len(self.steps) == 1 else {}
        axes.plot(self.steps, lines["median"], color=palette.first, linewidth=2, label="median", **alone)
        axes.plot(
            self.steps, lines["max"], color=palette.second, linewidth=1.2, linestyle="--", label="largest", **alone
        )
        low, high = min(lines["q05"]), max(lines["max"])
        if low > 0 and high > WIDE * low:
            axes.set_yscale("log")
        axes.margins(x=0)
        _style.legend(axes)
        return axes
