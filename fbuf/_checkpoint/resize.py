"""Move a state to another capacity or storage.

Rows that do not fit are evicted first, the oldest of each lane. The rest are written to the new storage in order of age, and
everything indexed by slot or position is remapped, on the host in numpy. Priorities, epochs and draw counts are kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf import samplers
from fbuf._algorithms import rank_buckets, sum_tree
from fbuf._algorithms.slot_pool import SlotPool
from fbuf._buffer import convert, write
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core import slots as _slots
from fbuf._core.pytree import item_bytes
from fbuf._core.sample import TICKET
from fbuf._core.slots import Geometry, Ring, next_lap
from fbuf._formats import checkpoint
from fbuf._host.ragged.values import MISSING
from fbuf._indexing.anchor_log import AnchorQueue, EpisodeQueue, Q
from fbuf._indexing.anchors import CUT, has
from fbuf._interfaces.sampler import EpisodeStarts
from fbuf._interfaces.storage import Read
from fbuf.samplers._host_priorities import HostTree
from fbuf.storages import Ragged

_RESIZABLE = ("Uniform", "Epoch", "Consume", "Prioritized", "Ranked", "Staleness")


class SlotRemap(NamedTuple):
    """Old and new slots of the rows held, oldest first."""

    before: Geometry
    after: Geometry
    old: np.ndarray  # int32[N, E]; C where a lane has fewer rows
    new: np.ndarray  # int32[N, E]; distinct and out of range there
    ring: Any  # the new rings; None if they stay

    @property
    def number(self) -> int:
        """Return N, the rows of the longest lane."""
        return int(self.old.shape[0])

    def chunk(self, start: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return old slots, new slots and validity of `size` rows from `start` on."""
        lanes, nowhere = self.after.lanes, self.after.capacity
        old = np.full((size, lanes), self.before.capacity, np.int32)
        new = (nowhere + np.arange(size * lanes, dtype=np.int32)).reshape(size, lanes)
        stop = min(start + size, self.number)
        old[: stop - start] = self.old[start:stop]
        there = old < self.before.capacity
        new[there] = self.new[start:stop][there[: stop - start]]
        return old, new, there

    def slot_table(self) -> np.ndarray:
        """Return int32[C + 1], the new slot of each old one; the new C for none."""
        out = np.full(self.before.capacity + 1, self.after.capacity, np.int32)
        there = self.old < self.before.capacity
        out[self.old[there]] = self.new[there]
        return out

    def by_slot(self, array: Any, fill: Any) -> np.ndarray:
        """Return an array [C, ...] by slot in its new order."""
        array = np.asarray(array)
        out = np.full((self.after.capacity, *array.shape[1:]), fill, array.dtype)
        there = self.old < self.before.capacity
        out[self.new[there]] = array[self.old[there]]
        return out


def slots_by_age(ring: Ring, geometry: Geometry) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the slots of each lane's rows, oldest first, with C after the last.

    Returns:
      Slots int32[N, E], whether each is a row bool[N, E], and the number of rows int32[E].
    """
    size, cursor = np.asarray(ring.size), np.asarray(ring.cursor)
    age = np.arange(int(size.max(initial=0)), dtype=np.int32)[:, None]
    there = age < size[None, :]
    lane = np.arange(geometry.lanes, dtype=np.int32)
    old = (cursor - size + age) % geometry.length * geometry.lanes + lane
    return np.where(there, old, geometry.capacity).astype(np.int32), there, size


def identity_remap(ring: Ring, geometry: Geometry) -> SlotRemap:
    """Return the remap in which all rows keep their slots."""
    old = slots_by_age(ring, geometry)[0]
    if not geometry.streams:  # the rings hold the number of rows, not their order
        held = int(np.asarray(ring.size).sum())
        number = -(-held // geometry.lanes)
        old = np.arange(number * geometry.lanes, dtype=np.int32).reshape(number, geometry.lanes)
        old[old >= held] = geometry.capacity
    return SlotRemap(geometry, geometry, old, old, None)


def compact_remap(ring: Ring, before: Geometry, after: Geometry, lost: np.ndarray) -> SlotRemap:
    """Return the remap to the first positions of each lane.

    A lane that lost rows and is not full starts at its second position, so that its first row does not count as the first ever.
    """
    old, there, size = slots_by_age(ring, before)
    first = (lost & (size < after.length)).astype(np.int32)
    age = np.arange(old.shape[0], dtype=np.int32)[:, None]
    lane = np.arange(after.lanes, dtype=np.int32)
    new = (first[None, :] + age) % after.length * after.lanes + lane
    rings = Ring(
        cursor=jnp.asarray((first + size) % after.length, jnp.int32),
        size=jnp.asarray(size, jnp.int32),
        lap=next_lap(ring.lap, jnp.uint32(2)),  # beyond all old generations
    )
    return SlotRemap(before, after, old, np.where(there, new, after.capacity).astype(np.int32), rings)


def can_remap(buffer: Buffer) -> bool:
    """Return whether the sampler's state can be remapped."""
    sampler = buffer.sampler
    if isinstance(sampler, samplers.Consume) and sampler.order == "fifo":
        return False
    return type(sampler).__name__ in _RESIZABLE and type(sampler).__module__.startswith("fbuf.")


