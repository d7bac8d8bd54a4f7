"""Track rows in any slot, for writers that choose slots (`fbuf._interfaces.writer.Scattering`).

Every row has a number by arrival in two words, because a row may stay while more than 2^32 others arrive. It gives the order of
arrival, and its low word is the generation. Empty slots are filled in order, so held rows occupy slots 0 to n - 1. The rings of
the lanes say the same, so counting and uniform draws work unchanged.

Writes change the array of numbers in place, so methods with a token order its reads before writes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fbuf._algorithms.sum_tree import keep_last
from fbuf._core import control_flow
from fbuf._core.component import state
from fbuf._core.control_flow import any_unbatched
from fbuf._core.pytree import Leaves, Spec
from fbuf._core.slots import Geometry, Ring, next_lap, where_written
from fbuf._interfaces.writer import Scattering


@state
class Scatter:
    """Hold the number of the row in each slot, and the state of the writer."""

    number: Array  # uint32[C, 2], low word from 1, high word; 0, 0: empty
    newest: Array  # uint32[2], the last number assigned
    own: Any  # state of the writer


class Choice(NamedTuple):
    """Where rows go; the last of several for one slot is written."""

    slot: Array  # int32[N, E]; out of range and all different where nothing is written
    filled: Array  # int32[], empty slots that get a row
    own: Any  # state of the writer
    refused: Array  # uint32[], rows that would leave an empty slot before them


def init(writer: Scattering, geometry: Geometry, spec: Spec) -> Scatter:
    """Make an empty state."""
    return Scatter(
        number=jnp.zeros((geometry.capacity, 2), jnp.uint32),
        newest=jnp.zeros((2,), jnp.uint32),
        own=writer.init(geometry, spec),
    )


def clear(scatter: Scatter, writer: Scattering, geometry: Geometry, spec: Spec) -> Scatter:
    """Remove all rows; every earlier index becomes stale."""
    return Scatter(jnp.zeros_like(scatter.number), scatter.newest, writer.clear(scatter.own, geometry, spec))


def size(ring: Ring) -> Array:
    """Return the rows held, int32[]."""
    return jnp.sum(ring.size, dtype=jnp.int32)


def choose(
    writer: Scattering, geometry: Geometry, scatter: Scatter, ring: Ring, leaves: Leaves, mask: Array | None
) -> Choice:
    """Choose slots for rows, leaves `[N, E, ...]`."""
    shape = next(iter(leaves.values())).shape[:2]
    keep = jnp.ones(shape, bool) if mask is None else mask
    before, capacity = size(ring), jnp.int32(geometry.capacity)
    chosen: Any = writer.choose(scatter.own, geometry, before, leaves, keep)
    if not isinstance(chosen, tuple) or len(chosen) != 2:
        raise TypeError(f"{type(writer).__name__}.choose returned a {type(chosen).__name__}; expected slots and state.")
    chosen_slot, writer_state = chosen
    _check_choice(writer, chosen_slot, shape)
    inside = keep & (chosen_slot >= jnp.int32(0)) & (chosen_slot < capacity)
    wanted = jnp.where(inside, chosen_slot, capacity).reshape(-1)
    last = functools.partial(keep_last, below=geometry.capacity + 1)
    # Skip each sort if it has nothing to do: full buffers, and writes that keep no row, are common.
    final = (wanted < capacity) & control_flow.cond(
        any_unbatched(inside), last, lambda w: jnp.zeros(w.shape, bool), wanted
    )
    named = jnp.where(final & (wanted >= before), wanted, capacity)
    filled = control_flow.cond(
        any_unbatched(before < capacity),
        _count_filled,
        lambda named, before, capacity: jnp.int32(0),
        named,
        before,
        capacity,
    )
    taken = final & (wanted < before + filled)
    slot = where_written(taken, wanted, geometry.capacity)
    return Choice(slot.reshape(shape), filled, writer_state, jnp.sum(final & ~taken, dtype=jnp.uint32))


def place(
    writer: Scattering,
    geometry: Geometry,
    scatter: Scatter,
    ring: Ring,
    choice: Choice,
    failed: Array | None,
    token: Array,
) -> tuple[Array, Ring, Scatter]:
    """Return slots int32[N, E], rings and state after a write of rows; as before it if `failed` bool[]: no row was stored."""
    slot, filled = choice.slot.reshape(-1), choice.filled
    if failed is not None:
        nowhere = jnp.int32(geometry.capacity) + jnp.arange(slot.shape[0], dtype=jnp.int32)
        slot, filled = jnp.where(failed, nowhere, slot), jnp.where(failed, jnp.int32(0), filled)
    taken = slot < jnp.int32(geometry.capacity)
    settled = writer.settle(geometry, scatter.own, choice.own, None)
    _check_state(writer, scatter.own, settled)
    if failed is not None:
        settled = writer.settle(geometry, scatter.own, choice.own, failed)
    low = next_lap(scatter.newest[0], jnp.cumsum(taken, dtype=jnp.uint32))  # never 0
    high = scatter.newest[1] + (low < scatter.newest[0]).astype(jnp.uint32)
    number = scatter.number.at[slot + token].set(jnp.stack([low, high], axis=-1), mode="drop", unique_indices=True)
    after = Scatter(number, jnp.stack([low[-1], high[-1]]), settled)
    return slot.reshape(choice.slot.shape), _filled_ring(ring, geometry, size(ring) + filled), after


def _count_filled(named: Array, before: Array, capacity: Array) -> Array:
    """Return how many empty slots from `before` on are filled, int32[]: the named ones before the first gap."""
    fresh = lax.sort(named, is_stable=False)
    order = jnp.arange(named.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.cumprod((fresh == before + order) & (fresh < capacity), dtype=jnp.int32), dtype=jnp.int32)


def _check_choice(writer: Scattering, slot: Any, shape: tuple[int, ...]) -> None:
    """Raise unless `choose` returned slots int32 of this shape."""
    if getattr(slot, "shape", None) != shape or getattr(slot, "dtype", None) != jnp.int32:
        came = f"{slot.dtype}{list(slot.shape)}" if hasattr(slot, "dtype") else type(slot).__name__
        raise TypeError(f"Buffer.extend: {writer!r}.choose returned slots {came}; expected int32{list(shape)}.")


def _check_state(writer: Scattering, before: Any, after: Any) -> None:
    """Raise unless the writer's state is like the one before."""

    def spec(tree: Any) -> Any:
        return jax.tree.structure(tree), [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]

    if spec(before) != spec(after):
        raise TypeError(f"{writer!r}.choose returned a state of {spec(after)[1]}; expected {spec(before)[1]}.")


