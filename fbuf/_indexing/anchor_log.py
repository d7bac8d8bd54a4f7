"""The anchors of all lanes in order, for samplers: the n-th of them in O(1), and an exact choice of n.

Where every row held is an anchor, the n-th is found by arithmetic. Otherwise each lane keeps a log of its anchors in
order of arrival: anchors open and close in that order, so the log is a queue.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._algorithms import rank_select
from fbuf._algorithms.random_bits import randint_below
from fbuf._core.component import state
from fbuf._core.geometry import Geometry
from fbuf._indexing import ring as _ring
from fbuf._interfaces.sampler import EligibilityUpdate, EligibleSet


@state
class Log:
    """Each lane's anchors, oldest first; empty where every row held is one."""

    slot: jax.Array  # int32[C] (or [0]); lane e owns places p * E + e
    head: jax.Array  # int32[E] (or [0]), place of the lane's oldest anchor
    count: jax.Array  # int32[E] (or [0])

    @property
    def dense(self) -> bool:
        """Whether every row held is an anchor, and nothing is stored."""
        return self.head.shape[0] == 0


def init(geometry: Geometry, dense: bool) -> Log:
    """No anchors."""
    lanes = 0 if dense else geometry.lanes
    return Log(
        slot=jnp.zeros((0 if dense else geometry.capacity,), jnp.int32),
        head=jnp.zeros((lanes,), jnp.int32),
        count=jnp.zeros((lanes,), jnp.int32),
    )


def follow(log: Log, change: EligibilityUpdate, geometry: Geometry, token: jax.Array) -> Log:
    """After a write."""
    if log.dense:
        return log
    head = (log.head + jnp.sum(change.close_mask, axis=0, dtype=jnp.int32)) % jnp.int32(geometry.length)
    count = log.count - jnp.sum(change.close_mask, axis=0, dtype=jnp.int32)
    slot = _append(log.slot, head + count, change.open_slot, change.open_mask, geometry, token)
    return Log(slot, head, count + jnp.sum(change.open_mask, axis=0, dtype=jnp.int32))


def clear(log: Log) -> Log:
    """No anchors any more."""
    return Log(log.slot, jnp.zeros_like(log.head), jnp.zeros_like(log.count))


def nth(log: Log, eligible: EligibleSet, nth: jax.Array) -> jax.Array:
    """Slots of the `nth` int32[B] anchors of all: lanes one after another, a lane's oldest first."""
    lane, rank = lane_and_rank(eligible.ring.size if log.dense else log.count, nth)
    return at(log, eligible, lane, rank)


def at(log: Log, eligible: EligibleSet, lane: jax.Array, rank: jax.Array) -> jax.Array:
    """Slots of anchors by lane and rank in it, 0 the oldest."""
    geometry, ring = eligible.geometry, eligible.ring
    if log.dense and eligible.before is not None:  # rows that stay are those of one lane
        assert eligible.flags is not None
        return rank_select.nth(eligible.flags, eligible.before, rank)
    if log.dense:
        position = (ring.cursor[lane] - ring.size[lane] + rank) % jnp.int32(geometry.length)
        return position * jnp.int32(geometry.lanes) + lane
    place = (log.head[lane] + rank) % jnp.int32(geometry.length)
    return log.slot.at[place * jnp.int32(geometry.lanes) + lane].get(mode="promise_in_bounds")


@state
class EpisodeLog:
    """The same, and where in it each episode's anchors begin. Episodes with anchors are numbered, modulo L."""

    log: Log
    number: jax.Array  # int32[C], of the episode of the anchor in each place of the log
    begin: jax.Array  # int32[C], place of the first anchor of each episode of a lane, by number: number n in n * E + e
    last: jax.Array  # int32[E], number of the newest episode
    name: jax.Array  # uint32[E], what `EligibilityUpdate.open_episode` calls it


