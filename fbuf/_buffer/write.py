"""Cores of the methods that change rows: `(buffer, state, ...) -> (state, result)`, pure functions of an opened state.

NaN and infinity are not priorities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms.sum_tree import keep_last
from fbuf._buffer import state as _state
from fbuf._buffer import transforms as _transforms
from fbuf._buffer.state import BufferConfig, BufferState, operation
from fbuf._core import control_flow
from fbuf._core import slots as _slots
from fbuf._core.control_flow import any_unbatched, order_after_reads
from fbuf._core.dispatch import update_if
from fbuf._core.sample import TICKET, Index
from fbuf._core.slots import Ring
from fbuf._indexing import anchors as _anchors
from fbuf._indexing import scatter as _scatter
from fbuf._interfaces.sampler import AnchorChange


@operation
def extend(
    buffer: BufferConfig,
    state: BufferState,
    leaves: dict[str, jax.Array],
    priority: Any,
    mask: Any,
    shape: tuple[int, int],
    axes: int,
    slots: bool = False,
    repeats: bool = False,
) -> tuple[BufferState, jax.Array | None]:
    """Write rows of `shape` [N, E]; leaves have the last or first of these axes only if `axes` is 1.

    With `slots` (of a Scattering writer) return their slots int32[N, E], C and more where nothing was written. `repeats`: rows
    that the storage does not store are given again before others, so that they leave no gap and are not counted.
    """
    mask, refused = _admitted(buffer, state, shape, mask)
    state = jax.named_scope("retire")(_make_room)(buffer, state, shape, mask)
    geometry, token = buffer.geometry, state.token
    leaves = {n: x.reshape(shape + x.shape[axes:]) for n, x in leaves.items()}
    priority, mask = (None if x is None else x.reshape(shape) for x in (priority, mask))
    sent = jax.named_scope("send")(_send)(buffer, state, leaves, mask, shape)
    leaves, mask, lost = sent.leaves, sent.mask, None if repeats else sent.lost
    counts = {} if repeats else dict(sent.counts)
    if refused is not None:
        counts["refused_rows"] = jnp.sum(refused, dtype=jnp.uint32) + counts.get("refused_rows", jnp.uint32(0))
    if priority is not None:
        priority, counts["refused_nonfinite"] = _finite(priority, mask)
    stamp = _state.stamp_of(buffer, leaves, shape)

    # If there are more rows than a lane holds, only the newest are written.
    skipped = max(shape[0] - geometry.length, 0) if mask is None and geometry.streams else 0
    kept = {n: x[skipped:] for n, x in leaves.items()} if skipped else leaves
    slot, ring, scatter = jax.named_scope("place")(_place)(buffer, state, shape[0] - skipped, skipped, sent)
    keep = None if mask is None and geometry.streams else slot < jnp.int32(geometry.capacity)
    if state.anchors is None:
        anchors, all_kept = None, jnp.ones(slot.shape, bool) if keep is None else keep
        priorities = None if priority is None else priority[skipped:]
        change = dense_change(slot, all_kept, priorities, None if stamp is None else stamp[skipped:])
    else:
        anchors, change, token = _follow(buffer, state, state.anchors, leaves, priority, stamp, mask)
    change = dataclasses.replace(change, newest_stamp=_state.largest(stamp, mask))
    rows, no_room = jax.named_scope("write")(buffer.storage.write)(sent.rows, slot, kept, keep, token)
    if no_room is not None:
        counts["refused_rows"] = no_room + counts.get("refused_rows", jnp.zeros((), jnp.uint32))
    after = state.replace(
        rows=rows,
        ring=ring,
        anchors=anchors,
        sampler=jax.named_scope("follow")(buffer.sampler.change)(state.sampler, change, geometry, token),
        counters=_state.count_up(state, **counts) if counts else state.counters,
        token=token,
        scatter=scatter,
        transforms=sent.transforms,
    )
    # No window spans the gap that refused or lost rows leave.
    if lost is not None and after.anchors is not None:
        after = _cut_lost(buffer, after, lost)
    return (after, slot if slots else None) if refused is None else cut.core(buffer, after, refused > jnp.int32(0))


def dense_change(
    slot: jax.Array, keep: jax.Array, priority: jax.Array | None, stamp: jax.Array | None = None
) -> AnchorChange:
    """Return the update of a write where every row held is an anchor: new rows open in place of the rows they replace."""
    priorities: Any = np.full(slot.shape, _anchors.NO_PRIORITY, np.float32) if priority is None else priority
    none = slot[:0]
    return AnchorChange(
        open_slot=slot,
        open_mask=keep,
        open_episode=None,
        open_stamp=stamp,
        newest_stamp=None,
        priority=priorities,
        close_slot=none,
        close_mask=jnp.zeros(none.shape, bool),
    )


def _finite(priority: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return |p| as float32, NO_PRIORITY where it is not finite, and how many of these rows are written."""
    priority = jnp.abs(priority.astype(jnp.float32))
    fine = jnp.isfinite(priority)
    invalid = ~fine if mask is None else ~fine & mask
    return jnp.where(fine, priority, jnp.float32(_anchors.NO_PRIORITY)), jnp.sum(invalid, dtype=jnp.uint32)


