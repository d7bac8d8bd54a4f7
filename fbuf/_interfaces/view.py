"""Protocol of views: which rows can be sampled, and what batch the sampled rows make."""

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
    """Which rows a view can draw. Views with equal rules can share a state.

    Attributes:
      kind: Name of the conditions that `opens` or `decide` adds.
      back: Rows before an anchor that must still be held, unless its episode began after them.
      ahead: Rows after an anchor that decide whether it can be drawn.
      prompt: Whether each new row opens at most one anchor, named by `View.opens`; otherwise `View.decide` reads the last
        `ahead` rows again with every write.
      stride: Distance in rows between anchors of an episode.
      closes: Whether one more anchor closes each episode: the row `ahead` rows before its last.
      learns: Rows of a window that are not learnt, the first and the last, where they decide what can be drawn. `decide`
        then gets exact steps.
      crosses: Whether windows continue across the ends of episodes.
      reset_rows: Whether the row after an episode's end belongs to it (Gymnasium's next-step autoreset).
      cut_ends: Whether the last row of a truncated episode can be drawn. Never if it was cut (`Buffer.cut`).
      window: T, rows of a batch's windows `[B, T, ...]`, which the first read of slots `[B, T]` names; 0: no windows.
      spans: Whether the view needs `EligibleSet.starts`.
      ends: Leaves that end an episode; filled in by the buffer.
      terminated: The leaf of `ends` that marks termination; filled in by the buffer.
      episode: Integer leaf that is equal in all rows of an episode; a change is a cut before that row.
    """

    kind: str = "row"
    back: int = 0
    ahead: int = 0
    prompt: bool = True
    stride: int = 1
    closes: bool = False
    learns: tuple[int, int] | None = None
    crosses: bool = False
    reset_rows: bool = False
    cut_ends: bool = True
    window: int = 0
    spans: bool = False
    ends: tuple[str, ...] = ()
    terminated: str | None = None
    episode: str | None = None

    @property
    def rows(self) -> int:
        """Rows of a lane that one anchor needs."""
        return 1 + self.back + self.ahead


class Window(NamedTuple):
    """The reads that a view needs for drawn anchors, and the context that `assemble` needs with them."""

    reads: tuple[Read, ...]
    context: Any


@runtime_checkable
class View(Protocol):
    """Choose the rows around a drawn anchor, and assemble the batch from them.

    One of these methods is required:
      opens(step, flags, before): If `rule.prompt`: which anchor each new row uint8[N, E] opens, as rows before it
        int32[N, E], and whether it opens one, bool[N, E]. `before` uint8[N, E] are the flags of the row before each.
        `step` int32[N, E] counts the rows of its episode (with `crosses`, of the lane) before it; beyond 2^29 only its
        remainder by `stride` is exact. The anchor gets the priority of the new row.
      decide(flags, available, step): If not `rule.prompt`: which rows of uint8[A, E] the first `available` int32[E] of them
        settle, which of those are anchors, and which row gave an anchor's priority, int32[A, E] (None: the anchor). `step`
        int32[A, E] is exact for rows of the running episode and newer ones; where `stride` is 1 and `learns` None it has no
        meaning.

    Optional: `adds`, False if batches of windows are the rows alone, without a leaf `mask` of the view. `learnt(flags)`: given
    the flags uint8[L, E] of rows in order of arrival (NumPy; 0 where there is none), which rows a batch may learn.
    `on_host(spec, structure)`: the view in NumPy for `Replay` (`views._host_transition`, `views._host_windows`), or None.
    `reads_pairs`: names of the view's fields that name leaves which it also takes as pairs of uint32, what 64 bits of a storage
    on the host are without x64.
    """

    @property
    def rule(self) -> EligibilityRule:
        """Which rows can be drawn."""

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        """Return the leaves that end an episode, and the one among them that marks termination."""

    def check(self, spec: Spec) -> None:
        """Raise if rows lack a leaf that the view reads."""

    def window(self, spec: Spec, eligible: EligibleSet, slot: jax.Array, mask: jax.Array, key: jax.Array) -> Window:
        """Return the reads for anchors int32[B]; `key` is for views that choose at random."""

    def assemble(self, spec: Spec, structure: PyTree, arrays: Sequence[jax.Array], window: Window) -> PyTree:
        """Return the batch, leaves `[B, ...]`, from the `arrays` of `window.reads`."""
