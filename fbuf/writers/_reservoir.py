"""Keep C rows drawn uniformly from all rows that ever arrived.

Row t (from 1) draws an integer uniform in [0, t) and takes that slot if it exists (Vitter's algorithm R). Draws are
independent, so all rows of a call are placed at once. The numbers come from a cipher of the row number under a key in the
state, so the result does not depend on how rows are split into calls.

Sources: Vitter 1985, "Random sampling with a reservoir" (algorithm R).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from fbuf._algorithms import random, uint64
from fbuf._algorithms.uint64 import Wide
from fbuf._core.arguments import check_key, is_int
from fbuf._core.component import component, state
from fbuf._core.pytree import Spec
from fbuf._core.slots import Geometry
from fbuf._interfaces.writer import Scattering

S = TypeVar("S")


@state
class ReservoirState:
    """Hold the number of rows that arrived, and the key of the draws."""

    key: jax.Array  # uint32[2]
    seen: jax.Array  # uint32[2], rows that arrived, high word first


@component
class Reservoir(Scattering):
    """Keep a uniform sample of all rows that ever arrived: every set of C of them is equally likely.

    Attributes:
      seed: Seed of the draws, an int from 0 to 2^32 - 1. `rekeyed` gives one state its own key.

    After T rows each is held with probability C / T. `extend` of a thousand rows and a thousand `add`s leave the same rows
    in the same slots, bit for bit. Rows of one step arrive lane by lane; masked rows do not count. Probabilities are exact
    to within :math:`2^{-64} T`, and rows are counted in 64 bits. Use it for data sets larger than memory, and for buffers
    that should not forget (Isele and Cosgun 2018).

    `clear` restarts with other draws. `rows` returns rows in order of arrival. Views that read neighbouring rows,
    samplers that rely on eviction of the oldest row, storages with files, and `Ragged` are refused.

    `stats`: `seen`, rows since the last `clear`, rounded to float32.

    Cost: O(N log N), in place if the state is donated; no memory a row. Rows that are not kept are never sent to the host.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(capacity=4, writer=fbuf.writers.Reservoir(seed=1))
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(100)})
      >>> int(buffer.size(state)), float(buffer.stats(state)["seen"])
      (4, 100.0)
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if not is_int(self.seed) or not 0 <= self.seed < 2**32:
            raise ValueError(f"Reservoir: seed is {self.seed!r}; expected an int from 0 to 2^32 - 1.")
        object.__setattr__(self, "seed", int(self.seed))

    def init(self, geometry: Geometry, spec: Spec) -> ReservoirState:
        return _initial_state(jnp.array([0, self.seed], jnp.uint32))

    def clear(self, state: ReservoirState, geometry: Geometry, spec: Spec) -> ReservoirState:
        return _initial_state(state.key)

    def choose(
        self,
        state: ReservoirState,
        geometry: Geometry,
        count: jax.Array,
        leaves: Mapping[str, jax.Array],
        keep: jax.Array,
    ) -> tuple[jax.Array, ReservoirState]:
        kept = keep.reshape(-1)
        rank = jnp.cumsum(kept, dtype=jnp.uint32)
        seen = Wide(state.seen[0], state.seen[1])
        number = uint64.add(seen, Wide(jnp.zeros_like(rank), rank))  # of each row, from 1
        words = Wide(*random.at(state.key, number.high, number.low))
        place = uint64.product_high(words, number)
        capacity, early = jnp.uint32(geometry.capacity), number.high == jnp.uint32(0)
        slot = jnp.where((place.high == jnp.uint32(0)) & (place.low < capacity), place.low, capacity)
        slot = jnp.where(early & (number.low <= capacity), number.low - jnp.uint32(1), slot)
        slot = jnp.where(kept, slot, capacity).astype(jnp.int32)
        after = jnp.stack([number.high[-1], number.low[-1]])
        return slot.reshape(keep.shape), ReservoirState(key=state.key, seen=after)

    def stats(self, state: ReservoirState) -> dict[str, jax.Array]:
        return {"seen": state.seen[0].astype(jnp.float32) * jnp.float32(2**32) + state.seen[1].astype(jnp.float32)}

    def rekeyed(self, state: S, key: jax.Array) -> S:
        """Return the state with another key for later draws; use it for states made under `vmap`.

        Args:
          state: Of a buffer with this writer.
          key: One PRNG key, typed or raw; consumed.
        Raises:
          TypeError: the state belongs to another writer, or the key is invalid.

        Example:
          >>> import fbuf, jax
          >>> buffer = fbuf.Buffer(capacity=4, writer=fbuf.writers.Reservoir())
          >>> make = lambda key: buffer.writer.rekeyed(buffer.init({"t": 0}), key)
          >>> states = jax.vmap(make)(jax.random.split(jax.random.key(0), 3))
        """
        scatter: Any = getattr(state, "scatter", None)
        reservoir = getattr(scatter, "own", None)
        if not isinstance(reservoir, ReservoirState):
            of = "of a buffer with another writer" if hasattr(state, "scatter") else type(state).__name__
            raise TypeError(f"Reservoir.rekeyed: state is {of}; expected a state of {self!r}.")
        check_key("Reservoir.rekeyed", key, "and for many states vmap it")
        reservoir = dataclasses.replace(reservoir, key=jax.random.bits(key, (2,), jnp.uint32))
        return dataclasses.replace(cast(Any, state), scatter=dataclasses.replace(scatter, own=reservoir))


def _initial_state(secret: jax.Array) -> ReservoirState:
    """Return the state before the first row. The key is encrypted by a counter that no row and no JAX function uses."""
    last = jnp.full((1,), 0xFFFFFFFF, jnp.uint32)
    return ReservoirState(key=jnp.concatenate(random.at(secret, last, last)), seen=jnp.zeros((2,), jnp.uint32))
