"""Protocols of views: which rows can be sampled and what a drawn anchor becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec
from fbuf._interfaces.sampler import EligibleSet
from fbuf._interfaces.storage import Read


@component(name="fbuf.Rule")
class EligibilityRule:
    """Which rows a view can draw, as far as `fbuf._indexing.anchors` must know. Two views with one rule can share a state.

    Attributes:
      kind: What the view adds to this in `decide` or `opens`, in a word.
      back: Rows behind an anchor that must still be held, unless an episode began after them.
      ahead: Rows ahead of an anchor that decide whether it can be drawn.
      prompt: Each row that arrives opens one anchor at most, which `Prompt.opens` names; if not, `Deciding.decide` looks at the
        last `ahead` rows again with every write.
      stride: Anchors of an episode are so many rows apart.
      crosses: Windows run on across the ends of episodes.
      reset_rows: The row after an episode's end belongs to it (Gymnasium's next-step autoreset).
      cut_ends: The last row of a truncated episode can be drawn.
      window: T, rows of a batch's windows `[B, T, ...]`; 0: it has none.
      spans: The view asks where episodes begin and end (`EligibleSet.starts`).
      ends: Leaves that end an episode, and `terminated` the one that says it did so for good; the buffer fills them in.
    """

    kind: str = "row"
    back: int = 0
    ahead: int = 0
    prompt: bool = True
    stride: int = 1
    crosses: bool = False
    reset_rows: bool = False
    cut_ends: bool = True
    window: int = 0
    spans: bool = False
    ends: tuple[str, ...] = ()
    terminated: str | None = None

    @property
    def rows(self) -> int:
        """Rows of a lane that one anchor needs."""
        return 1 + self.back + self.ahead


class Window(NamedTuple):
    """What a view wants read for drawn anchors, and what it needs to remember until it is."""

    reads: tuple[Read, ...]
    context: Any


@runtime_checkable
class View(Protocol):
    """Says what a drawn anchor means: which rows around it, and what they become."""

    @property
    def rule(self) -> EligibilityRule:
        """Which rows can be drawn."""

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        """Leaves that end an episode, and the one among them that says it terminated."""

    def check(self, spec: Spec) -> None:
        """Raises if rows lack what the view reads."""

    def window(
        self,
        spec: Spec,
        eligible: EligibleSet,
        slot: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> Window:
        """What to read for anchors int32[B]; `key` is for views that choose."""

    def assemble(self, spec: Spec, structure: PyTree, arrays: Sequence[jax.Array], window: Window) -> PyTree:
        """The batch, leaves `[B, ...]`."""


@runtime_checkable
class Prompt(Protocol):
    """What a view has besides if its rule is `prompt`."""

    def opens(self, step: jax.Array, flags: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which anchor each new row of uint8[N, E] opens: how many rows back int32[N, E], and whether any.

        `before` uint8[N, E] are the flags of the row before each. `step` int32[N, E] counts the rows of its episode before
        it (with `crosses`, all of the lane); beyond 2^29 only its remainder by `stride` is exact. The anchor's priority is
        that of the new row.
        """


@runtime_checkable
class Deciding(Protocol):
    """What a view has besides if its rule is not `prompt`."""

    def decide(
        self, flags: jax.Array, available: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Which rows of uint8[A, E] are settled by the first `available` int32[E] of them, and which of those are anchors.

        Also which of these rows brought an anchor's priority, int32[A, E]; None: the anchor itself. `step` int32[A, E] is
        that of `Prompt.opens`, exact for rows that were not settled before; where `stride` is 1 it means nothing.
        """
