"""Helpers over a buffer's state that its methods share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import COUNTERS, BufferState, Header, Transforms
from fbuf._core import control_flow
from fbuf._core.control_flow import any_unbatched, order_after_reads
from fbuf._core.pytree import Spec, zero_unless
from fbuf._core.row_format import RowFormat
from fbuf._core.sample import Index
from fbuf._indexing import anchors as _anchors
from fbuf._indexing import ring
from fbuf._indexing import scatter as _scatter
from fbuf._interfaces.sampler import EligibleSet, host_sampler
from fbuf._interfaces.storage import RaggedStorage
from fbuf._interfaces.writer import ReadOnly, Scattering, Streaming

_VIEW = 0x7669  # folded into the key of a view's random numbers


def count(state: BufferState) -> jax.Array:
    """Return int32[E], the anchors of each lane."""
    return state.ring.size if state.anchors is None else state.anchors.count


def empty_state(buffer: BufferConfig, rows: Any, given: RowFormat | None = None) -> BufferState:
    """Return the state of an empty buffer over `rows` of the storage; `given` is the format of rows before `on_write`."""
    geometry, writer, spec = buffer.geometry, buffer.writer, buffer.storage.spec(rows)[0]
    scatter = None
    if isinstance(writer, Scattering) and not writer.streams:
        scatter = _scatter.init(writer, geometry, spec)
    rings = ring.init(geometry) if scatter is not None else _streaming(buffer).init(geometry)
    return BufferState(
        rows=rows,
        header=Header(rings, jnp.zeros((len(COUNTERS),), jnp.uint32), jnp.zeros((), jnp.int32)).pack(),
        anchors=None if buffer.dense else _anchors.init(geometry, buffer.rule, buffer.sampler, spec, buffer.counted),
        sampler=buffer.sampler.init(geometry, buffer.dense or buffer.counted),
        scatter=scatter,
        transforms=_empty_transforms(buffer, spec, given),
    )


def _empty_transforms(buffer: BufferConfig, spec: Spec, was: RowFormat | None) -> Transforms | None:
    """Return the memory of transforms before the first row; `spec` is of stored rows."""
    write = {} if buffer.on_write is None or was is None else buffer.on_write.opened(was.example)[0]
    read = {} if buffer.on_read is None else buffer.on_read.init(spec)
    return Transforms(was, write, read) if was is not None or jax.tree.leaves(read) else None


def open_host_state(buffer: BufferConfig, call: str, sampler: Any) -> Any:
    """Return the sampler's state over a new store, if the sampler keeps part of it on the host. Eager."""
    kept = host_sampler(buffer.sampler)
    return sampler if kept is None else kept.open(call, sampler, buffer.geometry)


def init_host_sampler(buffer: BufferConfig, call: str) -> Any:
    """Return the state, for an empty buffer, of a sampler with a store on the host; None for others. Eager."""
    if host_sampler(buffer.sampler) is None:
        return None
    return open_host_state(buffer, call, buffer.sampler.init(buffer.geometry, buffer.dense or buffer.counted))


def _streaming(buffer: BufferConfig) -> Streaming:
    assert isinstance(buffer.writer, Streaming)
    return buffer.writer


def _scattering(buffer: BufferConfig) -> Scattering:
    assert isinstance(buffer.writer, Scattering)
    return buffer.writer


def generation(buffer: BufferConfig, state: BufferState, slot: jax.Array) -> jax.Array:
    """Return uint32, the generation of the row in each slot."""
    if state.scatter is not None:
        return _scatter.generation(state.scatter, slot)
    return _streaming(buffer).generation(state.ring, buffer.geometry, slot)


def index_of(buffer: BufferConfig, state: BufferState, slot: jax.Array) -> Index:
    """Return slots with their present generations."""
    return Index(slot, generation(buffer, state, slot))


def arrival_order(buffer: BufferConfig, state: BufferState) -> tuple[jax.Array, jax.Array]:
    """Return slots int32[L, E] in order of arrival, and which of them hold a row."""
    lanes, length, _ = buffer.geometry
    if state.scatter is not None:
        rank = jnp.arange(buffer.capacity, dtype=jnp.int32)
        slot, held = _scatter.by_age(state.scatter), rank < _scatter.held(state.ring)
        return slot.reshape(length, lanes), held.reshape(length, lanes)
    age = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], (length, lanes))
    return ring.by_age(state.ring, buffer.geometry, age), age < state.ring.size[None, :]


