r"""`Staleness`: anchors by how old they are, or how old the policy was that made them; nothing too old.

Staleness is a whole number: versions of the policy since the one that acted, or (without versions) how many lots of so many
anchors have come to the lane since. Anchors of a lane that came one after another with the same number are a *run*; the newest
K runs of each lane are remembered as a number and a count. A draw weighs the K E runs, chooses one, and any anchor in it: the
anchors of a lane lie in order of arrival (`fbuf._indexing.anchor_log`), so the n-th of a run is found by counting.

A weight for each row in a sum tree was rejected: with every new version all of them change (O(C)), but for weights that fall
exponentially, which then run out of a float's range. Weighing all rows at each draw, as torchrl does, is O(C) as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms import random_bits
from fbuf._core.component import component, state
from fbuf._core.geometry import Geometry
from fbuf._core.pytree import name_of
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import Log
from fbuf._interfaces.sampler import NO_NUMBERS, Draw, EligibilityUpdate, EligibleSet, Inspected

_MOST = 2**16  # runs of a lane; all are weighed at each draw
_RUNS = 64


@state
class StalenessState:
    """The anchors, and the newest runs of each lane, the newest last."""

    log: Log
    held: jax.Array  # int32[E], anchors each lane has now; those of no run are the oldest
    stamp: jax.Array  # int32[K, E], the version, or a count of lots
    count: jax.Array  # int32[K, E], anchors of the run that are held
    lot: jax.Array  # int32[E], anchors that came in the newest lot; [0] with versions
    version: jax.Array  # int32[], what staleness is measured from; [0] without versions


class _Arrived(NamedTuple):
    """Which run each anchor that opened belongs to."""

    run: jax.Array  # int32[A, E], 0: the newest there was, 1: the one after it
    stamp: jax.Array  # int32[A, E]
    lot: jax.Array  # int32[E], afterwards


@component
class Staleness:
    r"""Draws anchors by weights that fall with their staleness, with replacement; beyond `maximum` none at all.

    Attributes:
      maximum: The largest staleness that is drawn, >= 0.
      version: Name of an integer leaf (values that int32 holds): the version of the policy that acted. Staleness is the
        current version minus that one, or 0; current is the newest that came so far, 0 at first, or what
        `buffer.set(state, version=...)` said since, as a learner does that is ahead of what its actors send. Of a window or
        an episode its last row counts, of a transition the row it begins with. None: staleness is age, how many lots of
        `unit` anchors of its lane came since (those not counted that one write both brings and overwrites).
      decay: Weight of an anchor of staleness s: "inverse" 1 / (1 + s), "exponential" 2^(-s / half_life), or "none".
      half_life: > 0; for "exponential".
      unit: Anchors in a lot, >= 1; for ages.
      runs: How many runs of equal versions each lane remembers; None: 64, or `maximum` + 1 if that is more. Rows beyond are
        not drawn. In a lane whose versions never go down `maximum` + 1 are enough; where several actors share a lane,
        each change from one to another begins a run, so give each its lane (`lanes=E`), or ask for more runs.

    `probability` is that of the draw; `weight` is 1: what is drawn less often is meant to count less. `can_sample` says whether
    anything is fresh enough. `stats`: `anchors_fresh`, how many anchors are, and `version`. `Buffer.convert` starts anew from
    the rows: set the version again.

    Cost: O(B log(K E) + K E) a draw and O(K E) more a write, K runs a lane; 8 K E bytes, and 4 a row where the view looks at
    neighbours. Exact to what float32 can tell apart: a run of less than 10^-7 of all weight comes a little too often or
    too seldom.

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
    decay: str = "inverse"
    half_life: float | None = None
    unit: int = 1
    runs: int | None = None

    options = NO_NUMBERS
    prioritized = False
    by_rank = True
    by_episode = False
    in_order = True

    def __post_init__(self) -> None:
        if not _is_int(self.maximum) or not 0 <= self.maximum < _MOST:
            raise ValueError(
                f"Staleness: maximum is {self.maximum!r}; expected an int from 0 to {_MOST - 1}"
                f"{' (for greater ages use lots: unit=...)' if _is_int(self.maximum) and self.maximum > 0 else ''}."
            )
        if self.version is not None:
            if not isinstance(self.version, (str, tuple)):
                raise TypeError(
                    f"Staleness: version is {self.version!r}; expected the name of a leaf, or None for ages."
                )
            object.__setattr__(self, "version", name_of(self.version))
        if self.decay not in ("inverse", "exponential", "none"):
            raise ValueError(f'Staleness: decay is {self.decay!r}; expected "inverse", "exponential" or "none".')
        if self.decay == "exponential":
            if not isinstance(self.half_life, (int, float)) or not 1e-30 < self.half_life < 1e30:
                raise ValueError(
                    f"Staleness: half_life is {self.half_life!r}; expected a number > 0 that float32 holds. "
                    f"Write Staleness({self.maximum}, decay='exponential', half_life=8)."
                )
            object.__setattr__(self, "half_life", float(self.half_life))
        elif self.half_life is not None:
            raise ValueError(f"Staleness: half_life is for decay='exponential', but decay is {self.decay!r}. Drop one.")
        if not _is_int(self.unit) or not 1 <= self.unit < 2**30 or (self.version is not None and self.unit != 1):
            for_ages = " for ages; with a version leave it out" if self.version is not None else ""
            raise ValueError(f"Staleness: unit is {self.unit!r}; expected an int >= 1{for_ages}.")
        if self.runs is not None and (
            self.version is None or not _is_int(self.runs) or not self.maximum < self.runs <= _MOST
        ):
            for_versions = ", for versions only" if self.version is None else ""
            raise ValueError(
                f"Staleness: runs is {self.runs!r}; expected None or an int from maximum + 1 = {self.maximum + 1} to "
                f"{_MOST}{for_versions}."
            )

    @property
    def numbers(self) -> Mapping[str, Any]:
        return {} if self.version is None else {"version": np.int32}

    @property
    def stamp(self) -> str | None:
        return self.version

    def init(self, geometry: Geometry, dense: bool) -> StalenessState:
        lanes = geometry.lanes
        runs = self.runs or (self.maximum + 1 if self.version is None else max(_RUNS, self.maximum + 1))
        return StalenessState(
            log=anchor_log.init(geometry, dense),
            held=jnp.zeros((lanes,), jnp.int32),
            stamp=jnp.zeros((runs, lanes), jnp.int32),
            count=jnp.zeros((runs, lanes), jnp.int32),
            lot=jnp.zeros((lanes if self.version is None else 0,), jnp.int32),
            version=jnp.zeros((0,) if self.version is None else (), jnp.int32),
        )

    def change(
        self, sampler: StalenessState, change: EligibilityUpdate, geometry: Geometry, token: jax.Array
    ) -> StalenessState:
        held, closed = anchor_log.closed(sampler.held, change, geometry)
        count = _without_oldest(sampler.count, sampler.held, closed)
        opened = jnp.sum(change.open_mask, axis=0, dtype=jnp.int32)
        arrived = self._arrived(sampler, change)
        size = count.shape[0]
        more = jnp.max(jnp.where(change.open_mask, arrived.run, jnp.int32(0)), axis=0, initial=0)
        # All runs move up by as many as are new; what was the oldest is forgotten.
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
            log=anchor_log.follow(sampler.log, change, geometry, token),
            held=held + opened,
            stamp=stamp.at[place, lane].set(arrived.stamp, mode="drop"),
            count=count.at[place, lane].add(jnp.int32(1), mode="drop"),
            lot=arrived.lot,
            version=version,
        )

    def _arrived(self, sampler: StalenessState, change: EligibilityUpdate) -> _Arrived:
        mask, newest = change.open_mask, sampler.stamp[-1]
        if self.version is None:
            rank = jnp.cumsum(mask, axis=0, dtype=jnp.int32) - jnp.int32(1)
            unit, opened = jnp.int32(self.unit), jnp.sum(mask, axis=0, dtype=jnp.int32)
            run = (sampler.lot[None, :] + rank) // unit
            last = jnp.maximum(sampler.lot + opened - jnp.int32(1), jnp.int32(0)) // unit
            return _Arrived(run, newest[None, :] + run, sampler.lot + opened - last * unit)
        if change.open_stamp is None:  # nothing opens where only old rows are given up
            none = jnp.zeros(mask.shape, jnp.int32)
            return _Arrived(none, none, sampler.lot)
        first, _ = anchor_log.differs(change.open_stamp, mask, newest)
        return _Arrived(jnp.cumsum(first, axis=0, dtype=jnp.int32), change.open_stamp, sampler.lot)

    def _staleness(self, sampler: StalenessState) -> tuple[jax.Array, jax.Array]:
        """uint32[K, E] of each run, and which runs have anchors that may be drawn."""
        now = sampler.stamp[-1:] if self.version is None else sampler.version
        staleness = now.astype(jnp.uint32) - sampler.stamp.astype(
            jnp.uint32
        )  # any two versions are less than 2^32 apart
        if self.version is not None:
            staleness = jnp.where(sampler.stamp >= now, jnp.uint32(0), staleness)
        return staleness, (staleness <= jnp.uint32(self.maximum)) & (sampler.count > jnp.int32(0))

    def _weights(self, sampler: StalenessState) -> jax.Array:
        """float32[K, E], of one anchor of each run, but for a factor; 0 where none may be drawn, or hardly ever would be."""
        staleness, fresh = self._staleness(sampler)
        if self.decay == "inverse":
            weight = jnp.float32(1) / (jnp.float32(1) + staleness.astype(jnp.float32))
        elif self.half_life is not None:  # from the freshest on, or all might be too small for a float
            least = jnp.min(jnp.where(fresh, staleness, jnp.uint32(self.maximum)))
            weight = jnp.exp2((least.astype(jnp.float32) - staleness.astype(jnp.float32)) / jnp.float32(self.half_life))
        else:
            weight = jnp.ones(staleness.shape, jnp.float32)
        return jnp.where(fresh, weight, jnp.float32(0))

    def draw(
        self,
        sampler: StalenessState,
        key: jax.Array,
        batch_size: int,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[StalenessState, Draw]:
        del options, token
        geometry, count = eligible.geometry, sampler.count
        weight = self._weights(sampler)
        mass = (weight * count.astype(jnp.float32)).T.reshape(-1)
        upto = lax.cummax(jnp.cumsum(mass))  # a sum in another order may come out smaller by a hair
        total = upto[-1]
        which, within = jax.random.split(key)
        aim = jax.random.uniform(which, (batch_size,), jnp.float32) * total
        cell = jnp.minimum(jnp.searchsorted(upto, aim, side="right"), mass.shape[0] - 1).astype(jnp.int32)
        # By the same hair it may be a run of no weight: then one that has some.
        cell = jnp.where(mass[cell] > jnp.float32(0), cell, jnp.argmax(mass).astype(jnp.int32))
        lane, run = cell // jnp.int32(count.shape[0]), cell % jnp.int32(count.shape[0])
        mine = count[run, lane]
        newer = jnp.cumsum(count[::-1], axis=0, dtype=jnp.int32)[::-1]
        rank = sampler.held[lane] - newer[run, lane] + random_bits.randint_below(within, (batch_size,), mine)
        mask = jnp.broadcast_to(total > jnp.float32(0), (batch_size,))
        slot = anchor_log.at(sampler.log, eligible, lane, jnp.where(mask, rank, jnp.int32(0)))
        chance = weight[run, lane] / jnp.where(mask, total, jnp.float32(1))
        return sampler, Draw(
            slot=jnp.where(mask, slot, jnp.int32(geometry.capacity)),
            probability=jnp.where(mask, chance, jnp.float32(0)),
            weight=mask.astype(jnp.float32),
            mask=mask,
        )

    def update(
        self, sampler: StalenessState, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array
    ) -> StalenessState:
        return sampler

    def set(self, sampler: StalenessState, **numbers: Any) -> StalenessState:
        return dataclasses.replace(sampler, **numbers)

    def clear(self, sampler: StalenessState, geometry: Geometry, dense: bool) -> StalenessState:
        return dataclasses.replace(self.init(geometry, dense), version=sampler.version)

    def available(self, sampler: StalenessState, count: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(self._staleness(sampler)[1], sampler.count, jnp.int32(0)), dtype=jnp.int32)

    def inspect(self, sampler: StalenessState, eligible: EligibleSet, fetched: None) -> Inspected:
        geometry, count = eligible.geometry, sampler.count
        weight = self._weights(sampler)
        total = jnp.sum(weight * count.astype(jnp.float32))
        each = weight / jnp.where(total > jnp.float32(0), total, jnp.float32(1))
        # Anchors by rank in their lane, the oldest first; those of no run come before all runs.
        upto = (sampler.held - jnp.sum(count, axis=0, dtype=jnp.int32))[None, :] + jnp.cumsum(count, 0, jnp.int32)
        rank = jnp.broadcast_to(
            jnp.arange(geometry.length, dtype=jnp.int32)[:, None], (geometry.length, geometry.lanes)
        )
        lane = jnp.broadcast_to(jnp.arange(geometry.lanes, dtype=jnp.int32)[None, :], rank.shape)
        run = jax.vmap(lambda of, at: jnp.searchsorted(of, at, side="right"), 1, 1)(upto, rank).astype(jnp.int32)
        run = jnp.minimum(run, jnp.int32(count.shape[0] - 1))
        here = (rank >= (upto[0] - count[0])[None, :]) & (rank < sampler.held[None, :])
        slot = anchor_log.at(sampler.log, eligible, lane.reshape(-1), jnp.where(here, rank, jnp.int32(0)).reshape(-1))
        slot = jnp.where(here.reshape(-1), slot, jnp.int32(geometry.capacity))
        nothing = jnp.zeros((geometry.capacity,), jnp.float32)
        return Inspected(nothing.at[slot].set(each[run, lane].reshape(-1), mode="drop"))

    def stats(self, sampler: StalenessState) -> dict[str, jax.Array]:
        stats = {"anchors_fresh": self.available(sampler, jnp.zeros((), jnp.int32))}
        return stats if self.version is None else stats | {"version": sampler.version}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _without_oldest(count: jax.Array, held: jax.Array, closed: jax.Array) -> jax.Array:
    """int32[K, E], anchors of each run when the `closed` int32[E] oldest of a lane have gone, those of no run first."""
    upto = held[None, :] - jnp.sum(count, axis=0, dtype=jnp.int32)[None, :] + jnp.cumsum(count, axis=0, dtype=jnp.int32)
    return jnp.clip(upto - closed[None, :], jnp.int32(0), count)
