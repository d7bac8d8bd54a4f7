"""Move a state to another capacity or storage.

Rows that do not fit are evicted first, the oldest of each lane. The rest are written to the new storage in order of age, and
everything indexed by slot or position is remapped, on the host in numpy. Priorities, epochs and draw counts are kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import convert, write
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.pytree import item_bytes
from fbuf._core.sample import TICKET
from fbuf._core.slot_remap import SlotRemap
from fbuf._core.slots import Geometry, Ring, evict, next_lap
from fbuf._formats import checkpoint
from fbuf._host.failed_writes import write_of
from fbuf._host.ragged.values import MISSING
from fbuf._indexing.anchors import CUT, has
from fbuf._interfaces.sampler import EpisodeStarts
from fbuf._interfaces.storage import Read
from fbuf.storages import Ragged


def slots_by_age(ring: Ring, geometry: Geometry) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the slots of each lane's rows, oldest first, with C after the last.

    Returns:
      Slots int32[N, E], whether each is a row bool[N, E], and the number of rows int32[E].
    """
    size, cursor = np.asarray(ring.size), np.asarray(ring.cursor)
    age = np.arange(int(size.max(initial=0)), dtype=np.int32)[:, None]
    exists = age < size[None, :]
    lane = np.arange(geometry.lanes, dtype=np.int32)
    old = (cursor - size + age) % geometry.length * geometry.lanes + lane
    return np.where(exists, old, geometry.capacity).astype(np.int32), exists, size


