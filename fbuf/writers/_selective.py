"""Choose which rows to keep: `TopK` those with the highest ranks, `Reservoir` rows drawn uniformly from all that arrived.

Ranks are in a tree (`fbuf._algorithms.top_k_tree`), in which NaN has a defined order.

In a reservoir row t (from 1) draws an integer uniform in [0, t) and takes that slot if it exists (Vitter's algorithm R). Draws
are independent, so all rows of a call are placed at once. The numbers come from a cipher of the row number under a key in the
state, so the result does not depend on how rows are split into calls.

Sources: Vitter 1985, "Random sampling with a reservoir" (algorithm R).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import random, top_k_tree, uint64
from fbuf._algorithms.uint64 import Wide
from fbuf._core.arguments import check_key, is_int
from fbuf._core.component import component, state
from fbuf._core.pytree import Spec, name_of, nested
from fbuf._core.slots import Geometry, Ranges
from fbuf._interfaces.writer import Scattering


@state
class TopKState:
    """Hold the ranks of the rows."""

    tree: jax.Array  # uint32[nodes, W], ranks and arrivals (`fbuf._algorithms.top_k_tree`)
    arrived: jax.Array  # uint32[2], rows that arrived, kept or not, high word first
    lowest: jax.Array  # [], of the ranks' dtype: the lowest held in a full buffer, else the least of the dtype
    nan_ranks: jax.Array  # uint32[], NaN ranks; wraps
    done: tuple[top_k_tree.Inserted, jax.Array] | None = (
        None  # from `choose` to `settle`; and bool[], whether it is full
    )

    def ranges(self, geometry: Geometry) -> Ranges:
        slot = np.asarray(self.tree)[:, -1]
        yield "tree", slot, 0, np.where(slot == top_k_tree.NONE, slot, geometry.capacity - 1)


@component
class TopK(Scattering):
    """Keep the rows with the highest ranks: a new row replaces the lowest if it is higher.

    Attributes:
      rank: Name of a leaf with one real number a row (floating, integer or boolean, of any width), or a jittable function
        of one row that returns such a number: `lambda row: row["reward"].sum()`. The function receives nested dicts by the
        names of the leaves, or the array itself if a row is one array. Functions compare by identity.

    The buffer holds what a sort of all rows would keep: the C highest, and of equal ranks the earliest, however rows are
    split into calls. Rows of one step arrive lane by lane; masked rows do not count. Exactly:

    * Infinite ranks are valid, 0.0 and -0.0 are equal, integers are compared as integers.
    * NaN ranks are below everything, including -inf: such a row stays while there is room and is evicted first. `stats`
      counts them as `nan_ranks`.
    * The rank is that of the row when it was added: `update_rows` does not change it.
    * `clear` restarts.

    `rows` returns rows in order of arrival. The slot of a row is unspecified. Views that read neighbouring rows,
    samplers that rely on eviction of the oldest row, storages with files, and `Ragged` are refused.

    `stats`: `lowest_rank`, which a new row must exceed to be kept (-inf, or the least of the dtype, while there is room;
    -inf if a row with NaN is held); `nan_ranks`.

    Cost: O(N log N + K log C) for N rows of which K are kept, and 18 bytes a row; in place if the state is donated. On a
    CPU 0.1 to 0.3 us for each kept row.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(capacity=3, writer=fbuf.writers.TopK("score"))
      >>> state = buffer.init({"score": jnp.float32(0)})
      >>> state = buffer.extend(state, {"score": jnp.array([2.0, jnp.nan, 7.0, 1.0, 5.0])})
      >>> buffer.rows(state).data["score"].tolist()
      [2.0, 7.0, 5.0]
      >>> float(buffer.stats(state)["lowest_rank"])
      2.0
    """

    rank: str | tuple[str, ...] | Callable[[Any], Any]

    reads_rows = True

    def __post_init__(self) -> None:
        if isinstance(self.rank, tuple) and all(isinstance(part, str) for part in self.rank):
            object.__setattr__(self, "rank", name_of(self.rank))
        if not isinstance(self.rank, str) and not callable(self.rank):
            raise TypeError(f"TopK: rank is {self.rank!r}; expected the name of a leaf, or a function of a row.")

    def init(self, geometry: Geometry, spec: Spec) -> TopKState:
        dtype = self._dtype(spec)
        return TopKState(
            tree=top_k_tree.init(geometry.capacity, top_k_tree.number_of_words(dtype)),
            arrived=jnp.zeros((2,), jnp.uint32),
            lowest=jnp.asarray(_least(dtype), dtype),
            nan_ranks=jnp.zeros((), jnp.uint32),
        )

    def choose(
        self, own: TopKState, geometry: Geometry, held: jax.Array, leaves: Mapping[str, jax.Array], keep: jax.Array
    ) -> tuple[jax.Array, TopKState]:
        number = keep.size
        flat = {name: leaf.reshape(number, *leaf.shape[2:]) for name, leaf in leaves.items()}
        rank = flat[self.rank] if isinstance(self.rank, str) else jax.vmap(self._of_row)(flat)
        there = keep.reshape(-1)
        before = Wide(own.arrived[0], own.arrived[1])
        arrival = uint64.add(before, Wide(jnp.zeros((number,), jnp.uint32), jnp.arange(number, dtype=jnp.uint32)))
        done = top_k_tree.insert(own.tree, geometry.capacity, top_k_tree.encode(rank), arrival, there, held)
        nan = jnp.isnan(rank) if jnp.issubdtype(rank.dtype, jnp.floating) else jnp.zeros((number,), bool)
        full = jnp.sum(done.slot < jnp.int32(geometry.capacity), dtype=jnp.int32) + held >= jnp.int32(geometry.capacity)
        return done.slot.reshape(keep.shape), TopKState(
            tree=done.tree,
            arrived=jnp.stack(uint64.add(before, uint64.of(number))),
            lowest=own.lowest,
            nan_ranks=own.nan_ranks + jnp.sum(nan & there, dtype=jnp.uint32),
            done=(done, full),
        )

    def settle(self, geometry: Geometry, before: TopKState, after: TopKState, failed: jax.Array | None) -> TopKState:
        assert after.done is not None
        done, full = after.done
        tree = done.tree if failed is None else top_k_tree.undo(done, geometry.capacity, failed)
        least = jnp.asarray(_least(before.lowest.dtype), before.lowest.dtype)
        lowest = top_k_tree.decode(top_k_tree.root(tree)[:-3], least.dtype, least)
        after = TopKState(tree, after.arrived, jnp.where(full, lowest, least), after.nan_ranks)
        return super().settle(geometry, dataclasses.replace(before, tree=tree), after, failed)

    def stats(self, own: TopKState) -> dict[str, jax.Array]:
        return {"lowest_rank": own.lowest, "nan_ranks": own.nan_ranks}

    def _of_row(self, leaves: Mapping[str, jax.Array]) -> jax.Array:
        """Return the rank that the function gives a row."""
        assert callable(self.rank)
        made = self.rank(leaves[""] if list(leaves) == [""] else nested(leaves))
        if not isinstance(made, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise TypeError(f"TopK: {self.rank!r} returns {type(made).__name__}; expected one real number a row.")
        return jnp.asarray(made)

    def _dtype(self, spec: Spec) -> Any:
        """Return the dtype of the ranks; raise unless they are real numbers, one a row."""
        if isinstance(self.rank, str):
            if self.rank not in spec:
                raise ValueError(f"TopK: rank is '{self.rank}'; expected one of the leaves {', '.join(spec)}.")
            what, found, fix = f"leaf '{self.rank}'", spec[self.rank], f"lambda row: row['{self.rank}'].sum()"
        else:
            shape: Any = jax.eval_shape(self._of_row, dict(spec))
            what, found, fix = f"the result of {self.rank!r}", shape, "lambda row: row['reward'].sum()"
        real = any(jnp.issubdtype(found.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
        if found.shape != () or not real:
            raise TypeError(f"TopK: {what} is {found.dtype}{list(found.shape)}; expected a number. Write TopK({fix}).")
        return found.dtype


def _least(dtype: Any) -> Any:
    """Return the least number of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf
    integers: Any = jnp.iinfo  # also knows int4
    return False if dtype == jnp.bool_ else int(integers(dtype).min)


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

    def clear(self, own: ReservoirState, geometry: Geometry, spec: Spec) -> ReservoirState:
        return _initial_state(own.key)

    def choose(
        self, own: ReservoirState, geometry: Geometry, held: jax.Array, leaves: Mapping[str, jax.Array], keep: jax.Array
    ) -> tuple[jax.Array, ReservoirState]:
        there = keep.reshape(-1)
        rank = jnp.cumsum(there, dtype=jnp.uint32)
        seen = Wide(own.seen[0], own.seen[1])
        number = uint64.add(seen, Wide(jnp.zeros_like(rank), rank))  # of each row, from 1
        words = Wide(*random.at(own.key, number.high, number.low))
        place = uint64.product_high(words, number)
        capacity, early = jnp.uint32(geometry.capacity), number.high == jnp.uint32(0)
        slot = jnp.where((place.high == jnp.uint32(0)) & (place.low < capacity), place.low, capacity)
        slot = jnp.where(early & (number.low <= capacity), number.low - jnp.uint32(1), slot)
        slot = jnp.where(there, slot, capacity).astype(jnp.int32)
        after = jnp.stack([number.high[-1], number.low[-1]])
        return slot.reshape(keep.shape), ReservoirState(key=own.key, seen=after)

    def stats(self, own: ReservoirState) -> dict[str, jax.Array]:
        return {"seen": own.seen[0].astype(jnp.float32) * jnp.float32(2**32) + own.seen[1].astype(jnp.float32)}

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
        own = getattr(scatter, "own", None)
        if not isinstance(own, ReservoirState):
            of = "of a buffer with another writer" if hasattr(state, "scatter") else type(state).__name__
            raise TypeError(f"Reservoir.rekeyed: state is {of}; expected a state of {self!r}.")
        check_key("Reservoir.rekeyed", key, "and for many states vmap it")
        own = dataclasses.replace(own, key=jax.random.bits(key, (2,), jnp.uint32))
        return dataclasses.replace(cast(Any, state), scatter=dataclasses.replace(scatter, own=own))


def _initial_state(secret: jax.Array) -> ReservoirState:
    """Return the state before the first row. The key is encrypted by a counter that no row and no JAX function uses."""
    last = jnp.full((1,), 0xFFFFFFFF, jnp.uint32)
    return ReservoirState(key=jnp.concatenate(random.at(secret, last, last)), seen=jnp.zeros((2,), jnp.uint32))
