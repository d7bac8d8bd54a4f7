"""Anchors and sampler state from existing rows: of a data set (`writers.Frozen`), and of a state of another buffer.

Both replay the rows oldest first, and read only the leaves that end episodes and the sampler's stamp. A data set is read in
blocks, which bounds memory; its rows never change, so its anchors are counted once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._buffer import state as _state
from fbuf._buffer.state import BufferConfig, BufferState, operation
from fbuf._buffer.write import dense_change
from fbuf._core import control_flow
from fbuf._core import slots as _slots
from fbuf._core.pytree import tree_bytes
from fbuf._core.slots import Ring
from fbuf._indexing import anchors as _anchors
from fbuf._indexing.anchors import count_before
from fbuf._interfaces.storage import Read

BLOCK = 1 << 16
"""Rows per block."""


@operation
def index_rows(
    buffer: BufferConfig, state: BufferState, sampler: Any, other: BufferConfig
) -> tuple[BufferState, tuple[_anchors.Anchors | None, Any]]:
    """Return anchors and sampler state for all rows of a data set; `sampler` is from `init_host_sampler(other)`."""
    empty = _state.empty_state(other, state.rows)
    sampler = empty.sampler if sampler is None else sampler
    if other.dense and not tree_bytes(sampler):
        return state, (None, sampler)
    geometry = other.geometry
    block = min(BLOCK, geometry.capacity)

    def arrive(number: jax.Array, carry: Any) -> Any:
        anchors, sampler, token = carry
        start = number.astype(jnp.int32) * jnp.int32(block)
        slot = start + jnp.arange(block, dtype=jnp.int32)[:, None]
        inside = slot < jnp.int32(geometry.capacity)
        leaves, stamp = _leaves_of(buffer, state, slot, other)
        if anchors is None:
            change = dense_change(slot, inside, None, stamp)
        else:
            new, ids = _state.ending(other, leaves, slot.shape), _state.ids_of(other, leaves, anchors.newest_id)
            before = Ring(cursor=start[None], size=start[None], lap=jnp.ones((1,), jnp.uint32))
            count = jnp.minimum(jnp.int32(geometry.capacity) - start, jnp.int32(block))[None]
            rows = _anchors.NewRows(new, stamp=stamp, ids=ids, number=count)
            anchors, change, token = _anchors.extend(anchors, other.view, geometry, before, rows, token)
        change = dataclasses.replace(change, newest_stamp=_state.largest(stamp, inside))
        return anchors, other.sampler.change(sampler, change, geometry, token), token

    blocks = -(-geometry.capacity // block)
    anchors, sampler, _ = control_flow.fori_loop(0, blocks, arrive, (empty.anchors, sampler, state.token))
    if anchors is not None and anchors.before is not None:
        anchors = dataclasses.replace(anchors, before=count_before(anchors.flags))
    return state, (anchors, sampler)


def with_existing_rows(buffer: BufferConfig, call: str, state: BufferState) -> BufferState:
    """Return the state of a data set with the anchors of its rows."""
    fresh = _state.init_host_sampler(buffer, call)
    anchors, sampler = index_rows(buffer, state, fresh, static=(buffer,))[1]
    return dataclasses.replace(state, anchors=anchors, sampler=sampler)


def _leaves_of(
    buffer: BufferConfig, state: BufferState, slot: jax.Array, other: BufferConfig
) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """Return the leaves that decide which rows in slots int32[A, E] `other` can draw, by name, and their stamps int32[A, E]."""
    ends = () if other.dense else (*other.ends, other.view.rule.episode)
    names = [name for name in (*ends, other.sampler.stamp) if name is not None]
    values, _ = buffer.storage.read(state.rows, [Read(name, slot.reshape(-1)) for name in names])
    leaves = dict(zip(names, values, strict=True))
    return leaves, _state.stamp_of(other, leaves, slot.shape)


@operation
def convert(
    buffer: BufferConfig, state: BufferState, sampler: Any, other: BufferConfig
) -> tuple[BufferState, tuple[_anchors.Anchors | None, Any]]:
    """Return anchors and sampler state of `other` for the rows held; `sampler` is from `init_host_sampler(other)`.

    Unless a lane has never been full, its oldest row may follow a row that was overwritten. Its episode is then assumed to
    have begun earlier. With reset rows it may be one, so it is left out, except for its effect on the next row.
    """
    geometry = buffer.geometry
    lanes, length, _ = geometry
    age = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], (length, lanes))
    keep = age < state.ring.size[None, :]
    slot = jnp.where(keep, _slots.by_age(state.ring, geometry, age), jnp.int32(geometry.capacity))
    empty = _state.empty_state(other, state.rows)
    leaves, stamp = _leaves_of(buffer, state, slot, other)
    if other.dense:
        anchors, change = None, dense_change(slot, keep, None, stamp)
    else:
        assert empty.anchors is not None
        new, ids = _state.ending(other, leaves, keep.shape), _state.ids_of(other, leaves, empty.anchors.newest_id)
        was_cut = jnp.zeros(keep.shape, bool)
        if state.anchors is not None:
            was_cut = _anchors.has(state.anchors.flags.at[slot].get(mode="fill", fill_value=0), _anchors.CUT)
            new = new | _anchors.bit(was_cut, _anchors.CUT | _anchors.END)
        full = may_have_lost_rows(buffer, state)
        first = state.ring.cursor - state.ring.size
        tail, unknown, cut = empty.anchors.tail_flags, jnp.zeros((lanes,), jnp.uint8), None
        if other.view.rule.reset_rows:
            keep = keep.at[0].set(keep[0] & ~full)
            first = first + full.astype(jnp.int32)
            unknown, cut = new[0] & jnp.uint8(_anchors.END), was_cut[0] & full
        before = Ring(cursor=first % jnp.int32(length), size=jnp.zeros_like(state.ring.size), lap=state.ring.lap)
        nothing = dataclasses.replace(empty.anchors, tail_flags=tail.at[-1].set(jnp.where(full, unknown, tail[-1])))
        if nothing.step is not None:
            nothing = dataclasses.replace(nothing, step=jnp.where(full, _anchors.unknown_step(nothing), nothing.step))
        if ids is not None:
            nothing = dataclasses.replace(nothing, newest_id=ids[0])
        rows = _anchors.NewRows(new, None, stamp, ids, keep)
        anchors, change, _ = _anchors.extend(nothing, other.view, geometry, before, rows, state.token, cut=cut)
    change = dataclasses.replace(change, newest_stamp=_state.largest(stamp, keep))
    sampler = empty.sampler if sampler is None else sampler
    return state, (anchors, other.sampler.change(sampler, change, geometry, state.token))


def may_have_lost_rows(buffer: BufferConfig, state: BufferState) -> jax.Array:
    """Return bool[E], lanes whose oldest row may follow a row that was overwritten."""
    ring = state.ring
    return (ring.size == jnp.int32(buffer.geometry.length)) | (ring.cursor != ring.size)
