"""Buffers people ask for by name: plain functions that return a `Buffer`, nothing more.

Each says in one line what it would take to write it out; change any part with `dataclasses.replace`.
"""

from __future__ import annotations

from typing import Any

from fbuf._buffer import Buffer
from fbuf.samplers import Prioritized, Uniform


def uniform(capacity: int, **parts: Any) -> Buffer:
    """`Buffer(capacity, sampler=Uniform(), **parts)`: every row alike.

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
    **parts: Any,
) -> Buffer:
    """`Buffer(capacity, sampler=Prioritized(alpha, beta, ...), **parts)`: prioritized replay.

    Args:
      capacity: C, rows held.
      alpha, beta, eps, normalize, stratified: Of `samplers.Prioritized`.
      **parts: `storage`, `view`, `lanes`, ... of `Buffer`.

    Example:
      >>> import fbuf
      >>> fbuf.prioritized(1000, alpha=0.7).sampler.alpha
      0.7
    """
    return Buffer(capacity, sampler=Prioritized(alpha, beta, eps, normalize, stratified), **parts)
