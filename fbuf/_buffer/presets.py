"""Functions that return common buffers; change any part with `dataclasses.replace`."""

from __future__ import annotations

from typing import Any

from fbuf._buffer.buffer import Buffer
from fbuf.samplers import Prioritized, Uniform
from fbuf.views import Sequence


def uniform(capacity: int, **parts: Any) -> Buffer:
    """`Buffer(capacity, sampler=Uniform(), **parts)`: every row equally likely.

    Args:
      capacity: C, rows held.
      **parts: `storage`, `view`, `lanes`, ... of `Buffer`.

    Example:
      >>> import fbuf
      >>> fbuf.uniform(1000, lanes=4).lanes
      4
    """
    return Buffer(capacity, sampler=Uniform(), **parts)


def prioritized(
    capacity: int,
    alpha: float = 0.6,
    beta: float = 0.4,
    *,
    eps: float = 1e-6,
    normalize: str | None = "batch",
    stratified: bool = True,
    on: str = "device",
    **parts: Any,
) -> Buffer:
    """`Buffer(capacity, sampler=Prioritized(alpha, beta, ...), **parts)`: prioritized replay.

    Args:
      capacity: C, rows held.
      alpha, beta, eps, normalize, stratified, on: Of `samplers.Prioritized`.
      **parts: `storage`, `view`, `lanes`, ... of `Buffer`.

    Example:
      >>> import fbuf
      >>> fbuf.prioritized(1000, alpha=0.7).sampler.alpha
      0.7
    """
    return Buffer(capacity, sampler=Prioritized(alpha, beta, eps, normalize, stratified, on=on), **parts)


def trajectory(
    capacity: int,
    length: int,
    *,
    burn_in: int = 0,
    bootstrap: int = 0,
    stride: int = 1,
    boundary: str = "stop",
    autoreset: str | None = None,
    episode_end: tuple[str, ...] = ("terminated", "truncated"),
    over: str = "anchors",
    **parts: Any,
) -> Buffer:
    """`Buffer(capacity, view=Sequence(length, ...), sampler=Uniform(over), **parts)`: windows of successive rows.

    Args:
      capacity: C, rows held.
      length, burn_in, bootstrap, stride, boundary, autoreset, episode_end: Of `views.Sequence`.
      over: Of `samplers.Uniform`: "anchors", all windows equally likely, or "episodes", all episodes.
      **parts: `storage`, `lanes`, ... of `Buffer`; a `sampler` of your own replaces `over`.

    Example:
      >>> import fbuf
      >>> fbuf.trajectory(10_000, length=16, lanes=4, autoreset="same_step").view.length
      16
    """
    view = Sequence(
        length,
        burn_in=burn_in,
        bootstrap=bootstrap,
        stride=stride,
        boundary=boundary,
        autoreset=autoreset,
        episode_end=episode_end,
    )
    return Buffer(capacity, view=view, **{"sampler": Uniform(over), **parts})
