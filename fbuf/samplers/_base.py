"""Share defaults of the samplers: methods that do nothing, masked draws, and what `Prioritized` and `Ranked` have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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


class Number:
    """One of a state's `numbers` float32[k], as an attribute float32[]; None beyond the last."""

    def __init__(self, place: int):
        self.place = place

    def __get__(self, state: Any, owner: Any) -> Any:
        if state is None:
            return self
        numbers = state.numbers
        return None if self.place >= numbers.shape[-1] else lax.index_in_dim(numbers, self.place, -1, keepdims=False)


S = TypeVar("S")


def with_numbers(state: S, **values: jax.Array) -> S:
    """Return the state of a priority sampler with other `numbers`."""
    any_state: Any = state
    numbers = any_state.numbers
    for name, value in values.items():
        here = lax.iota(np.int32, numbers.shape[-1]) == jnp.int32(vars(type(state))[name].place)
        numbers = jnp.where(here, value, numbers)
    after: S = dataclasses.replace(any_state, numbers=numbers)
    return after


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
                raise ValueError(f"{kind}: {name} is {value!r}; expected a {what}. Anneal it with buffer.set.")
            object.__setattr__(self, name, float(value))

    def set(self, sampler: Any, **numbers: Any) -> Any:
        return with_numbers(sampler, **numbers)

    def _initial_numbers(self) -> jax.Array:
        """Return the numbers of a new state: `max_priority`, which is 1, and those of `annealed` that are not None."""
        own = vars(self)
        return jnp.asarray([1.0, *(own[name] for name in self.annealed if own[name] is not None)], jnp.float32)

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
