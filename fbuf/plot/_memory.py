"""Bytes by leaf and place, as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fbuf._buffer.state import BufferState
from fbuf._core.text_table import human
from fbuf._interfaces.storage import LeafBytes
from fbuf.plot import _style

if TYPE_CHECKING:
    from fbuf._buffer.buffer import Buffer


def memory(buffer: Buffer, state: BufferState, *, ax: Any = None) -> Any:
    """What each leaf takes on the device, on the host and on the disk, and what the rest of the state does.

    Beside each bar stand its bytes and, of a leaf, how much smaller than its raw rows that is (`LeafSummary.ratio`).

    Args:
      ax: Axes to draw into; None: those of a new figure.
    Returns:
      The axes.
    Raises:
      ImportError: matplotlib is missing.
    """
    call = "plot.memory"
    _style.check(call, buffer, state)
    summary = buffer.summary(state, compare=0)
    bars = [(name, leaf.stored, leaf.ratio) for name, leaf in summary.leaves.items() if leaf.stored is not None]
    bars = sorted(bars, key=lambda bar: -sum(bar[1]))
    parts = sorted(summary.parts.items(), key=lambda part: -sum(part[1]))
    large = [(name, held, None) for name, held in parts if 200 * sum(held) > sum(summary.nbytes.values())]
    small = [held for _, held in parts if 200 * sum(held) <= sum(summary.nbytes.values())]
    bars += large
    if small:
        bars.append(("other", LeafBytes(*map(sum, zip(*small, strict=True))), None))
    axes = _style.new_axes(call, ax, (6.5, 1.1 + 0.28 * len(bars)))
    palette = _style.colors(axes)
    _style.dress(axes, f"Memory, {human(sum(summary.nbytes.values()))} for {summary.size:,} rows", "bytes", "")
    names = [name for name, *_ in bars]
    left = [0.0] * len(bars)
    for place, color in zip(LeafBytes._fields, (palette.first, palette.second, palette.third), strict=True):
        size = [getattr(held, place) for _, held, _ in bars]
        if any(size):
            axes.barh(range(len(bars)), size, 0.7, left=left, color=color, label=f"{place} {human(sum(size))}")
            left = [a + b for a, b in zip(left, size, strict=True)]
    most = max(max(left, default=0), 1)
    for i, (end, (*_, ratio)) in enumerate(zip(left, bars, strict=True)):
        times = (
            "" if ratio is None or 0.95 < ratio < 1.05 else f", {ratio:.{0 if ratio >= 10 else 1}f}x smaller than raw"
        )
        times = times if ratio is None or ratio >= 1 else ""
        axes.text(end + most * 0.01, i, f"{human(end)}{times}", va="center", fontsize=9)
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
