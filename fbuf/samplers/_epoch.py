"""Draw every anchor once per epoch: sampling without replacement.

An epoch is a random order of the n anchors at its start, and a position in it. The order is a keyed permutation
(`fbuf._algorithms.random`), so two words of state name it; up to 1024 anchors are shuffled exactly. Element i of the
order is the `rank`-th anchor of a lane. Anchors of a lane close oldest first, so one count per lane tells which have
closed, and a write updates only that count. Closed anchors are skipped when their position is reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fbuf._algorithms import random
from fbuf._algorithms.random import fresh_key
from fbuf._core import control_flow
from fbuf._core.arguments import check_bool
from fbuf._core.component import component, state
from fbuf._core.control_flow import any_unbatched
from fbuf._core.pytree import Leaves
from fbuf._core.slot_remap import SlotJoin, SlotRemap
from fbuf._core.slots import Geometry, Ranges, zeros
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._interfaces.sampler import AnchorChange, AnchorSet, Draw, Inspected
from fbuf.samplers._base import LogSampler, masked_draw


@state
class EpochPosition:
    """Hold an epoch and the position in it."""

    start: Array  # int32[E], anchors of each lane when the epoch began; all 0: there is no epoch
    closed: Array  # int32[E], how many of these, the oldest, have closed since
    taken: Array  # int32[], positions of the order that are drawn or skipped
    begun: Array  # uint32[], epochs begun, this one included; wraps
    key: Any  # uint32[2], names the order; None without `shuffle`
    order: Any  # int32[min(C, 1024)], the order itself if there are at most 1024 anchors; None without `shuffle`

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "start", self.start, 0, geometry.length
        yield "closed", self.closed, 0, self.start
        yield "taken", self.taken, 0, np.asarray(self.start).sum()
        if self.order is not None:
            yield "order", self.order, 0, self.order.shape[0] - 1


@state
class EpochState:
    """Hold the anchors and the position in the epoch."""

    log: AnchorQueue | None  # None if every row held is an anchor
    held: Array  # int32[E], anchors each lane has now
    position: EpochPosition

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "held", self.held, 0, geometry.length


class _Batch(NamedTuple):
    """Hold a batch while it is filled."""

    position: EpochPosition
    chosen: Array  # int32[B], numbers in the epoch
    found: Array  # int32[], open anchors found so far; more than B if the batch is full and others are left
    next: Array  # int32[], position of the order to look at next


@component
class Epoch(LogSampler):
    """Draw every anchor once per epoch: without replacement.

    Attributes:
      shuffle: Draw in a new random order in each epoch; False: in order of arrival, lane by lane.
      drop_last: What to do if fewer than B anchors of an epoch are left. False: return a short batch (`mask` False at its end).
        True: skip them and begin the next epoch; with fewer than B anchors in all, the batch is fully masked.

    An epoch begins with all anchors of that moment, in an order drawn from the key of that call; keys of later calls are
    ignored. Anchors that are overwritten before they are drawn are skipped. New anchors wait for the next epoch, which
    begins with the first `sample` that finds none left. Batch sizes may change within an epoch. `probability` is 1 / n for
    n anchors at the start; `weight` is 1. `clear` ends the epoch. `peek` returns the batch of the next `sample`.

    `batch.last` bool[] is True if the epoch ends with this batch: no anchor of it is left, or with `drop_last` fewer than B.
    It is also True from an empty buffer, so a loop until `batch.last` draws one epoch unless rows are overwritten in between.

    The position is part of the state: a loaded state continues with the same batches. A caller that drops the state returned by
    `sample` draws the same batch again.

    `stats`: `epoch`, epochs begun so far; `epoch_left`, anchors still to come, including overwritten ones not yet skipped.

    Cost: O(B) a draw; O(1) once for each anchor overwritten before its draw; a shuffle of up to 1024 anchors when an epoch
    begins (0.2 ms). O(1) for each row that becomes an anchor. 4 bytes a row if the view reads neighbours, else none, and 4 KiB.
    More than 1024 anchors are drawn in one of 2^64 orders, not in any of n!.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(capacity=100, sampler=fbuf.samplers.Epoch())
      >>> state = buffer.extend(buffer.init(jnp.float32(0)), jnp.arange(6.0))
      >>> drawn = []
      >>> for key in jax.random.split(jax.random.key(0), 2):
      ...     state, batch = buffer.sample(state, key, 4)
      ...     drawn += batch.data[batch.mask].tolist()
      >>> sorted(drawn)
      [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
      >>> batch.mask.tolist()
      [True, True, False, False]
    """

    shuffle: bool = True
    drop_last: bool = False

    in_order = True
    covers = True
    epochs = True
    whole = ""
    moves = True
    since = "in this epoch"

    def __post_init__(self) -> None:
        check_bool("Epoch", "shuffle", self.shuffle)
        check_bool("Epoch", "drop_last", self.drop_last)

    def init(self, geometry: Geometry, dense: bool) -> EpochState:
        start, closed, counts = zeros(*(geometry.lanes,) * 3)
        position = EpochPosition(
            start=start,
            closed=closed,
            taken=jnp.zeros((), jnp.int32),
            begun=jnp.zeros((), jnp.uint32),
            key=jnp.zeros((2,), jnp.uint32) if self.shuffle else None,
            order=zeros(min(geometry.capacity, random.SHUFFLED))[0] if self.shuffle else None,
        )
        return EpochState(log=anchor_log.init(geometry, dense), held=counts, position=position)

    def change(self, sampler: EpochState, change: AnchorChange, geometry: Geometry, token: Array) -> EpochState:
        counts, closed = anchor_log.close(sampler.held, change, geometry)
        position = sampler.position
        lost = jnp.minimum(closed, position.start - position.closed)
        return EpochState(
            log=anchor_log.apply(sampler.log, change, geometry, token),
            held=counts + jnp.sum(change.open_mask, axis=0, dtype=jnp.int32),
            position=dataclasses.replace(position, closed=position.closed + lost),
        )

    def draw_some(
        self,
        sampler: EpochState,
        key: Array,
        batch_size: int,
        wanted: Array,
        anchors: AnchorSet,
        options: Leaves,
        token: Array,
    ) -> tuple[EpochState, Draw]:
        geometry = anchors.geometry
        counts = sampler.held
        least = wanted if self.drop_last else jnp.int32(1)  # rows of the smallest batch
        enough = (jnp.sum(counts, dtype=jnp.int32) >= least) & (wanted > jnp.int32(0))

        own_key = fresh_key(key)

        def ended(batch: _Batch) -> Array:
            return (batch.next >= _size(batch.position)) | ~jnp.any(batch.position.closed < batch.position.start)

        def begins(batch: _Batch) -> Array:
            return enough & ended(batch) & (batch.found < least)

        def searching(batch: _Batch) -> Array:
            # A full batch ends the epoch if only closed anchors are left.
            most = wanted + jnp.where(jnp.any(batch.position.closed > jnp.int32(0)), least, jnp.int32(0))
            return begins(batch) | (enough & ~ended(batch) & (batch.found < most))

        def fill(batch: _Batch) -> _Batch:
            wants, new = searching(batch), begins(batch)
            position = self._begin(batch.position, new, counts, own_key())
            found, next = (jnp.where(new, jnp.int32(0), n) for n in (batch.found, batch.next))
            return self._take(_Batch(position, batch.chosen, found, next), wants, wanted, geometry)

        zero = jnp.zeros((), jnp.int32)
        nothing = _Batch(sampler.position, jnp.zeros((batch_size,), jnp.int32), zero, sampler.position.taken)
        batch = control_flow.while_loop(lambda batch: any_unbatched(searching(batch)), fill, nothing)
        position, chosen, found, _ = batch
        left = jnp.where(jnp.any(position.closed > jnp.int32(0)), found - wanted, _size(position) - position.taken)
        found = jnp.minimum(found, wanted)
        mask = jnp.arange(batch_size, dtype=jnp.int32) < found
        lane, number = anchor_log.lane_and_rank(position.start, jnp.where(mask, chosen, jnp.int32(0)))
        rank = jnp.maximum(number - position.closed[lane], jnp.int32(0))
        slot = anchor_log.at(sampler.log, anchors, lane, rank)
        chance = jnp.float32(1) / jnp.maximum(_size(position), jnp.int32(1)).astype(jnp.float32)
        drawn = masked_draw(slot, chance, mask, geometry)
        return dataclasses.replace(sampler, position=position), dataclasses.replace(drawn, last=left < least)

    def position(self, sampler: EpochState, wanted: Array) -> tuple[Array, Array, Array, Array]:
        """Return epochs begun, whether a draw of `wanted` int32[] begins one, and the anchors of this one and the next."""
        position, size = sampler.position, _size(sampler.position)
        left = jnp.where(jnp.any(position.closed < position.start), size - position.taken, jnp.int32(0))
        is_ended = left < (wanted if self.drop_last else jnp.int32(1))
        return position.begun, is_ended, size, jnp.sum(sampler.held, dtype=jnp.int32)

    def begun(self, position: EpochPosition, counts: Array, key: Array) -> EpochPosition:
        """Return the position at the beginning of an epoch of `counts` int32[E] anchors, which follows `position`."""
        return self._begin(position, jnp.ones((), bool), counts, key)

    def clear(self, sampler: EpochState, geometry: Geometry, dense: bool) -> EpochState:
        empty = self.init(geometry, dense)
        return dataclasses.replace(empty, position=dataclasses.replace(empty.position, begun=sampler.position.begun))

    def inspect(self, sampler: EpochState, anchors: AnchorSet) -> Inspected:
        geometry, position = anchors.geometry, sampler.position
        place = jnp.arange(geometry.capacity, dtype=jnp.int32)
        lane, number = anchor_log.lane_and_rank(
            position.start, self.numbers_at(position, place, _size(position), geometry)
        )
        rank = number - position.closed[lane]
        live = (place < _size(position)) & (rank >= jnp.int32(0))  # an anchor of the epoch that is still open
        slot = anchor_log.at(sampler.log, anchors, lane, jnp.maximum(rank, jnp.int32(0)))
        slot = jnp.where(live, slot, jnp.int32(geometry.capacity))
        waits = live & (place >= position.taken)
        number = jnp.sum(waits, dtype=jnp.int32)
        nothing = jnp.zeros((geometry.capacity,), jnp.int32)
        drawn = nothing.at[slot].set((~waits).astype(jnp.int32), mode="drop")
        waiting = nothing.at[slot].set(waits.astype(jnp.int32), mode="drop").astype(jnp.float32)
        total = jnp.maximum(jnp.sum(sampler.held, dtype=jnp.int32), jnp.int32(1)).astype(jnp.float32)
        chance = waiting / jnp.maximum(number, jnp.int32(1)).astype(jnp.float32)
        # At the end of an epoch the next one begins.
        chance = jnp.where(number > jnp.int32(0), chance, jnp.float32(1) / total)
        return Inspected(chance, draws=drawn)

    def moved(self, sampler: EpochState, remap: SlotRemap) -> EpochState:
        # An epoch with more anchors than the capacity ends.
        position, capacity = sampler.position, remap.after.capacity
        if position.order is not None:
            order = np.zeros(min(capacity, 1024), np.int32)
            kept = min(order.size, position.order.shape[0])
            order[:kept] = np.asarray(position.order)[:kept]
            position = dataclasses.replace(position, order=jnp.asarray(order))
        if int(np.asarray(position.start).sum()) > capacity:
            none = jnp.zeros_like(position.start)
            position = dataclasses.replace(position, start=none, closed=none, taken=jnp.zeros_like(position.taken))
        return dataclasses.replace(sampler, log=anchor_log.moved(sampler.log, remap), position=position)

    def joined(self, parts: Sequence[EpochState], fresh: EpochState, join: SlotJoin) -> EpochState:
        position = dataclasses.replace(fresh.position, begun=jnp.uint32(join.begun))  # an epoch of other shards ends
        if fresh.log is None:
            return EpochState(None, join.ring.size, position)
        log = anchor_log.joined([part.log for part in parts if part.log is not None], join)
        return EpochState(log, jnp.asarray(join.lanes([part.held for part in parts])), position)

    def stats(self, sampler: EpochState) -> dict[str, Array]:
        position = sampler.position
        return {"epoch": position.begun, "epoch_left": _size(position) - position.taken}

    def _begin(self, position: EpochPosition, begins: Array, counts: Array, key: Array) -> EpochPosition:
        """Begin an epoch of the `counts` anchors where `begins`, else return `position`."""

        def new(position: EpochPosition) -> EpochPosition:
            name, order = position.key, position.order
            if self.shuffle:
                bits = jax.random.bits(key, (2 + order.shape[0],), jnp.uint32)
                name, total = bits[:2], jnp.sum(counts, dtype=jnp.int32)
                few = begins & (total <= jnp.int32(random.SHUFFLED))

                def shuffled(order: Array) -> Array:
                    return jnp.where(few, random.shuffled(bits[2:], total), order)

                order = control_flow.cond(any_unbatched(few), shuffled, lambda order: order, order)
            fresh = EpochPosition(
                start=counts,
                closed=jnp.zeros_like(counts),
                taken=jnp.zeros((), jnp.int32),
                begun=position.begun + jnp.uint32(1),
                key=name,
                order=order,
            )
            return jax.tree.map(lambda new, old: jnp.where(begins, new, old), fresh, position)

        return control_flow.cond(any_unbatched(begins), new, lambda position: position, position)

    def _take(self, batch: _Batch, wants: Array, wanted: Array, geometry: Geometry) -> _Batch:
        """Look at the next positions if the batch `wants` to; fill it up to `wanted` anchors."""
        position, chosen, found, next = batch
        batch_size = chosen.shape[0]
        # A few more than wanted, so one pass usually suffices even if some have closed.
        width = min(batch_size + batch_size // 8 + 8, geometry.capacity)
        size, ahead = _size(position), jnp.arange(width, dtype=jnp.int32)
        taken = wants & (ahead < size - next)
        number = self.numbers_at(position, next + ahead, size, geometry)
        lane, rank = anchor_log.lane_and_rank(position.start, number)
        live = taken & (rank >= position.closed[lane])
        upto = found + jnp.cumsum(live, dtype=jnp.int32)
        passed = taken & (upto <= wanted)
        put = jnp.where(live & passed, upto - jnp.int32(1), jnp.int32(batch_size) + ahead)
        return _Batch(
            position=dataclasses.replace(position, taken=position.taken + jnp.sum(passed, dtype=jnp.int32)),
            chosen=chosen.at[put].set(number, mode="drop", unique_indices=True),
            found=upto[-1],
            next=next + jnp.sum(taken, dtype=jnp.int32),
        )

    def numbers_at(self, position: EpochPosition, place: Array, size: Array, geometry: Geometry) -> Array:
        """Return the numbers in the epoch, int32[A] in [0, `size`), at positions of the order; undefined beyond it."""
        if not self.shuffle:
            return place
        few = position.order.at[jnp.clip(place, 0, position.order.shape[0] - 1)].get(mode="promise_in_bounds")
        if geometry.capacity <= random.SHUFFLED:
            return few
        many = random.permute(position.key, place, size)
        return jnp.where(size <= jnp.int32(random.SHUFFLED), few, many)


def _size(position: EpochPosition) -> Array:
    """Return the anchors of the epoch, int32[]."""
    return jnp.sum(position.start, dtype=jnp.int32)
