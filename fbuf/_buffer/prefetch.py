"""`Buffer(prefetch=1)`: each `sample` returns the batch that the previous call drew, and draws the next.

The prefetched batch is part of the state: anchors with their generations, probabilities and weights, the view's context, and
the rows. Rows on the host are tickets and the number of a request, which `fbuf._host.store.read_ahead` serves during the step.
A state sampled twice therefore gives the same batch twice.

An immediate draw is `update_if`, because XLA copies what a branch changes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from fbuf._algorithms.random import fresh_key
from fbuf._buffer import read as _read
from fbuf._buffer import state as _state
from fbuf._buffer import transforms
from fbuf._buffer.state import Ahead, BufferConfig, BufferState, ReadNames, generation_of, index_of, operation
from fbuf._core.control_flow import order_after_reads
from fbuf._core.dispatch import update_if
from fbuf._core.row_format import RowFormat
from fbuf._core.sample import Sample
from fbuf._interfaces.storage import Read
from fbuf._interfaces.view import Window

T = TypeVar("T")
_IMMEDIATE_FOLD = 1  # folded into the key of an immediate draw


def empty_state(buffer: BufferConfig, rows: Any, row_format: RowFormat | None = None) -> BufferState:
    """Return the state of an empty buffer over `rows` of the storage; its prefetched batch, if any, is empty."""
    state = _state.empty_state(buffer, rows, row_format)
    return dataclasses.replace(state, ahead=empty_prefetch(buffer, state))


def empty_prefetch(buffer: BufferConfig, state: BufferState) -> Ahead | None:
    """Return a prefetched batch whose mask is False; None without prefetch."""
    if not buffer.prefetch:
        return None

    def drawn(state: BufferState, key: Array) -> Ahead:
        return _prefetch_batch(buffer, state, key, {}, jnp.zeros((), jnp.uint32), ahead=False)[2]

    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(drawn, state, key))


def held_bytes(buffer: BufferConfig, state: BufferState) -> int:
    """Return the host bytes of a prefetched batch, from shapes."""
    return 0 if state.ahead is None else buffer.storage.held_bytes(state.rows, state.ahead.held)


def _prefetch_batch(
    buffer: BufferConfig, state: BufferState, key: Array, options: dict[str, Array], stale: Array, ahead: bool
) -> tuple[Any, Array, Ahead]:
    """Draw a batch; return sampler, token and batch. Start its read now if it is drawn `ahead`."""
    assert buffer.batch_size is not None
    sampler, draw, window = _read.draw(buffer, state, key, options, buffer.batch_size)
    pending = jax.named_scope("read")(buffer.storage.prepare_read)(state.rows, window.reads)
    if ahead:
        pending = jax.named_scope("request")(buffer.storage.start_read)(state.rows, pending)
    index = index_of(buffer, state, draw.slot)
    # Ordered too: the same leaf must not be in the state twice.
    reading = None if buffer.on_read is None else transforms.reading(buffer, state, key)
    token, (pending, draw, context, index, reading) = order_after_reads(
        state.token, (pending, draw, window.context, index, reading)
    )
    names = ReadNames(tuple(read.name for read in window.reads))
    batch = Sample(None, index, draw.probability, draw.weight, draw.mask, last=draw.last)
    return sampler, token, Ahead(batch, names, context, pending, stale, reading)


@operation
def sample(
    buffer: BufferConfig, state: BufferState, key: Array, options: dict[str, Array]
) -> tuple[BufferState, Sample]:
    """Return the batch drawn by the call before, and draw the next."""
    state = _drawn_now(buffer, state, jax.random.fold_in(key, _IMMEDIATE_FOLD), options)
    ahead = state.ahead
    assert ahead is not None
    arrays, ok = jax.named_scope("read")(buffer.storage.finish_read)(state.rows, ahead.held)
    token, (arrays, ok, context) = order_after_reads(state.token, (arrays, ok, ahead.context))
    window = Window(tuple(Read(name, None) for name in ahead.reads.names), context)
    batch, counters = _read.deliver(buffer, state, ahead.batch, window, arrays, ok, ahead.reading)
    drawn = ahead.batch.index
    now = generation_of(buffer, state, drawn.slot)
    token, (now,) = order_after_reads(token, (now,))
    stale = ahead.stale + jnp.sum(ahead.batch.mask & (now != drawn.generation), dtype=jnp.uint32)
    state = state.replace(token=token, counters=counters)
    sampler, token, ahead = _prefetch_batch(buffer, state, key, options, stale, ahead=True)
    return state.replace(sampler=sampler, token=token, ahead=ahead), batch


def _drawn_now(buffer: BufferConfig, state: BufferState, key: Array, options: dict[str, Array]) -> BufferState:
    """Return a state with a prefetched batch: draw one if there is none."""
    own_key = fresh_key(key)

    def draw(wanted: Array, parts: tuple[Any, Array], ahead: Ahead) -> tuple[tuple[Any, Array], Ahead]:
        now = state.replace(sampler=parts[0], token=parts[1])
        sampler, token, drawn = _prefetch_batch(buffer, now, own_key(), options, ahead.stale, ahead=False)
        sampler = jax.tree.map(lambda new, old: old if new is old else _where(wanted, new, old), sampler, parts[0])
        return (sampler, token), _where(wanted, drawn, ahead)

    assert state.ahead is not None
    wanted = ~jnp.any(state.ahead.batch.mask)
    (sampler, token), ahead = update_if(wanted, draw, (state.sampler, state.token), state.ahead)
    return state.replace(sampler=sampler, token=token, ahead=ahead)


@jax.custom_batching.custom_vmap
def _where(wanted: Array, new: T, old: T) -> T:
    """Return `new`; under `vmap`, `old` for members that do not want it."""
    return new


@_where.def_vmap
def _where_of_all(axis_size: int, in_batched: Any, wanted: Array, new: T, old: T) -> tuple[T, Any]:
    def choose(wanted: Array, new: T, old: T) -> T:
        return jax.tree.map(lambda a, b: jnp.where(wanted, a, b), new, old)

    axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
    chosen = jax.vmap(choose, axes, axis_size=axis_size)(wanted, new, old)
    return chosen, jax.tree.map(lambda _: True, chosen)
