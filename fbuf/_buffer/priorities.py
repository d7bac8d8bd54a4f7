"""Pure cores of `update_priority` and `priorities`. Invalid errors, stale and closed rows are refused singly and counted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import BufferState
from fbuf._buffer.state_ops import _classify_indices, _count_up, arrival_order, drawable, flat_index
from fbuf._core.control_flow import order_after_reads
from fbuf._core.dispatch import scoped
from fbuf._core.sample import Index


def _window_error(error: jax.Array, mask: jax.Array, eta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return float32[B] from float32[B, T], `eta` * max + (1 - `eta`) * mean of magnitudes, and where these are finite.

    A window without counted errors gets 0; otherwise it would keep the priority of new rows forever.
    """
    finite = jnp.isfinite(error)
    magnitude = jnp.where(mask & finite, jnp.abs(error), jnp.float32(0))
    number = jnp.sum(mask, axis=1, dtype=jnp.int32)
    mean = jnp.sum(magnitude, axis=1) / jnp.maximum(number, jnp.int32(1)).astype(jnp.float32)
    share = jnp.clip(eta, jnp.float32(0), jnp.float32(1))
    mixed = share * jnp.max(magnitude, axis=1) + (jnp.float32(1) - share) * mean
    return mixed, jnp.all(finite | ~mask, axis=1) & jnp.isfinite(mixed)


def accept(
    buffer: BufferConfig,
    state: BufferState,
    index: Index,
    td_error: jax.Array,
    mask: jax.Array | None,
    eta: jax.Array | None,
) -> tuple[BufferState, jax.Array, jax.Array]:
    """Return a state that counts invalid errors and indices, and slots and errors without these (slot C)."""
    geometry = buffer.geometry
    error = td_error.astype(jnp.float32)
    if mask is not None and eta is not None:
        error, finite = _window_error(error, mask, eta)
    else:
        error, index = error.reshape(-1), flat_index(index, mask, geometry.capacity)
        finite = jnp.isfinite(error)
    token, masked, inside, fresh = _classify_indices(buffer, state, index)
    open = drawable(state, index.slot, fresh)
    if state.anchors is not None:
        token, open = order_after_reads(token, open)
    accepted = finite & open
    slot = jnp.where(accepted, index.slot, jnp.int32(geometry.capacity))
    error = jnp.where(accepted, error, jnp.float32(0))
    counters = _count_up(
        state,
        refused_nonfinite=jnp.sum(~masked & ~finite, dtype=jnp.uint32),
        refused_out_of_range=jnp.sum(~masked & finite & ~inside, dtype=jnp.uint32),
        refused_stale=jnp.sum(finite & inside & ~fresh, dtype=jnp.uint32),
        refused_closed=jnp.sum(finite & fresh & ~open, dtype=jnp.uint32),
    )
    return state.replace(counters=counters, token=token), slot, error


def _update_priority_core(
    buffer: BufferConfig,
    state: BufferState,
    index: Index,
    td_error: jax.Array,
    mask: jax.Array | None,
    eta: jax.Array | None,
) -> tuple[BufferState, None]:
    state, slot, error = accept(buffer, state, index, td_error, mask, eta)
    sampler = scoped("update", buffer.sampler.update)(state.sampler, slot, error, buffer.geometry, state.token)
    return state.replace(sampler=sampler), None


def _priorities_core(buffer: BufferConfig, state: BufferState, index: Index | None) -> tuple[BufferState, jax.Array]:
    """Return |p| of rows, NaN where they are no anchors; None: of all rows, in the order and shape of `rows`."""
    if index is None:
        slot, held = arrival_order(buffer, state)
        slot, held = (slot[:, 0], held[:, 0]) if buffer.lanes is None else (slot, held)
    else:
        slot, held = index.slot, _classify_indices(buffer, state, index)[3]
    sampler: Any = buffer.sampler  # `priority` is optional
    priority = sampler.priority(state.sampler, jnp.where(held, slot, jnp.int32(0)))
    known = drawable(state, slot, held) & (priority >= jnp.float32(0))
    return state, jnp.where(known, priority, jnp.float32(jnp.nan))
