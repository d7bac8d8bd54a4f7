"""Axes and colours shared by all plots; matplotlib is imported on the first plot.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish, in lighter tones on dark backgrounds.

Source: Okabe and Ito 2008, "Color Universal Design".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from fbuf._buffer.state import BufferState
from fbuf._core.lazy_import import import_extra
from fbuf._replay import Replay
from fbuf.sharded import ShardedState


class Colors(NamedTuple):
    """The colours of a plot."""

    first: str
    second: str
    third: str


def colors(axes: Any) -> Colors:
    """Return the colours for the background of these axes."""
    from matplotlib import colors as of
    from matplotlib import rcParams

    face, figure = of.to_rgba(axes.get_facecolor()), axes.get_figure()
    if face[3] < 0.5 and figure is not None:  # transparent: that of the figure
        face = of.to_rgba(figure.get_facecolor())
    # On an unknown page, bright text means a dark background.
    dark = _light(face) < 0.5 if face[3] >= 0.5 else _light(of.to_rgba(rcParams["text.color"])) > 0.5
    return Colors("#56B4E9", "#E69F00", "#2FCB9A") if dark else Colors("#0072B2", "#D55E00", "#009E73")


def _light(color: tuple[float, ...]) -> float:
    return 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]


def new_axes(call: str, ax: Any, size: tuple[float, float]) -> Any:
    """Return `ax`, or the axes of a new figure of pyplot, which notebooks show."""
    if ax is None:
        return import_pyplot(call).subplots(figsize=size, layout="constrained")[1]
    if not hasattr(ax, "plot"):
        raise TypeError(f"{call}: ax is {type(ax).__name__}; expected the axes of matplotlib, or None.")
    return ax


def import_pyplot(call: str) -> Any:
    """Return pyplot. Raises ImportError: matplotlib is missing."""
    return import_extra(call, "matplotlib.pyplot", '"fbuf[plot]"')


def opened(call: str, buffer: Any, state: Any) -> tuple[Any, Any]:
    """Return a buffer and its concrete state, also those of a `Replay`. Raises TypeError for anything else."""
    if isinstance(buffer, Replay) and state is None:
        return buffer.buffer, buffer.state
    if not hasattr(buffer, "summary") or not isinstance(state, (BufferState, ShardedState)):
        fix = f"Write {call}(buffer, state), or {call}(replay)."
        if type(buffer).__name__ == "Mixture":
            name = buffer.names[0]
            fix = f"Plot its buffers: {call}(mixture[{name!r}], states[{name!r}])."
        raise TypeError(f"{call}: {type(buffer).__name__} and {type(state).__name__}; expected Buffer and state. {fix}")
    leaves = jax.tree.leaves(state)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(f"{call}: the state is traced, but a picture needs its values. Call it outside jit.")
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        raise RuntimeError(f"{call}: the state was donated. Pass the state that the step returned.")
    return buffer, state


def whole(buffer: Any, state: Any) -> tuple[Any, Any]:
    """Return the buffer and its state; of a sharded one, the buffer it is and the state of all shards."""
    return (buffer.buffer, state.shards) if isinstance(state, ShardedState) else (buffer, state)


def dress(axes: Any, title: str, x: str, y: str) -> None:
    """Set titles, and keep few lines."""
    axes.set_title(title, loc="left", fontsize=11, pad=22)  # room for the legend
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def legend(axes: Any) -> None:
    """Draw the legend in one line between title and axes."""
    columns = len(axes.get_legend_handles_labels()[1])
    axes.legend(
        frameon=False,
        fontsize=9,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=max(columns, 1),
        borderaxespad=0.1,
        borderpad=0.2,
        handlelength=1.4,
        columnspacing=1.2,
    )


def nothing(axes: Any, why: str) -> Any:
    """Write the reason for an empty plot."""
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", fontsize=10, alpha=0.7)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    return axes
