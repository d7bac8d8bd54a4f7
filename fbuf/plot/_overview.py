"""All pictures of a buffer that make sense, on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fbuf._buffer.state import BufferState
from fbuf.plot import _style
from fbuf.plot._frames import _is_frames, frames
from fbuf.plot._histograms import ages, episode_lengths, priorities
from fbuf.plot._memory import memory

if TYPE_CHECKING:
    from fbuf._buffer.buffer import Buffer


def overview(buffer: Buffer, state: BufferState, key: Any = None, *, figure: Any = None) -> dict[str, Any]:
    """Ages, priorities, lengths of episodes, memory, and frames if rows have some.

    Args:
      key: PRNG key of the draw that is shown; None: `jax.random.key(0)`.
      figure: Figure to draw into; None: a new one of pyplot.
    Returns:
      Axes by name: "ages", "memory", and of "priorities", "episode_lengths" and "frames" those that make sense.
    Raises:
      ImportError: matplotlib is missing.
    """
    call = "plot.overview"
    _style.check(call, buffer, state)
    known = bool(buffer.ends) and buffer.writer.streams
    tops: list[tuple[str, Any]] = [("ages", ages)]
    tops += [("priorities", priorities)] if buffer.sampler.prioritized else []
    tops += [("episode_lengths", episode_lengths)] if known else []
    spec, _ = buffer.storage.spec(state.rows)
    pictures = any(_is_frames(leaf.shape) for leaf in spec.values())
    if figure is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError(
                f'{call}: matplotlib is missing; expected it. Install it with: pip install "fbuf[plot]".'
            ) from error
        figure = pyplot.figure(figsize=(13.0, 7.6 if pictures else 6.4))
    if not hasattr(figure, "add_gridspec"):
        raise TypeError(
            f"{call}: figure is {type(figure).__name__}; expected one of matplotlib, or None. Write figure=plt.figure()."
        )
    if figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")
    top, bottom = figure.add_gridspec(2, 1, height_ratios=(1.0, 1.25 if pictures else 0.9))
    grid = top.subgridspec(1, len(tops))
    made = {name: draw(buffer, state, ax=figure.add_subplot(grid[i])) for i, (name, draw) in enumerate(tops)}
    if not pictures:
        made["memory"] = memory(buffer, state, ax=figure.add_subplot(bottom))
        return made
    grid = bottom.subgridspec(1, 2, width_ratios=(1.0, 1.7))
    left, right = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    figure.canvas.draw()  # their sizes are known only then
    made["memory"] = memory(buffer, state, ax=left)
    made["frames"] = frames(buffer, state, key, number=10, ax=right)
    return made