def ending(buffer: BufferConfig, leaves: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Return the flags END and TERMINATED of rows, uint8."""
    flags = jnp.zeros(shape, jnp.uint8)
    for name in buffer.ends:
        bits = _anchors.END | (_anchors.TERMINATED if name == buffer.view.episode_fields()[1] else 0)
        flags = flags | _anchors.bit(leaves[name].reshape(shape), bits)
    return flags


def ids_of(buffer: BufferConfig, leaves: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array | None:
    """Return the episode id of each row; None if the view names none."""
    name = buffer.view.rule.episode
    return None if name is None else leaves[name].reshape(shape)


def stamp_of(buffer: BufferConfig, leaves: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array | None:
    """Return int32, the stamp of each row; None if the sampler needs none."""
    name = buffer.sampler.stamp
    return None if name is None else leaves[name].reshape(shape).astype(jnp.int32)


def largest(stamp: jax.Array | None, keep: jax.Array | None) -> jax.Array | None:
    """Return int32[], the largest stamp of all rows written; the smallest int32 if there are none."""
    if stamp is None:
        return None
    least = -(2**31)
    return jnp.max(stamp if keep is None else jnp.where(keep, stamp, jnp.int32(least)), initial=least)


def _count_up(state: BufferState, **counts: jax.Array) -> jax.Array:
    counters = state.counters
    for name, number in counts.items():
        one = np.arange(len(COUNTERS)) == COUNTERS.index(name)
        counters = counters + jnp.asarray(one, jnp.uint32) * number.astype(jnp.uint32)  # compiles faster than `stack`
    return counters


def _zero_masked(mask: jax.Array, data: Any) -> Any:
    """Return data with zeros where `mask` is False; without cost if it is True throughout."""
    return control_flow.cond(
        any_unbatched(~mask), lambda data: jax.tree.map(lambda x: zero_unless(mask, x), data), lambda data: data, data
    )


def _split(buffer: BufferConfig, state: BufferState, data: Any) -> tuple[Any, Any]:
    """Split data into the user's part and the tickets that `lazy` reads; None if rows are arrays only."""
    if isinstance(buffer.storage, RaggedStorage):
        recording: RaggedStorage = buffer.storage
        return recording.split(state.rows, data)
    return data, None


def _classify_indices(
    buffer: BufferConfig, state: BufferState, index: Index
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the token, and which indices are masked, in range, and fresh (their row is still there)."""
    capacity = jnp.int32(buffer.geometry.capacity)
    masked = (index.slot == capacity) & (index.ticket == jnp.uint32(0))
    inside = (index.slot >= jnp.int32(0)) & (index.slot < capacity)
    token, now = state.token, generation(buffer, state, index.slot)
    if state.scatter is not None:
        token, now = order_after_reads(token, now)
    fresh = inside & (now == index.ticket) & (now != jnp.uint32(0))
    return token, masked, inside, fresh


def drawable(state: BufferState, slot: jax.Array, held: jax.Array) -> jax.Array:
    """Return which of the slots are anchors; `held` are those of a row, in [0, C)."""
    if state.anchors is None:
        return held
    at = jnp.where(held, slot, jnp.int32(0))
    return held & _anchors.has(state.anchors.flags.at[at].get(mode="promise_in_bounds"), _anchors.OPEN)


def flat_index(index: Index, mask: jax.Array | None, capacity: int) -> Index:
    """Return the index with one axis, and masked where `mask` is False."""
    if mask is not None:
        index = Index(jnp.where(mask, index.slot, jnp.int32(capacity)), jnp.where(mask, index.ticket, jnp.uint32(0)))
    return Index(index.slot.reshape(-1), index.ticket.reshape(-1))


def room(buffer: BufferConfig, state: BufferState) -> jax.Array | None:
    """Return int32[E], rows that each lane can take before it loses one that a waiting or a later anchor needs.

    None: the sampler lets rows be overwritten (`Sampler.waiting`).
    """
    waiting = getattr(buffer.sampler, "waiting", lambda sampler: None)(state.sampler)
    if waiting is None or isinstance(buffer.writer, ReadOnly):
        return None
    number, oldest = waiting
    lanes, length, _ = buffer.geometry
    since = ring.modulo(state.ring.cursor - jnp.int32(1) - oldest // jnp.int32(lanes), length) + jnp.int32(1)
    later = jnp.int32(0) if state.anchors is None else _anchors.undecided(state.anchors)
    needed = jnp.where(number > jnp.int32(0), since, later) + jnp.int32(buffer.view.rule.back)
    return jnp.int32(length) - jnp.minimum(needed, state.ring.size)


def eligible_set(buffer: BufferConfig, state: BufferState) -> EligibleSet:
    """Return the anchors, for samplers and views."""
    anchors = state.anchors
    if anchors is None:
        return EligibleSet(buffer.geometry, state.ring, count(state), None)
    return EligibleSet(buffer.geometry, state.ring, anchors.count, anchors.flags, anchors.starts, anchors.before)
