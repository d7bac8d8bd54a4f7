"""Pure cores of `update_priority` and `priorities`. Invalid errors, stale and closed rows are refused singly and counted.

Priorities given to `extend` are in `fbuf._buffer.write`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from fbuf._buffer import state as _state
from fbuf._buffer.state import BufferConfig, BufferState, operation
from fbuf._core import control_flow
from fbuf._core.control_flow import order_after_reads
from fbuf._core.sample import Index


def window_error(error: Array, mask: Array, eta: Array) -> tuple[Array, Array]:
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
    buffer: BufferConfig, state: BufferState, index: Index, td_error: Array, mask: Array | None, eta: Array | None
) -> tuple[BufferState, Array, Array]:
    """Return a state that counts invalid errors and indices, and slots and errors without these (slot C)."""
    geometry = buffer.geometry
    error = td_error.astype(jnp.float32)
    if mask is not None and eta is not None:
        error, finite = window_error(error, mask, eta)
    else:
        error, index = error.reshape(-1), _state.flat_index(index, mask, geometry.capacity)
        finite = jnp.isfinite(error)
    token, masked, inside, fresh = _state.classify_indices(buffer, state, index)
    open = _state.is_anchor(state, index.slot, fresh)
    if state.anchors is not None:
        token, open = order_after_reads(token, open)
    accepted = finite & open
    slot = jnp.where(accepted, index.slot, jnp.int32(geometry.capacity))
    error = jnp.where(accepted, error, jnp.float32(0))
    refused = {
        "refused_nonfinite": ~masked & ~finite,
        "refused_out_of_range": ~masked & finite & ~inside,
        "refused_stale": finite & inside & ~fresh,
        "refused_closed": finite & fresh & ~open,
    }
    counters = _state.count_up(state, **dict(zip(refused, _numbers(list(refused.values())), strict=True)))
    return state.replace(counters=counters, token=token), slot, error


def _numbers(flags: list[Array]) -> list[Array]:
    """Return how many of each bool[B] hold, uint32[]."""

    def in_one(flags: list[Array]) -> list[Array]:  # XLA on CPU makes several kernels of each
        return list(jnp.sum(jnp.stack(flags), axis=1, dtype=jnp.uint32))

    def each(flags: list[Array]) -> list[Array]:  # on a GPU in one kernel with the largest priority
        return [jnp.sum(x, dtype=jnp.uint32) for x in flags]

    return control_flow.platform_dependent(flags, gpu=each, default=in_one)


@operation
def update_priority(
    buffer: BufferConfig, state: BufferState, index: Index, td_error: Array, mask: Array | None, eta: Array | None
) -> tuple[BufferState, None]:
    """Set the priorities of rows, or windows, from TD errors."""
    state, slot, error = accept(buffer, state, index, td_error, mask, eta)
    sampler = jax.named_scope("update")(buffer.sampler.update)(state.sampler, slot, error, buffer.geometry, state.token)
    return state.replace(sampler=sampler), None


@operation
def read_priorities(buffer: BufferConfig, state: BufferState, index: Index | None) -> tuple[BufferState, Array]:
    """Return |p| of rows, NaN where they are no anchors; None: of all rows, in the order and shape of `rows`."""
    if index is None:
        slot, exists = _state.arrival_order(buffer, state)
        slot, exists = (slot[:, 0], exists[:, 0]) if buffer.lanes is None else (slot, exists)
    else:
        slot, exists = index.slot, _state.classify_indices(buffer, state, index)[3]
    priority = buffer.sampler.priority(state.sampler, jnp.where(exists, slot, jnp.int32(0)))
    if priority is None:
        raise TypeError(f"Buffer.priorities: {buffer.sampler!r} has no `priority`; see fbuf.parts.Sampler.")
    known = _state.is_anchor(state, slot, exists) & (priority >= jnp.float32(0))
    return state, jnp.where(known, priority, jnp.float32(jnp.nan))
