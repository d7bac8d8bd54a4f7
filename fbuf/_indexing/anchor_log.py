"""Queue the anchors of each lane in order of arrival, and find the n-th anchor.

Anchors of a lane open and close in order, so a ring buffer of slots finds the n-th in O(1). If every row held is an anchor,
nothing is stored. Rows of a data set never change, so counts of anchors before each block (`anchors.count_before`) replace the
queue: 1/32 byte a row, and O(log C) a draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._algorithms.random import randint_below
from fbuf._core.component import state
from fbuf._core.control_flow import number_up_to
from fbuf._core.slot_remap import SlotJoin, SlotRemap
from fbuf._core.slots import Geometry, Ranges, modulo, of_lane, put_in_queues, slot_at, zeros
from fbuf._indexing.anchors import nth_by_count
from fbuf._interfaces.sampler import AnchorChange, AnchorSet


@state
class AnchorQueue:
    """Hold each lane's anchors, oldest first."""

    slot: Array  # int32[C]; place p of lane e is element p * E + e
    head: Array  # int32[E], place of the lane's oldest anchor
    count: Array  # int32[E]

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "slot", self.slot, 0, geometry.capacity - 1
        yield "head", self.head, 0, geometry.length - 1
        yield "count", self.count, 0, geometry.length


Q = TypeVar("Q", AnchorQueue, AnchorQueue | None)


def init(geometry: Geometry, dense: bool) -> AnchorQueue | None:
    """Make an empty queue; None if every row held is an anchor."""
    return None if dense else _empty(geometry)


def _empty(geometry: Geometry) -> AnchorQueue:
    return AnchorQueue(*zeros(geometry.capacity, geometry.lanes, geometry.lanes))


def apply(log: Q, change: AnchorChange, geometry: Geometry, token: Array) -> Q:
    """Update the queue after a write."""
    if log is None:
        return log
    head = modulo(log.head + jnp.sum(change.close_mask, axis=0, dtype=jnp.int32), geometry.length)
    count = log.count - jnp.sum(change.close_mask, axis=0, dtype=jnp.int32)
    rank = jnp.cumsum(change.open_mask, axis=0, dtype=jnp.int32) - jnp.int32(1)
    place = modulo((head + count)[None, :] + rank, geometry.length)
    slot = put_in_queues(log.slot, geometry, place, change.open_slot, change.open_mask, token)
    return AnchorQueue(slot, head, count + jnp.sum(change.open_mask, axis=0, dtype=jnp.int32))


def clear(log: Q) -> Q:
    """Remove all anchors."""
    return log if log is None else AnchorQueue(log.slot, jnp.zeros_like(log.head), jnp.zeros_like(log.count))


def moved(log: Q, remap: SlotRemap) -> Q:
    """Return the queue of rows that moved to other slots. Eager."""
    if log is None:
        return log
    at = remap.slot_table()
    queues = [at[queue] for queue in remap.read_queues(log.slot, log.head, log.count)]
    return AnchorQueue(remap.pack_queues(queues, np.int32), jnp.zeros_like(log.head), log.count)


def joined(parts: Sequence[AnchorQueue], join: SlotJoin) -> AnchorQueue:
    """Return the queue of a shard that takes lanes of others. Eager."""
    slot = join.place[join.slots(join.names([part.slot for part in parts]))]
    head, count = (jnp.asarray(join.lanes([getattr(part, name) for part in parts])) for name in ("head", "count"))
    return AnchorQueue(jnp.asarray(np.maximum(slot, 0), jnp.int32), head, count)


def nth(log: AnchorQueue | None, anchors: AnchorSet, nth: Array) -> Array:
    """Return the slots of the `nth` int32[B] anchors: lane by lane, oldest first."""
    lane, rank = lane_and_rank(anchors.ring.size if log is None else log.count, nth)
    return at(log, anchors, lane, rank)


def at(log: AnchorQueue | None, anchors: AnchorSet, lane: Array, rank: Array) -> Array:
    """Return the slots of anchors by lane and rank, 0 the oldest."""
    geometry, ring = anchors.geometry, anchors.ring
    if log is None and anchors.before is not None:  # a data set has one lane
        assert anchors.flags is not None
        return nth_by_count(anchors.flags, anchors.before, rank)
    if log is None:
        position = modulo(of_lane(ring.cursor - ring.size, lane) + rank, geometry.length)
        return position * jnp.int32(geometry.lanes) + lane
    place = modulo(of_lane(log.head, lane) + rank, geometry.length)
    return log.slot.at[place * jnp.int32(geometry.lanes) + lane].get(mode="promise_in_bounds")


