"""Functions that return common buffers; change any part with `dataclasses.replace`."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack

from fbuf._buffer.buffer import Buffer
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.storage import Storage
from fbuf._interfaces.view import View
from fbuf._interfaces.writer import Writer
from fbuf.samplers import Prioritized, Uniform
from fbuf.views import Sequence


class _Parts(TypedDict, total=False):
    storage: Storage
    writer: Writer
    lanes: int | None
    prefetch: int
    batch_size: int | None
    on_write: Any
    on_read: Any


class Parts(_Parts, total=False):
    """The keywords of `Buffer` that `uniform` and `prioritized` pass on, for type checkers."""

    view: View
    episode_end: tuple[str, ...]


class TrajectoryParts(_Parts, total=False):
    """Those that `trajectory` passes on."""

    sampler: Sampler


def uniform(capacity: int, **parts: Unpack[Parts]) -> Buffer:
    """Return `Buffer(capacity, sampler=Uniform(), **parts)`: every row is equally likely.

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
    normalize: Literal["batch", "buffer", None] = "batch",
    stratified: bool = True,
    on: Literal["device", "host"] = "device",
    **parts: Unpack[Parts],
) -> Buffer:
    """Return `Buffer(capacity, sampler=Prioritized(alpha, beta, ...), **parts)`, for prioritized replay.

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
    boundary: Literal["stop", "mask", "cross"] = "stop",
    autoreset: Literal["same_step", "next_step"] | None = None,
    episode_end: tuple[str, ...] = ("terminated", "truncated"),
    over: Literal["anchors", "episodes"] = "anchors",
    **parts: Unpack[TrajectoryParts],
) -> Buffer:
    """Return `Buffer(capacity, view=Sequence(length, ...), sampler=Uniform(over), **parts)`, for windows of rows.

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
    parts.setdefault("sampler", Uniform(over))
    return Buffer(capacity, view=view, **parts)