def init_episodes(geometry: Geometry) -> EpisodeLog:
    """No anchors."""
    return EpisodeLog(
        log=init(geometry, dense=False),
        number=jnp.zeros((geometry.capacity,), jnp.int32),
        begin=jnp.zeros((geometry.capacity,), jnp.int32),
        last=jnp.zeros((geometry.lanes,), jnp.int32),
        name=jnp.zeros((geometry.lanes,), jnp.uint32),
    )


def follow_episodes(
    episodes: EpisodeLog, change: EligibilityUpdate, geometry: Geometry, token: jax.Array
) -> EpisodeLog:
    """After a write."""
    log, length = follow(episodes.log, change, geometry, token), jnp.int32(geometry.length)
    mask, name = change.open_mask, change.open_episode
    if name is None or not mask.shape[0]:
        return dataclasses.replace(episodes, log=log)
    first, latest = differs(name, mask, episodes.name)
    number = (episodes.last[None, :] + jnp.cumsum(first, axis=0, dtype=jnp.int32)) % length
    rank = jnp.cumsum(mask, axis=0, dtype=jnp.int32) - jnp.int32(1)
    opened = jnp.sum(mask, axis=0, dtype=jnp.int32)
    place = ((log.head + log.count - opened)[None, :] + rank) % length
    return EpisodeLog(
        log=log,
        number=_put(episodes.number, place, number, mask, geometry, token),
        begin=_put(episodes.begin, number, place, first, geometry, token),
        last=number[-1],
        name=latest,
    )


def differs(name: jax.Array, mask: jax.Array, latest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of the anchors that open (`mask` bool[A, E]) has another name [A, E] than the one before it in its lane.

    `latest` [E] is the name of the one before the first; also what it is afterwards. A is at least 1.
    """
    index = jnp.arange(mask.shape[0], dtype=jnp.int32)[:, None]
    newest = lax.cummax(jnp.where(mask, index, jnp.int32(-1)), axis=0)
    before = jnp.concatenate([jnp.full((1, mask.shape[1]), -1, jnp.int32), newest[:-1]])

    def name_at(index: jax.Array) -> jax.Array:
        known = jnp.take_along_axis(name, jnp.maximum(index, jnp.int32(0)), axis=0)
        return jnp.where(index >= jnp.int32(0), known, latest[None, :])

    return mask & (name != name_at(before)), name_at(newest[-1:])[0]


def closed(held: jax.Array, change: EligibilityUpdate, geometry: Geometry) -> tuple[jax.Array, jax.Array]:
    """Anchors int32[E] of the `held` int32[E] that are left when some have closed, the oldest; and how many have.

    Where every row is an anchor, only those written are told: they overwrite the oldest once the lane is full.
    """
    given_up = jnp.sum(change.close_mask, axis=0, dtype=jnp.int32)
    opened = jnp.sum(change.open_mask, axis=0, dtype=jnp.int32)
    overwritten = jnp.maximum(opened - (jnp.int32(geometry.length) - held + given_up), jnp.int32(0))
    return held - given_up - overwritten, given_up + overwritten


def clear_episodes(episodes: EpisodeLog) -> EpisodeLog:
    """No anchors any more."""
    return dataclasses.replace(
        episodes,
        log=clear(episodes.log),
        last=jnp.zeros_like(episodes.last),
        name=jnp.zeros_like(episodes.name),
    )


def draw_episodes(
    episodes: EpisodeLog, key: jax.Array, batch_size: int, eligible: EligibleSet
) -> tuple[jax.Array, ...]:
    """Slots int32[B]: an episode of all that have anchors, then one of these; and the chance of each, float32[B].

    Both are of no meaning where there are no anchors.
    """
    log, geometry = episodes.log, eligible.geometry
    lanes, length = jnp.int32(geometry.lanes), jnp.int32(geometry.length)
    every = jnp.arange(geometry.lanes, dtype=jnp.int32)
    oldest = episodes.number.at[log.head * lanes + every].get(mode="promise_in_bounds")
    count = jnp.where(log.count > jnp.int32(0), (episodes.last - oldest) % length + jnp.int32(1), jnp.int32(0))
    total = jnp.sum(count, dtype=jnp.int32)
    choose, within = jax.random.split(key)
    lane, nth = lane_and_rank(count, randint_below(choose, (batch_size,), total))
    number, head = (oldest[lane] + nth) % length, log.head[lane]

    def begin_of(number: jax.Array) -> jax.Array:
        return episodes.begin.at[number % length * lanes + lane].get(mode="promise_in_bounds")

    begin = jnp.where(nth == jnp.int32(0), head, begin_of(number))
    is_last = nth == count[lane] - jnp.int32(1)
    end = jnp.where(is_last, head + log.count[lane], begin_of(number + jnp.int32(1)))
    size = (end - begin) % length
    size = jnp.where(size == jnp.int32(0), length, size)  # not none: all
    slot = at(log, eligible, lane, (begin - head) % length + randint_below(within, (batch_size,), size))
    chance = jnp.float32(1) / (jnp.maximum(total, jnp.int32(1)).astype(jnp.float32) * size.astype(jnp.float32))
    return slot, chance


def chances_by_episode(episodes: EpisodeLog, geometry: Geometry) -> jax.Array:
    """float32[C], of each slot's anchor in one draw of `draw_episodes`; 0 where there is none. O(C)."""
    log, (lanes, length, _) = episodes.log, geometry
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], (length, lanes))
    live = (place - log.head[None, :]) % jnp.int32(length) < log.count[None, :]
    slot = jnp.where(live, log.slot.reshape(length, lanes), jnp.int32(geometry.capacity))
    mine = _ring.slot_at(geometry, episodes.number.reshape(length, lanes))
    size = jnp.zeros((geometry.capacity,), jnp.int32).at[mine].add(live.astype(jnp.int32))
    total = jnp.sum(size > jnp.int32(0), dtype=jnp.int32)
    each = total.astype(jnp.float32) * size[mine].astype(jnp.float32)
    chance = jnp.where(live, jnp.float32(1) / jnp.maximum(each, jnp.float32(1)), jnp.float32(0))
    return jnp.zeros((geometry.capacity,), jnp.float32).at[slot].set(chance, mode="drop")


