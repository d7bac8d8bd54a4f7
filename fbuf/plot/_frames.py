"""Plot sampled frames as a contact sheet: one image in one axes, since dozens of axes would take seconds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.arguments import check_int
from fbuf._core.frames import is_frames, to_images
from fbuf._core.pytree import named_leaves
from fbuf._core.sample import Sample
from fbuf._replay import Replay
from fbuf.plot import _style
from fbuf.sharded import ShardedState

WIDTH = 10.0  # inches of a new figure
LINE = 0.21  # inches of a line of text
CHARACTER = 0.065  # inches of one
LEAST = 60  # pixels of an image's lesser side
LINES = (0.5, 0.5, 0.5, 1.0)
"""Grey, which is seen beside black frames and beside white ones, on any page."""
GAP = "   "  # between things that are said
SAID = ("action", "reward", "discount", "terminated", "truncated")


_Strip = tuple[np.ndarray, str]
"""Frames side by side, float[H, W, 4], transparent between them; and the text above them."""


def frames(
    buffer: Buffer | Replay | Sample,
    state: BufferState | None = None,
    key: Any = None,
    *,
    number: int = 6,
    observation: str | None = None,
    next_observation: str = "next_obs",
    batch: Sample | None = None,
    ax: Any = None,
) -> Any:
    """Plot rows that `sample` would draw: frames of the stack (or window), the next frames, action and reward.

    Frames are `[H, W]`, `[H, W, 1]` or `[H, W, 3]`; stacks have one more leading axis, or four frames as `[H, W, 4]`.
    uint8 is shown from 0, black, to 255, white; other dtypes from the least to the largest value.

    Args:
      buffer, state: What to draw from; or a `Replay`, or a `Sample` to show, in place of both.
      key: PRNG key of the draw; None: `jax.random.key(0)`.
      number: Rows to show.
      observation: Leaf of `batch.data` with frames; None: "obs", or the first that looks like frames.
      next_observation: Leaf with the next frames, shown after a wider gap if it exists.
      batch: A batch to show instead of a new draw.
      ax: Axes to draw into; None: those of a new figure.
    Returns:
      The axes.
    Raises:
      ValueError: the leaf is missing, or none looks like frames; `number` < 1.
      ImportError: matplotlib is missing.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> from matplotlib.figure import Figure
      >>> buffer = fbuf.Buffer(100)
      >>> state = buffer.init({"obs": jnp.zeros((16, 16), jnp.uint8)})
      >>> state = buffer.extend(state, {"obs": jnp.ones((9, 16, 16), jnp.uint8)})
      >>> axes = fbuf.plot.frames(buffer, state, jax.random.key(1), number=3, ax=Figure().subplots())
      >>> len(axes.images), len(axes.texts)
      (1, 3)
    """
    call = "plot.frames"
    check_int(call, "number", number)
    if isinstance(buffer, Sample):
        return draw_batch(call, buffer, observation, next_observation, int(number), ax)
    buffer, state = _style.opened(call, buffer, state)
    if batch is None:
        batch = _peek(buffer, state, jax.random.key(0) if key is None else key, int(number))
    elif not hasattr(batch, "data"):
        raise TypeError(f"{call}: batch is {type(batch).__name__}; expected a Sample. Pass buffer.peek(state, key, 6).")
    return draw_batch(call, batch, observation, next_observation, int(number), ax)


def _peek(buffer: Any, state: Any, key: Any, number: int) -> Any:
    """Return a batch of at least `number` rows; of a sharded buffer with one row of each shard in turn."""
    if not isinstance(state, ShardedState):
        return buffer.peek(state, key, number)
    size, shards = -(-number // buffer.shards) * buffer.shards, buffer.shards
    batch = dataclasses.replace(buffer.peek(state, key, size), last=None)
    order = np.arange(size).reshape(shards, -1).T.reshape(-1)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[order], batch)


def draw_batch(call: str, batch: Sample, observation: str | None, next_observation: str, number: int, ax: Any) -> Any:
    """Draw the first `number` rows of a batch; arguments as for `frames`."""
    data = {name: np.asarray(leaf) for name, leaf in named_leaves(batch.data).items()}
    name = _chosen(call, data, observation)
    shown = np.flatnonzero(batch.mask)[:number].tolist()
    leaves = [name] + ([next_observation] if next_observation in data and next_observation != name else [])
    images = {leaf: _magnified(to_images(data[leaf][shown])) for leaf in leaves} if shown else {}
    strips = [(_strip([images[leaf][j] for leaf in leaves]), _words(data, batch, i)) for j, i in enumerate(shown)]
    heading = " | ".join(leaf or "row" for leaf in leaves)
    if not strips:
        axes = _style.new_axes(call, ax, (WIDTH, 2.0))
        axes.set_title(heading, loc="left", fontsize=11)
        return _style.nothing(axes, "there is nothing to draw")
    return _sheet(call, strips, heading, ax)


def _chosen(call: str, data: dict[str, np.ndarray], observation: str | None) -> str:
    """Return the leaf with frames."""
    like = [name for name, leaf in data.items() if is_frames(leaf.shape[1:])]
    if observation is not None:
        if observation not in data or observation not in like:
            what = "does not look like frames" if observation in data else "is not in the batch"
            raise ValueError(
                f"{call}: leaf '{observation}' {what} (it has: {', '.join(data)}); expected frames [H, W] of 4 by 4 or "
                f"more. Pass observation={next(iter(like), 'obs')!r}."
            )
        return observation
    if not like:
        shapes = ", ".join(f"'{name}' {list(leaf.shape[1:])}" for name, leaf in data.items())
        raise ValueError(f"{call}: no leaf looks like frames ({shapes}); expected [H, W] of 4 by 4 or more.")
    return "obs" if "obs" in like else like[0]


def _magnified(images: np.ndarray) -> np.ndarray:
    """Enlarge small images `[..., H, W, 3]`, so that lines and gaps are thin beside them."""
    times = -(-LEAST // min(images.shape[-3:-1]))
    return images.repeat(times, -3).repeat(times, -2) if times > 1 else images


def _strip(groups: list[np.ndarray]) -> np.ndarray:
    """Return float[H, W, 4]: groups of frames `[S, H, W, 3]` side by side, each in a thin border."""
    height = max(group.shape[1] for group in groups)
    line = max(1, min(height, *(group.shape[2] for group in groups)) // LEAST)
    parts: list[np.ndarray] = []
    for i, group in enumerate(groups):
        for j, frame in enumerate(group):
            if parts:
                parts.append(np.zeros((height + 2 * line, (7 if i and not j else 1) * line, 4)))
            opaque = np.concatenate([frame, np.ones((*frame.shape[:2], 1))], axis=2)
            framed = np.zeros((height + 2 * line, frame.shape[1] + 2 * line, 4))
            framed[: len(frame) + 2 * line] = LINES
            framed[line : line + len(frame), line:-line] = opaque
            parts.append(framed)
    return np.concatenate(parts, axis=1)


def _words(data: dict[str, np.ndarray], batch: Sample, row: int) -> str:
    """Describe a row: numbers of the usual names, and its weight if weights differ."""
    said = []
    for name in SAID:
        value = data[name][row] if name in data else None
        if value is not None and value.dtype == bool:
            said += [name] if value.any() else []
        elif value is not None and value.size == 1:
            said.append(f"{name} {value.item():.3g}")
        elif value is not None and value.ndim == 1 and value.size <= 6:
            said.append(f"{name} {' '.join(f'{x:.3g}' for x in value.tolist())}")
    weight = np.asarray(batch.weight)
    if np.ptp(weight[np.asarray(batch.mask)]) > 0:
        said.append(f"weight {weight[row]:.2f}")
    return GAP.join(said)


def _sheet(call: str, strips: list[_Strip], heading: str, ax: Any) -> Any:
    """Draw all strips in one image, in as many columns as suit its shape."""
    height, width = (max(image.shape[axis] for image, _ in strips) for axis in (0, 1))
    inches = WIDTH if ax is None else max(ax.get_window_extent().width / ax.get_figure().dpi, 1.0)
    high = None if ax is None else max(ax.get_window_extent().height / ax.get_figure().dpi, 1.0)
    columns, (line, across, down) = _columns(len(strips), height, width, inches, high)
    sheet = np.zeros((round(down), round(across), 4))
    places = []
    for i, (image, _) in enumerate(strips):
        top = round((i // columns) * (height + line * 1.35) + line)
        left = round((i % columns) * (across + width * 0.06) / columns)
        shown = image[: sheet.shape[0] - top, : sheet.shape[1] - left]
        sheet[top : top + shown.shape[0], left : left + shown.shape[1]] = shown
        places.append((left, top))
    axes = _style.new_axes(call, ax, (WIDTH, WIDTH * sheet.shape[0] / sheet.shape[1] + 0.4))
    axes.imshow(sheet, interpolation="nearest" if height < 2 * LEAST else "antialiased")
    room = int(width * LINE / line / CHARACTER) if columns > 1 else max(len(words) for _, words in strips)
    for (_, words), (left, top) in zip(strips, places, strict=True):
        axes.text(left, top - line * 0.12, _cut(words, room), fontsize=8.5, va="bottom", ha="left")
    axes.set_title(heading, loc="left", fontsize=11)
    axes.set_axis_off()
    axes.set_anchor("NW")
    return axes


def _cut(words: str, room: int) -> str:
    """Return the first items that fit into `room` characters."""
    said = words.split(GAP)
    while said and len(GAP.join(said)) > room:
        said.pop()
    return GAP.join(said)


_Sizes = tuple[float, float, float]


def _columns(number: int, height: int, width: int, inches: float, high: float | None) -> tuple[int, _Sizes]:
    """Return the number of columns; and a line of text, the width and the height of the sheet, in pixels of frames."""

    def layout(columns: int) -> tuple[float, int, _Sizes]:
        across = columns * width + (columns - 1) * 0.06 * width
        rows = -(-number // columns)
        scale = inches / across
        if high is not None:  # the text must fit where the height is what limits
            scale = min(scale, max(high - rows * 1.35 * LINE, 0.2 * high) / (rows * height))
        line = LINE / scale
        down = rows * (height + 1.35 * line) - 0.35 * line
        shape = down / across
        wanted = 0.62 if high is None else high / inches
        off = abs(np.log(shape / wanted)) + (2.0 if scale * width < 3.0 else 0.0)  # words need 3 inches
        return off, columns, (line, across, down)

    return min(map(layout, range(1, number + 1)))[1:]
