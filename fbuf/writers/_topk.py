"""Keep the C rows with the highest ranks; see `fbuf._algorithms.top_k_tree`. NaN has a defined order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import top_k_tree, uint64
from fbuf._algorithms.uint64 import Wide
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
    # From `choose` to `settle`; and bool[], whether it is full.
    done: tuple[top_k_tree.Inserted, jax.Array] | None = None

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
        self, state: TopKState, geometry: Geometry, count: jax.Array, leaves: Mapping[str, jax.Array], keep: jax.Array
    ) -> tuple[jax.Array, TopKState]:
        number = keep.size
        flat = {name: leaf.reshape(number, *leaf.shape[2:]) for name, leaf in leaves.items()}
        rank = flat[self.rank] if isinstance(self.rank, str) else jax.vmap(self._of_row)(flat)
        kept = keep.reshape(-1)
        before = Wide(state.arrived[0], state.arrived[1])
        arrival = uint64.add(before, Wide(jnp.zeros((number,), jnp.uint32), jnp.arange(number, dtype=jnp.uint32)))
        done = top_k_tree.insert(state.tree, geometry.capacity, top_k_tree.encode(rank), arrival, kept, count)
        nan = jnp.isnan(rank) if jnp.issubdtype(rank.dtype, jnp.floating) else jnp.zeros((number,), bool)
        full = jnp.sum(done.slot < jnp.int32(geometry.capacity), dtype=jnp.int32) + count >= jnp.int32(
            geometry.capacity
        )
        return done.slot.reshape(keep.shape), TopKState(
            tree=done.tree,
            arrived=jnp.stack(uint64.add(before, uint64.of(number))),
            lowest=state.lowest,
            nan_ranks=state.nan_ranks + jnp.sum(nan & kept, dtype=jnp.uint32),
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

    def stats(self, state: TopKState) -> dict[str, jax.Array]:
        return {"lowest_rank": state.lowest, "nan_ranks": state.nan_ranks}

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
