"""`Buffer(prefetch=1)`: each `sample` hands out the batch drawn by the one before, and draws the next.

What is drawn ahead is part of the state: anchors with their generations, probabilities and weights, the view's context,
and what the storage holds for it: the rows themselves, or, where they lie on the host, their tickets and the number of a
request that a thread of the store is busy with while the step goes on. So a state sampled twice gives the same batch
twice, two futures do not meet, and every storage gives the same batch.

A draw on the spot happens in a loop of no or one turn, because XLA copies what a branch changes; of the sampler it
carries only the leaves that a draw changes. Rejected: one loop that draws once or twice (the batch would be copied from
turn to turn), a batch kept beside the state (donation, checkpoints and futures would all need rules of their own).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._algorithms.random_bits import anew
from fbuf._buffer import read as _read
from fbuf._buffer import state_ops, transforms
from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import Ahead, BufferState, ReadNames
from fbuf._core.dispatch import Operation, scoped
from fbuf._core.ordering import any_unbatched, order_after_reads
from fbuf._core.row_format import RowFormat
from fbuf._core.sample import Sample
from fbuf._interfaces.storage import Prefetchable, Read
from fbuf._interfaces.view import Window

T = TypeVar("T")
_IMMEDIATE_FOLD = 1  # what tells the key of a draw on the spot from that of a draw ahead


def _prepare_read(storage: Any, rows: Any, reads: Sequence[Read]) -> Any:
    return scoped("read", storage.prepare_read if isinstance(storage, Prefetchable) else storage.read)(rows, reads)


def _start_read(storage: Any, rows: Any, held: Any) -> Any:
    return scoped("request", storage.start_read)(rows, held) if isinstance(storage, Prefetchable) else held


def _finish_read(storage: Any, rows: Any, held: Any) -> tuple[list[jax.Array], jax.Array | None]:
    arrays, ok = scoped("read", storage.finish_read)(rows, held) if isinstance(storage, Prefetchable) else held
    return list(arrays), ok


def empty_state(buffer: BufferConfig, rows: Any, given: RowFormat | None = None) -> BufferState:
    """No rows yet, over a storage's empty `rows`, and nothing drawn ahead."""
    state = state_ops.empty_state(buffer, rows, given)
    return dataclasses.replace(state, ahead=empty_prefetch(buffer, state))


def empty_prefetch(buffer: BufferConfig, state: BufferState) -> Ahead | None:
    """Nothing drawn ahead yet."""
    if not buffer.prefetch:
        return None

    def drawn(state: BufferState, key: jax.Array) -> Ahead:
        return _prefetch_batch(buffer, state, key, {}, jnp.zeros((), jnp.uint32), ahead=False)[2]

    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(drawn, state, key))


def held_bytes(buffer: BufferConfig, state: BufferState) -> int:
    """Bytes on the host for what is drawn ahead, from shapes."""
    if state.ahead is None or not isinstance(buffer.storage, Prefetchable):
        return 0
    return buffer.storage.held_bytes(state.rows, state.ahead.held)


def _prefetch_batch(
    buffer: BufferConfig,
    state: BufferState,
    key: jax.Array,
    options: dict[str, jax.Array],
    stale: jax.Array,
    ahead: bool,
) -> tuple[Any, jax.Array, Ahead]:
    """Sampler, token, and a batch of `state` as it is now; its read has been asked for if it is drawn `ahead`."""
    assert buffer.batch_size is not None
    sampler, draw, window = _read.draw(buffer, state, key, options, buffer.batch_size)
    held = _prepare_read(buffer.storage, state.rows, window.reads)
    if ahead:
        held = _start_read(buffer.storage, state.rows, held)
    index = state_ops.index_of(buffer, state, draw.slot)
    reading = transforms.reading(buffer, state, key)  # pinned too: what is kept is no leaf of the state twice
    token, (held, draw, context, index, reading) = order_after_reads(
        state.token, (held, draw, window.context, index, reading)
    )
    names = ReadNames(tuple(read.name for read in window.reads))
    batch = Sample(None, index, draw.probability, draw.weight, draw.mask)
    return sampler, token, Ahead(batch, names, context, held, stale, reading)