def remap_state(target: Buffer, state: BufferState, remap: SlotRemap, rows: Any) -> BufferState:
    """Return the state over its new rows."""
    anchors = state.anchors
    if anchors is not None:
        starts = None if anchors.starts is None else _remap_starts(anchors.starts, state.ring, remap)
        anchors = dataclasses.replace(anchors, flags=jnp.asarray(remap.by_slot(anchors.flags, 0)), starts=starts)
    sampler = _remap_sampler(target, state.sampler, remap)
    return state.replace(rows=rows, ring=remap.ring, anchors=anchors, sampler=sampler)


def _read_queue(entries: Any, head: Any, count: Any, remap: SlotRemap) -> list[np.ndarray]:
    """Return of each lane the entries of a queue [C] that begins at `head`, oldest first."""
    entries, lanes, length = np.asarray(entries), remap.before.lanes, remap.before.length
    heads, counts = np.asarray(head), np.asarray(count)
    return [entries[(heads[e] + np.arange(counts[e])) % length * lanes + e] for e in range(lanes)]


def _pack_queues(queues: list[np.ndarray], remap: SlotRemap, dtype: Any) -> Any:
    """Return the lanes' queues as one array, each from its first position on."""
    out = np.zeros((remap.after.length, remap.after.lanes), dtype)
    for lane, queue in enumerate(queues):
        out[: len(queue), lane] = queue
    return jnp.asarray(out.reshape(-1))


def _remap_starts(starts: EpisodeStarts, ring: Ring, remap: SlotRemap) -> EpisodeStarts:
    length = remap.before.length
    oldest = np.asarray(ring.cursor) - np.asarray(ring.size)
    first = np.asarray(remap.ring.cursor) - np.asarray(remap.ring.size)
    queues = [
        (first[e] + (queue - oldest[e]) % length) % remap.after.length
        for e, queue in enumerate(_read_queue(starts.position, starts.head, starts.count, remap))
    ]
    return EpisodeStarts(_pack_queues(queues, remap, np.int32), jnp.zeros_like(starts.head), starts.count)


def _remap_log(log: Q, remap: SlotRemap) -> Q:
    if log is None:
        return log
    at = remap.slot_table()
    queues = [at[queue] for queue in _read_queue(log.slot, log.head, log.count, remap)]
    return AnchorQueue(_pack_queues(queues, remap, np.int32), jnp.zeros_like(log.head), log.count)


def _remap_episodes(episodes: EpisodeQueue, remap: SlotRemap) -> EpisodeQueue:
    """Renumber episodes from the oldest with anchors on."""
    numbers, begins, last = [], [], []
    for queue in _read_queue(episodes.number, episodes.log.head, episodes.log.count, remap):
        number = (queue - queue[:1]) % remap.before.length
        numbers.append(number)
        begins.append(np.searchsorted(number, np.arange(int(number.max(initial=-1)) + 1)))
        last.append(int(number.max(initial=0)))
    return dataclasses.replace(
        episodes,
        log=_remap_log(episodes.log, remap),
        number=_pack_queues(numbers, remap, np.int32),
        begin=_pack_queues(begins, remap, np.int32),
        last=jnp.asarray(last, jnp.int32),
    )


