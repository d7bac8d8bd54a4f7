"""Move a state to another capacity or storage, and the rows of some shards to another number of them.

Rows that do not fit are evicted first, the oldest of each lane. The rest are written to the new storage in order of age, and
everything indexed by slot or position is remapped, on the host in numpy. Priorities, epochs and draw counts are kept.

With lanes, a new shard takes lanes of old ones, whose rows keep their positions: a lane has as many rows in any number of
shards. Without lanes it takes rows of old shards by age, every k-th from the newest on where old shards are divided, so that
each new shard has recent ones; they are ordered by age. Generations begin beyond all old ones, so old indices are stale. An
epoch of `samplers.Epoch` restarts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import slot_pool
from fbuf._algorithms.slot_pool import SlotPool
from fbuf._buffer import convert, write
from fbuf._buffer import state as state_ops
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, row_format_of
from fbuf._core import slots as _slots
from fbuf._core.pytree import item_bytes
from fbuf._core.sample import TICKET
from fbuf._core.slot_remap import SlotJoin, SlotRemap
from fbuf._core.slots import Geometry, Ring, next_lap
from fbuf._formats import checkpoint
from fbuf._host.failed_writes import write_of
from fbuf._host.ragged.values import MISSING
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
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
    return anchors, sampler, _slots.evict(state.ring, count)


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


Array = np.ndarray[Any, Any]


class Rows(NamedTuple):
    """The rows of a new shard, by age from the oldest: part and slot they come from, and their new slot, `[N, E]`."""

    part: Array  # -1: none
    old: Array
    new: Array
    cursor: Array
    size: Array


class Moves(NamedTuple):
    """Which shard is made of which."""

    first: int  # old shard of the first part
    number: int  # of old shards
    at: int  # the new shard
    shards: int  # of new shards
    lap: int  # the latest of all old shards
    begun: int  # the most epochs begun in an old shard


def reshard(call: str, reader: Buffer, parts: Sequence[BufferState], target: Buffer, moves: Moves) -> BufferState:
    """Return the state of a new shard, from the states of successive old ones, of `reader`. Eager.

    Raises:
      SchemaError: the sampler is custom; or a table of blocks has no room for the rows.
    """
    if not reader.sampler.moves or reader.writer != target.writer or not reader.writer.streams:
        raise checkpoint.SchemaError(
            f"{call}: the state of {reader.sampler!r} and {reader.writer!r} cannot be distributed to {moves.shards} shards; "
            f"expected a sampler of fbuf and writers.Ring(). Use {moves.number} shards."
        )
    parts = [dataclasses.replace(part, ahead=None).open() for part in parts]
    before, after = reader.geometry, target.geometry
    take = _by_age if reader.lanes is None else _by_lane
    rows, source, lane = take(parts, before, after, moves)
    place = np.full(len(parts) * before.capacity, -1, np.int64)
    place[source[source >= 0]] = np.flatnonzero(source >= 0)
    laps = next_lap(jnp.full((after.lanes,), moves.lap, jnp.uint32), jnp.uint32(2))
    ring = Ring(jnp.asarray(rows.cursor, jnp.int32), jnp.asarray(rows.size, jnp.int32), laps)
    moved = SlotJoin(before, after, source, lane, place, ring, moves.begun)

    stored = _write(call, reader, target, parts, rows)
    empty = state_ops.empty_state(target, stored, row_format_of(parts[0])).open()
    mine = [part for i, part in enumerate(parts) if (moves.first + i) * moves.shards // moves.number == moves.at]
    counters = sum((np.asarray(part.counters) for part in mine), np.zeros_like(np.asarray(empty.counters)))
    joined = target.sampler.joined([part.sampler for part in parts], empty.sampler, moved)
    left = {"rows": None, "header": None} | ({} if joined is None else {"sampler": None})
    kept = [dataclasses.replace(part, **left) for part in parts]
    fresh = dataclasses.replace(empty, **left)
    known = AnchorQueue, SlotPool
    made = jax.tree.map(lambda *nodes: _join(moved, *nodes), fresh, *kept, is_leaf=lambda node: isinstance(node, known))
    made = dataclasses.replace(
        made, rows=stored, header=empty.header, **({} if joined is None else {"sampler": joined})
    )
    state: BufferState = made.replace(ring=ring, counters=jnp.asarray(counters)).pack()
    if reader.lanes is None and target.sampler.by_arrival:
        numbers = {name: getattr(state.sampler, name) for name in target.sampler.numbers}
        sampler = convert.convert(target, state, None, static=(target,))[1][1]
        state = dataclasses.replace(state, sampler=target.sampler.set(sampler, **numbers))
    return state


def _by_lane(
    parts: Sequence[BufferState], before: Geometry, after: Geometry, moves: Moves
) -> tuple[Rows, Array, Array]:
    lane = (moves.at * after.lanes - moves.first * before.lanes + np.arange(after.lanes)).astype(np.int64)
    part, column = lane // before.lanes, lane % before.lanes
    position = np.arange(after.length)[:, None]
    source = part * before.capacity + position * before.lanes + column
    cursor, size = (np.concatenate([np.asarray(getattr(p.ring, n)) for p in parts])[lane] for n in ("cursor", "size"))
    age = np.arange(size.max(initial=0))[:, None]
    exists, place = age < size, (cursor - size + age) % after.length
    rows = Rows(
        np.where(exists, part, -1),
        place * before.lanes + column,
        place * after.lanes + np.arange(after.lanes),
        cursor,
        size,
    )
    return rows, source.reshape(-1), lane


def _by_age(parts: Sequence[BufferState], before: Geometry, after: Geometry, moves: Moves) -> tuple[Rows, Array, Array]:
    groups = math.lcm(moves.number, moves.shards)
    each, taken = groups // moves.number, groups // moves.shards
    found = []
    for i, state in enumerate(parts):
        slot = slots_by_age(state.ring, before)[0].reshape(-1)
        age = np.arange(slot.size)[::-1]  # 0: the newest
        group = (moves.first + i) * each + age % each
        keep = group // taken == moves.at
        found.append(np.stack([-age, group, np.full_like(group, i), slot])[:, keep])
    every = np.concatenate(found, axis=1)
    _, _, part, old = every[:, np.lexsort((every[1], every[0]))]
    size = part.size
    lost = any(int(s.ring.size[0]) == before.length or int(s.ring.size[0]) != int(s.ring.cursor[0]) for s in parts)
    start = int(lost and size < after.length)  # as `compact_remap`
    new = (start + np.arange(size)) % after.length
    source = np.full(after.capacity, -1, np.int64)
    source[new] = part.astype(np.int64) * before.capacity + old
    rows = Rows(part[:, None], old[:, None], new[:, None], np.array([(start + size) % after.length]), np.array([size]))
    return rows, source, np.zeros(1, np.int64)


def _write(call: str, reader: Buffer, target: Buffer, parts: Sequence[BufferState], rows: Rows) -> Any:
    """Write the rows to the target's storage."""
    nowhere = target.capacity + np.arange(rows.new.size).reshape(rows.new.shape)
    pairs = []
    for i, part in enumerate(parts):
        mine = rows.part == i
        old, new = np.where(mine, rows.old, reader.capacity), np.where(mine, rows.new, nowhere)
        pairs.append(
            (part, SlotRemap(reader.geometry, target.geometry, old.astype(np.int32), new.astype(np.int32), None))
        )
    return move_rows(call, reader, target, pairs)


def _join(moved: SlotJoin, fresh: Any, *parts: Any) -> Any:
    """Return a node of the new state."""
    if fresh is None:
        return None
    if isinstance(fresh, AnchorQueue):
        return anchor_log.joined(parts, moved)
    if isinstance(fresh, SlotPool):
        return slot_pool.joined(parts, moved)
    lanes, number = moved.before.lanes, moved.before.capacity
    if parts[0].shape[:1] == (number,) and fresh.shape[:1] == (moved.after.capacity,):
        return jnp.asarray(moved.slots(parts))
    if parts[0].shape[-1:] == (lanes,) and fresh.shape[-1:] == (moved.after.lanes,):
        return jnp.asarray(moved.lanes(parts))
    return parts[0]