@state
class EpisodeQueue:
    """Add the place where the anchors of each episode begin. Episodes with anchors are numbered modulo L."""

    log: AnchorQueue
    number: Array  # int32[C], episode of the anchor in each place of the queue
    begin: Array  # int32[C], place of the first anchor of each episode; number n of lane e is element n * E + e
    last: Array  # int32[E], number of the newest episode
    name: Array  # uint32[E], its count by `AnchorChange.open_episode`

    def ranges(self, geometry: Geometry) -> Ranges:
        for field in ("number", "begin", "last"):
            yield field, getattr(self, field), 0, geometry.length - 1


def init_episodes(geometry: Geometry) -> EpisodeQueue:
    """Make an empty queue."""
    number, begin, last = zeros(geometry.capacity, geometry.capacity, geometry.lanes)
    return EpisodeQueue(_empty(geometry), number, begin, last, jnp.zeros((geometry.lanes,), jnp.uint32))


def apply_episodes(episodes: EpisodeQueue, change: AnchorChange, geometry: Geometry, token: Array) -> EpisodeQueue:
    """Update the queue after a write."""
    log, length = apply(episodes.log, change, geometry, token), jnp.int32(geometry.length)
    mask, name = change.open_mask, change.open_episode
    if name is None or not mask.shape[0]:
        return dataclasses.replace(episodes, log=log)
    first, latest = differs_from_previous(name, mask, episodes.name)
    number = (episodes.last[None, :] + jnp.cumsum(first, axis=0, dtype=jnp.int32)) % length
    rank = jnp.cumsum(mask, axis=0, dtype=jnp.int32) - jnp.int32(1)
    opened = jnp.sum(mask, axis=0, dtype=jnp.int32)
    place = ((log.head + log.count - opened)[None, :] + rank) % length
    return EpisodeQueue(
        log=log,
        number=put_in_queues(episodes.number, geometry, place, number, mask, token),
        begin=put_in_queues(episodes.begin, geometry, number, place, first, token),
        last=number[-1],
        name=latest,
    )


def moved_episodes(episodes: EpisodeQueue, remap: SlotRemap) -> EpisodeQueue:
    """Return the queue of rows that moved to other slots; episodes are renumbered from the oldest with anchors on. Eager."""
    numbers, begins, last = [], [], []
    for queue in remap.read_queues(episodes.number, episodes.log.head, episodes.log.count):
        number = (queue - queue[:1]) % remap.before.length
        numbers.append(number)
        begins.append(np.searchsorted(number, np.arange(int(number.max(initial=-1)) + 1)))
        last.append(int(number.max(initial=0)))
    return dataclasses.replace(
        episodes,
        log=moved(episodes.log, remap),
        number=remap.pack_queues(numbers, np.int32),
        begin=remap.pack_queues(begins, np.int32),
        last=jnp.asarray(last, jnp.int32),
    )


def differs_from_previous(name: Array, mask: Array, latest: Array) -> tuple[Array, Array]:
    """Return which opening anchors (`mask` bool[A, E]) have another name [A, E] than the previous anchor of the lane.

    `latest` [E] is the name before the first; also return it after the last. A is at least 1.
    """
    index = jnp.arange(mask.shape[0], dtype=jnp.int32)[:, None]
    newest = lax.cummax(jnp.where(mask, index, jnp.int32(-1)), axis=0)
    before = jnp.concatenate([jnp.full((1, mask.shape[1]), -1, jnp.int32), newest[:-1]])

    def name_at(index: Array) -> Array:
        known = jnp.take_along_axis(name, jnp.maximum(index, jnp.int32(0)), axis=0)
        return jnp.where(index >= jnp.int32(0), known, latest[None, :])

    return mask & (name != name_at(before)), name_at(newest[-1:])[0]


