"""Where each row lies before and after a move, and everything in a state that goes by slot, or by a place in a lane.

On the host, in numpy: it is done once, and of rows themselves nothing is touched here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import rank_buckets, sum_tree
from fbuf._algorithms.slot_pool import SlotPool
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.geometry import Geometry, Ring
from fbuf._indexing.anchor_log import AnchorQueue, EpisodeQueue
from fbuf._indexing.ring import next_lap
from fbuf._interfaces.sampler import EpisodeStarts
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

_KNOWN = ("Uniform", "Epoch", "Consume", "Prioritized", "Ranked", "Staleness")


class Places(NamedTuple):
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


def same(ring: Ring, geometry: Geometry) -> Places:
    """All rows stay where they are."""
    old = _ages(ring, geometry)[0]
    if not geometry.streams:  # the rings say how many there are, not which came first
        held = int(np.asarray(ring.size).sum())
        number = -(-held // geometry.lanes)
        old = np.arange(number * geometry.lanes, dtype=np.int32).reshape(number, geometry.lanes)
        old[old >= held] = geometry.capacity
    return Places(geometry, geometry, old, old, None)


def packed(ring: Ring, before: Geometry, after: Geometry, lost: np.ndarray) -> Places:
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
        lap=next_lap(ring.lap, jnp.uint32(2)),  # beyond all generations there were
    )
    return Places(before, after, old, np.where(there, new, after.capacity).astype(np.int32), rings)


def knows(buffer: Buffer) -> bool:
    """Whether the sampler's state is of a kind that can be moved."""
    return type(buffer.sampler).__name__ in _KNOWN and type(buffer.sampler).__module__.startswith("fbuf.")


def relocated(target: Buffer, state: BufferState, places: Places, rows: Any) -> BufferState:
    """The state over its new rows."""
    anchors = state.anchors
    if anchors is not None:
        starts = None if anchors.starts is None else _starts(anchors.starts, state.ring, places)
        anchors = dataclasses.replace(anchors, flags=jnp.asarray(places.by_slot(anchors.flags, 0)), starts=starts)
    sampler = _sampler(target, state.sampler, places)
    return dataclasses.replace(state, rows=rows, ring=places.ring, anchors=anchors, sampler=sampler)


def _queue(entries: Any, head: Any, count: Any, places: Places) -> list[np.ndarray]:
    """Of each lane, the entries of a queue [C] that begins at `head`, oldest first."""
    entries, lanes, length = np.asarray(entries), places.before.lanes, places.before.length
    heads, counts = np.asarray(head), np.asarray(count)
    return [entries[(heads[e] + np.arange(counts[e])) % length * lanes + e] for e in range(lanes)]


def _queued(queues: list[np.ndarray], places: Places, dtype: Any) -> Any:
    """Such queues side by side, all from their first place on."""
    out = np.zeros((places.after.length, places.after.lanes), dtype)
    for lane, queue in enumerate(queues):
        out[: len(queue), lane] = queue
    return jnp.asarray(out.reshape(-1))


def _starts(starts: EpisodeStarts, ring: Ring, places: Places) -> EpisodeStarts:
    length = places.before.length
    oldest = np.asarray(ring.cursor) - np.asarray(ring.size)
    first = np.asarray(places.ring.cursor) - np.asarray(places.ring.size)
    queues = [
        (first[e] + (queue - oldest[e]) % length) % places.after.length
        for e, queue in enumerate(_queue(starts.position, starts.head, starts.count, places))
    ]
    return EpisodeStarts(_queued(queues, places, np.int32), jnp.zeros_like(starts.head), starts.count)


def _log(log: AnchorQueue, places: Places) -> AnchorQueue:
    if log.dense:
        return log
    at = places.at()
    queues = [at[queue] for queue in _queue(log.slot, log.head, log.count, places)]
    return AnchorQueue(_queued(queues, places, np.int32), jnp.zeros_like(log.head), log.count)


