"""`Epoch`: every anchor once, then all again in another order; sampling without replacement.

An epoch is a random order of the n anchors there were when it began, and a place in it. The order is a keyed permutation
(`fbuf._algorithms.permutation`): two words of state name it, and any part of it is worked out when it is drawn; of up to 1024
anchors it is a true shuffle, made when the epoch begins. The i-th anchor of an epoch is the `rank`-th of a lane, and as
the anchors of a lane close in the order in which they opened, the oldest first, one count a lane says which are gone: so
a write adds up to E numbers, whatever it closes. Closed anchors are found when their turn comes, and passed over.

Rejected: an order of all slots in the state (O(C) a new epoch: half a second for a million; and slots are written anew
within it); a byte a row that says "drawn" (O(C) to clear, and the last draws of an epoch look for a needle); drawing with
replacement and again where two are alike (no epochs, and eight times the time). A writer that does not overwrite the oldest
row would need an order of slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._algorithms import permutation
from fbuf._algorithms.random_bits import anew
from fbuf._core.component import component, state
from fbuf._core.geometry import Geometry
from fbuf._core.ordering import any_unbatched
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import Log
from fbuf._interfaces.sampler import NO_NUMBERS, Draw, EligibilityUpdate, EligibleSet, Inspected


@state
class Turn:
    """An epoch, and how far it has come."""

    start: jax.Array  # int32[E], anchors each lane had when it began; all 0: there is no epoch
    closed: jax.Array  # int32[E], how many of these have closed since: the oldest
    taken: jax.Array  # int32[], places of its order that are drawn or passed over
    begun: jax.Array  # uint32[], epochs begun, this one included; wraps
    key: jax.Array  # uint32[2] (or [0]), names the order
    order: jax.Array  # int32[min(C, 1024)] (or [0]), the order itself where there are no more anchors than that


@state
class EpochState:
    """The anchors, and the turn of each."""

    log: Log
    held: jax.Array  # int32[E], anchors each lane has now
    turn: Turn


class _Batch(NamedTuple):
    """A batch being filled."""

    turn: Turn
    chosen: jax.Array  # int32[B], numbers in the epoch
    found: jax.Array  # int32[], how many of them


@component
class Epoch:
    """Draws every anchor once an epoch: without replacement.

    Attributes:
      shuffle: In random order, another one in each epoch; False: in order of arrival, lane after lane.
      drop_last: What happens where an epoch has fewer than B anchors left. False: the batch is short (`mask` False at its
        end). True: they are left out and the next epoch begins at once; with fewer than B anchors in all the whole
        batch is masked, and the epoch stays where it is.

    An epoch begins with all anchors of that moment, in an order drawn from the key of that call; the keys of its other calls
    make no difference. Anchors that close before their turn (rows overwritten) are passed over and take up no place in a
    batch; those that open wait for the next epoch, which begins with the first `sample` that finds nothing left. Batch sizes
    may change within an epoch. `probability` is 1 / n, n the anchors there were when the epoch began; `weight` is 1.
    `clear` ends the epoch. `peek` shows the batch that `sample` would draw, and leaves it where it is.

    Where the epoch stands is part of the state: one saved and loaded goes on with the same batches, and who drops the state
    that `sample` returned draws the same batch again.

    `stats`: `epoch`, epochs begun so far; `epoch_left`, how many anchors of this one are still to come, those among them
    included that have closed unnoticed.

    Cost: O(B) a draw, in a scan that of `Uniform`; and O(1) for each anchor that closed before its turn, once (all in one
    call, if all were overwritten between two); up to 1024 anchors are shuffled as an epoch begins (0.2 ms). O(1) an anchor
    that opens or closes. 4 bytes a row where the view looks at neighbours, else none, and 4 KiB. More than 1024 anchors come
    in one of 2^64 orders, not in any of n!.

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

    numbers = NO_NUMBERS
    options = NO_NUMBERS
    prioritized = False
    by_rank = True
    by_episode = False
    in_order = True
    stamp = None
    since = "in this epoch"

    def __post_init__(self) -> None:
        for name in ("shuffle", "drop_last"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                fix = not getattr(type(self), name)
                raise TypeError(f"Epoch: {name} is {value!r}; expected a bool. Write Epoch({name}={fix}).")

    def init(self, geometry: Geometry, dense: bool) -> EpochState:
        lanes = (geometry.lanes,)
        turn = Turn(
            start=jnp.zeros(lanes, jnp.int32),
            closed=jnp.zeros(lanes, jnp.int32),
            taken=jnp.zeros((), jnp.int32),
            begun=jnp.zeros((), jnp.uint32),
            key=jnp.zeros((2 if self.shuffle else 0,), jnp.uint32),
            order=jnp.zeros((min(geometry.capacity, permutation.SHUFFLED) if self.shuffle else 0,), jnp.int32),
        )
        return EpochState(log=anchor_log.init(geometry, dense), held=jnp.zeros(lanes, jnp.int32), turn=turn)

    def change(
        self, sampler: EpochState, change: EligibilityUpdate, geometry: Geometry, token: jax.Array
    ) -> EpochState:
        held, closed = anchor_log.closed(sampler.held, change, geometry)
        turn = sampler.turn
        lost = jnp.minimum(closed, turn.start - turn.closed)
        return EpochState(
            log=anchor_log.follow(sampler.log, change, geometry, token),
            held=held + jnp.sum(change.open_mask, axis=0, dtype=jnp.int32),
            turn=dataclasses.replace(turn, closed=turn.closed + lost),
        )

    def draw(
        self,
        sampler: EpochState,
        key: jax.Array,
        batch_size: int,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[EpochState, Draw]:
        return self.draw_some(sampler, key, batch_size, jnp.int32(batch_size), eligible, options, token)

    def draw_some(
        self,
        sampler: EpochState,
        key: jax.Array,
        batch_size: int,
        wanted: jax.Array,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[EpochState, Draw]:
        del options, token
        geometry = eligible.geometry
        held = sampler.held
        least = wanted if self.drop_last else jnp.int32(1)  # fewer are no batch
        enough = (jnp.sum(held, dtype=jnp.int32) >= least) & (wanted > jnp.int32(0))

        own = anew(key)

        def ended(turn: Turn) -> jax.Array:
            return (turn.taken >= _size(turn)) | ~jnp.any(turn.closed < turn.start)

        def wanting(batch: _Batch) -> jax.Array:
            more = ~ended(batch.turn) | (batch.found < least)
            return enough & more & (batch.found < wanted)

        def fill(batch: _Batch) -> _Batch:
            wants = wanting(batch)
            begins = wants & ended(batch.turn)
            turn = self._begin(batch.turn, begins, held, own())
            found = jnp.where(begins, jnp.int32(0), batch.found)
            return self._take(_Batch(turn, batch.chosen, found), wants, wanted, geometry)

        nothing = _Batch(sampler.turn, jnp.zeros((batch_size,), jnp.int32), jnp.zeros((), jnp.int32))
        turn, chosen, found = lax.while_loop(lambda batch: any_unbatched(wanting(batch)), fill, nothing)
        mask = jnp.arange(batch_size, dtype=jnp.int32) < found
        lane, number = anchor_log.lane_and_rank(turn.start, jnp.where(mask, chosen, jnp.int32(0)))
        rank = jnp.maximum(number - turn.closed[lane], jnp.int32(0))
        slot = anchor_log.at(sampler.log, eligible, lane, rank)
        chance = jnp.float32(1) / jnp.maximum(_size(turn), jnp.int32(1)).astype(jnp.float32)
        return dataclasses.replace(sampler, turn=turn), Draw(
            slot=jnp.where(mask, slot, jnp.int32(geometry.capacity)),
            probability=jnp.where(mask, chance, jnp.float32(0)),
            weight=mask.astype(jnp.float32),
            mask=mask,
        )

    def update(
        self, sampler: EpochState, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array
    ) -> EpochState:
        return sampler

    def set(self, sampler: EpochState, **numbers: Any) -> EpochState:
        return sampler

    def clear(self, sampler: EpochState, geometry: Geometry, dense: bool) -> EpochState:
        none = jnp.zeros_like(sampler.held)
        turn = dataclasses.replace(sampler.turn, start=none, closed=none, taken=jnp.zeros((), jnp.int32))
        return EpochState(log=anchor_log.clear(sampler.log), held=none, turn=turn)

    def available(self, sampler: EpochState, count: jax.Array) -> jax.Array:
        return count

    def inspect(self, sampler: EpochState, eligible: EligibleSet, fetched: None) -> Inspected:
        geometry, turn = eligible.geometry, sampler.turn
        place = jnp.arange(geometry.capacity, dtype=jnp.int32)
        lane, number = anchor_log.lane_and_rank(turn.start, self._at(turn, place, _size(turn), geometry))
        rank = number - turn.closed[lane]
        live = (place < _size(turn)) & (rank >= jnp.int32(0))  # an anchor of the epoch that is still one
        slot = anchor_log.at(sampler.log, eligible, lane, jnp.maximum(rank, jnp.int32(0)))
        slot = jnp.where(live, slot, jnp.int32(geometry.capacity))
        waits = live & (place >= turn.taken)
        number = jnp.sum(waits, dtype=jnp.int32)
        nothing = jnp.zeros((geometry.capacity,), jnp.int32)
        drawn = nothing.at[slot].set((~waits).astype(jnp.int32), mode="drop")
        waiting = nothing.at[slot].set(waits.astype(jnp.int32), mode="drop").astype(jnp.float32)
        held = jnp.maximum(jnp.sum(sampler.held, dtype=jnp.int32), jnp.int32(1)).astype(jnp.float32)
        chance = waiting / jnp.maximum(number, jnp.int32(1)).astype(jnp.float32)
        chance = jnp.where(number > jnp.int32(0), chance, jnp.float32(1) / held)  # none is left: the next epoch begins
        return Inspected(chance, draws=drawn)

    def stats(self, sampler: EpochState) -> dict[str, jax.Array]:
        turn = sampler.turn
        return {"epoch": turn.begun, "epoch_left": _size(turn) - turn.taken}

    def _begin(self, turn: Turn, begins: jax.Array, held: jax.Array, key: jax.Array) -> Turn:
        """A new epoch of the `held` anchors where one `begins`; else `turn`."""

        def new(turn: Turn) -> Turn:
            name, order = turn.key, turn.order
            if self.shuffle:
                bits = jax.random.bits(key, (2 + order.shape[0],), jnp.uint32)
                name, total = bits[:2], jnp.sum(held, dtype=jnp.int32)
                few = begins & (total <= jnp.int32(permutation.SHUFFLED))

                def shuffled(order: jax.Array) -> jax.Array:
                    return jnp.where(few, permutation.shuffled(bits[2:], total), order)

                order = lax.cond(any_unbatched(few), shuffled, lambda order: order, order)
            fresh = Turn(
                start=held,
                closed=jnp.zeros_like(held),
                taken=jnp.zeros((), jnp.int32),
                begun=turn.begun + jnp.uint32(1),
                key=name,
                order=order,
            )
            return jax.tree.map(lambda new, old: jnp.where(begins, new, old), fresh, turn)

        return lax.cond(any_unbatched(begins), new, lambda turn: turn, turn)

    def _take(self, batch: _Batch, wants: jax.Array, wanted: jax.Array, geometry: Geometry) -> _Batch:
        """Fills the first `wanted` of the batch from one lot of places in the order; nothing happens unless it `wants`."""
        turn, chosen, found = batch
        batch_size = chosen.shape[0]
        # A few more than wanted, so that one lot is enough even if some have closed.
        lot = min(batch_size + batch_size // 8 + 8, geometry.capacity)
        size, ahead = _size(turn), jnp.arange(lot, dtype=jnp.int32)
        there = wants & (ahead < size - turn.taken)
        number = self._at(turn, turn.taken + ahead, size, geometry)
        lane, rank = anchor_log.lane_and_rank(turn.start, number)
        live = there & (rank >= turn.closed[lane])
        upto = found + jnp.cumsum(live, dtype=jnp.int32)
        place = upto - jnp.int32(1)
        passed = there & (upto - live.astype(jnp.int32) < wanted)
        put = jnp.where(live & passed, place, jnp.int32(batch_size) + ahead)
        return _Batch(
            turn=dataclasses.replace(turn, taken=turn.taken + jnp.sum(passed, dtype=jnp.int32)),
            chosen=chosen.at[put].set(number, mode="drop", unique_indices=True),
            found=jnp.minimum(upto[-1], wanted),
        )

    def _at(self, turn: Turn, place: jax.Array, size: jax.Array, geometry: Geometry) -> jax.Array:
        """Numbers in the epoch, int32[A] in [0, `size`), at places of its order; any at places beyond."""
        if not self.shuffle:
            return place
        few = turn.order.at[jnp.clip(place, 0, turn.order.shape[0] - 1)].get(mode="promise_in_bounds")
        if geometry.capacity <= permutation.SHUFFLED:
            return few
        many = permutation.permute(turn.key, place, size)
        return jnp.where(size <= jnp.int32(permutation.SHUFFLED), few, many)


def _size(turn: Turn) -> jax.Array:
    """int32[], anchors of the epoch."""
    return jnp.sum(turn.start, dtype=jnp.int32)
