"""Helpers over a buffer's state that its methods share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import COUNTERS, BufferState, Header, Transforms
from fbuf._core.ordering import any_unbatched, order_after_reads
from fbuf._core.pytree import Spec, zero_unless
from fbuf._core.row_format import RowFormat
from fbuf._core.sample import Index
from fbuf._indexing import anchors as _anchors
from fbuf._indexing import ring
from fbuf._indexing import scatter as _scatter
from fbuf._interfaces.sampler import EligibleSet, host_sampler
from fbuf._interfaces.storage import RaggedStorage
from fbuf._interfaces.writer import Scattering, Streaming

_VIEW = 0x7669  # folded into the key of a view's random numbers


def count(state: BufferState) -> jax.Array:
    """Return int32[E], the anchors of each lane."""
    return state.ring.size if state.anchors is None else state.anchors.count


def empty_state(buffer: BufferConfig, rows: Any, given: RowFormat | None = None) -> BufferState:
    """Return the state of an empty buffer over `rows` of the storage; `given` is the format of rows before `on_write`."""
    geometry, writer = buffer.geometry, buffer.writer
    scatter = None
    if isinstance(writer, Scattering) and not writer.streams:
        scatter = _scatter.init(writer, geometry, buffer.storage.spec(rows)[0])
    rings = ring.init(geometry) if scatter is not None else _streaming(buffer).init(geometry)
    return BufferState(
        rows=rows,
        header=Header(rings, jnp.zeros((len(COUNTERS),), jnp.uint32), jnp.zeros((), jnp.int32)).pack(),
        anchors=None if buffer.dense else _anchors.init(geometry, buffer.rule, buffer.sampler, buffer.counted),
        sampler=buffer.sampler.init(geometry, buffer.dense or buffer.counted),
        scatter=scatter,
        transforms=_empty_transforms(buffer, buffer.storage.spec(rows)[0], given),
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


def ending(buffer: BufferConfig, leaves: dict[str, jax.Array], shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return which rows end an episode, and which of them by termination."""
    end = jnp.zeros(shape, bool)
    for name in buffer.ends:
        end = end | leaves[name].reshape(shape)
    terminated = buffer.view.episode_fields()[1]
    return end, jnp.zeros(shape, bool) if terminated is None else leaves[terminated].reshape(shape)


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
    return lax.cond(
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


def eligible_set(buffer: BufferConfig, state: BufferState) -> EligibleSet:
    """Return the anchors, for samplers and views."""
    anchors = state.anchors
    if anchors is None:
        return EligibleSet(buffer.geometry, state.ring, count(state), None)
    return EligibleSet(buffer.geometry, state.ring, anchors.count, anchors.flags, anchors.starts, anchors.before)
