"""Cores of the methods that read: `(buffer, state, ...) -> (state, result)`, pure functions of an opened state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fbuf._buffer import state as _state
from fbuf._buffer import transforms
from fbuf._buffer.state import COUNTERS, BufferConfig, BufferState, operation
from fbuf._core import slots
from fbuf._core.control_flow import order_after_reads
from fbuf._core.sample import Index, Rows, Sample
from fbuf._core.slots import zero_unless
from fbuf._indexing import scatter
from fbuf._interfaces.sampler import AnchorSet, Draw
from fbuf._interfaces.storage import Read
from fbuf._interfaces.view import Window
from fbuf.samplers._base import masked_draw

_VIEW = 0x7669  # folded into the key of a view's random numbers


def draw(
    buffer: BufferConfig, state: BufferState, key: jax.Array, options: dict[str, jax.Array], batch_size: int
) -> tuple[Any, Draw, Window]:
    """Draw anchors; return the sampler's state, the draw, and the reads for it."""
    anchors = _state.anchor_set(buffer, state)
    result = jax.named_scope("draw")(buffer.sampler.draw)(state.sampler, key, batch_size, anchors, options, state.token)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Draw):
        raise TypeError(f"{type(buffer.sampler).__name__}.draw gave {type(result).__name__}; expected (state, Draw).")
    sampler, drawn = result
    return sampler, drawn, window_of(buffer, state, key, drawn, anchors)


def window_of(buffer: BufferConfig, state: BufferState, key: jax.Array, drawn: Draw, anchors: AnchorSet) -> Window:
    """Return the reads for a draw with `key`."""
    spec, _ = buffer.storage.spec(state.rows)
    return jax.named_scope("window")(buffer.view.window)(
        spec, anchors, drawn.slot, drawn.mask, jax.random.fold_in(key, _VIEW)
    )


def deliver(
    buffer: BufferConfig,
    state: BufferState,
    drawn: Sample,
    window: Window,
    arrays: list[jax.Array],
    ok: jax.Array | None,
    reading: transforms.Reading | None,
    partly: bool = False,
) -> tuple[Sample, jax.Array]:
    """Return the batch `drawn` with the data that was read, and the counters.

    Args:
      ok: bool[B], whether the rows were present; None: all were.
      partly: Do not count an empty draw, which a part of a mixture's batch may be.
    """
    spec, structure = buffer.storage.spec(state.rows)
    data = jax.named_scope("assemble")(buffer.view.assemble)(spec, structure, arrays, window)
    index, probability, weight, mask = drawn.index, drawn.probability, drawn.weight, drawn.mask
    counts = {} if partly else {"empty_samples": jnp.sum(~mask[:1], dtype=jnp.uint32)}
    if ok is not None:
        why = "draws_refused" if buffer.storage.grows else "expired_rows"
        counts[why] = jnp.sum(mask & ~ok, dtype=jnp.uint32)
        mask = mask & ok
        probability = jnp.where(mask, probability, jnp.float32(0))
        weight = jnp.where(mask, weight, jnp.float32(0))
        nowhere = jnp.int32(buffer.capacity)
        index = Index(jnp.where(mask, index.slot, nowhere), jnp.where(mask, index.generation, jnp.uint32(0)))
        if buffer.storage.masks_expired:
            data = _state.zero_masked(mask, data)
    data, ragged = buffer.storage.split(state.rows, data)
    if buffer.on_read is not None:
        data = transforms.read(buffer, data, mask, reading)
    sample = Sample(data, index, probability, weight, mask, ragged, drawn.last)
    return sample, _state.count_up(state, **counts) if counts else state.counters


@operation
def sample(
    buffer: BufferConfig, state: BufferState, key: jax.Array, options: dict[str, jax.Array], batch_size: int
) -> tuple[BufferState, Sample]:
    """Draw a batch of `batch_size`."""
    sampler, drawn, window = draw(buffer, state, key, options, batch_size)
    state, batch = read_drawn(buffer, state, key, drawn, window)
    return state.replace(sampler=sampler), batch


