"""Base class of views: which rows can be sampled, and what batch the sampled rows make."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec
from fbuf._interfaces.sampler import AnchorSet
from fbuf._interfaces.storage import Read


@component(name="fbuf.Rule")
class AnchorRule:
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
      spans: Whether the view needs `AnchorSet.starts`.
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


class View(abc.ABC):
    """Choose the rows around a drawn anchor, and assemble the batch from them.

    Required are `rule`, `window` and `assemble`; also `decide`, unless `rule.prompt`.
    """

    @property
    @abc.abstractmethod
    def rule(self) -> AnchorRule:
        """Which rows can be drawn."""

    @property
    def adds(self) -> bool:
        """Whether batches of windows have a leaf `mask` of the view; False if they are the rows alone."""
        return True

    @property
    def reads_pairs(self) -> tuple[str | None, ...]:
        """Leaves, named by its fields, that it also takes as pairs of uint32: 64 bits of a host storage without x64."""
        return ()

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        """Return the leaves that end an episode, and the one among them that marks termination."""
        return (), None

    def check(self, spec: Spec) -> None:
        """Raise if rows lack a leaf that the view reads."""

    def opens(self, step: jax.Array, flags: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return of each new row uint8[N, E] which anchor it opens, as rows before it int32[N, E], and whether it opens one.

        Called if `rule.prompt`. By default the row `rule.ahead` rows before it, if its episode has one. `before` uint8[N, E]
        are the flags of the row before each. `step` int32[N, E] counts the rows of its episode (with `crosses`, of the lane)
        before it; beyond 2^29 only its remainder by `stride` is exact. The anchor gets the priority of the new row.
        """
        ahead = jnp.int32(self.rule.ahead)
        return jnp.full_like(step, ahead), step >= ahead

    def decide(
        self, flags: jax.Array, count: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return which rows of uint8[A, E] the first `count` int32[E] of them settle, and which of those are anchors.

        Also return which row gave an anchor's priority, int32[A, E] (None: the anchor). Called unless `rule.prompt`. `step`
        int32[A, E] is exact for rows of the running episode and newer ones; where `stride` is 1 and `learns` None it has no
        meaning.
        """
        raise NotImplementedError(f"{type(self).__name__}: write def decide; see fbuf.parts.View.")

    @abc.abstractmethod
    def window(self, spec: Spec, anchors: AnchorSet, slot: jax.Array, mask: jax.Array, key: jax.Array) -> Window:
        """Return the reads for anchors int32[B]; `key` is for views that choose at random."""

    @abc.abstractmethod
    def assemble(self, spec: Spec, structure: PyTree, arrays: Sequence[jax.Array], window: Window) -> PyTree:
        """Return the batch, leaves `[B, ...]`, from the `arrays` of `window.reads`."""

    def learnt(self, flags: np.ndarray) -> np.ndarray:
        """Return which rows a batch of windows may learn, from flags uint8[L, E] in order of arrival, 0 for no row."""
        return np.ones(flags.shape, bool)

    def on_host(self, spec: Spec, structure: Any) -> Any:
        """Return the view in NumPy for `Replay` (`views._host_transition`, `views._host_windows`), or None."""
        return None