def _episodes(episodes: EpisodeQueue, places: Places) -> EpisodeQueue:
    """Numbered anew, from the oldest that has anchors on."""
    numbers, begins, last = [], [], []
    for queue in _queue(episodes.number, episodes.log.head, episodes.log.count, places):
        number = (queue - queue[:1]) % places.before.length
        numbers.append(number)
        begins.append(np.searchsorted(number, np.arange(int(number.max(initial=-1)) + 1)))
        last.append(int(number.max(initial=0)))
    return dataclasses.replace(
        episodes,
        log=_log(episodes.log, places),
        number=_queued(numbers, places, np.int32),
        begin=_queued(begins, places, np.int32),
        last=jnp.asarray(last, jnp.int32),
    )


def _roster(roster: SlotPool, places: Places) -> SlotPool:
    number, at = int(roster.number), places.at()
    slot = np.zeros(places.after.capacity, np.int32)
    slot[:number] = at[np.asarray(roster.slot)[:number]]
    return SlotPool(jnp.asarray(slot), jnp.asarray(places.by_slot(roster.place, -1)), roster.number)


def _epoch(epoch: EpochState, places: Places) -> EpochState:
    """An epoch of more anchors than there is room for now has ended."""
    turn, capacity = epoch.turn, places.after.capacity
    if turn.order.shape[0]:
        order = np.zeros(min(capacity, 1024), np.int32)
        kept = min(order.size, turn.order.shape[0])
        order[:kept] = np.asarray(turn.order)[:kept]
        turn = dataclasses.replace(turn, order=jnp.asarray(order))
    if int(np.asarray(turn.start).sum()) > capacity:
        none = jnp.zeros_like(turn.start)
        turn = dataclasses.replace(turn, start=none, closed=none, taken=jnp.zeros_like(turn.taken))
    return dataclasses.replace(epoch, log=_log(epoch.log, places), turn=turn)


def _prioritized(target: Buffer, sampler: PrioritizedState, places: Places) -> PrioritizedState:
    capacity = places.before.capacity
    log = None if sampler.log is None else _log(sampler.log, places)
    if isinstance(sampler.tree, HostTree):
        assert isinstance(target.sampler, Prioritized)
        leaves = places.by_slot(_host_priorities.leaves(sampler.tree), 0)
        tree = _host_priorities.open("fbuf.load", target.capacity, target.sampler.normalize == "buffer", leaves)
        return dataclasses.replace(sampler, tree=tree, log=log)

    def moved(nodes: Any, fill: float, reduce: sum_tree.Reduce) -> Any:
        if not nodes.shape[0]:
            return nodes
        return sum_tree.rebuild(jnp.asarray(places.by_slot(np.asarray(nodes)[:capacity], fill)), reduce=reduce)

    return dataclasses.replace(
        sampler,
        tree=moved(sampler.tree, 0, "sum"),
        low=moved(sampler.low, np.inf, "min"),
        top=None if sampler.top is None else moved(sampler.top, -np.inf, "max"),
        log=log,
    )


def _sampler(target: Buffer, sampler: Any, places: Places) -> Any:
    if isinstance(sampler, AnchorQueue):
        return _log(sampler, places)
    if isinstance(sampler, EpisodeQueue):
        return _episodes(sampler, places)
    if isinstance(sampler, EpochState):
        return _epoch(sampler, places)
    if isinstance(sampler, StalenessState):
        return dataclasses.replace(sampler, log=_log(sampler.log, places))
    if isinstance(sampler, ConsumeState):
        left = jnp.asarray(places.by_slot(sampler.left, 0)) if sampler.left.shape[0] else sampler.left
        return ConsumeState(_roster(sampler.roster, places), left)
    if isinstance(sampler, RankedState):
        capacity = places.before.capacity
        bucket = places.by_slot(np.asarray(sampler.ranks.bucket)[:capacity], 0)
        log = None if sampler.log is None else _log(sampler.log, places)
        return dataclasses.replace(sampler, ranks=rank_buckets.of_buckets(jnp.asarray(bucket)), log=log)
    assert isinstance(sampler, PrioritizedState)
    return _prioritized(target, sampler, places)
