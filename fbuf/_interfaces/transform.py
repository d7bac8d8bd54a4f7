"""Protocols of transforms: what happens to rows before storage and to batches after the view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from fbuf._core.pytree import PyTree, Spec


class Context(NamedTuple):
    """What a transform may know of the leaves it is given, `[N, E, item]`, `[B, item]`, or in windows `[B, T, item]`."""

    lead: int  # axes of leaves before those of a row's: 2, or 1 for a batch of single rows
    time: int | None  # which of these goes along time; None: none does
    writing: bool  # rows on their way in; else a batch on its way out
    mask: jax.Array  # bool[*lead], which rows are there; what is not is zeros, in batches before and after
    key: jax.Array | None = None  # where it is `keyed`
    memory: Any = None  # where it is `Remembering`: what it knows by now
    collapsed: frozenset[str] = frozenset()  # leaves `[B, F]` with one value a window, also where F is T

    @property
    def mapped(self) -> int:
        """Axes that count rows on their way in, or elements of a batch, each a row or a window."""
        return self.lead if self.writing else 1


@runtime_checkable
class Transform(Protocol):
    """Makes other rows of rows, or other batches of batches. Pure, of a pytree of arrays."""

    def apply(self, data: PyTree, context: Context) -> PyTree:
        """What becomes of `data`: any pytree with the same leading axes; at read, of a batch, with axis B at least."""


@runtime_checkable
class Keyed(Protocol):
    """What a transform has besides if it may want random numbers: then it is for batches only."""

    @property
    def keyed(self) -> bool:
        """Whether it does."""


@runtime_checkable
class Invertible(Protocol):
    """What a transform has besides if it can be undone."""

    def inverse(self) -> Transform:
        """What undoes it; raises in words where that cannot be. It is given the memory of the transform that it undoes."""


@runtime_checkable
class Remembering(Protocol):
    """What a transform has besides if it learns from the rows that are written, before it and at read.

    Where it stands in `on_write` these are the rows as they come to it, in `on_read` those that are stored.
    """

    def watches(self, spec: Spec) -> tuple[str, ...]:
        """Leaves of such rows that it learns from; raises if they lack one."""

    def init(self, spec: Spec) -> Any:
        """What it knows before the first row: a pytree of arrays."""

    def observe(self, memory: Any, leaves: Mapping[str, jax.Array], mask: jax.Array) -> Any:
        """What it knows after rows with leaves `[N, E, ...]`, those where `mask` bool[N, E]."""

    def stats(self, memory: Any) -> dict[str, jax.Array]:
        """Scalars worth logging, from small arrays only."""
