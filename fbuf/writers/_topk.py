"""`TopK`: of all rows the C with the highest ranks stay.

The arithmetic is in `fbuf._algorithms.top_k_tree`. torchrl's writer of this kind is a Python heap beside the rows, in which
one NaN that came while there was room keeps out every better row for ever; here ranks have one order that includes NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import top_k_tree, uint64
from fbuf._algorithms.uint64 import Wide
from fbuf._core.component import component, state
from fbuf._core.geometry import Geometry
from fbuf._core.pytree import Spec, name_of, nested


@state
class TopKState:
    """What it remembers of the rows held."""

    tree: jax.Array  # uint32[nodes, W], the rows' ranks and arrivals (`fbuf._algorithms.top_k_tree`)
    arrived: jax.Array  # uint32[2], rows that came, kept or not, high word first
    lowest: jax.Array  # [], of the ranks' dtype: the lowest held once the buffer is full, until then the least there is
    nan_ranks: jax.Array  # uint32[], ranks that were NaN; wraps


@component
class TopK:
    """Keeps the rows with the highest ranks: a new row takes the place of the lowest if it is higher.

    Attributes:
      rank: Name of a leaf with one real number a row (floating, integer or boolean, of any width); or a function of one row
        that gives such a number, jittable: `lambda row: row["reward"].sum()`. Rows that are no nested dicts come to it as such,
        by the names of their leaves; a row that is one array as it is. Functions compare by identity.

    What stays is what sorting all rows that ever came would leave: the C highest, of equal ranks those that came first,
    whatever calls they came in (of one step, lane by lane; rows that are masked never came). Exactly:

    * Infinite ranks are ranks like others, 0.0 and -0.0 are equal, integers are compared as integers.
    * NaN ranks below everything, -inf too: such a row stays while there is room, and is the first to go. `stats` counts them
      as `nan_ranks`.
    * A rank is that of the row as it was added: `update_rows` does not change it.
    * `clear` begins anew.

    `rows` and `last` give rows in order of arrival, as ever. Which slot a row takes is not specified. Views that look at
    neighbouring rows are refused, and so are samplers that count on the oldest row going first, storages with files, and
    `Ragged`.

    `stats`: `lowest_rank`, what a new row must exceed to be kept (-inf, or the least of the dtype, while there is room; -inf
    where a row with NaN is held); `nan_ranks`.

    Cost: O(N log N + K log C) for N rows of which K are kept, and 18 bytes a row; in place where the state is donated. On a
    CPU 0.1 to 0.3 us for each row kept.

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

    streams = False

    def __post_init__(self) -> None:
        if isinstance(self.rank, tuple) and all(isinstance(part, str) for part in self.rank):
            object.__setattr__(self, "rank", name_of(self.rank))
        if not isinstance(self.rank, str) and not callable(self.rank):
            raise TypeError(
                f"TopK: rank is {self.rank!r}; expected the name of a leaf, or a function of a row. Write TopK('reward')."
            )

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
        tree, slot = top_k_tree.insert(own.tree, geometry.capacity, top_k_tree.encode(rank), arrival, there, held)
        nan = jnp.isnan(rank) if jnp.issubdtype(rank.dtype, jnp.floating) else jnp.zeros((number,), bool)
        full = jnp.sum(slot < jnp.int32(geometry.capacity), dtype=jnp.int32) + held >= jnp.int32(geometry.capacity)
        least = jnp.asarray(_least(rank.dtype), rank.dtype)
        lowest = top_k_tree.decode(top_k_tree.root(tree)[:-3], rank.dtype, least)
        after = uint64.add(before, uint64.of(number))
        return slot.reshape(keep.shape), TopKState(
            tree=tree,
            arrived=jnp.stack(after),
            lowest=jnp.where(full, lowest, least),
            nan_ranks=own.nan_ranks + jnp.sum(nan & there, dtype=jnp.uint32),
        )

    def stats(self, own: TopKState) -> dict[str, jax.Array]:
        return {"lowest_rank": own.lowest, "nan_ranks": own.nan_ranks}

    def _of_row(self, leaves: Mapping[str, jax.Array]) -> jax.Array:
        """The rank that a function gives a row."""
        assert callable(self.rank)
        made = self.rank(leaves[""] if list(leaves) == [""] else nested(leaves))
        if not isinstance(made, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise TypeError(
                f"TopK: what {self.rank!r} gives is {type(made).__name__}; expected one real number a row. Write "
                f"TopK(lambda row: row['reward'].sum())."
            )
        return jnp.asarray(made)

    def _dtype(self, spec: Spec) -> Any:
        """Of ranks; raises unless they are real numbers, one a row."""
        if isinstance(self.rank, str):
            if self.rank not in spec:
                raise ValueError(
                    f"TopK: rank names leaf '{self.rank}', but rows have {', '.join(spec)}. Use one of those."
                )
            what, found, fix = f"leaf '{self.rank}'", spec[self.rank], f"lambda row: row['{self.rank}'].sum()"
        else:
            shape: Any = jax.eval_shape(self._of_row, dict(spec))
            what, found, fix = f"what {self.rank!r} gives", shape, "lambda row: row['reward'].sum()"
        real = any(jnp.issubdtype(found.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
        if found.shape != () or not real:
            raise TypeError(
                f"TopK: {what} is {found.dtype}{list(found.shape)}; expected one real number a row. Write TopK({fix})."
            )
        return found.dtype


def _least(dtype: Any) -> Any:
    """The least number of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf
    integers: Any = jnp.iinfo  # numpy's knows none of four bits
    return False if dtype == jnp.bool_ else int(integers(dtype).min)