def _filled_ring(ring: Ring, geometry: Geometry, number: Array) -> Ring:
    """Return the rings of lanes whose first slots hold `number` int32[] rows in all."""
    lane = jnp.arange(geometry.lanes, dtype=jnp.int32)
    lanes = jnp.int32(geometry.lanes)
    size = (number - lane + lanes - jnp.int32(1)) // lanes
    return Ring(cursor=size % jnp.int32(geometry.length), size=size, lap=ring.lap)


def generation(scatter: Scatter, slot: Array) -> Array:
    """Return the generation of each slot, uint32; 0 for empty slots and out of range."""
    inside = (slot >= jnp.int32(0)) & (slot < jnp.int32(scatter.number.shape[0]))
    at = jnp.where(inside, slot, jnp.int32(0))
    return jnp.where(inside, scatter.number.at[at, 0].get(mode="promise_in_bounds"), jnp.uint32(0))


def rows_written(scatter: Scatter) -> Array:
    """Return the rows ever written, uint32[]; 2^32 - 1 for that many or more."""
    return jnp.where(scatter.newest[1] == jnp.uint32(0), scatter.newest[0], jnp.uint32(2**32 - 1))


def by_age(scatter: Scatter) -> Array:
    """Return all slots in order of arrival, int32[C], oldest first, empty ones last. Cost: a sort."""
    low, high = scatter.number[:, 0], scatter.number[:, 1]
    empty = low == jnp.uint32(0)
    slot = lax.iota(jnp.int32, low.shape[0])
    return lax.sort((empty.astype(jnp.uint32), high, low, slot), num_keys=3)[3]