def identity_remap(ring: Ring, geometry: Geometry) -> SlotRemap:
    """Return the remap in which all rows keep their slots."""
    old = slots_by_age(ring, geometry)[0]
    if not geometry.streams:  # the rings hold the number of rows, not their order
        count = int(np.asarray(ring.size).sum())
        number = -(-count // geometry.lanes)
        old = np.arange(number * geometry.lanes, dtype=np.int32).reshape(number, geometry.lanes)
        old[old >= count] = geometry.capacity
    return SlotRemap(geometry, geometry, old, old, None)


def compact_remap(ring: Ring, before: Geometry, after: Geometry, lost: np.ndarray) -> SlotRemap:
    """Return the remap to the first positions of each lane.

    A lane that lost rows and is not full starts at its second position, so that its first row does not count as the first ever.
    """
    old, exists, size = slots_by_age(ring, before)
    first = (lost & (size < after.length)).astype(np.int32)
    age = np.arange(old.shape[0], dtype=np.int32)[:, None]
    lane = np.arange(after.lanes, dtype=np.int32)
    new = (first[None, :] + age) % after.length * after.lanes + lane
    rings = Ring(
        cursor=jnp.asarray((first + size) % after.length, jnp.int32),
        size=jnp.asarray(size, jnp.int32),
        lap=next_lap(ring.lap, jnp.uint32(2)),  # beyond all old generations
    )
    return SlotRemap(before, after, old, np.where(exists, new, after.capacity).astype(np.int32), rings)


def remap_state(target: Buffer, state: BufferState, remap: SlotRemap, rows: Any) -> BufferState:
    """Return the state over its new rows."""
    anchors = state.anchors
    if anchors is not None:
        starts = None if anchors.starts is None else _remap_starts(anchors.starts, state.ring, remap)
        anchors = dataclasses.replace(anchors, flags=jnp.asarray(remap.by_slot(anchors.flags, 0)), starts=starts)
    sampler = target.sampler.moved(state.sampler, remap)
    return state.replace(rows=rows, ring=remap.ring, anchors=anchors, sampler=sampler)


def _remap_starts(starts: EpisodeStarts, ring: Ring, remap: SlotRemap) -> EpisodeStarts:
    length = remap.before.length
    oldest = np.asarray(ring.cursor) - np.asarray(ring.size)
    first = np.asarray(remap.ring.cursor) - np.asarray(remap.ring.size)
    queues = [
        (first[e] + (queue - oldest[e]) % length) % remap.after.length
        for e, queue in enumerate(remap.read_queues(starts.position, starts.head, starts.count))
    ]
    return EpisodeStarts(remap.pack_queues(queues, np.int32), jnp.zeros_like(starts.head), starts.count)


_CHUNK_BYTES = 8 * 1024 * 1024  # of rows moved at once


def resize_state(call: str, reader: Buffer, target: Buffer, state: BufferState) -> BufferState:
    """Return the state of `reader` as one of `target`, with another capacity or storage, without a prefetched batch.

    Raises:
      SchemaError: the writer or sampler is custom; or a table of blocks has no room for the rows.
    """
    _check_movable(call, reader, target)
    state = dataclasses.replace(state, ahead=None)
    if reader.geometry == target.geometry:
        remap = identity_remap(state.ring, reader.geometry)
        return dataclasses.replace(state, rows=move_rows(call, reader, target, [(state, remap)]))
    lost = np.asarray(convert.may_have_lost_rows(reader, state))
    size = np.asarray(state.ring.size)
    excess = np.maximum(size - target.geometry.length, 0)
    if excess.any():
        most = reader.geometry.length - target.geometry.length
        anchors, sampler, ring = _evict_oldest(reader, most, state, jnp.asarray(excess, jnp.int32))
        state = state.replace(anchors=anchors, sampler=sampler, ring=ring)
    remap = compact_remap(state.ring, reader.geometry, target.geometry, lost | (excess > 0))
    rows = move_rows(call, reader, target, [(state, remap)])
    return remap_state(target, state, remap, rows)


def _check_movable(call: str, reader: Buffer, target: Buffer) -> None:
    if isinstance(reader.storage, Ragged) != isinstance(target.storage, Ragged):
        raise checkpoint.SchemaError(f"{call}: {target.storage!r} cannot hold rows of {reader.storage!r}.")
    if reader.geometry == target.geometry:
        return
    if not reader.writer.streams:
        raise checkpoint.SchemaError(
            f"{call}: {reader.writer!r} chooses slots itself, so rows cannot move; expected capacity {reader.capacity}. "
            f"Leave resize out, or add the rows again: other.extend(other.init(example), rows)."
        )
    if not reader.sampler.moves:
        raise checkpoint.SchemaError(f"{call}: the state of {reader.sampler!r} cannot be resized. Leave resize out.")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evict_oldest(buffer: Buffer, most: int, state: BufferState, count: jax.Array) -> Any:
    """Return anchors, sampler and rings without the `count` int32[E] oldest rows of each lane."""
    _, _, anchors, change, token = write.evict_oldest(buffer, state, count, most, state.token)
    sampler = buffer.sampler.change(state.sampler, change, buffer.geometry, token)
    return anchors, sampler, evict(state.ring, count)


def move_rows(call: str, reader: Buffer, target: Buffer, moves: Sequence[tuple[BufferState, SlotRemap]]) -> Any:
    """Write the rows of states of `reader` to the target's storage, those of each lane in order of age.

    The remaps have the same shape, and no new slot is in two of them.
    """
    state, remap = moves[0]
    spec, structure = reader.storage.spec(state.rows)
    geometry = target.geometry
    if isinstance(target.storage, Ragged):
        rows: Any = target.storage.open(geometry, spec, structure, state.rows.layout.leaves)
    else:
        rows = target.storage.init(geometry, spec, structure)
    step = max(_CHUNK_BYTES // max(geometry.lanes * sum(map(item_bytes, spec.values())), 1), 1)
    step = min(1 << (step.bit_length() - 1), max(remap.number, 1))
    for start in range(0, remap.number, step):
        for state, remap in moves:
            old, new, keep = remap.chunk(start, step)
            if not keep.any():
                continue
            more = {}
            if isinstance(target.storage, Ragged):
                more = {TICKET: _move_ragged(reader, target, state, rows, old, keep)}
            flags = None if state.anchors is None else state.anchors.flags
            rows, wrong = _copy_rows(reader, target, rows, state.rows, old, new, keep, more, flags)
            wrong = int(wrong)
            try:
                jax.tree.leaves(rows)  # raises if the storage could not write
            except OSError as error:
                failed = write_of(error)
                why = error.strerror if failed is None else failed.reason
                text = (
                    f"{call}: the rows do not fit in {target.storage!r} ({why}). Free memory or disk, and load again."
                )
                raise OSError(error.errno, text) from None
            if wrong:
                raise checkpoint.SchemaError(f"{call}: {wrong} rows do not fit in {target.storage!r}, or had expired.")
    return rows


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _copy_rows(
    reader: Buffer, target: Buffer, rows: Any, source: Any, old: Any, new: Any, keep: Any, more: Any, flags: Any
) -> tuple[Any, jax.Array]:
    """Copy rows from slots int32[N, E] `old` to `new`; also return how many were missing or did not fit."""
    names = [name for name in reader.storage.spec(source)[0] if name not in more]
    if isinstance(target.storage, Ragged):
        names = [name for name in names if name in source.device]
    arrays, ok = reader.storage.read(source, [Read(name, old.reshape(-1)) for name in names])
    leaves = {n: a.reshape(old.shape + a.shape[1:]) for n, a in zip(names, arrays, strict=True)}
    wrong = jnp.zeros((), jnp.uint32)
    if ok is not None:
        wrong = jnp.sum(keep & ~jnp.broadcast_to(ok, (old.size,)).reshape(old.shape), dtype=jnp.uint32)
    token = jnp.zeros((), jnp.int32)
    leaves |= more
    if target.storage.sends:
        rows, leaves, _ = target.storage.send(rows, leaves, keep, None if target.geometry.streams else new, token)
    rows, no_room = target.storage.write(rows, new, leaves, keep, token)
    if flags is not None and target.storage.in_files:
        cut = keep & has(flags.at[old].get(mode="fill", fill_value=0), CUT)
        rows = target.storage.cut(rows, jnp.where(cut, new, jnp.int32(target.capacity)).reshape(-1), token)
    return rows, wrong if no_room is None else wrong + no_room


def _move_ragged(
    reader: Buffer, target: Buffer, state: BufferState, rows: Any, old: np.ndarray, keep: np.ndarray
) -> Any:
    """Store ragged leaves in the target; return their tickets."""
    assert isinstance(target.storage, Ragged)
    read = reader.storage.read(state.rows, [Read(TICKET, jnp.asarray(old.reshape(-1)))])[0][0]
    lazy = reader.storage.split(state.rows, {TICKET: read})[1].open({})
    values = [lazy.get(name, MISSING) for name in lazy.names]
    return jnp.asarray(target.storage.put_values(rows, values, old.shape, target.geometry.length, keep, ()))
