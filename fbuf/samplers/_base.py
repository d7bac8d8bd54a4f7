r"""What samplers share: masked and uniform draws, and importance weights :math:`(n P(i))^{-\beta}`.

`PrioritySampler` has what `Prioritized` and `Ranked` have in common. Weights are finite for any annealed numbers.

Source: Schaul et al. 2016, "Prioritized Experience Replay", section 3.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._algorithms import random
from fbuf._core import control_flow
from fbuf._core.slots import Geometry, sum_of_lanes
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._indexing.anchors import nth_anchor
from fbuf._interfaces.sampler import AnchorChange, AnchorSet, Draw, Sampler
from fbuf._members import weights

_FEW = 31  # rows of a lane, whose slots a GPU compares within the kernel that writes them
LARGEST = float(np.finfo(np.float32).max)


class LogSampler(Sampler):
    """A sampler that finds its anchors in their log, whose order does not depend on how rows were grouped."""

    by_rank = True

    def row_by_row(self, dense: bool) -> bool:
        return True


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


def with_numbers(state: S, **values: Array) -> S:
    """Return the state of a priority sampler with other `numbers`."""
    any_state: Any = state
    numbers = any_state.numbers
    for name, value in values.items():
        here = lax.iota(np.int32, numbers.shape[-1]) == jnp.int32(vars(type(state))[name].place)
        numbers = jnp.where(here, value, numbers)
    return dataclasses.replace(any_state, numbers=numbers)


def with_larger(state: S, priority: Array) -> S:
    """Return the state of a priority sampler whose `max_priority` is at least `priority` float32[]."""
    any_state: Any = state
    numbers = any_state.numbers
    here = lax.iota(np.int32, numbers.shape[-1]) == jnp.int32(vars(type(state))["max_priority"].place)
    return dataclasses.replace(any_state, numbers=jnp.where(here, jnp.maximum(numbers, priority), numbers))


class PrioritySampler(LogSampler):
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

    def row_by_row(self, dense: bool) -> bool:
        # A window may end without another in its place: the largest priority held may then fall between two rows.
        return dense or vars(self)["largest"] == "seen"

    def stats(self, sampler: Any) -> dict[str, Array]:
        # Scalars of the state only: reading a tree here would make a later write in the same step copy it.
        return {"max_priority": sampler.max_priority, "alpha": sampler.alpha, "beta": sampler.beta}

    def __post_init__(self) -> None:
        """Convert numbers to Python floats and raise ValueError for an invalid field."""
        values, kind = vars(self), type(self).__name__
        for name in self.annealed:
            value, most = values[name], self.most.get(name, float("inf"))
            if value is None and name == "uniform":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and 0 <= value <= most and value < float("inf")):
                what = "finite Python number >= 0" if most > 1 else "Python number from 0 to 1"
                raise ValueError(f"{kind}: {name} is {value!r}; expected a {what}. Anneal it with buffer.set.")
            object.__setattr__(self, name, float(value))

    def set(self, sampler: Any, **numbers: Any) -> Any:
        return with_numbers(sampler, **numbers)

    def _initial_numbers(self) -> Array:
        """Return the numbers of a new state: `max_priority`, which is 1, and those of `annealed` that are not None."""
        values = vars(self)
        return jnp.asarray([1.0, *(values[name] for name in self.annealed if values[name] is not None)], jnp.float32)

    def _initial_queue(self, geometry: Geometry, dense: bool) -> AnchorQueue | None:
        """Return the queue that uniform draws need, if any."""
        return anchor_log.init(geometry, dense or vars(self)["uniform"] is None)


def masked_draw(slot: Array, probability: Array, mask: Array, geometry: Geometry, weight: Array | None = None) -> Draw:
    """Return a draw with slot C and probability 0 where `mask` is False; weights are 1 unless given."""
    return Draw(
        slot=jnp.where(mask, slot, jnp.int32(geometry.capacity)),
        probability=jnp.where(mask, probability, jnp.float32(0)),
        weight=mask.astype(jnp.float32) if weight is None else weight,
        mask=mask,
    )


def written_slots(change: AnchorChange, capacity: int) -> tuple[Array, Array, Array | None]:
    """Return slots int32[K + A] that close, then those that open, C for none.

    Also return bool[A], which of the opened ones were given a priority, and the largest given priority, float32[]; None if it
    is known while tracing that there is none.
    """
    closed = jnp.where(change.close_mask, change.close_slot, jnp.int32(capacity))
    opened = jnp.where(change.open_mask, change.open_slot, jnp.int32(capacity))
    has_priority = change.priority >= jnp.float32(0)
    largest = None
    if not isinstance(change.priority, np.ndarray):
        largest = jnp.max(jnp.where(has_priority & change.open_mask, change.priority, jnp.float32(0)), initial=0.0)
    return jnp.concatenate([closed.reshape(-1), opened.reshape(-1)]), has_priority.reshape(-1), largest


def without_reopened(change: AnchorChange, capacity: int) -> AnchorChange | None:
    """Return a change whose slots are all different on accelerators: a slot that closes and opens only opens.

    None: they may repeat, or comparing them takes longer than sorting them. CPUs write slots in turn.
    """
    rows = change.open_slot.shape[0]
    if rows > _FEW:
        return None

    def none(closed: Array) -> Array:
        return closed

    def reopened(closed: Array) -> Array:
        opened = jnp.where(change.open_mask, change.open_slot, jnp.int32(capacity))
        again = jnp.any(change.close_slot[:, None] == opened[None], axis=1)
        return closed & ~again

    closed = control_flow.platform_dependent(change.close_mask, cpu=none, default=reopened)
    return dataclasses.replace(change, close_mask=closed)


def largest_written(slot: Array, priority: Array, capacity: int) -> Array:
    """Return the largest priority of the slots below C, float32[]; 0 if there are none."""
    return jnp.max(jnp.where(slot < jnp.int32(capacity), priority, jnp.float32(0)), initial=0.0)


def importance_weights(
    number: Array, chance: Array, mask: Array, beta: Array, normalize: str | None, least: Array
) -> Array:
    """Return importance weights float32[B], 0 where `mask` is False.

    Args:
      number: float32[], anchors.
      chance: float32[B], probability of each row in one draw.
      mask: bool[B].
      beta: float32[], clipped by `weights.finite_exponent`.
      normalize: Divide by the largest in the "batch", the largest possible in the "buffer", or not at all (None).
      least: float32[], the smallest probability of any row; for "buffer".
    """
    weight = weights.weigh(number * chance, mask, beta)
    if normalize is None:
        return weight
    if normalize == "batch":
        return weights.normalized(weight, jnp.max(weight))
    return weights.normalized(
        weight, weights.importance(number * jnp.where(jnp.any(mask), least, jnp.float32(1)), beta)
    )


def clip_unit(share: Array) -> Array:
    """Clip an annealed number to [0, 1]; NaN becomes 0."""
    return jnp.where(share >= jnp.float32(0), jnp.minimum(share, jnp.float32(1)), jnp.float32(0))


def uniform_mask(key: Array, share: Array, batch_size: int, *, spread: bool) -> Array:
    """Return bool[B], the rows of a batch to draw uniformly, each with probability `share` float32[] in [0, 1].

    `spread`: any m successive rows contain `share * m` of them, plus or minus one; else rows are independent. Shares are
    counted in units of 2^-32, because float32 cannot distinguish `share` times successive large row numbers.
    """
    step = (jnp.minimum(share, jnp.float32(1 - 2**-24)) * jnp.float32(2**32)).astype(jnp.uint32)
    if spread:
        start = random.pairs(key, 1, random.SHARE)[0]
        before = start + jnp.arange(batch_size, dtype=jnp.uint32) * step
        chosen = before + step < before  # past 2^32
    else:
        chosen = random.pairs(key, batch_size, random.SHARE)[0] < step
    return chosen | (share >= jnp.float32(1))


def draw_uniform(
    key: Array, anchors: AnchorSet, queue: AnchorQueue | None, wanted: Array, *, distinct: bool = False
) -> Array:
    """Draw slots int32[B] of anchors uniformly; `distinct`: without repeats, meaningful for the first n rows.

    Cost: O(B) with a queue or counts, or if every row is an anchor; else O(C), unless no row is `wanted` bool[B].
    """
    batch_size = wanted.shape[0]
    total = sum_of_lanes(anchors.counts)
    if distinct:
        nth = random.permute(random.key_words(key), jnp.arange(batch_size, dtype=jnp.int32), total)
        nth = jnp.minimum(nth, jnp.maximum(total - jnp.int32(1), jnp.int32(0)))
    else:
        nth = random.randint_below(key, (batch_size,), total)
    if queue is None and anchors.flags is not None and anchors.before is None:
        return nth_anchor(anchors.flags, nth, wanted)
    return anchor_log.nth(queue, anchors, nth)


def mix_uniform(
    slot: Array,
    key: Array,
    share: Array,
    anchors: AnchorSet,
    queue: AnchorQueue | None,
    wanted: Array,
    *,
    stratified: bool,
) -> Array:
    """Replace a `share` float32[] in [0, 1] of the slots int32[B] by uniform draws; `wanted` bool[B]: there are anchors."""
    batch_size = slot.shape[0]
    replaced = uniform_mask(key, share, batch_size, spread=stratified)
    return jnp.where(replaced, draw_uniform(key, anchors, queue, wanted), slot)


def mixed_probability(probability: Array, share: Array | None, number: Array) -> Array:
    """Return probabilities where a `share` float32[] (None: 0) of draws is uniform over `number` float32[] anchors."""
    if share is None:
        return probability
    share = clip_unit(share)
    return (jnp.float32(1) - share) * probability + share / jnp.maximum(number, jnp.float32(1))
