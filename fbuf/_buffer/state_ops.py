"""Helpers over a buffer's state that its methods share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._buffer import transforms
from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import COUNTERS, BufferState
from fbuf._core.ordering import any_unbatched, order_after_reads
from fbuf._core.pytree import zero_unless
from fbuf._core.row_format import RowFormat
from fbuf._core.sample import Index
from fbuf._indexing import anchors as _anchors
from fbuf._indexing import ring
from fbuf._indexing import scatter as _scatter
from fbuf._interfaces.sampler import EligibleSet, host_sampler
from fbuf._interfaces.storage import RaggedStorage
from fbuf._interfaces.writer import Scattering, Streaming

_VIEW = 0x7669  # what tells a view's random numbers from the sampler's


def count(state: BufferState) -> jax.Array:
    """int32[E], anchors of each lane."""
    return state.ring.size if state.anchors is None else state.anchors.count


def empty_state(buffer: BufferConfig, rows: Any, given: RowFormat | None = None) -> BufferState:
    """No rows yet, over a storage's empty `rows`; `given` is what rows are before `on_write`."""
    geometry, writer = buffer.geometry, buffer.writer
    scatter = None
    if isinstance(writer, Scattering) and not writer.streams:
        scatter = _scatter.init(writer, geometry, buffer.storage.spec(rows)[0])
    return BufferState(
        rows=rows,
        ring=ring.init(geometry) if scatter is not None else _streaming(buffer).init(geometry),
        anchors=None if buffer.dense else _anchors.init(geometry, buffer.rule, buffer.sampler, buffer.counted),
        sampler=buffer.sampler.init(geometry, buffer.dense or buffer.counted),
        counters=jnp.zeros((len(COUNTERS),), jnp.uint32),
        token=jnp.zeros((), jnp.int32),
        scatter=scatter,
        transforms=transforms.empty(buffer, buffer.storage.spec(rows)[0], given),
    )


def open_host_state(buffer: BufferConfig, call: str, sampler: Any) -> Any:
    """The sampler's state over a store, where it keeps something on the host: what its `init` gave names none. Eager."""
    kept = host_sampler(buffer.sampler)
    return sampler if kept is None else kept.open(call, sampler, buffer.geometry)


def init_host_sampler(buffer: BufferConfig, call: str) -> Any:
    """The state of a sampler that keeps something on the host, of an empty buffer; None of any other. Eager."""
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
    """uint32, of the row that lies in each slot."""
    if state.scatter is not None:
        return _scatter.generation(state.scatter, slot)
    return _streaming(buffer).generation(state.ring, buffer.geometry, slot)


def index_of(buffer: BufferConfig, state: BufferState, slot: jax.Array) -> Index:
    """Slots with the generations that lie there now."""
    return Index(slot, generation(buffer, state, slot))


def ending(buffer: BufferConfig, leaves: dict[str, jax.Array], shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Which rows end an episode, and which of them because it terminated."""
    end = jnp.zeros(shape, bool)
    for name in buffer.ends:
        end = end | leaves[name].reshape(shape)
    terminated = buffer.view.episode_fields()[1]
    return end, jnp.zeros(shape, bool) if terminated is None else leaves[terminated].reshape(shape)


def stamp_of(buffer: BufferConfig, leaves: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array | None:
    """int32, what the sampler wants to know of each row."""
    name = buffer.sampler.stamp
    return None if name is None else leaves[name].reshape(shape).astype(jnp.int32)


def largest(stamp: jax.Array | None, keep: jax.Array | None) -> jax.Array | None:
    """int32[], of the rows written, those overwritten by the same write too; the least there is where none are."""
    if stamp is None:
        return None
    least = -(2**31)
    return jnp.max(stamp if keep is None else jnp.where(keep, stamp, jnp.int32(least)), initial=least)


def _count_up(state: BufferState, **counts: jax.Array) -> jax.Array:
    more = [counts.get(name, jnp.zeros((), jnp.uint32)).astype(jnp.uint32) for name in COUNTERS]
    return state.counters + jnp.stack(more)


def _zero_masked(mask: jax.Array, data: Any) -> Any:
    """Zeros where `mask` is False; costs nothing where it is True throughout."""
    return lax.cond(
        any_unbatched(~mask), lambda data: jax.tree.map(lambda x: zero_unless(mask, x), data), lambda data: data, data
    )


def _split(buffer: BufferConfig, state: BufferState, data: Any) -> tuple[Any, Any]:
    """What users see as data, and what `lazy` reads: None where all of a row are arrays."""
    if isinstance(buffer.storage, RaggedStorage):
        recording: RaggedStorage = buffer.storage
        return recording.split(state.rows, data)
    return data, None


def _classify_indices(
    buffer: BufferConfig, state: BufferState, index: Index
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The token; and which indices are masked rows of a sample, in range, and still name the row they did."""
    capacity = jnp.int32(buffer.geometry.capacity)
    masked = (index.slot == capacity) & (index.ticket == jnp.uint32(0))
    inside = (index.slot >= jnp.int32(0)) & (index.slot < capacity)
    token, now = state.token, generation(buffer, state, index.slot)
    if state.scatter is not None:
        token, now = order_after_reads(token, now)
    fresh = inside & (now == index.ticket) & (now != jnp.uint32(0))
    return token, masked, inside, fresh


def eligible_set(buffer: BufferConfig, state: BufferState) -> EligibleSet:
    """What samplers and views may know when they draw."""
    anchors = state.anchors
    if anchors is None:
        return EligibleSet(buffer.geometry, state.ring, count(state), None)
    return EligibleSet(buffer.geometry, state.ring, anchors.count, anchors.flags, anchors.starts, anchors.before)