def read_drawn(
    buffer: BufferConfig, state: BufferState, key: jax.Array, drawn: Draw, window: Window, partly: bool = False
) -> tuple[BufferState, Sample]:
    """Read the rows of a draw; return the state that orders the reads, and the batch. `partly`: as for `deliver`."""
    arrays, ok = jax.named_scope("read")(buffer.storage.read)(state.rows, window.reads)
    token, (arrays, ok, drawn, context, index) = order_after_reads(
        state.token, (arrays, ok, drawn, window.context, _state.index_of(buffer, state, drawn.slot))
    )
    sample = Sample(None, index, drawn.probability, drawn.weight, drawn.mask, last=drawn.last)
    reading = None if buffer.on_read is None else transforms.reading(buffer, state, key)
    batch, counters = deliver(buffer, state, sample, window._replace(context=context), arrays, ok, reading, partly)
    return state.replace(token=token, counters=counters), batch


@operation
def all_anchors(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, tuple[Index, jax.Array]]:
    """Return the index of every slot in order of arrival, [C], and which of them hold an anchor."""
    slot, exists = (x.reshape(-1) for x in _state.arrival_order(buffer, state))
    return state, (_state.index_of(buffer, state, slot), _state.is_anchor(state, slot, exists))


@operation
def sample_at(
    buffer: BufferConfig, state: BufferState, key: jax.Array, number: Any, index: Index, chance: Any
) -> tuple[BufferState, Sample]:
    """Return batch `number` of an epoch of anchors with probability `chance`; masked where they have closed since."""
    mask = _state.is_anchor(state, index.slot, _state.classify_indices(buffer, state, index)[3])
    drawn = masked_draw(index.slot, chance, mask, buffer.geometry)
    key = jax.random.fold_in(key, number)
    window = window_of(buffer, state, key, drawn, _state.anchor_set(buffer, state))
    return read_drawn(buffer, state, key, drawn, window, partly=True)


@operation
def rows_at(buffer: BufferConfig, state: BufferState, slot: jax.Array) -> tuple[BufferState, Rows]:
    """Return the rows in slots int32[...], masked where there is none."""
    index = _state.index_of(buffer, state, slot)
    mask = index.generation != jnp.uint32(0)
    at = jnp.where(mask, slot, jnp.int32(buffer.capacity))
    spec, structure = buffer.storage.spec(state.rows)
    arrays, ok = jax.named_scope("read")(buffer.storage.read)(state.rows, [Read(name, at.reshape(-1)) for name in spec])
    if ok is not None:
        mask = mask & ok.reshape(mask.shape)
        at = jnp.where(mask, at, jnp.int32(buffer.capacity))
    shaped = [a.reshape(slot.shape + a.shape[1:]) for a in arrays]
    data = structure.unflatten([zero_unless(mask, a) for a in shaped] if buffer.storage.masks_expired else shaped)
    index = Index(at, jnp.where(mask, index.generation, jnp.uint32(0)))
    data, ragged = buffer.storage.split(state.rows, data)
    return state, Rows(data, index, mask, ragged)


@operation
def get(buffer: BufferConfig, state: BufferState, index: Index) -> tuple[BufferState, Rows]:
    """Return rows by index, masked where it is stale."""
    fresh = _state.classify_indices(buffer, state, index)[3]
    slot = jnp.where(fresh, index.slot, jnp.int32(buffer.capacity))
    return rows_at.core(buffer, state, slot)


def _existing_rows(
    buffer: BufferConfig, state: BufferState, slot: jax.Array, exists: jax.Array
) -> tuple[BufferState, Rows]:
    """Return the rows in slots int32[A, E] where `exists`."""
    slot = jnp.where(exists, slot, jnp.int32(buffer.capacity))
    return rows_at.core(buffer, state, slot[:, 0] if buffer.lanes is None else slot)


