"""What a mixture changes and hands out: the states of its buffers, batches with the source of each row, and indices."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from fbuf._buffer.state import BufferState
from fbuf._core.component import state
from fbuf._core.pytree import PyTree

COUNTERS = ("empty_samples", "moved_rows", "refused_out_of_range", "refused_read_only")
"""Batches for which no buffer had anything; rows of a batch that buffers with nothing to draw left to the others; indices that
name no buffer; rows of data sets that were to be changed."""


@state
class MixtureState:
    """Everything that changes. `state["online"]` is the `BufferState` of that buffer."""

    buffers: Mapping[str, BufferState]
    fractions: jax.Array | None  # float32[S], as `set` left them; None unless the mixture is `annealed`
    beta: jax.Array  # float32[]
    counters: jax.Array  # uint32[4], see `COUNTERS`

    @property
    def refused(self) -> dict[str, jax.Array]:
        """What is an error where nothing was meant to be refused: batches of nothing, and indices that lead nowhere."""
        return {name: self.counters[COUNTERS.index(name)] for name in ("empty_samples", "refused_out_of_range")}

    def __repr__(self) -> str:
        return "\n\n".join(
            [f"MixtureState({', '.join(self.buffers)})", *(f"{n}: {s!r}" for n, s in self.buffers.items())]
        )

    def __getitem__(self, name: str) -> BufferState:
        if name not in self.buffers:
            raise KeyError(f"MixtureState: there is no buffer '{name}'; expected one of {', '.join(self.buffers)}.")
        return self.buffers[name]


@state
class MixtureIndex:
    """Names rows of several buffers: which buffer, and an `Index` into it; see `Index`. `Mixture.route` gives that."""

    source: jax.Array  # int32[B], in [0, S), in the order of the mixture's names; S where the sample's mask is False
    slot: jax.Array  # int32[B], in that buffer; 0 where the mask is False
    ticket: jax.Array  # uint32[B]; 0 where the mask is False


@state
class MixtureSample:
    """A batch of several buffers. Where `mask` is False everything else is zero, but `source`, which is S."""

    data: PyTree  # what the views make, leaves [B, ...]
    index: MixtureIndex  # for `update_priority` and `update_rows`
    probability: jax.Array  # float32[B], chance of this anchor in one draw of the mixture
    weight: jax.Array  # float32[B], importance weight
    mask: jax.Array  # bool[B]

    @property
    def source(self) -> jax.Array:
        """int32[B], which buffer each row came from, in the order of the mixture's names; S where `mask` is False."""
        return self.index.source
