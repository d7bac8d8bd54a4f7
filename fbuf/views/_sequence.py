"""Return windows of successive rows of one lane: `Sequence` of a fixed length, `Episode` of whole episodes.

Rows are stored once. The anchor of a window is chosen as rows arrive (`fbuf._indexing.anchors`), so a draw costs O(B T) at
any capacity, and every valid window is equally likely. An episode can be sampled from its last row, until its first is
overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._core.arguments import check_int
from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec, name_of
from fbuf._core.slots import Geometry, shift
from fbuf._indexing.anchors import RESET, START, TERMINATED, has
from fbuf._interfaces.sampler import AnchorSet
from fbuf._interfaces.storage import Read
from fbuf._interfaces.view import AnchorRule, View, Window
from fbuf.views import _fields
from fbuf.views._autoreset import check_autoreset, last_bit
from fbuf.views._host_windows import HostEpisode, HostSequence
from fbuf.views._learnt import learnt

_LAST_RESET, _LAST_TERMINATED, _TERMINATED_BEFORE = 1, 2, 4  # the last row of an episode, and the row before it


class _WindowView(View):
    """What `Sequence` and `Episode` share."""

    episode_end: tuple[str, ...]
    episode: str | None

    @property
    def reads_pairs(self) -> tuple[str | None, ...]:
        return (self.episode,)

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        return self.episode_end, None

    def check(self, spec: Spec) -> None:
        kind = type(self).__name__
        _fields.check_ends(kind, self.episode_end, spec)
        _fields.check_id(kind, self.episode, spec)
        if self.adds:
            _fields.check_free(kind, _fields.MADE, spec)

    def assemble(self, spec: Spec, structure: Any, arrays: Several[Array], window: Window) -> PyTree:
        rows = structure.unflatten(arrays)
        return _fields.with_masks(rows, window.context) if self.adds else rows


@component
class Sequence(_WindowView):
    """Return windows of `length` rows: leaves `[B, T, ...]`, T = length.

    What is not learnt: with "stop", episodes of fewer than `length` rows; "mask" learns them. Where dilation is 1 and
    stride <= length - burn_in - bootstrap, all other rows of an ended episode are learnt, except its last `bootstrap` rows
    if it did not terminate (a reset row is one of them). In a running episode of n rows, the newest (n - length + at) %
    stride + bootstrap wait for more, and all of them if n < length - at. A longer stride also skips stride - (length -
    burn_in - bootstrap) rows between two windows. `summary` and `stats` count `unlearnt`, the rows held that no window
    learns.

    `batch.data` is a dict with every leaf of the rows under its own name (rows that are not a dict are whole under `row`), and

    * `mask` bool[B, T]: the row exists; other entries of missing rows are zeros;
    * `is_first` bool[B, T]: the row begins an episode (with `dilation`: one began since the previous row);
    * `learning_mask` bool[B, T]: the row exists, and is not a reset row (with autoreset="next_step", the row after an end, with
      the final observation and an action that was ignored). In its window `burn_in` rows precede it, unless one of them, or
      itself, begins an episode; and `bootstrap` rows follow it, unless one of them, or itself, is terminated.

    No window without a row to learn is drawn. Rows that two windows share are learnt in both. With episode_end=(), and without
    burn-in, bootstrap rows, reset rows and boundary="mask", the masks are constant: `batch.data` is then the rows alone, in
    their own pytree (a dict, a NamedTuple, a dataclass, one array).

    Attributes:
      length: T >= 1, rows of a window, including burn-in and bootstrap rows.
      burn_in: First rows of a window, which only warm up a recurrent state. A window that begins its episode needs none.
      bootstrap: Last rows of a window, which only provide bootstrap values. A window that ends with a terminated row needs
        none.
      stride: Rows between successive anchors of an episode, from its first row (with "cross": of a lane). If it is not 1, one
        more window ends with the last row of the episode (with "mask": if `at` is not 0).
      dilation: Rows between successive rows of a window.
      boundary: At the end of an episode: "stop", windows are within one episode; "mask", windows are cut there, and missing
        rows are zeros, which suits R2D2; "cross", windows continue, also across cuts, and rows of the next episode count as
        bootstrap rows: the learner must look at the flags.
      at: With "mask": position of the anchor in its window. 0: windows begin at the anchor and are cut on the right. length
        - 1: windows end at the anchor and are cut on the left. In between: on either side.
      episode_end: Names of the boolean leaves that end an episode, such as `"terminated"` or the path `"done/__all__"`; `()`:
        there are no episodes.
      terminated: The name among `episode_end` that marks termination. Every other end (also by an id or `Buffer.cut`) counts as
        truncated.
      autoreset: Required if rows end episodes. "same_step": the row after an end is the first of the next episode.
        "next_step" (Gymnasium's default vector mode): it belongs to the episode and holds the final observation.
      episode: Name of an integer leaf that is equal in all rows of an episode (trajectory ids). A row with another id than the
        one before it begins an episode, as after `Buffer.cut`. With `episode_end=()` no flags are read.

    A priority given to `extend` with the row that completes a window becomes the priority of the window.

    Cost: reads B T rows ("mask" and "cross" also B T dilation flags). A write is O(1) a row; with "mask" it also examines
    the last rows of a window.

    Example:
      >>> import fbuf
      >>> fbuf.views.Sequence(80, burn_in=40, stride=40, boundary="mask", autoreset="same_step").length
      80
    """

    length: int
    burn_in: int = 0
    bootstrap: int = 0
    stride: int = 1
    dilation: int = 1
    boundary: Literal["stop", "mask", "cross"] = "stop"
    at: int = 0
    episode_end: tuple[str, ...] = ("terminated", "truncated")
    terminated: str = "terminated"
    autoreset: Literal["same_step", "next_step"] | None = None
    episode: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("burn_in", 0), ("bootstrap", 0), ("stride", 1), ("dilation", 1), ("at", 0)):
            check_int("Sequence", name, getattr(self, name), least)
        if self.stride >= 2**29:
            raise ValueError(f"Sequence: stride is {self.stride}; expected less than 2^29.")
        if self.burn_in + self.bootstrap >= self.length:
            least = self.burn_in + self.bootstrap + 1
            raise ValueError(f"Sequence: length={self.length} has no row to learn from. Use length={least} or more.")
        if self.at and (self.boundary != "mask" or self.at >= self.length):
            raise ValueError(f"Sequence: at is {self.at}; expected 0, or less than {self.length} with boundary='mask'.")
        object.__setattr__(self, "episode", None if self.episode is None else name_of(self.episode))
        object.__setattr__(self, "episode_end", _fields.checked_ends("Sequence", self.episode_end))
        object.__setattr__(self, "terminated", name_of(self.terminated))
        if self.terminated not in ("terminated", *self.episode_end):
            raise ValueError(
                f"Sequence: terminated is '{self.terminated}'; expected a name of episode_end, {self.episode_end!r}. Write "
                f"episode_end=({self.terminated!r}, ...)."
            )
        check_autoreset("Sequence", self.autoreset, self.episode_end)

    @property
    def adds(self) -> bool:
        """Whether batches have masks besides the rows."""
        rows_differ = self.burn_in or self.bootstrap or self.autoreset == "next_step" or self.boundary == "mask"
        return bool(self.episode_end or self.episode or rows_differ)

    @property
    def back(self) -> int:
        """Rows from the first of a window to its anchor."""
        return self.at * self.dilation

    @property
    def ahead(self) -> int:
        """Rows from the anchor of a window to its last."""
        return (self.length - 1 - self.at) * self.dilation

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        # Without bootstrap rows all ends are treated equally.
        known = self.bootstrap and self.terminated in self.episode_end
        return self.episode_end, self.terminated if known else None

    def on_host(self, spec: Spec, structure: Any) -> HostSequence | None:
        """Return these windows in NumPy; None with ids."""
        return HostSequence(self, spec, structure) if self.episode is None else None

    def learnt(self, flags: np.ndarray) -> np.ndarray:
        """Return which rows of uint8[L, E], in order of arrival, a window learns."""
        settings = {name: getattr(self, name) for name in ("length", "burn_in", "bootstrap", "dilation", "at")}
        return learnt(flags, last_bit=last_bit(self.autoreset) if self.boundary == "mask" else None, **settings)

    @property
    def _least_learnt(self) -> tuple[int, int] | None:
        """`AnchorRule.learns`: burn-in and bootstrap rows, if a window can have no other row, or reset rows only."""
        resets, regular = self.autoreset == "next_step", self.length - self.burn_in - self.bootstrap
        empty = {
            "stop": resets and regular == 1 and not self.bootstrap,
            "mask": self.burn_in or self.bootstrap or (resets and self.at),
            "cross": resets and regular == 1,
        }
        return (self.burn_in, self.bootstrap) if empty[self.boundary] else None

    @property
    def rule(self) -> AnchorRule:
        ends = bool(self.episode_end or self.episode)
        return AnchorRule(
            self.boundary,
            self.back,
            self.ahead,
            prompt=self.boundary == "stop" or (self.boundary == "cross" and self._least_learnt is None),
            stride=self.stride,
            closes=ends and self.stride > 1 and (self.boundary == "stop" or self.at > 0),
            learns=self._least_learnt,
            crosses=self.boundary == "cross",
            reset_rows=self.autoreset == "next_step",
            window=self.length,
            episode=self.episode,
        )

    def opens(self, step: Array, flags: Array, before: Array) -> tuple[Array, Array]:
        rule, first = self.rule, step - jnp.int32(self.ahead)
        chosen = first % jnp.int32(self.stride) == jnp.int32(0)
        if rule.closes:
            chosen = chosen | has(flags, last_bit(self.autoreset))
        opens = (first >= jnp.int32(0)) & chosen
        if self.boundary == "stop" and rule.reset_rows:
            if self.ahead:  # nothing follows a reset row
                opens = opens & ~has(before, RESET)
            if rule.learns:  # the last row is the only one to learn, except at the start of an episode
                opens = opens & (~has(flags, RESET) | (first == jnp.int32(0) if self.ahead else False))
        return jnp.full_like(step, self.ahead), opens

    def decide(self, flags: Array, count: Array, step: Array) -> tuple[Array, Array, Array | None]:
        rule, rows = self.rule, flags.shape[0]
        index = jnp.arange(rows, dtype=jnp.int32)[:, None]
        by = index + jnp.int32(self.ahead)  # the row that completes the window: its last, or the last of the episode
        chosen = step % jnp.int32(self.stride) == jnp.int32(0)
        if rule.crosses and rule.learns is None:
            chosen = chosen & ~has(flags, RESET)
        elif rule.crosses:
            near = jnp.minimum(index + jnp.arange(self.ahead + 1, dtype=jnp.int32)[None, :], jnp.int32(rows - 1))
            near_flags = jnp.moveaxis(flags.at[near].get(), 1, 2).reshape(-1, self.ahead + 1)
            chosen = chosen & jnp.any(self._masks(near_flags)[2], axis=1).reshape(flags.shape)
        else:
            before = jnp.concatenate([jnp.zeros_like(flags[:1]), flags[:-1]]) if rule.reset_rows else flags
            last, end = self._ends(flags, before, index)
            if rule.closes:
                chosen = chosen | (last == by)
            by = jnp.minimum(last, by)
            if rule.learns is not None:
                chosen = chosen & self._learns(flags, index, by, last, end, step)
            if rule.reset_rows:
                chosen = chosen & ~has(flags if rule.learns is None else flags & before, RESET)
        return by < count[None, :], chosen, jnp.minimum(by, jnp.int32(rows - 1))

    def _ends(self, flags: Array, before: Array, index: Array) -> tuple[Array, Array]:
        """Return the last row of each row's episode, or one later than all, and what `_learns` asks of it.

        One scan finds both: uint32, the row above the bits `_LAST_RESET`, `_LAST_TERMINATED` and `_TERMINATED_BEFORE`.
        """
        rule = self.rule
        end = index.astype(jnp.uint32) * jnp.uint32(8)
        if rule.learns is not None and rule.reset_rows:
            end = end | jnp.where(has(flags, RESET), jnp.uint32(_LAST_RESET), jnp.uint32(0))
        if rule.learns is not None and self.bootstrap:
            end = end | jnp.where(has(flags, TERMINATED), jnp.uint32(_LAST_TERMINATED), jnp.uint32(0))
            if rule.reset_rows:
                end = end | jnp.where(has(before, TERMINATED), jnp.uint32(_TERMINATED_BEFORE), jnp.uint32(0))
        end = jnp.where(has(flags, last_bit(self.autoreset)), end, jnp.uint32(2**32 - 8))
        end = lax.cummin(end, axis=0, reverse=True)
        return (end // jnp.uint32(8)).astype(jnp.int32), end

    def _learns(self, flags: Array, index: Array, by: Array, last: Array, end: Array, step: Array) -> Array:
        """Return whether the window of each row, which `by` completes, learns a row ("mask"). `last`, `end`: see `_ends`."""

        def is_set(bits: int) -> Array:
            return (end & jnp.uint32(bits)) != jnp.uint32(0)

        def position(row: Array) -> tuple[Array, Array | bool]:
            """Return the position in the window of the last of its rows up to `row`, and whether that is `row` itself."""
            if self.dilation == 1:
                return jnp.int32(self.at) + (row - index), True
            apart = jnp.int32(self.dilation)
            return jnp.int32(self.at) + (row - index) // apart, (row - index) % apart == jnp.int32(0)

        resets = self.rule.reset_rows
        behind = jnp.minimum(step // jnp.int32(self.dilation), jnp.int32(self.at)) if self.at else jnp.int32(0)
        begins = step <= jnp.int32(self.back)  # the first of its rows begins the episode
        first = jnp.where(begins, jnp.int32(self.at) - behind, jnp.int32(self.burn_in))
        final, on_grid = position(by)
        regular = final - jnp.int32(self.bootstrap)
        if resets:
            reset = on_grid & (by == last) & is_set(_LAST_RESET)
            final = final - reset.astype(jnp.int32)
            regular = jnp.minimum(regular, final)
        if self.bootstrap:  # a terminated row needs no bootstrap rows; a reset row may follow it
            terminated = on_grid & (by == last) & is_set(_LAST_TERMINATED)
            if resets:
                full = jnp.concatenate([flags[self.ahead :], jnp.zeros_like(flags[: self.ahead])])
                terminated = terminated | (on_grid & (by < last) & has(full, TERMINATED))
            regular = jnp.where(terminated, final, regular)
        if self.bootstrap and resets:
            before = by - jnp.int32(1)
            final, on_grid = position(before)
            ended = on_grid & (by == last) & is_set(_TERMINATED_BEFORE)
            ended = ended & (before >= index - behind * jnp.int32(self.dilation))
            regular = jnp.where(ended, jnp.maximum(regular, final), regular)
        return first <= regular

    def _masks(self, near: Array) -> tuple[Array, Array, Array]:
        """Return `mask`, `is_first` and `learning_mask` bool[B, T] of windows, from the flags uint8[B, back + 1 + ahead]."""
        if self.boundary == "mask":
            return self._cut_masks(near)
        number, apart = self.length, self.dilation
        first, flags = has(near, START), near[:, ::apart]
        if apart > 1:  # an episode began since the previous row of the window
            lines = jnp.concatenate([jnp.zeros((near.shape[0], apart - 1), bool), first], axis=1)
            first = jnp.any(lines.reshape(near.shape[0], number, apart), axis=2)
        place = jnp.arange(number, dtype=jnp.int32)[None, :]
        learn = ~has(flags, RESET)
        if self.burn_in:
            begun = lax.associative_scan(jnp.logical_or, first, axis=1)
            learn = learn & (begun | (place >= jnp.int32(self.burn_in)))
        if self.bootstrap:
            terminated = lax.associative_scan(jnp.logical_or, has(flags, TERMINATED), reverse=True, axis=1)
            learn = learn & (terminated | (place < jnp.int32(number - self.bootstrap)))
        return jnp.ones(first.shape, bool), first, learn

    def _cut_masks(self, near: Array) -> tuple[Array, Array, Array]:
        """Return what `_masks` does, of windows that are cut at the ends of their episode."""
        back, ahead, apart = self.back, self.ahead, jnp.int32(self.dilation)
        age = jnp.arange(-back, ahead + 1, dtype=jnp.int32)[None, :]  # of a row, from the anchor
        row = age[:, :: self.dilation]
        unknown = jnp.int32(-back - self.dilation)  # the episode began before the window
        began = jnp.where(has(near[:, : back + 1], START), age[:, : back + 1], unknown)
        began = jnp.max(began, axis=1, keepdims=True)
        ended = jnp.where(has(near[:, back:], last_bit(self.autoreset)), age[:, back:], jnp.int32(ahead))
        ended = jnp.min(ended, axis=1, keepdims=True)
        inside = (row >= began) & (row <= ended)
        first = inside & (row < began + apart)
        learn, flags = inside, near[:, :: self.dilation]
        if self.autoreset == "next_step":
            learn = learn & ~has(flags, RESET)
        if self.burn_in:
            learn = learn & ((began > unknown) | (row >= jnp.int32(self.burn_in * self.dilation - back)))
        if self.bootstrap:  # rows after a terminated one are reset rows
            terminated = jnp.any(has(flags, TERMINATED) & inside, axis=1, keepdims=True)
            learn = learn & (terminated | (row <= ended - jnp.int32(self.bootstrap) * apart))
        return inside, first, learn

    def window(self, spec: Spec, anchors: AnchorSet, slot: Array, mask: Array, key: Array) -> Window:
        geometry, flags = anchors.geometry, anchors.flags
        assert flags is not None
        safe = jnp.where(mask, slot, jnp.int32(0))
        place = jnp.arange(self.length, dtype=jnp.int32)[None, :]
        slots = shift(geometry, safe[:, None], place * jnp.int32(self.dilation) - jnp.int32(self.back))
        if self.boundary != "stop":
            every = jnp.arange(-self.back, self.ahead + 1, dtype=jnp.int32)[None, :]
            near = flags.at[shift(geometry, safe[:, None], every)].get(mode="promise_in_bounds")
            inside, first, learn = self._masks(near)
            return _window(spec, geometry, slots, tuple(part & mask[:, None] for part in (inside, first, learn)))
        # Only the first row can begin an episode, and only the last can be a reset row; then the one before may be terminated.
        ends = (0, -1, -2) if self.bootstrap else (0, -1)
        near = flags.at[slots[:, jnp.array(ends)]].get(mode="promise_in_bounds")
        begins, last = has(near[:, :1], START), place == jnp.int32(self.length - 1)
        learn = ~(last & has(near[:, 1:2], RESET))
        if self.burn_in:
            learn = learn & ((place >= jnp.int32(self.burn_in)) | begins)
        if self.bootstrap:
            terminated = has(near[:, 1:2] | near[:, 2:], TERMINATED)
            learn = learn & ((place < jnp.int32(self.length - self.bootstrap)) | terminated)
        inside = jnp.broadcast_to(mask[:, None], slots.shape)
        first = inside & begins & (place == jnp.int32(0))
        return _window(spec, geometry, slots, (inside, first, inside & learn))


@component
class Episode(_WindowView):
    """Return whole episodes, padded: leaves `[B, T, ...]`, T = max_length; with `Uniform` every episode is equally likely.

    `batch.data` is a dict with every leaf of the rows under its own name (rows that are not a dict are whole under `row`), and

    * `mask` bool[B, T]: the row exists; other entries of missing rows are zeros;
    * `is_first` bool[B, T]: True at the first row of the episode;
    * `learning_mask` bool[B, T]: `mask` without reset rows.

    Attributes:
      max_length: T, rows of the longest episode that is drawn; with autoreset="next_step" the reset row counts.
      longer: Longer episodes: "skip", they are never drawn; "cut", they are drawn as their first T rows.
      episode_end: Names of the boolean leaves that end an episode, such as `"terminated"` or the path `"done/__all__"`.
      autoreset: Required if rows end episodes. "same_step": the row after an end is the first of the next episode.
        "next_step" (Gymnasium's default vector mode): it belongs to the episode and holds the final observation.
      episode: Name of an integer leaf that is equal in all rows of an episode (trajectory ids). A row with another id than the
        one before it begins an episode, as after `Buffer.cut`. With `episode_end=()` no flags are read.

    A priority given to `extend` with the last row of an episode becomes the priority of the episode.

    Cost: reads B T rows; O(1) for each added row.

    Example:
      >>> import fbuf
      >>> fbuf.views.Episode(200, autoreset="same_step").max_length
      200
    """

    max_length: int
    longer: Literal["skip", "cut"] = "skip"
    episode_end: tuple[str, ...] = ("terminated", "truncated")
    autoreset: Literal["same_step", "next_step"] | None = None
    episode: str | None = None

    def __post_init__(self) -> None:
        check_int("Episode", "max_length", self.max_length)
        object.__setattr__(self, "episode", None if self.episode is None else name_of(self.episode))
        object.__setattr__(self, "episode_end", _fields.checked_ends("Episode", self.episode_end))
        check_autoreset("Episode", self.autoreset, self.episode_end)
        if not self.episode_end and self.episode is None:
            raise ValueError("Episode: episode_end is (); expected at least one name, or episode='id'.")

    def on_host(self, spec: Spec, structure: Any) -> HostEpisode | None:
        """Return these windows in NumPy; None with ids."""
        return HostEpisode(self, spec, structure) if self.episode is None else None

    def learnt(self, flags: np.ndarray) -> np.ndarray:
        """Return which rows of uint8[L, E], in order of arrival, belong to an episode that can be drawn."""
        last = last_bit(self.autoreset)
        return learnt(flags, length=self.max_length, burn_in=0, bootstrap=0, dilation=1, at=0, last_bit=last)

    @property
    def rule(self) -> AnchorRule:
        length = self.max_length
        resets = self.autoreset == "next_step"
        return AnchorRule(
            f"episode-{self.longer}", ahead=length - 1, reset_rows=resets, window=length, episode=self.episode
        )

    def opens(self, step: Array, flags: Array, before: Array) -> tuple[Array, Array]:
        room = jnp.int32(self.max_length) - step
        opens = has(flags, last_bit(self.autoreset)) & (room > jnp.int32(0))
        if self.longer == "cut":
            opens = opens | (room == jnp.int32(1))
        return step, opens & ~(has(flags, RESET) & has(before, RESET))

    def window(self, spec: Spec, anchors: AnchorSet, slot: Array, mask: Array, key: Array) -> Window:
        geometry, flags = anchors.geometry, anchors.flags
        assert flags is not None
        safe = jnp.where(mask, slot, jnp.int32(0))
        slots = shift(geometry, safe[:, None], jnp.arange(self.max_length, dtype=jnp.int32)[None, :])
        near = flags.at[slots].get(mode="promise_in_bounds")
        ends = lax.associative_scan(jnp.logical_or, has(near, last_bit(self.autoreset)), axis=1)
        inside = jnp.concatenate([jnp.ones((near.shape[0], 1), bool), ~ends[:, :-1]], axis=1) & mask[:, None]
        first = inside & (jnp.arange(self.max_length, dtype=jnp.int32) == jnp.int32(0))[None, :]
        return _window(spec, geometry, slots, (inside, first, inside & ~has(near, RESET)))


def _window(spec: Spec, geometry: Geometry, slots: Array, masks: tuple[Array, ...]) -> Window:
    """Return reads of all leaves at slots int32[B, T] where the first of the masks is True."""
    slots = jnp.where(masks[0], slots, jnp.int32(geometry.capacity))
    return Window(tuple(Read(name, slots) for name in spec), masks)
