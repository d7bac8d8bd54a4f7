"""Draw anchors by weights of their staleness: their age, or the age of the policy that produced them.

Staleness is an integer: policy versions since the acting one, or units of anchors that arrived in the lane since. Consecutive
anchors of a lane with equal staleness form a *run*. The newest K runs of each lane are stored as a stamp and a count. A draw
weighs the K E runs, chooses one, then one of its anchors; the anchor queue (`fbuf._indexing.anchor_log`) gives its slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._algorithms import random
from fbuf._core.component import component, state
from fbuf._core.control_flow import number_up_to
from fbuf._core.pytree import Leaves, name_of
from fbuf._core.slot_remap import SlotRemap
from fbuf._core.slots import Geometry, Ranges
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._interfaces.sampler import AnchorChange, AnchorSet, Draw, Inspected, Mass
from fbuf.samplers._base import LogSampler, masked_draw

_MAX_RUNS = 2**16  # runs of a lane, which every draw weighs
_DEFAULT_RUNS = 64


@state
class StalenessState:
    """Hold the anchors and the newest runs of each lane, the newest last."""

    log: AnchorQueue | None  # None if every row held is an anchor
    held: Array  # int32[E], anchors of each lane; the oldest may belong to no run
    stamp: Array  # int32[K, E], the version, or the number of the unit
    count: Array  # int32[K, E], anchors of the run that are held
    unit_size: Any  # int32[E], anchors of the newest unit; None with versions
    version: Any  # int32[], what staleness is measured from; None without versions

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "held", self.held, 0, geometry.length
        yield "count", self.count, 0, geometry.length
        if self.unit_size is not None:
            yield "unit_size", self.unit_size, 0, 2**31 - 1


class _Arrived(NamedTuple):
    """Hold the run of each new anchor."""

    run: Array  # int32[A, E], 0: the newest run before the write, 1: the next one
    stamp: Array  # int32[A, E]
    unit_size: Any  # int32[E], afterwards; None with versions


@component
class Staleness(LogSampler):
    """Draw anchors by weights that decrease with staleness, with replacement; staleness above `maximum` is never drawn.

    Attributes:
      maximum: Largest staleness that is drawn, >= 0.
      version: Name of an integer leaf (int32 values): the version of the acting policy. Staleness is the current version
        minus that of the anchor, at least 0. The current version is the largest so far, 0 at first, or set by
        `buffer.set(state, version=...)`. A window or an episode has the version of its last row, a transition that of its
        first. None: staleness is age, the number of units of `unit` anchors that arrived in the lane since.
      decay: Weight of an anchor of staleness s: "inverse" 1 / (1 + s), "exponential" 2^(-s / half_life), or "none".
      half_life: > 0; for "exponential".
      unit: Anchors in a unit of age, >= 1.
      runs: Runs of equal versions that each lane remembers; None: the larger of 64 and `maximum` + 1. Older rows are not
        drawn. A lane with nondecreasing versions needs `maximum` + 1. Give each actor its own lane (`lanes=E`), or increase
        `runs`.

    `probability` is that of the draw; `weight` is 1, because stale rows are meant to count less. `can_sample` returns
    whether any anchor is fresh. `stats`: `anchors_fresh`, the number of fresh anchors, and `version`. `Buffer.convert`
    restarts from the rows: set the version again.

    Cost: O(B log(K E) + K E) a draw and O(K E) a write for K runs a lane; 8 K E bytes, and 4 a row if the view reads
    neighbours. Runs of less than 10^-7 of the total weight are subject to float32 rounding.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> sampler = fbuf.samplers.Staleness(maximum=2, version="version")
      >>> buffer = fbuf.Buffer(capacity=100, sampler=sampler)
      >>> state = buffer.init({"x": jnp.int32(0), "version": jnp.int32(0)})
      >>> rows = {"x": jnp.arange(8), "version": jnp.arange(8) // 2}
      >>> state, batch = buffer.sample(buffer.extend(state, rows), jax.random.key(0), 64)
      >>> sorted(set(batch.data["x"].tolist()))
      [2, 3, 4, 5, 6, 7]
      >>> state = buffer.set(state, version=6)
      >>> bool(buffer.can_sample(state))
      False
    """

    maximum: int
    version: str | None = None
    decay: Literal["inverse", "exponential", "none"] = "inverse"
    half_life: float | None = None
    unit: int = 1
    runs: int | None = None

    in_order = True
    whole = ""
    moves = True
    by_arrival = True

    def __post_init__(self) -> None:
        if not _is_int(self.maximum) or not 0 <= self.maximum < _MAX_RUNS:
            raise ValueError(f"Staleness: maximum is {self.maximum!r}; expected 0 to {_MAX_RUNS - 1}. Or use unit=.")
        if self.version is not None:
            if not isinstance(self.version, (str, tuple)):
                raise TypeError(f"Staleness: version is {self.version!r}; expected the name of a leaf, or None.")
            object.__setattr__(self, "version", name_of(self.version))
        if self.decay == "exponential":
            if not isinstance(self.half_life, (int, float)) or not 1e-30 < self.half_life < 1e30:
                raise ValueError(f"Staleness: half_life is {self.half_life!r}; expected a number > 0.")
            object.__setattr__(self, "half_life", float(self.half_life))
        elif self.half_life is not None:
            raise ValueError(f"Staleness: half_life is for decay='exponential', but decay is {self.decay!r}. Drop one.")
        if not _is_int(self.unit) or not 1 <= self.unit < 2**30 or (self.version is not None and self.unit != 1):
            raise ValueError(f"Staleness: unit is {self.unit!r}; expected an int >= 1, and 1 with a version.")
        if self.runs is None:
            return
        if self.version is None or not _is_int(self.runs) or not self.maximum < self.runs <= _MAX_RUNS:
            raise ValueError(
                f"Staleness: runs is {self.runs!r}; expected None, or {self.maximum + 1} to {_MAX_RUNS} with a version."
            )

    @property
    def numbers(self) -> Mapping[str, Any]:
        return {} if self.version is None else {"version": np.int32}

    @property
    def stamp(self) -> str | None:
        return self.version

    def init(self, geometry: Geometry, dense: bool) -> StalenessState:
        lanes = geometry.lanes
        runs = self.runs or (self.maximum + 1 if self.version is None else max(_DEFAULT_RUNS, self.maximum + 1))
        return StalenessState(
            log=anchor_log.init(geometry, dense),
            held=jnp.zeros((lanes,), jnp.int32),
            stamp=jnp.zeros((runs, lanes), jnp.int32),
            count=jnp.zeros((runs, lanes), jnp.int32),
            unit_size=jnp.zeros((lanes,), jnp.int32) if self.version is None else None,
            version=None if self.version is None else jnp.zeros((), jnp.int32),
        )

    def change(self, sampler: StalenessState, change: AnchorChange, geometry: Geometry, token: Array) -> StalenessState:
        counts, closed = anchor_log.close(sampler.held, change, geometry)
        upto = sampler.held[None, :] - jnp.sum(sampler.count, axis=0, dtype=jnp.int32)[None, :]
        upto = upto + jnp.cumsum(sampler.count, axis=0, dtype=jnp.int32)
        count = jnp.clip(upto - closed[None, :], jnp.int32(0), sampler.count)  # without the oldest `closed`
        opened = jnp.sum(change.open_mask, axis=0, dtype=jnp.int32)
        arrived = self._arrived(sampler, change)
        size = count.shape[0]
        more = jnp.max(jnp.where(change.open_mask, arrived.run, jnp.int32(0)), axis=0, initial=0)
        # All runs move up by the number of new ones; the oldest are dropped.
        behind = jnp.arange(size, dtype=jnp.int32)[:, None] + more[None, :]
        still = behind < jnp.int32(size)
        behind = jnp.minimum(behind, jnp.int32(size - 1))
        count = jnp.where(still, jnp.take_along_axis(count, behind, axis=0), jnp.int32(0))
        stamp = jnp.take_along_axis(sampler.stamp, behind, axis=0)
        place = jnp.int32(size - 1) - more[None, :] + arrived.run
        place = jnp.where(change.open_mask & (place >= jnp.int32(0)), place, jnp.int32(size))
        lane = jnp.broadcast_to(jnp.arange(geometry.lanes, dtype=jnp.int32)[None, :], place.shape)
        version = sampler.version
        if self.version is not None:
            version = jnp.maximum(version, version if change.newest_stamp is None else change.newest_stamp)
        return StalenessState(
            log=anchor_log.apply(sampler.log, change, geometry, token),
            held=counts + opened,
            stamp=stamp.at[place, lane].set(arrived.stamp, mode="drop"),
            count=count.at[place, lane].add(jnp.int32(1), mode="drop"),
            unit_size=arrived.unit_size,
            version=version,
        )

    def _arrived(self, sampler: StalenessState, change: AnchorChange) -> _Arrived:
        mask, newest = change.open_mask, sampler.stamp[-1]
        if self.version is None:
            rank = jnp.cumsum(mask, axis=0, dtype=jnp.int32) - jnp.int32(1)
            unit, opened = jnp.int32(self.unit), jnp.sum(mask, axis=0, dtype=jnp.int32)
            run = (sampler.unit_size[None, :] + rank) // unit
            last = jnp.maximum(sampler.unit_size + opened - jnp.int32(1), jnp.int32(0)) // unit
            return _Arrived(run, newest[None, :] + run, sampler.unit_size + opened - last * unit)
        if change.open_stamp is None:  # an eviction opens nothing
            none = jnp.zeros(mask.shape, jnp.int32)
            return _Arrived(none, none, sampler.unit_size)
        first, _ = anchor_log.differs_from_previous(change.open_stamp, mask, newest)
        return _Arrived(jnp.cumsum(first, axis=0, dtype=jnp.int32), change.open_stamp, sampler.unit_size)

    def _staleness(self, sampler: StalenessState) -> tuple[Array, Array]:
        """Return the staleness of each run, uint32[K, E], and which runs have anchors that may be drawn."""
        now = sampler.stamp[-1:] if self.version is None else sampler.version
        staleness = now.astype(jnp.uint32) - sampler.stamp.astype(jnp.uint32)  # versions are less than 2^32 apart
        if self.version is not None:
            staleness = jnp.where(sampler.stamp >= now, jnp.uint32(0), staleness)
        return staleness, (staleness <= jnp.uint32(self.maximum)) & (sampler.count > jnp.int32(0))

    def _weights(self, sampler: StalenessState) -> Array:
        """Return the relative weight of one anchor of each run, float32[K, E]; 0 where none may be drawn."""
        staleness, fresh = self._staleness(sampler)
        if self.decay == "inverse":
            weight = jnp.float32(1) / (jnp.float32(1) + staleness.astype(jnp.float32))
        elif self.half_life is not None:  # relative to the freshest, so that not all underflow
            least = jnp.min(jnp.where(fresh, staleness, jnp.uint32(self.maximum)))
            weight = jnp.exp2((least.astype(jnp.float32) - staleness.astype(jnp.float32)) / jnp.float32(self.half_life))
        else:
            weight = jnp.ones(staleness.shape, jnp.float32)
        return jnp.where(fresh, weight, jnp.float32(0))

    def draw(
        self, sampler: StalenessState, key: Array, batch_size: int, anchors: AnchorSet, options: Leaves, token: Array
    ) -> tuple[StalenessState, Draw]:
        count, weight = sampler.count, self._weights(sampler)
        mass = (weight * count.astype(jnp.float32)).T.reshape(-1)
        upto = lax.cummax(jnp.cumsum(mass))  # a parallel sum may decrease by rounding
        total = upto[-1]
        which, within = jax.random.split(key)
        aim = jax.random.uniform(which, (batch_size,), jnp.float32) * total
        cell = jnp.minimum(number_up_to(upto, aim), jnp.int32(mass.shape[0] - 1))
        # Rounding may select a run of weight 0; use the heaviest then.
        cell = jnp.where(mass[cell] > jnp.float32(0), cell, jnp.argmax(mass).astype(jnp.int32))
        lane, run = cell // jnp.int32(count.shape[0]), cell % jnp.int32(count.shape[0])
        mine = count[run, lane]
        newer = jnp.cumsum(count[::-1], axis=0, dtype=jnp.int32)[::-1]
        rank = sampler.held[lane] - newer[run, lane] + random.randint_below(within, (batch_size,), mine)
        mask = jnp.broadcast_to(total > jnp.float32(0), (batch_size,))
        slot = anchor_log.at(sampler.log, anchors, lane, jnp.where(mask, rank, jnp.int32(0)))
        chance = weight[run, lane] / jnp.where(mask, total, jnp.float32(1))
        return sampler, masked_draw(slot, chance, mask, anchors.geometry)

    def mass(self, sampler: StalenessState, anchors: AnchorSet) -> Mass:
        staleness, fresh = self._staleness(sampler)
        zero = jnp.zeros((), jnp.float32)
        unit = zero
        if self.half_life is not None:  # weights are relative to the freshest
            least = jnp.min(jnp.where(fresh, staleness, jnp.uint32(self.maximum)))
            unit = -least.astype(jnp.float32) / jnp.float32(self.half_life)
        return Mass(jnp.sum(self._weights(sampler) * sampler.count.astype(jnp.float32)), unit, zero)

    def available(self, sampler: StalenessState, count: Array) -> Array:
        return jnp.sum(jnp.where(self._staleness(sampler)[1], sampler.count, jnp.int32(0)), dtype=jnp.int32)

    def inspect(self, sampler: StalenessState, anchors: AnchorSet) -> Inspected:
        geometry, count = anchors.geometry, sampler.count
        weight = self._weights(sampler)
        total = jnp.sum(weight * count.astype(jnp.float32))
        each = weight / jnp.where(total > jnp.float32(0), total, jnp.float32(1))
        # Anchors by rank in their lane, oldest first; those of no run precede all runs.
        upto = (sampler.held - jnp.sum(count, axis=0, dtype=jnp.int32))[None, :] + jnp.cumsum(count, 0, jnp.int32)
        rank = jnp.broadcast_to(
            jnp.arange(geometry.length, dtype=jnp.int32)[:, None], (geometry.length, geometry.lanes)
        )
        lane = jnp.broadcast_to(jnp.arange(geometry.lanes, dtype=jnp.int32)[None, :], rank.shape)
        run = jax.vmap(number_up_to, 1, 1)(upto, rank)
        run = jnp.minimum(run, jnp.int32(count.shape[0] - 1))
        here = (rank >= (upto[0] - count[0])[None, :]) & (rank < sampler.held[None, :])
        slot = anchor_log.at(sampler.log, anchors, lane.reshape(-1), jnp.where(here, rank, jnp.int32(0)).reshape(-1))
        slot = jnp.where(here.reshape(-1), slot, jnp.int32(geometry.capacity))
        nothing = jnp.zeros((geometry.capacity,), jnp.float32)
        return Inspected(nothing.at[slot].set(each[run, lane].reshape(-1), mode="drop"))

    def moved(self, sampler: StalenessState, remap: SlotRemap) -> StalenessState:
        return dataclasses.replace(sampler, log=anchor_log.moved(sampler.log, remap))

    def stats(self, sampler: StalenessState) -> dict[str, Array]:
        stats = {"anchors_fresh": self.available(sampler, jnp.zeros((), jnp.int32))}
        return stats if self.version is None else stats | {"version": sampler.version}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
