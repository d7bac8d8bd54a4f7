"""Move a state to another capacity or storage.

Rows that do not fit are evicted first, the oldest of each lane. The rest are written to the new storage in order of age, and
everything indexed by slot or position is remapped, on the host in numpy. Priorities, epochs and draw counts are kept.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import rank_buckets, sum_tree
from fbuf._algorithms.slot_pool import Roster
from fbuf._buffer import convert, write
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.geometry import Geometry, Ring
from fbuf._core.pytree import item_bytes
from fbuf._core.sample import TICKET
from fbuf._formats import checkpoint
from fbuf._host.ragged.values import MISSING
from fbuf._indexing import ring as _ring
from fbuf._indexing.anchor_log import EpisodeLog, Log
from fbuf._indexing.ring import later
from fbuf._interfaces.sampler import EpisodeStarts
from fbuf._interfaces.storage import Read
from fbuf.samplers import (
    ConsumeState,
    EpochState,
    Prioritized,
    PrioritizedState,
    RankedState,
    StalenessState,
    _host_priorities,
)
from fbuf.samplers._host_priorities import HostTree
from fbuf.storages import Ragged

_KNOWN = ("Uniform", "Epoch", "Consume", "Prioritized", "Ranked", "Staleness")


class SlotRemap(NamedTuple):
    """Slots of the rows held, oldest first."""

    before: Geometry
    after: Geometry
    old: np.ndarray  # int32[N, E]; C where a lane has fewer rows
    new: np.ndarray  # int32[N, E]; out of range and all different there
    ring: Any  # the rings afterwards; None where they stay

    @property
    def number(self) -> int:
        """N, rows of the longest lane."""
        return int(self.old.shape[0])

    def chunk(self, start: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Some of them, always `size`: old and new slots, and which there are."""
        lanes, nowhere = self.after.lanes, self.after.capacity
        old = np.full((size, lanes), self.before.capacity, np.int32)
        new = (nowhere + np.arange(size * lanes, dtype=np.int32)).reshape(size, lanes)
        stop = min(start + size, self.number)
        old[: stop - start] = self.old[start:stop]
        there = old < self.before.capacity
        new[there] = self.new[start:stop][there[: stop - start]]
        return old, new, there

    def at(self) -> np.ndarray:
        """int32[C + 1], the new slot of each old one; the new C for none."""
        out = np.full(self.before.capacity + 1, self.after.capacity, np.int32)
        there = self.old < self.before.capacity
        out[self.old[there]] = self.new[there]
        return out

    def by_slot(self, array: Any, fill: Any) -> np.ndarray:
        """An array [C, ...] by slot, in its new order."""
        array = np.asarray(array)
        out = np.full((self.after.capacity, *array.shape[1:]), fill, array.dtype)
        there = self.old < self.before.capacity
        out[self.new[there]] = array[self.old[there]]
        return out


def _ages(ring: Ring, geometry: Geometry) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    size, cursor = np.asarray(ring.size), np.asarray(ring.cursor)
    age = np.arange(int(size.max(initial=0)), dtype=np.int32)[:, None]
    there = age < size[None, :]
    lane = np.arange(geometry.lanes, dtype=np.int32)
    old = (cursor - size + age) % geometry.length * geometry.lanes + lane
    return np.where(there, old, geometry.capacity).astype(np.int32), there, size