def _sample_core(
    buffer: BufferConfig, state: BufferState, key: jax.Array, options: dict[str, jax.Array]
) -> tuple[BufferState, Sample]:
    state = _drawn_now(buffer, state, jax.random.fold_in(key, _IMMEDIATE_FOLD), options)
    ahead = state.ahead
    assert ahead is not None
    arrays, ok = _finish_read(buffer.storage, state.rows, ahead.held)
    token, (arrays, ok, context) = order_after_reads(state.token, (arrays, ok, ahead.context))
    window = Window(tuple(Read(name, None) for name in ahead.reads.names), context)
    batch, counters = _read.deliver(buffer, state, ahead.batch, window, arrays, ok, ahead.reading)
    drawn = ahead.batch.index
    now = state_ops.generation(buffer, state, drawn.slot)
    token, (now,) = order_after_reads(token, (now,))
    stale = ahead.stale + jnp.sum(ahead.batch.mask & (now != drawn.ticket), dtype=jnp.uint32)
    state = dataclasses.replace(state, token=token, counters=counters)
    sampler, token, ahead = _prefetch_batch(buffer, state, key, options, stale, ahead=True)
    return dataclasses.replace(state, sampler=sampler, token=token, ahead=ahead), batch


def _drawn_now(buffer: BufferConfig, state: BufferState, key: jax.Array, options: dict[str, jax.Array]) -> BufferState:
    """The state with a batch to hand out; unchanged where one was drawn ahead."""
    before = jax.tree.leaves(state.sampler)
    structure: Any = jax.tree.structure(state.sampler)
    changed = _changed_by_draws(buffer, state, key, options)

    def with_leaves(leaves: list[jax.Array]) -> Any:
        rest = iter(leaves)
        return structure.unflatten([next(rest) if c else leaf for c, leaf in zip(changed, before, strict=True)])

    own = anew(key)

    def turn(carry: tuple[jax.Array, list[jax.Array], jax.Array, Ahead]) -> Any:
        wanted, leaves, token, ahead = carry
        now = dataclasses.replace(state, sampler=with_leaves(leaves), token=token)
        sampler, token, drawn = _prefetch_batch(buffer, now, own(), options, ahead.stale, ahead=False)
        after = [leaf for c, leaf in zip(changed, jax.tree.leaves(sampler), strict=True) if c]
        leaves, drawn = _where(wanted, (after, drawn), (leaves, ahead))
        return jnp.zeros_like(wanted), leaves, token, drawn

    assert state.ahead is not None
    carried = [leaf for c, leaf in zip(changed, before, strict=True) if c]
    start = (~jnp.any(state.ahead.batch.mask), carried, state.token, state.ahead)
    _, leaves, token, ahead = lax.while_loop(lambda carry: any_unbatched(carry[0]), turn, start)
    return dataclasses.replace(state, sampler=with_leaves(leaves), token=token, ahead=ahead)


def _changed_by_draws(
    buffer: BufferConfig, state: BufferState, key: jax.Array, options: dict[str, jax.Array]
) -> list[bool]:
    """Which leaves of the sampler's state a draw changes: known by identity, while tracing."""
    changed: list[bool] = []

    def trace(state: BufferState, key: jax.Array) -> None:
        sampler = _read.draw(buffer, state, key, options, buffer.batch_size or 1)[0]
        pairs = zip(jax.tree.leaves(state.sampler), jax.tree.leaves(sampler), strict=True)
        changed.extend(old is not new for old, new in pairs)

    jax.eval_shape(trace, state, key)
    return changed


@jax.custom_batching.custom_vmap
def _where(wanted: jax.Array, new: T, old: T) -> T:
    """`new`; under `vmap` only for the members that want it, as the others go along for nothing."""
    del wanted, old
    return new


@_where.def_vmap
def _where_of_all(axis_size: int, in_batched: Any, wanted: jax.Array, new: T, old: T) -> tuple[T, Any]:
    def choose(wanted: jax.Array, new: T, old: T) -> T:
        return jax.tree.map(lambda a, b: jnp.where(wanted, a, b), new, old)

    axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
    chosen = jax.vmap(choose, axes, axis_size=axis_size)(wanted, new, old)
    return chosen, jax.tree.map(lambda _: True, chosen)


sample = Operation(_sample_core)