def _remap_slot_pool(roster: SlotPool, remap: SlotRemap) -> SlotPool:
    number, at = int(roster.number), remap.slot_table()
    slot = np.zeros(remap.after.capacity, np.int32)
    slot[:number] = at[np.asarray(roster.slot)[:number]]
    return SlotPool(jnp.asarray(slot), jnp.asarray(remap.by_slot(roster.place, -1)), roster.number)


def _remap_epoch(epoch: samplers.EpochState, remap: SlotRemap) -> samplers.EpochState:
    """An epoch with more anchors than the capacity ends."""
    turn, capacity = epoch.turn, remap.after.capacity
    if turn.order is not None:
        order = np.zeros(min(capacity, 1024), np.int32)
        kept = min(order.size, turn.order.shape[0])
        order[:kept] = np.asarray(turn.order)[:kept]
        turn = dataclasses.replace(turn, order=jnp.asarray(order))
    if int(np.asarray(turn.start).sum()) > capacity:
        none = jnp.zeros_like(turn.start)
        turn = dataclasses.replace(turn, start=none, closed=none, taken=jnp.zeros_like(turn.taken))
    return dataclasses.replace(epoch, log=_remap_log(epoch.log, remap), turn=turn)


def _remap_prioritized(
    target: Buffer, sampler: samplers.PrioritizedState, remap: SlotRemap
) -> samplers.PrioritizedState:
    capacity = remap.before.capacity
    log = _remap_log(sampler.log, remap)
    if isinstance(sampler.tree, HostTree):
        assert isinstance(target.sampler, samplers.Prioritized)
        leaves = remap.by_slot(samplers._host_priorities.leaves(sampler.tree), 0)
        tree = samplers._host_priorities.open(
            "fbuf.load", target.capacity, target.sampler.normalize == "buffer", leaves
        )
        return dataclasses.replace(sampler, tree=tree, log=log)

    def moved(nodes: Any, fill: float, reduce: sum_tree.Reduce) -> Any:
        if nodes is None:
            return None
        return sum_tree.rebuild(jnp.asarray(remap.by_slot(np.asarray(nodes)[:capacity], fill)), reduce=reduce)

    return dataclasses.replace(
        sampler,
        tree=moved(sampler.tree, 0, "sum"),
        low=moved(sampler.low, np.inf, "min"),
        top=moved(sampler.top, -np.inf, "max"),
        log=log,
    )


def _remap_sampler(target: Buffer, sampler: Any, remap: SlotRemap) -> Any:
    if sampler is None or isinstance(sampler, AnchorQueue):
        return _remap_log(sampler, remap)
    if isinstance(sampler, EpisodeQueue):
        return _remap_episodes(sampler, remap)
    if isinstance(sampler, samplers.EpochState):
        return _remap_epoch(sampler, remap)
    if isinstance(sampler, samplers.StalenessState):
        return dataclasses.replace(sampler, log=_remap_log(sampler.log, remap))
    if isinstance(sampler, samplers.ConsumeState):
        left = None if sampler.left is None else jnp.asarray(remap.by_slot(sampler.left, 0))
        return samplers.ConsumeState(_remap_slot_pool(sampler.roster, remap), left)
    if isinstance(sampler, samplers.RankedState):
        capacity = remap.before.capacity
        bucket = remap.by_slot(np.asarray(sampler.ranks.bucket)[:capacity], 0)
        log = _remap_log(sampler.log, remap)
        return dataclasses.replace(sampler, ranks=rank_buckets.of_buckets(jnp.asarray(bucket)), log=log)
    assert isinstance(sampler, samplers.PrioritizedState)
    return _remap_prioritized(target, sampler, remap)


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
    lost = np.asarray(convert._may_have_lost_rows(reader, state))
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
    if not can_remap(reader):
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
            if int(wrong):
                raise checkpoint.SchemaError(
                    f"{call}: {int(wrong)} rows do not fit in {target.storage!r}, or had expired."
                )
    return rows


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _copy_rows(
    reader: Buffer,
    target: Buffer,
    rows: Any,
    source: Any,
    old: Any,
    new: Any,
    keep: Any,
    more: dict[str, Any],
    flags: Any,
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
    rows, no_room = target.storage.write(rows, new, leaves | more, keep, token)
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
