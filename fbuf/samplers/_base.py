"""Share defaults of the samplers: methods that do nothing, masked draws, and what `Prioritized` and `Ranked` have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.geometry import Geometry
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._interfaces.sampler import NO_NUMBERS, Draw, EligibilityUpdate, EligibleSet


class BaseSampler:
    """Define the methods of a sampler that has no priorities and keeps nothing on the host."""

    prioritized = False
    by_rank = True

    @property
    def numbers(self) -> Mapping[str, Any]:
        return NO_NUMBERS

    @property
    def options(self) -> Mapping[str, Any]:
        return NO_NUMBERS

    @property
    def by_episode(self) -> bool:
        return False

    @property
    def stamp(self) -> str | None:
        return None

    def update(self, sampler: Any, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array) -> Any:
        return sampler

    def set(self, sampler: Any, **numbers: Any) -> Any:
        return dataclasses.replace(sampler, **numbers)

    def clear(self, sampler: Any, geometry: Geometry, dense: bool) -> Any:
        own: Any = self
        return self.set(own.init(geometry, dense), **{name: getattr(sampler, name) for name in self.numbers})

    def available(self, sampler: Any, count: jax.Array) -> jax.Array:
        return count


class LimitedSampler(BaseSampler):
    """Define `draw` of a sampler with `draw_some`."""

    draw_some: Any

    def draw(
        self,
        sampler: Any,
        key: jax.Array,
        batch_size: int,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[Any, Draw]:
        drawn: tuple[Any, Draw] = self.draw_some(
            sampler, key, batch_size, jnp.int32(batch_size), eligible, options, token
        )
        return drawn


class PrioritySampler(BaseSampler):
    """Define the fields and numbers that `Prioritized` and `Ranked` share."""

    annealed: tuple[str, ...] = ()
    prioritized = True
    most = {"uniform": 1.0}

    @property
    def numbers(self) -> Mapping[str, Any]:
        """All annealed numbers but a `uniform` of None."""
        return dict.fromkeys((name for name in self.annealed if getattr(self, name) is not None), np.float32)

    @property
    def options(self) -> Mapping[str, Any]:
        return dict.fromkeys((name for name in ("beta", "uniform") if name in self.numbers), np.float32)

    def stats(self, sampler: Any) -> dict[str, jax.Array]:
        # Scalars of the state only: reading a tree here would make a later write in the same step copy it.
        return {"max_priority": sampler.max_priority, "alpha": sampler.alpha, "beta": sampler.beta}

    def _check(self) -> None:
        """Convert numbers to Python floats and raise ValueError for an invalid field."""
        own, kind = vars(self), type(self).__name__
        for name in self.annealed:
            value, most = own[name], self.most.get(name, float("inf"))
            if value is None and name == "uniform":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and 0 <= value <= most and value < float("inf")):
                what = "finite Python number >= 0" if most > 1 else "Python number from 0 to 1"
                raise ValueError(
                    f"{kind}: {name} is {value!r}; expected a {what}. Anneal it with buffer.set(state, {name}=...)."
                )
            object.__setattr__(self, name, float(value))

    def _initial_numbers(self) -> dict[str, Any]:
        """Return the numbers of a new state, None for a `uniform` of None."""
        own = vars(self)
        return {name: None if own[name] is None else jnp.full((), own[name], jnp.float32) for name in self.annealed}

    def _initial_queue(self, geometry: Geometry, dense: bool) -> AnchorQueue | None:
        """Return the queue that uniform draws need, if any."""
        return None if vars(self)["uniform"] is None or dense else anchor_log.init(geometry, dense)


def masked_draw(
    slot: jax.Array, probability: jax.Array, mask: jax.Array, geometry: Geometry, weight: jax.Array | None = None
) -> Draw:
    """Return a draw with slot C and probability 0 where `mask` is False; weights are 1 unless given."""
    return Draw(
        slot=jnp.where(mask, slot, jnp.int32(geometry.capacity)),
        probability=jnp.where(mask, probability, jnp.float32(0)),
        weight=mask.astype(jnp.float32) if weight is None else weight,
        mask=mask,
    )


def written_slots(change: EligibilityUpdate, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return slots int32[K + A] that close, then those that open, C for none.

    Also return bool[A], which of the opened ones were given a priority, and the largest given priority, float32[].
    """
    closed = jnp.where(change.close_mask, change.close_slot, jnp.int32(capacity))
    opened = jnp.where(change.open_mask, change.open_slot, jnp.int32(capacity))
    given = change.priority >= jnp.float32(0)
    largest = jnp.max(jnp.where(given & change.open_mask, change.priority, jnp.float32(0)), initial=0.0)
    return jnp.concatenate([closed.reshape(-1), opened.reshape(-1)]), given.reshape(-1), largest


def largest_written(slot: jax.Array, priority: jax.Array, capacity: int) -> jax.Array:
    """Return the largest priority of the slots below C, float32[]; 0 if there are none."""
    return jnp.max(jnp.where(slot < jnp.int32(capacity), priority, jnp.float32(0)), initial=0.0)
