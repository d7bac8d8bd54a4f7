"""How a spread changes as a run goes on: recorded now and then, drawn at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fbuf._buffer.state import BufferState
from fbuf._buffer.summary import Quantiles
from fbuf.plot import _style

if TYPE_CHECKING:
    from fbuf._buffer.buffer import Buffer

OF = {"priorities": "|p|", "ages": "age", "drawn_ages": "age of what is drawn", "draws": "draws a row"}


class Evolution:
    """Quantiles of priorities (or ages) over a run: feed it in the loop, then plot it.

    Args:
      of: "priorities", "ages", "drawn_ages" or "draws", as in `Summary`.

    Cost: a record is one `Buffer.summary` that compares no rows, and keeps nine numbers.

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
        if of not in OF:
            raise ValueError(f"plot.Evolution: of is {of!r}; expected one of {', '.join(OF)}.")
        self.of = of
        self.steps: list[float] = []
        self.quantiles: list[Quantiles] = []

    def record(self, buffer: Buffer, state: BufferState, step: float | None = None) -> None:
        """Looks at a state; one that has nothing to look at yet is passed over.

        Args:
          step: Where it stands on the x-axis; None: one after the last.
        Raises:
          ValueError: the buffer never has what is recorded.
        """
        call = "plot.Evolution.record"
        _style.check(call, buffer, state)
        if self.of == "priorities" and not buffer.sampler.prioritized:
            raise ValueError(
                f"{call}: {buffer.sampler!r} has no priorities. Write Evolution('ages'), or use a buffer with "
                f"sampler=fbuf.samplers.Prioritized()."
            )
        found: Quantiles | None = getattr(buffer.summary(state, compare=0), self.of)
        step = step if step is not None else (self.steps[-1] + 1 if self.steps else 0)
        if found is not None:
            self.steps.append(float(step))
            self.quantiles.append(found)

    def plot(self, *, ax: Any = None) -> Any:
        """Median, where the middle half and nine tenths lie, and the largest, over steps.

        Args:
          ax: Axes to draw into; None: those of a new figure.
        Returns:
          The axes.
        Raises:
          ImportError: matplotlib is missing.
        """
        axes = _style.new_axes("plot.Evolution.plot", ax, (6.0, 3.6))
        _style.dress(axes, f"{OF[self.of][0].upper()}{OF[self.of][1:]} over time", "step", OF[self.of])
        if not self.steps:
            return _style.nothing(axes, "nothing was recorded")
        palette = _style.colors(axes)
        lines = {
            name: [getattr(q, name) for q in self.quantiles] for name in ("q05", "q25", "median", "q75", "q95", "max")
        }
        band = {"color": palette.first, "linewidth": 0}
        axes.fill_between(self.steps, lines["q05"], lines["q95"], alpha=0.22, label="5 to 95 %", **band)
        axes.fill_between(self.steps, lines["q25"], lines["q75"], alpha=0.4, label="25 to 75 %", **band)
        alone = {"marker": "o"} if len(self.steps) == 1 else {}
        axes.plot(self.steps, lines["median"], color=palette.first, linewidth=2, label="median", **alone)
        axes.plot(
            self.steps, lines["max"], color=palette.second, linewidth=1.2, linestyle="--", label="largest", **alone
        )
        low, high = min(lines["q05"]), max(lines["max"])
        if low > 0 and high > 30 * low:
            axes.set_yscale("log")
        axes.margins(x=0)
        _style.legend(axes)
        return axes