def _place(
    buffer: BufferConfig, state: BufferState, num: int, skipped: int, sent: Sent
) -> tuple[jax.Array, Ring, _scatter.Scatter | None]:
    """Return the slots int32[num, E] of rows, and the rings and scattered rows after."""
    if state.scatter is None or sent.choice is None:
        place = _state.streaming(buffer).place(state.ring, buffer.geometry, num, sent.mask, skipped)
        return place.slot, place.ring, None
    writer = _state.scattering(buffer)
    return _scatter.place(writer, buffer.geometry, state.scatter, state.ring, sent.choice, sent.failed, state.token)


def _follow(
    buffer: BufferConfig,
    state: BufferState,
    anchors: _anchors.Anchors,
    leaves: dict[str, jax.Array],
    priority: jax.Array | None,
    stamp: jax.Array | None,
    mask: jax.Array | None,
) -> tuple[_anchors.Anchors, AnchorChange, jax.Array]:
    """Return the anchors after a write of rows, what opened and closed, and the token."""
    geometry = buffer.geometry
    new = _state.ending(buffer, leaves, (next(iter(leaves.values())).shape[0], geometry.lanes))
    ids = _state.ids_of(buffer, leaves, anchors.newest_id)
    rows = _anchors.NewRows(new, priority, stamp, ids, mask)
    return jax.named_scope("anchors")(_anchors.extend)(anchors, buffer.view, geometry, state.ring, rows, state.token)


class Sent(NamedTuple):
    """Rows `[N, E, ...]` after `on_write`, stored by a storage that can fail. Of lost ones nothing else is written."""

    rows: Any  # of the storage
    leaves: dict[str, jax.Array]  # that `Storage.write` takes
    mask: jax.Array | None  # bool[N, E], the rows to write; None: all
    transforms: _state.Transforms | None
    choice: _scatter.Choice | None  # of a Scattering writer
    lost: jax.Array | None = None  # bool[E], which lanes lost rows
    failed: jax.Array | None = None  # bool[], whether there were rows, and none was stored
    counts: Mapping[str, jax.Array] = {}