@operation
def all_rows(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, Rows]:
    """Return every row, oldest first."""
    return _existing_rows(buffer, state, *_state.arrival_order(buffer, state))


@operation
def last(buffer: BufferConfig, state: BufferState, n: int) -> tuple[BufferState, Rows]:
    """Return the newest `n` rows of each lane, newest last."""
    lanes = buffer.geometry.lanes
    if state.scatter is None:
        age = (state.ring.size - jnp.int32(n))[None, :] + jnp.arange(n, dtype=jnp.int32)[:, None]
        return _existing_rows(buffer, state, slots.by_age(state.ring, buffer.geometry, age), age >= jnp.int32(0))
    rank = scatter.size(state.ring) - jnp.int32(n * lanes) + jnp.arange(n * lanes, dtype=jnp.int32)
    slot = scatter.by_age(state.scatter).at[jnp.maximum(rank, jnp.int32(0))].get(mode="promise_in_bounds")
    return _existing_rows(buffer, state, slot.reshape(n, lanes), rank.reshape(n, lanes) >= jnp.int32(0))


@operation
def window_index(buffer: BufferConfig, state: BufferState, index: Index) -> tuple[BufferState, Index]:
    """Return the rows [B, T] of windows; an index without a window, made stale if its row is held, takes all of T."""
    fresh = _state.classify_indices(buffer, state, index)[3]
    open = _state.is_anchor(state, index.slot, fresh)
    key = jax.random.key(0)  # for views that choose at random; windows of consecutive rows do not depend on it
    window = buffer.view.window(
        buffer.storage.spec(state.rows)[0], _state.anchor_set(buffer, state), index.slot, open, key
    )
    rows = _state.index_of(buffer, state, next(read.slot for read in window.reads if read.slot.ndim == 2))
    gone = Index(index.slot, index.generation - (fresh & ~open).astype(jnp.uint32))
    return state, jax.tree.map(lambda row, anchor: jnp.where(open[:, None], row, anchor[:, None]), rows, gone)


@operation
def size(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, jax.Array]:
    """Return int32[], the rows held."""
    return state, jnp.sum(state.ring.size, dtype=jnp.int32)


@operation
def can_sample(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, jax.Array]:
    """Return bool[], whether there is an anchor to draw."""
    anchors = jnp.sum(_state.anchor_count(state), dtype=jnp.int32)
    return state, buffer.sampler.available(state.sampler, anchors) > jnp.int32(0)


@operation
def can_add(buffer: BufferConfig, state: BufferState, number: jax.Array) -> tuple[BufferState, jax.Array]:
    """Return bool[], whether a queue has room for so many more rows in each lane."""
    free = _state.room_left(buffer, state)
    return state, jnp.ones((), bool) if free is None else jnp.all(number <= free)


@operation
def stats(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, dict[str, jax.Array]]:
    """Return scalars to log."""
    size = jnp.sum(state.ring.size, dtype=jnp.int32)
    counts = {"size": size, "anchors": jnp.sum(_state.anchor_count(state), dtype=jnp.int32)}
    counts["is_full"] = size == jnp.int32(buffer.capacity)
    if state.scatter is None:
        counts["cursor"], counts["writes"] = slots.head(state.ring, buffer.geometry)
    else:
        counts["writes"] = scatter.rows_written(state.scatter)
    counts |= {name: state.counters[i] for i, name in enumerate(COUNTERS)}
    counts |= buffer.storage.stats(state.rows, counts["size"])
    if state.scatter is not None:
        counts |= _state.scattering(buffer).stats(state.scatter.own)
    if state.ahead is not None:
        counts["stale_draws"] = state.ahead.stale
    return state, counts | buffer.sampler.stats(state.sampler) | transforms.stats(buffer, state)
