"""`Sequence`: windows of successive rows of one lane, for recurrent learners and world models.

Rows are stored once; a window is read from wherever it begins. Whether it may is decided as rows arrive
(`fbuf._indexing.anchors`), so that a draw costs O(B T) whatever the capacity, and every window that can be drawn is as likely
as every other.

Cutting the stream into fixed pieces before storing was rejected: it stores overlapping windows several times, and fixes
length and stride for the life of the data. Drawing any window and throwing away those that cross an end was, too: it takes
an unbounded number of tries, or is biased.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec
from fbuf._indexing import ring
from fbuf._indexing.anchors import RESET, START, has
from fbuf._interfaces.sampler import EligibleSet
from fbuf._interfaces.storage import Read
from fbuf._interfaces.view import EligibilityRule, Window
from fbuf.views._fields import check_autoreset, check_window_rows, checked_ends, last_bit, whole_rows


@component
class Sequence:
    """Batches are windows of `length` rows: leaves `[B, T, ...]`, T = length.

    `batch.data` is a dict with every leaf of the rows under its own name, and

    * `mask` bool[B, T]: a row lies there; what is False is zeros everywhere else;
    * `is_first` bool[B, T]: the row begins an episode (with `dilation`: one began since the row before);
    * `learning_mask` bool[B, T]: to be learned from: there, after the burn-in, before what is kept for bootstrapping, and no
      reset row.

    Attributes:
      length: T >= 1, rows of a window; burn-in and bootstrap rows are among them.
      burn_in: First rows of a window, which only warm a recurrent state up.
      bootstrap: Last rows of a window, which only give the values that others bootstrap from.
      stride: An episode's anchors are so many rows apart, from its first row on (with "cross": a lane's).
      dilation: Rows of a window are so many apart.
      boundary: At an episode's end: "stop", windows lie within one episode, and those of episodes too short for one are
        not drawn; "mask", a window of every row, cut at the ends of its episode; "cross", windows run on across ends.
      at: With "mask": where in its window the anchor lies. 0: windows begin at a row and are cut on the right, down to
        one row; length - 1: they end at a row and are cut on the left; between: on either side. Of episodes of T rows and
        more, windows have at least at + 1 rows at the end and length - at at the beginning.
      episode_end: Names of the boolean leaves of which any ends an episode; `()`: there are no episodes.
      autoreset: "same_step": the row after an end is the first of the next episode; "next_step" (Gymnasium's default
        vector mode): the row after an end still belongs to the episode; it holds the final observation.

    A priority given to `extend` with the row that completes a window becomes the window's.

    Cost: reads B T rows ("mask" and "cross" look at B T dilation flags); one anchor at most for each row added ("mask": as
    many of the last rows as lie ahead of an anchor are looked at again).

    Example:
      >>> import fbuf
      >>> fbuf.views.Sequence(80, burn_in=40, stride=40).length
      80
    """

    length: int
    burn_in: int = 0
    bootstrap: int = 0
    stride: int = 1
    dilation: int = 1
    boundary: str = "stop"
    at: int = 0
    episode_end: tuple[str, ...] = ("terminated", "truncated")
    autoreset: str = "same_step"

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("burn_in", 0), ("bootstrap", 0), ("stride", 1), ("dilation", 1), ("at", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Sequence: {name} is {value!r}; expected an int >= {least}.")
        if self.stride >= 2**29:
            raise ValueError(f"Sequence: stride is {self.stride}; expected less than 2^29 (rows are counted in int32).")
        if self.burn_in + self.bootstrap >= self.length:
            least = self.burn_in + self.bootstrap + 1
            raise ValueError(
                f"Sequence: burn_in={self.burn_in} and bootstrap={self.bootstrap} leave nothing to learn from in length="
                f"{self.length} (they are among its rows). Use length={least} or more."
            )
        if self.boundary not in ("stop", "mask", "cross"):
            raise ValueError(f'Sequence: boundary is {self.boundary!r}; expected "stop", "mask" or "cross".')
        if self.at and (self.boundary != "mask" or self.at >= self.length):
            raise ValueError(
                f"Sequence: at is {self.at}; expected 0, or with boundary='mask' less than length={self.length}."
            )
        check_autoreset("Sequence", self.autoreset)
        object.__setattr__(self, "episode_end", checked_ends("Sequence", self.episode_end))

    @property
    def back(self) -> int:
        """Rows from a window's first to its anchor."""
        return self.at * self.dilation

    @property
    def ahead(self) -> int:
        """Rows from a window's anchor to its last."""
        return (self.length - 1 - self.at) * self.dilation

    @property
    def rule(self) -> EligibilityRule:
        return EligibilityRule(
            self.boundary,
            self.back,
            self.ahead,
            prompt=self.boundary != "mask",
            stride=self.stride,
            crosses=self.boundary == "cross",
            reset_rows=self.autoreset == "next_step",
            window=self.length,
        )

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        return self.episode_end, None

    def check(self, spec: Spec) -> None:
        check_window_rows("Sequence", self.episode_end, spec)

    def opens(self, step: jax.Array, flags: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = step - jnp.int32(self.ahead)
        opens = (first >= jnp.int32(0)) & (first % jnp.int32(self.stride) == jnp.int32(0))
        if self.boundary == "stop":  # nothing comes after a reset row, which is no window of its own either
            opens = opens & ~has(before if self.ahead else flags, RESET)
        return jnp.full_like(step, self.ahead), opens

    def decide(
        self, flags: jax.Array, available: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        index = jnp.arange(flags.shape[0], dtype=jnp.int32)[:, None]
        last = jnp.where(has(flags, last_bit(self.autoreset)), index, jnp.int32(2**30))
        # the row that completes the window: its last, or that of the episode
        by = jnp.minimum(lax.cummin(last, axis=0, reverse=True), index + jnp.int32(self.ahead))
        drawable = (step % jnp.int32(self.stride) == jnp.int32(0)) & ~has(flags, RESET)
        return by < available[None, :], drawable, jnp.minimum(by, jnp.int32(flags.shape[0] - 1))

    def window(
        self,
        spec: Spec,
        eligible: EligibleSet,
        slot: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> Window:
        geometry, flags = eligible.geometry, eligible.flags
        assert flags is not None
        number, apart = self.length, self.dilation
        safe = jnp.where(mask, slot, jnp.int32(0))
        offset = jnp.arange(number, dtype=jnp.int32)[None, :] * jnp.int32(apart) - jnp.int32(self.back)
        slots = ring.shift(geometry, safe[:, None], offset)
        if self.boundary == "stop":
            # Nothing but the first row can begin an episode, nothing but the last be a reset row.
            near = flags.at[slots[:, jnp.array([0, -1])]].get(mode="promise_in_bounds")
            within = jnp.ones(slots.shape, bool)
            first = jnp.zeros(slots.shape, bool).at[:, 0].set(has(near[:, 0], START))
            reset = jnp.zeros(slots.shape, bool).at[:, -1].set(has(near[:, 1], RESET))
        else:
            every = jnp.arange(-self.back, self.ahead + 1, dtype=jnp.int32)[None, :]
            near = flags.at[ring.shift(geometry, safe[:, None], every)].get(mode="promise_in_bounds")
            within = jnp.ones(near.shape, bool)
            if self.boundary == "mask":
                behind = has(near[:, 1 : self.back + 1], START)
                began = lax.associative_scan(jnp.logical_or, behind, reverse=True, axis=1) if self.back else behind
                ends = has(near[:, self.back : -1], last_bit(self.autoreset))
                ended = lax.associative_scan(jnp.logical_or, ends, axis=1) if self.ahead else ends
                within = jnp.concatenate([~began, jnp.ones((near.shape[0], 1), bool), ~ended], axis=1)
            starts = has(near, START) & within
            if apart > 1:  # since the row of the window before
                lines = jnp.concatenate([jnp.zeros((near.shape[0], apart - 1), bool), starts], axis=1)
                first = jnp.any(lines.reshape(near.shape[0], number, apart), axis=2)
            else:
                first = starts
            within, reset = within[:, ::apart], has(near[:, ::apart], RESET)
        there = within & mask[:, None]
        place_in = jnp.arange(number, dtype=jnp.int32)[None, :]
        learn = (place_in >= jnp.int32(self.burn_in)) & (place_in < jnp.int32(number - self.bootstrap))
        slots = jnp.where(there, slots, jnp.int32(geometry.capacity))
        reads = tuple(Read(name, slots) for name in spec)
        return Window(reads, (there, first & there, learn & there & ~reset))

    def assemble(self, spec: Spec, structure: Any, arrays: Several[jax.Array], window: Window) -> PyTree:
        return whole_rows(structure, spec, arrays, window.context)
