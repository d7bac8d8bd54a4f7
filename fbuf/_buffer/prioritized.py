"""`prioritized`: a buffer with prioritized replay. Change any part with `dataclasses.replace`."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack

from fbuf._buffer.buffer import Buffer
from fbuf._interfaces.storage import Storage
from fbuf._interfaces.view import View
from fbuf._interfaces.writer import Writer
from fbuf.samplers import Prioritized


class Parts(TypedDict, total=False):
    """The keywords of `Buffer` that `prioritized` passes on, for type checkers."""

    storage: Storage
    writer: Writer
    lanes: int | None
    prefetch: int
    batch_size: int | None
    on_write: Any
    on_read: Any
    view: View
    episode_end: tuple[str, ...]


def prioritized(
    capacity: int,
    *,
    alpha: float = 0.6,
    beta: float = 0.4,
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