def _send(
    buffer: BufferConfig,
    state: BufferState,
    leaves: dict[str, jax.Array],
    mask: jax.Array | None,
    shape: tuple[int, int],
) -> Sent:
    """Transform the rows, let the writer choose slots, if it chooses any, and the storage store the rows, if that can fail."""
    geometry, before = buffer.geometry, state.transforms
    transforms, choice, slot = before, None, None
    if before is not None:
        leaves, transforms = _transforms.write(buffer, before, leaves, mask, shape)
    transformed = leaves
    if state.scatter is not None:
        choice = _scatter.choose(_state.scattering(buffer), geometry, state.scatter, state.ring, leaves, mask)
        slot = choice.slot
    counts = {} if choice is None else {"refused_rows": choice.refused}
    rows, lost, failed = state.rows, None, None
    if buffer.storage.sends:
        wanted = jnp.ones(shape, bool) if mask is None else mask
        if slot is None and (mask is not None or shape[0] > geometry.length):
            slot = _state.streaming(buffer).place(state.ring, geometry, shape[0], wanted, 0).slot
        keep = None if slot is None else slot < jnp.int32(geometry.capacity)
        rows, leaves, stored = buffer.storage.send(rows, leaves, keep, None if choice is None else slot, state.token)
        gone = ~stored if keep is None else keep & ~stored
        mask, lost = jnp.where(jnp.any(gone), stored, wanted), jnp.any(gone, axis=0)
        failed = jnp.any(lost) & ~jnp.any(mask)
        counts["refused_rows"] = jnp.sum(gone, dtype=jnp.uint32) + counts.get("refused_rows", jnp.uint32(0))
        transforms = jax.tree.map(lambda old, new: jnp.where(failed, old, new), before, transforms)
    if transforms is not None:
        transforms = _transforms.observe(buffer, transforms, transformed, mask, shape)
    return Sent(rows, leaves, mask, transforms, choice, lost, failed, counts)