def close(counts: Array, change: AnchorChange, geometry: Geometry) -> tuple[Array, Array]:
    """Return the anchors int32[E] left of the `counts` int32[E] after a write, and how many have closed, the oldest.

    If every row is an anchor, the update lists new rows only, which overwrite the oldest once the lane is full.
    """
    given_up = jnp.sum(change.close_mask, axis=0, dtype=jnp.int32)
    opened = jnp.sum(change.open_mask, axis=0, dtype=jnp.int32)
    overwritten = jnp.maximum(opened - (jnp.int32(geometry.length) - counts + given_up), jnp.int32(0))
    return counts - given_up - overwritten, given_up + overwritten


def draw_episodes(episodes: EpisodeQueue, key: Array, batch_size: int, anchors: AnchorSet) -> tuple[Array, ...]:
    """Draw an episode uniformly, then one of its anchors: slots int32[B] and their probabilities float32[B].

    Both are undefined if there are no anchors.
    """
    log, geometry = episodes.log, anchors.geometry
    lanes, length = jnp.int32(geometry.lanes), jnp.int32(geometry.length)
    oldest = _oldest(episodes, geometry)
    count = episode_counts(episodes, geometry)
    total = jnp.sum(count, dtype=jnp.int32)
    choose, within = jax.random.split(key)
    lane, nth = lane_and_rank(count, randint_below(choose, (batch_size,), total))
    number, head = (oldest[lane] + nth) % length, log.head[lane]

    def begin_of(number: Array) -> Array:
        return episodes.begin.at[number % length * lanes + lane].get(mode="promise_in_bounds")

    begin = jnp.where(nth == jnp.int32(0), head, begin_of(number))
    is_last = nth == count[lane] - jnp.int32(1)
    end = jnp.where(is_last, head + log.count[lane], begin_of(number + jnp.int32(1)))
    size = (end - begin) % length
    size = jnp.where(size == jnp.int32(0), length, size)  # 0 modulo L means all
    slot = at(log, anchors, lane, (begin - head) % length + randint_below(within, (batch_size,), size))
    chance = jnp.float32(1) / (jnp.maximum(total, jnp.int32(1)).astype(jnp.float32) * size.astype(jnp.float32))
    return slot, chance


def _oldest(episodes: EpisodeQueue, geometry: Geometry) -> Array:
    """Return the number of the oldest episode of each lane, int32[E]."""
    every = jnp.arange(geometry.lanes, dtype=jnp.int32)
    return episodes.number.at[episodes.log.head * jnp.int32(geometry.lanes) + every].get(mode="promise_in_bounds")


def episode_counts(episodes: EpisodeQueue, geometry: Geometry) -> Array:
    """Return the episodes with anchors of each lane, int32[E]."""
    since = (episodes.last - _oldest(episodes, geometry)) % jnp.int32(geometry.length)
    return jnp.where(episodes.log.count > jnp.int32(0), since + jnp.int32(1), jnp.int32(0))


def episode_probabilities(episodes: EpisodeQueue, geometry: Geometry) -> Array:
    """Return the probability of each slot in one draw of `draw_episodes`, float32[C]; 0 for other rows. O(C)."""
    log, (lanes, length, _) = episodes.log, geometry
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], (length, lanes))
    live = (place - log.head[None, :]) % jnp.int32(length) < log.count[None, :]
    slot = jnp.where(live, log.slot.reshape(length, lanes), jnp.int32(geometry.capacity))
    mine = slot_at(geometry, episodes.number.reshape(length, lanes))
    size = jnp.zeros((geometry.capacity,), jnp.int32).at[mine].add(live.astype(jnp.int32))
    total = jnp.sum(size > jnp.int32(0), dtype=jnp.int32)
    each = total.astype(jnp.float32) * size[mine].astype(jnp.float32)
    chance = jnp.where(live, jnp.float32(1) / jnp.maximum(each, jnp.float32(1)), jnp.float32(0))
    return jnp.zeros((geometry.capacity,), jnp.float32).at[slot].set(chance, mode="drop")


def lane_and_rank(count: Array, nth: Array) -> tuple[Array, Array]:
    """Return the lane of the `nth` anchor, and its rank in the lane, counting lane by lane."""
    if count.shape[0] == 1:
        return jnp.zeros_like(nth), nth
    end = jnp.cumsum(count, dtype=jnp.int32)
    lane = number_up_to(end, nth)
    lane = jnp.minimum(lane, jnp.int32(count.shape[0] - 1))
    return lane, nth - (end[lane] - count[lane])
