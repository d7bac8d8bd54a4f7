"""`Episode`: whole episodes, padded to a fixed length.

An episode becomes drawable with its last row, and stops being so when its first is overwritten. Its anchor is its first row.
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
from fbuf._indexing.anchors import RESET, has
from fbuf._interfaces.sampler import EligibleSet
from fbuf._interfaces.storage import Read
from fbuf._interfaces.view import EligibilityRule, Window
from fbuf.views._fields import check_autoreset, check_window_rows, checked_ends, last_bit, whole_rows


@component
class Episode:
    """Batches are whole episodes: leaves `[B, T, ...]`, T = max_length; with `Uniform` every episode is as likely as any.

    `batch.data` is a dict with every leaf of the rows under its own name, and

    * `mask` bool[B, T]: a row of the episode lies there; what is False is zeros everywhere else;
    * `is_first` bool[B, T]: the row begins the episode: the first;
    * `learning_mask` bool[B, T]: `mask` without reset rows.

    Attributes:
      max_length: T, rows of the longest episode that is drawn; with autoreset="next_step" the reset row counts.
      longer: What becomes of longer ones: "skip", they are never drawn; "cut", they are drawn as their first T rows.
      episode_end: Names of the boolean leaves of which any ends an episode.
      autoreset: "same_step": the row after an end is the first of the next episode; "next_step" (Gymnasium's default
        vector mode): the row after an end still belongs to the episode; it holds the final observation.

    A priority given to `extend` with an episode's last row becomes the episode's.

    Cost: reads B T rows; O(1) a row added.

    Example:
      >>> import fbuf
      >>> fbuf.views.Episode(200).max_length
      200
    """

    max_length: int
    longer: str = "skip"
    episode_end: tuple[str, ...] = ("terminated", "truncated")
    autoreset: str = "same_step"

    def __post_init__(self) -> None:
        if not isinstance(self.max_length, int) or isinstance(self.max_length, bool) or self.max_length < 1:
            raise ValueError(f"Episode: max_length is {self.max_length!r}; expected an int >= 1.")
        if self.longer not in ("skip", "cut"):
            raise ValueError(f'Episode: longer is {self.longer!r}; expected "skip" or "cut".')
        check_autoreset("Episode", self.autoreset)
        object.__setattr__(self, "episode_end", checked_ends("Episode", self.episode_end))
        if not self.episode_end:
            raise ValueError("Episode: episode_end is (); expected at least one name, as nothing else ends an episode.")

    @property
    def rule(self) -> EligibilityRule:
        length = self.max_length
        resets = self.autoreset == "next_step"
        return EligibilityRule(f"episode-{self.longer}", ahead=length - 1, reset_rows=resets, window=length)

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        return self.episode_end, None

    def check(self, spec: Spec) -> None:
        check_window_rows("Episode", self.episode_end, spec)

    def opens(self, step: jax.Array, flags: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        room = jnp.int32(self.max_length) - step
        opens = has(flags, last_bit(self.autoreset)) & (room > jnp.int32(0))
        if self.longer == "cut":
            opens = opens | (room == jnp.int32(1))
        return step, opens & ~(has(flags, RESET) & has(before, RESET))

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
        safe = jnp.where(mask, slot, jnp.int32(0))
        slots = ring.shift(geometry, safe[:, None], jnp.arange(self.max_length, dtype=jnp.int32)[None, :])
        near = flags.at[slots].get(mode="promise_in_bounds")
        ends = lax.associative_scan(jnp.logical_or, has(near, last_bit(self.autoreset)), axis=1)
        there = jnp.concatenate([jnp.ones((near.shape[0], 1), bool), ~ends[:, :-1]], axis=1) & mask[:, None]
        first = there & (jnp.arange(self.max_length, dtype=jnp.int32) == jnp.int32(0))[None, :]
        slots = jnp.where(there, slots, jnp.int32(geometry.capacity))
        reads = tuple(Read(name, slots) for name in spec)
        return Window(reads, (there, first, there & ~has(near, RESET)))

    def assemble(self, spec: Spec, structure: Any, arrays: Several[jax.Array], window: Window) -> PyTree:
        return whole_rows(structure, spec, arrays, window.context)