def _admitted(
    buffer: BufferConfig, state: BufferState, shape: tuple[int, int], mask: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return `mask` without the rows that a queue has no room for, and how many these are in each lane; None: no queue."""
    room = _state.room_left(buffer, state)
    if room is None:
        return mask, None
    wanted = jnp.ones(shape, bool) if mask is None else mask.reshape(shape)
    mask = wanted & (jnp.cumsum(wanted, axis=0, dtype=jnp.int32) <= room[None, :])
    return mask, jnp.sum(wanted & ~mask, axis=0, dtype=jnp.int32)


def store_values(
    buffer: BufferConfig, state: BufferState, leaves: dict[str, Any], values: Any, shape: tuple[int, int], mask: Any
) -> dict[str, Any]:
    """Store values that are not arrays (`storages.Ragged`); return the leaves with their tickets. Eager."""
    mask, _ = _admitted(buffer, state, shape, mask)
    tickets = buffer.storage.put_values(state.rows, values, shape, buffer.geometry.length, mask, state.token)
    return {**leaves, TICKET: jnp.asarray(tickets.reshape(leaves[TICKET].shape))}


def evict_oldest(
    buffer: BufferConfig, state: BufferState, count: jax.Array, most: int, token: jax.Array
) -> tuple[jax.Array, jax.Array, Any, AnchorChange, jax.Array]:
    """Close the anchors of the `count` int32[E] oldest rows of each lane, at most `most`.

    Returns:
      slot: int32[most, E], of the evicted rows; C elsewhere.
      gone: bool[most, E], which entries of `slot` are evicted rows.
      anchors, change, token: The remaining anchors, the update for the sampler, and the token.
    """
    geometry = buffer.geometry
    age = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32)[:, None], (most, geometry.lanes))
    gone = age < count[None, :]
    slot = jnp.where(gone, _slots.by_age(state.ring, geometry, age), jnp.int32(geometry.capacity))
    if state.anchors is None:
        change = dense_change(slot[:0], gone[:0], None)
        return slot, gone, None, dataclasses.replace(change, close_slot=slot, close_mask=gone), token
    anchors, change, token = _anchors.extend(
        state.anchors, buffer.view, geometry, state.ring, _anchors.no_rows(geometry), token, evict=(count, most)
    )
    return slot, gone, anchors, change, token


def _make_room(buffer: BufferConfig, state: BufferState, shape: tuple[int, int], mask: jax.Array | None) -> BufferState:
    """Evict the oldest rows if the storage has no room for the new ones, as if they had been overwritten.

    First the rows that the write overwrites are dropped, then more if needed: per lane at most twice the number of new rows.
    The oldest row that remains is never at position 0, where it would look like the first row of all (see
    `may_have_lost_rows`). With a Scattering writer new rows are refused instead.
    """
    geometry = buffer.geometry
    storage = buffer.storage
    if not storage.grows or not geometry.streams:
        return state
    skipped = max(shape[0] - geometry.length, 0) if mask is None else 0
    num = shape[0] - skipped
    most = min(2 * num, geometry.length)
    brought = jnp.full((geometry.lanes,), num, jnp.int32)
    if mask is not None:
        mask = mask.reshape(shape)
        brought = jnp.minimum(jnp.sum(mask, axis=0, dtype=jnp.int32), jnp.int32(geometry.length))
    needs_eviction = storage.needs_eviction(state.rows, jnp.sum(brought, dtype=jnp.int32))
    if needs_eviction is None:
        return state
    overwritten = _state.streaming(buffer).place(state.ring, geometry, num, mask, skipped).slot

    # The newest rows stay: some of them may be undecided.
    rule = buffer.view.rule
    free = _state.room_left(buffer, state)
    needed = jnp.int32(1 if rule.prompt else rule.rows)
    needed = needed if free is None else jnp.maximum(needed, jnp.int32(geometry.length) - free)

    def given_up(needs_eviction: jax.Array, ring: Ring) -> jax.Array:
        """Return int32[E], how many of the oldest rows of each lane to evict."""
        spare = jnp.maximum(ring.size - needed, jnp.int32(0))
        count = jnp.minimum(jnp.minimum(jnp.int32(2) * brought, jnp.int32(most)), spare)
        count = jnp.where(needs_eviction, count, jnp.int32(0))
        first = (ring.cursor - ring.size + count) % jnp.int32(geometry.length)
        return jnp.where((first == jnp.int32(0)) & (count > jnp.int32(0)), count - jnp.int32(1), count)

    def some(carry: tuple[jax.Array, BufferState]) -> tuple[jax.Array, BufferState]:
        _, state = carry
        rows, token = storage.drop(state.rows, overwritten, state.token)
        still = storage.needs_eviction(rows, jnp.sum(brought, dtype=jnp.int32))
        assert still is not None
        count = given_up(still, state.ring)
        slot, gone, anchors, change, token = evict_oldest(buffer, state, count, most, token)
        rows, token = storage.drop(rows, slot, token)
        sampler = buffer.sampler.change(state.sampler, change, geometry, token)
        ring = _slots.evict(state.ring, count)
        counters = _state.count_up(state, retired_rows=jnp.sum(gone, dtype=jnp.uint32))
        state = state.replace(rows=rows, ring=ring, anchors=anchors, sampler=sampler, counters=counters, token=token)
        return jnp.zeros_like(count), state

    # A loop of at most one iteration: a branch would copy the counts of the blocks.
    start = (given_up(needs_eviction, state.ring), state)
    return control_flow.while_loop(lambda carry: any_unbatched(carry[0] > jnp.int32(0)), some, start)[1]


@operation
def update_rows(
    buffer: BufferConfig, state: BufferState, index: Index, leaves: dict[str, jax.Array], mask: jax.Array | None
) -> tuple[BufferState, None]:
    """Replace leaves of rows, except of stale ones; the last of duplicates wins."""
    capacity, axes = jnp.int32(buffer.capacity), index.slot.ndim
    index = _state.flat_index(index, mask, buffer.capacity)
    leaves = {name: leaf.reshape(index.slot.shape + leaf.shape[axes:]) for name, leaf in leaves.items()}
    token, masked, inside, fresh = _state.classify_indices(buffer, state, index)
    if axes > 1:  # `window_index` read flags
        token, fresh = order_after_reads(token, fresh)
    wanted = jnp.where(fresh, index.slot, capacity)
    slot = _slots.where_written(fresh & keep_last(wanted), wanted, buffer.capacity)
    rows, no_room = jax.named_scope("write")(buffer.storage.update)(state.rows, slot, leaves, token)
    counters = _state.count_up(
        state,
        refused_out_of_range=jnp.sum(~masked & ~inside, dtype=jnp.uint32),
        refused_stale=jnp.sum(inside & ~fresh, dtype=jnp.uint32),
        **({} if no_room is None else {"refused_rows": no_room}),
    )
    return state.replace(rows=rows, counters=counters, token=token), None


@operation
def cut(buffer: BufferConfig, state: BufferState, lanes: jax.Array | None) -> tuple[BufferState, None]:
    """Cut the lanes bool[E] or bool[]; None: all."""
    before, geometry = state.anchors, buffer.geometry
    if before is None:
        return state, None
    lanes = jnp.ones((geometry.lanes,), bool) if lanes is None else lanes.reshape(-1)
    state = _cut_anchors(buffer, state, lanes)
    if buffer.storage.in_files:
        assert state.anchors is not None
        cut = state.anchors.tail_flags[-1] != before.tail_flags[-1]
        newest = _slots.by_age(state.ring, geometry, state.ring.size[None, :] - jnp.int32(1))[0]
        slot = jnp.where(cut, newest, jnp.int32(geometry.capacity))
        state = state.replace(rows=buffer.storage.cut(state.rows, slot, state.token))
    return state, None


def _cut_anchors(buffer: BufferConfig, state: BufferState, lanes: jax.Array) -> BufferState:
    """Cut the lanes bool[E] in the state; it has anchors."""
    assert state.anchors is not None
    geometry = buffer.geometry
    anchors, change, token = _anchors.extend(
        state.anchors, buffer.view, geometry, state.ring, _anchors.no_rows(geometry), state.token, cut=lanes
    )
    sampler = buffer.sampler.change(state.sampler, change, geometry, token)
    return state.replace(anchors=anchors, sampler=sampler, token=token)


def _cut_lost(buffer: BufferConfig, state: BufferState, lost: jax.Array) -> BufferState:
    """Cut the lanes bool[E] that lost rows; almost always none has."""

    def cut_lost(_: jax.Array, state: BufferState, lost: jax.Array) -> tuple[BufferState, jax.Array]:
        return _cut_anchors(buffer, state, lost), lost

    return update_if(jnp.any(lost), cut_lost, state, lost)[0]


@operation
def clear(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, None]:
    """Drop every row."""
    geometry = buffer.geometry
    spec = buffer.storage.spec(state.rows)[0]
    anchors = None if state.anchors is None else _anchors.init(geometry, buffer.rule, buffer.sampler, spec)
    scatter = state.scatter
    if scatter is None:
        ring = _state.streaming(buffer).clear(state.ring)
    else:
        ring = _slots.clear_rings(state.ring)
        scatter = _scatter.clear(scatter, _state.scattering(buffer), geometry, spec)
    return (
        state.replace(
            rows=buffer.storage.clear(state.rows),
            ring=ring,
            scatter=scatter,
            anchors=anchors,
            sampler=buffer.sampler.clear(state.sampler, geometry, buffer.dense),
            ahead=None if state.ahead is None else state.ahead.dropped(),
        ),
        None,
    )


@operation
def set_numbers(buffer: BufferConfig, state: BufferState, numbers: dict[str, jax.Array]) -> tuple[BufferState, None]:
    """Replace numbers of the sampler."""
    return dataclasses.replace(state, sampler=buffer.sampler.set(state.sampler, **numbers)), None


@operation
def rebuild(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, None]:
    """Apply the sampler's current numbers to all rows."""
    sampler: Any = buffer.sampler  # `rebuild` is optional
    return dataclasses.replace(state, sampler=sampler.rebuild(state.sampler, buffer.geometry, state.token)), None
