"""Distribute the rows of some shards to another number of them.

With lanes, a new shard takes lanes of old ones, whose rows keep their positions: a lane has as many rows in any number of
shards. Without lanes it takes rows of old shards by age, every k-th from the newest on where old shards are divided, so that
each new shard has recent ones; they are ordered by age. Generations begin beyond all old ones, so old indices are stale. An
epoch of `samplers.Epoch` restarts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import slot_pool
from fbuf._algorithms.slot_pool import SlotPool
from fbuf._buffer import convert
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, empty_state, row_format_of
from fbuf._checkpoint import resize
from fbuf._core.slot_remap import SlotJoin, SlotRemap
from fbuf._core.slots import Geometry, Ring, next_lap
from fbuf._formats import checkpoint
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue

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
    empty = empty_state(target, stored, row_format_of(parts[0])).open()
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
        slot = resize.slots_by_age(state.ring, before)[0].reshape(-1)
        age = np.arange(slot.size)[::-1]  # 0: the newest
        group = (moves.first + i) * each + age % each
        keep = group // taken == moves.at
        found.append(np.stack([-age, group, np.full_like(group, i), slot])[:, keep])
    every = np.concatenate(found, axis=1)
    _, _, part, old = every[:, np.lexsort((every[1], every[0]))]
    size = part.size
    lost = any(int(s.ring.size[0]) == before.length or int(s.ring.size[0]) != int(s.ring.cursor[0]) for s in parts)
    start = int(lost and size < after.length)  # as `resize.compact_remap`
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
    return resize.move_rows(call, reader, target, pairs)


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
