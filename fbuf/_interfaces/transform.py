"""Base classes of transforms: functions of rows before storage and of batches after the view."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fbuf._core.pytree import PyTree, Spec


class Context(NamedTuple):
    """What a transform knows about its leaves: rows `[N, E, item]`, a batch `[B, item]`, or windows `[B, T, item]`."""

    lead: int  # leading axes: 2, or 1 for a batch of single rows
    time: int | None  # index of the time axis; None: there is none
    writing: bool  # True for rows on write, False for a batch on read
    mask: jax.Array  # bool[*lead], which rows exist; in batches the others are zeros, before and after
    key: jax.Array | None = None  # if `keyed`
    memory: Any = None  # of a `StatefulTransform`
    collapsed: frozenset[str] = frozenset()  # leaves `[B, F]` with one value a window, also where F is T

    @property
    def mapped(self) -> int:
        """Leading axes of single rows on write, of elements of a batch (rows or windows) on read."""
        return self.lead if self.writing else 1


class Transform(abc.ABC):
    """Map rows to rows, or batches to batches: a pure function of a pytree of arrays."""

    @property
    def keyed(self) -> bool:
        """Whether `Context.key` is needed; such a transform is for batches only."""
        return False

    @property
    def row_by_row(self) -> bool:
        """Whether rows `[N, E, item]` are mapped one by one, bit for bit; `Replay.add` may then collect rows for `on_write`.

        Arithmetic of floats is not: XLA compiles it for each N, and may round differently.
        """
        return False

    @abc.abstractmethod
    def apply(self, data: PyTree, context: Context) -> PyTree:
        """Return the transformed `data`: any pytree with the same leading axes; of a batch, at least axis B."""

    def inverse(self) -> Transform | None:
        """Return the inverse, which is given the memory of this one; None if there is none."""
        return None


class StatefulTransform(Transform):
    """A transform that learns from the rows that are written.

    In `on_write` it sees rows as they reach its stage, in `on_read` rows as they are stored.
    """

    @abc.abstractmethod
    def watches(self, spec: Spec) -> tuple[str, ...]:
        """Return the names of the leaves to learn from; raise if one is missing."""

    @abc.abstractmethod
    def init(self, spec: Spec) -> Any:
        """Return the memory before the first row: a pytree of arrays."""

    @abc.abstractmethod
    def observe(self, memory: Any, leaves: Mapping[str, jax.Array], mask: jax.Array) -> Any:
        """Return the memory after rows with leaves `[N, E, ...]`, those where `mask` bool[N, E]."""

    def stats(self, memory: Any) -> dict[str, jax.Array]:
        """Return scalars to log, from small arrays."""
        return {}