def identity_remap(ring: Ring, geometry: Geometry) -> SlotRemap:
    """All rows stay where they are."""
    old = _ages(ring, geometry)[0]
    if not geometry.streams:  # the rings say how many there are, not which came first
        held = int(np.asarray(ring.size).sum())
        number = -(-held // geometry.lanes)
        old = np.arange(number * geometry.lanes, dtype=np.int32).reshape(number, geometry.lanes)
        old[old >= held] = geometry.capacity
    return SlotRemap(geometry, geometry, old, old, None)


def compact_remap(ring: Ring, before: Geometry, after: Geometry, lost: np.ndarray) -> SlotRemap:
    """The rows of each lane from its first position on; from its second where there were rows before them (`lost`) and the lane
    is not full, so that the first held is not taken for the first there ever was."""
    old, there, size = _ages(ring, before)
    first = (lost & (size < after.length)).astype(np.int32)
    age = np.arange(old.shape[0], dtype=np.int32)[:, None]
    lane = np.arange(after.lanes, dtype=np.int32)
    new = (first[None, :] + age) % after.length * after.lanes + lane
    rings = Ring(
        cursor=jnp.asarray((first + size) % after.length, jnp.int32),
        size=jnp.asarray(size, jnp.int32),
        lap=later(ring.lap, jnp.uint32(2)),  # beyond all generations there were
    )
    return SlotRemap(before, after, old, np.where(there, new, after.capacity).astype(np.int32), rings)


def can_remap(buffer: Buffer) -> bool:
    """Whether the sampler's state is of a kind that can be moved."""
    return type(buffer.sampler).__name__ in _KNOWN and type(buffer.sampler).__module__.startswith("fbuf.")


def remap_state(target: Buffer, state: BufferState, remap: SlotRemap, rows: Any) -> BufferState:
    """The state over its new rows."""
    anchors = state.anchors
    if anchors is not None:
        starts = None if anchors.starts is None else _starts(anchors.starts, state.ring, remap)
        anchors = dataclasses.replace(anchors, flags=jnp.asarray(remap.by_slot(anchors.flags, 0)), starts=starts)
    sampler = _sampler(target, state.sampler, remap)
    return dataclasses.replace(state, rows=rows, ring=remap.ring, anchors=anchors, sampler=sampler)


def _queue(entries: Any, head: Any, count: Any, remap: SlotRemap) -> list[np.ndarray]:
    """Of each lane, the entries of a queue [C] that begins at `head`, oldest first."""
    entries, lanes, length = np.asarray(entries), remap.before.lanes, remap.before.length
    heads, counts = np.asarray(head), np.asarray(count)
    return [entries[(heads[e] + np.arange(counts[e])) % length * lanes + e] for e in range(lanes)]


def _queued(queues: list[np.ndarray], remap: SlotRemap, dtype: Any) -> Any:
    """Such queues side by side, all from their first place on."""
    out = np.zeros((remap.after.length, remap.after.lanes), dtype)
    for lane, queue in enumerate(queues):
        out[: len(queue), lane] = queue
    return jnp.asarray(out.reshape(-1))


def _starts(starts: EpisodeStarts, ring: Ring, remap: SlotRemap) -> EpisodeStarts:
    length = remap.before.length
    oldest = np.asarray(ring.cursor) - np.asarray(ring.size)
    first = np.asarray(remap.ring.cursor) - np.asarray(remap.ring.size)
    queues = [
        (first[e] + (queue - oldest[e]) % length) % remap.after.length
        for e, queue in enumerate(_queue(starts.position, starts.head, starts.count, remap))
    ]
    return EpisodeStarts(_queued(queues, remap, np.int32), jnp.zeros_like(starts.head), starts.count)


def _log(log: Log, remap: SlotRemap) -> Log:
    if log.dense:
        return log
    at = remap.at()
    queues = [at[queue] for queue in _queue(log.slot, log.head, log.count, remap)]
    return Log(_queued(queues, remap, np.int32), jnp.zeros_like(log.head), log.count)


def _episodes(episodes: EpisodeLog, remap: SlotRemap) -> EpisodeLog:
    """Numbered anew, from the oldest that has anchors on."""
    numbers, begins, last = [], [], []
    for queue in _queue(episodes.number, episodes.log.head, episodes.log.count, remap):
        number = (queue - queue[:1]) % remap.before.length
        numbers.append(number)
        begins.append(np.searchsorted(number, np.arange(int(number.max(initial=-1)) + 1)))
        last.append(int(number.max(initial=0)))
    return dataclasses.replace(
        episodes,
        log=_log(episodes.log, remap),
        number=_queued(numbers, remap, np.int32),
        begin=_queued(begins, remap, np.int32),
        last=jnp.asarray(last, jnp.int32),
    )


def _roster(roster: Roster, remap: SlotRemap) -> Roster:
    number, at = int(roster.number), remap.at()
    slot = np.zeros(remap.after.capacity, np.int32)
    slot[:number] = at[np.asarray(roster.slot)[:number]]
    return Roster(jnp.asarray(slot), jnp.asarray(remap.by_slot(roster.place, -1)), roster.number)


def _epoch(epoch: EpochState, remap: SlotRemap) -> EpochState:
    """An epoch of more anchors than there is room for now has ended."""
    turn, capacity = epoch.turn, remap.after.capacity
    if turn.order.shape[0]:
        order = np.zeros(min(capacity, 1024), np.int32)
        kept = min(order.size, turn.order.shape[0])
        order[:kept] = np.asarray(turn.order)[:kept]
        turn = dataclasses.replace(turn, order=jnp.asarray(order))
    if int(np.asarray(turn.start).sum()) > capacity:
        none = jnp.zeros_like(turn.start)
        turn = dataclasses.replace(turn, start=none, closed=none, taken=jnp.zeros_like(turn.taken))
    return dataclasses.replace(epoch, log=_log(epoch.log, remap), turn=turn)


def _prioritized(target: Buffer, sampler: PrioritizedState, remap: SlotRemap) -> PrioritizedState:
    capacity = remap.before.capacity
    log = None if sampler.log is None else _log(sampler.log, remap)
    if isinstance(sampler.tree, HostTree):
        assert isinstance(target.sampler, Prioritized)
        leaves = remap.by_slot(_host_priorities.leaves(sampler.tree), 0)
        tree = _host_priorities.open("fbuf.load", target.capacity, target.sampler.normalize == "buffer", leaves)
        return dataclasses.replace(sampler, tree=tree, log=log)

    def moved(nodes: Any, fill: float, reduce: sum_tree.Reduce) -> Any:
        if not nodes.shape[0]:
            return nodes
        return sum_tree.rebuild(jnp.asarray(remap.by_slot(np.asarray(nodes)[:capacity], fill)), reduce=reduce)

    return dataclasses.replace(
        sampler,
        tree=moved(sampler.tree, 0, "sum"),
        low=moved(sampler.low, np.inf, "min"),
        top=None if sampler.top is None else moved(sampler.top, -np.inf, "max"),
        log=log,
    )


def _sampler(target: Buffer, sampler: Any, remap: SlotRemap) -> Any:
    if isinstance(sampler, Log):
        return _log(sampler, remap)
    if isinstance(sampler, EpisodeLog):
        return _episodes(sampler, remap)
    if isinstance(sampler, EpochState):
        return _epoch(sampler, remap)
    if isinstance(sampler, StalenessState):
        return dataclasses.replace(sampler, log=_log(sampler.log, remap))
    if isinstance(sampler, ConsumeState):
        left = jnp.asarray(remap.by_slot(sampler.left, 0)) if sampler.left.shape[0] else sampler.left
        return ConsumeState(_roster(sampler.roster, remap), left)
    if isinstance(sampler, RankedState):
        capacity = remap.before.capacity
        bucket = remap.by_slot(np.asarray(sampler.ranks.bucket)[:capacity], 0)
        log = None if sampler.log is None else _log(sampler.log, remap)
        return dataclasses.replace(sampler, ranks=rank_buckets.of_buckets(jnp.asarray(bucket)), log=log)
    assert isinstance(sampler, PrioritizedState)
    return _prioritized(target, sampler, remap)


_CHUNK_BYTES = 8 * 1024 * 1024  # of rows moved at once


def resize_state(call: str, reader: Buffer, target: Buffer, state: BufferState) -> BufferState:
    """The state of `reader` as one of `target`, of another capacity or storage, with nothing drawn ahead.

    Raises:
      SchemaError: the writer or sampler is of a kind that nothing is known of; or a table of blocks has no room for the rows.
    """
    _check_movable(call, reader, target)
    state = dataclasses.replace(state, ahead=None)
    if reader.geometry == target.geometry:
        remap = identity_remap(state.ring, reader.geometry)
        return dataclasses.replace(state, rows=_move_rows(call, reader, target, state, remap))
    lost = np.asarray(convert._may_have_lost_rows(reader, state))
    size = np.asarray(state.ring.size)
    excess = np.maximum(size - target.geometry.length, 0)
    if excess.any():
        most = reader.geometry.length - target.geometry.length
        anchors, sampler, ring = _evict_oldest(reader, most, state, jnp.asarray(excess, jnp.int32))
        state = dataclasses.replace(state, anchors=anchors, sampler=sampler, ring=ring)
    remap = compact_remap(state.ring, reader.geometry, target.geometry, lost | (excess > 0))
    rows = _move_rows(call, reader, target, state, remap)
    return remap_state(target, state, remap, rows)


def _check_movable(call: str, reader: Buffer, target: Buffer) -> None:
    if isinstance(reader.storage, Ragged) != isinstance(target.storage, Ragged):
        raise checkpoint.SchemaError(
            f"{call}: rows of {reader.storage!r} cannot come to lie in {target.storage!r}; expected Ragged for ragged rows, "
            f"and for them alone. Use the storage that was saved."
        )
    if reader.geometry == target.geometry:
        return
    if not reader.writer.streams:
        raise checkpoint.SchemaError(
            f"{call}: {reader.writer!r} says itself where rows go, so that nobody else can move them; expected capacity "
            f"{reader.capacity}. Leave resize out, or add the rows anew: other.extend(other.init(example), rows)."
        )
    if not can_remap(reader):
        raise checkpoint.SchemaError(
            f"{call}: what {reader.sampler!r} keeps by slot only it knows; expected one of fbuf's samplers. Leave resize out."
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evict_oldest(buffer: Buffer, most: int, state: BufferState, count: jax.Array) -> Any:
    """Anchors, sampler and rings without the `count` int32[E] oldest rows of each lane."""
    _, _, anchors, change, token = write.evict_oldest(buffer, state, count, most, state.token)
    sampler = buffer.sampler.change(state.sampler, change, buffer.geometry, token)
    return anchors, sampler, _ring.retire(state.ring, count)


def _move_rows(call: str, reader: Buffer, target: Buffer, state: BufferState, remap: SlotRemap) -> Any:
    """The rows in the target's storage: those of each lane in order of age."""
    spec, structure = reader.storage.spec(state.rows)
    geometry = target.geometry
    if isinstance(target.storage, Ragged):
        rows: Any = target.storage.open(geometry, spec, structure, state.rows.layout.leaves)
    else:
        rows = target.storage.init(geometry, spec, structure)
    step = max(_CHUNK_BYTES // max(geometry.lanes * sum(map(item_bytes, spec.values())), 1), 1)
    step = min(1 << (step.bit_length() - 1), max(remap.number, 1))
    for start in range(0, remap.number, step):
        old, new, keep = remap.chunk(start, step)
        more = (
            {TICKET: _move_ragged(reader, target, state, rows, old, keep)} if isinstance(target.storage, Ragged) else {}
        )
        rows, wrong = _copy_rows(reader, target, rows, state.rows, old, new, keep, more)
        if int(wrong):
            raise checkpoint.SchemaError(
                f"{call}: {int(wrong)} rows found no place in {target.storage!r}, or had expired; expected room for all. Give "
                f"it more: Deduplicated(blocks=...), or load into another storage."
            )
    return rows


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _copy_rows(
    reader: Buffer, target: Buffer, rows: Any, source: Any, old: Any, new: Any, keep: Any, more: dict[str, Any]
) -> tuple[Any, jax.Array]:
    """The rows with some more, from slots int32[N, E] `old` to `new`; and how many were not there or found no room."""
    names = [name for name in reader.storage.spec(source)[0] if name not in more]
    if isinstance(target.storage, Ragged):
        names = [name for name in names if name in source.device]
    arrays, ok = reader.storage.read(source, [Read(name, old.reshape(-1)) for name in names])
    leaves = {n: a.reshape(old.shape + a.shape[1:]) for n, a in zip(names, arrays, strict=True)}
    wrong = jnp.zeros((), jnp.uint32)
    if ok is not None:
        wrong = jnp.sum(keep & ~jnp.broadcast_to(ok, (old.size,)).reshape(old.shape), dtype=jnp.uint32)
    rows, no_room = target.storage.write(rows, new, leaves | more, keep, jnp.zeros((), jnp.int32))
    return rows, wrong if no_room is None else wrong + no_room


def _move_ragged(
    reader: Buffer, target: Buffer, state: BufferState, rows: Any, old: np.ndarray, keep: np.ndarray
) -> Any:
    """Tickets of ragged leaves, stored anew."""
    assert isinstance(target.storage, Ragged)
    read = reader.storage.read(state.rows, [Read(TICKET, jnp.asarray(old.reshape(-1)))])[0][0]
    lazy = reader.storage.split(state.rows, {TICKET: read})[1].open({})  # type: ignore[attr-defined]
    values = [lazy.get(name, MISSING) for name in lazy.names]
    return jnp.asarray(target.storage.put(rows, values, old.shape, target.geometry.length, keep, ()))
