r"""`Reservoir`: of all rows that ever came, C drawn at random stay.

Row t (from 1) draws a whole number uniform in [0, t) and goes into that slot, if there is one: Vitter's algorithm R. Its
draws do not depend on one another, so that all rows of a call are placed at once, and of several for one slot the last stays,
as it would one by one. The numbers come from a cipher of the row's own number under a key in the state, so that it makes no
difference which rows come in one call.

Rejected: algorithm L, which draws how many rows to skip (fewer random numbers, which are no cost here, but each skip follows
from the last: a loop); a random key a row and a heap of the largest (what `TopK` does; O(log C) a row).

Sources: Vitter 1985, "Random sampling with a reservoir" (algorithm R); Li 1994 (algorithm L).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import random_bits, uint64
from fbuf._algorithms.uint64 import Wide
from fbuf._core.arguments import check_key
from fbuf._core.component import component, state
from fbuf._core.geometry import Geometry
from fbuf._core.pytree import Spec

S = TypeVar("S")


@state
class ReservoirState:
    """How many rows came, and what their draws are made of."""

    key: jax.Array  # uint32[2]
    seen: jax.Array  # uint32[2], rows that ever came, high word first


@component
class Reservoir:
    r"""Keeps a uniform sample of all rows that ever came: each set of C of them is equally likely.

    Attributes:
      seed: Of the draws, an int from 0 to 2^32 - 1. `rekeyed` gives one state a key of its own.

    After T rows each is held with probability C / T, whatever calls they came in: `extend` of a thousand rows and a thousand
    `add`s leave the same rows in the same slots, bit for bit. (Rows of one step come lane by lane; rows that are masked never
    came.) A row's chances are exact to within :math:`2^{-64} T`, and rows are counted in 64 bits. For data sets larger than
    memory, and for buffers that should not forget (Isele and Cosgun 2018).

    `clear` begins anew, with other draws. `rows` and `last` give rows in order of arrival. Views that look at neighbouring
    rows are refused, and so are samplers that count on the oldest row going first, storages with files, and `Ragged`.

    `stats`: `seen`, rows that came since the last `clear`, rounded to float32.

    Cost: O(N log N), in place where the state is donated; nothing a row. Rows that are not kept are never sent to the host.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(capacity=4, writer=fbuf.writers.Reservoir(seed=1))
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(100)})
      >>> int(buffer.size(state)), float(buffer.stats(state)["seen"])
      (4, 100.0)
    """

    seed: int = 0

    streams = False

    def __post_init__(self) -> None:
        good = isinstance(self.seed, (int, np.integer)) and not isinstance(self.seed, bool)
        if not good or not 0 <= self.seed < 2**32:
            raise ValueError(f"Reservoir: seed is {self.seed!r}; expected an int from 0 to 2^32 - 1.")
        object.__setattr__(self, "seed", int(self.seed))

    def init(self, geometry: Geometry, spec: Spec) -> ReservoirState:
        return _started(jnp.array([0, self.seed], jnp.uint32))

    def clear(self, own: ReservoirState, geometry: Geometry, spec: Spec) -> ReservoirState:
        return _started(own.key)

    def choose(
        self, own: ReservoirState, geometry: Geometry, held: jax.Array, leaves: Mapping[str, jax.Array], keep: jax.Array
    ) -> tuple[jax.Array, ReservoirState]:
        there = keep.reshape(-1)
        rank = jnp.cumsum(there, dtype=jnp.uint32)
        seen = Wide(own.seen[0], own.seen[1])
        number = uint64.add(seen, Wide(jnp.zeros_like(rank), rank))  # of each row, from 1
        random = Wide(*random_bits.at(own.key, number.high, number.low))
        place = uint64.product_high(random, number)
        capacity, early = jnp.uint32(geometry.capacity), number.high == jnp.uint32(0)
        slot = jnp.where((place.high == jnp.uint32(0)) & (place.low < capacity), place.low, capacity)
        slot = jnp.where(early & (number.low <= capacity), number.low - jnp.uint32(1), slot)
        slot = jnp.where(there, slot, capacity).astype(jnp.int32)
        after = jnp.stack([number.high[-1], number.low[-1]])
        return slot.reshape(keep.shape), ReservoirState(key=own.key, seen=after)

    def stats(self, own: ReservoirState) -> dict[str, jax.Array]:
        return {"seen": own.seen[0].astype(jnp.float32) * jnp.float32(2**32) + own.seen[1].astype(jnp.float32)}

    def rekeyed(self, state: S, key: jax.Array) -> S:
        """The state with another key for the draws to come: for states made under `vmap`, which should not draw alike.

        Args:
          state: Of a buffer with this writer.
          key: One PRNG key, typed or raw; consumed.
        Raises:
          TypeError: the state is of another writer, or none at all; or it is not one key.

        Example:
          >>> import fbuf, jax
          >>> buffer = fbuf.Buffer(capacity=4, writer=fbuf.writers.Reservoir())
          >>> make = lambda key: buffer.writer.rekeyed(buffer.init({"t": 0}), key)
          >>> states = jax.vmap(make)(jax.random.split(jax.random.key(0), 3))
        """
        scatter: Any = getattr(state, "scatter", None)
        own = getattr(scatter, "own", None)
        if not isinstance(own, ReservoirState):
            of = "of a buffer with another writer" if hasattr(state, "scatter") else type(state).__name__
            raise TypeError(
                f"Reservoir.rekeyed: the state is {of}; expected one with {self!r}. Write buffer.writer.rekeyed(state, key)."
            )
        check_key("Reservoir.rekeyed", key, "and for many states vmap it")
        own = dataclasses.replace(own, key=jax.random.bits(key, (2,), jnp.uint32))
        return dataclasses.replace(cast(Any, state), scatter=dataclasses.replace(scatter, own=own))


def _started(secret: jax.Array) -> ReservoirState:
    """Before the first row, with a key made of `secret` uint32[2] by a counter that neither rows get nor `jax.random` uses."""
    last = jnp.full((1,), 0xFFFFFFFF, jnp.uint32)
    return ReservoirState(key=jnp.concatenate(random_bits.at(secret, last, last)), seen=jnp.zeros((2,), jnp.uint32))