def lane_and_rank(count: jax.Array, nth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lane of the `nth` anchor of all, and its place among the lane's; lanes one after another."""
    if count.shape[0] == 1:
        return jnp.zeros_like(nth), nth
    end = jnp.cumsum(count, dtype=jnp.int32)
    lane = jnp.searchsorted(end, nth, side="right").astype(jnp.int32)
    lane = jnp.minimum(lane, jnp.int32(count.shape[0] - 1))
    return lane, nth - (end[lane] - count[lane])


def _append(
    log: jax.Array,
    end: jax.Array,
    slot: jax.Array,
    mask: jax.Array,
    geometry: Geometry,
    token: jax.Array,
) -> jax.Array:
    """Writes slots int32[A, E] where `mask` to each lane's log, from place `end` int32[E] on."""
    rank = jnp.cumsum(mask, axis=0, dtype=jnp.int32) - jnp.int32(1)
    return _put(log, (end[None, :] + rank) % jnp.int32(geometry.length), slot, mask, geometry, token)


def _put(
    log: jax.Array, place: jax.Array, values: jax.Array, mask: jax.Array, geometry: Geometry, token: jax.Array
) -> jax.Array:
    """Writes int32[A, E] to each lane's places [A, E] where `mask`; none twice."""
    nowhere = jnp.arange(values.size, dtype=jnp.int32).reshape(values.shape) + jnp.int32(geometry.capacity)
    at = jnp.where(mask, _ring.slot_at(geometry, place), nowhere).reshape(-1) + token
    return log.at[at].set(values.reshape(-1), mode="drop", unique_indices=True)
