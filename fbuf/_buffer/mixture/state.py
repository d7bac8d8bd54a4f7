"""Hold the configuration of a mixture, and its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.component import state

COUNTERS = ("empty_samples", "moved_rows", "refused_out_of_range", "refused_read_only")
"""Batches with all buffers empty; rows drawn from other buffers in place of empty ones; invalid indices; updates of data
sets."""


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """Hold the fields of a `Mixture` and values derived from them."""

    buffers: Mapping[str, Buffer] | tuple[tuple[str, Buffer], ...]
    fractions: Mapping[str, float] | tuple[float, ...] | None = None
    quota: Literal["exact", "random", "all"] = "exact"
    target: Literal["union", "source"] = "union"
    beta: float = 1.0
    normalize: Literal["batch", None] = "batch"
    if_empty: Literal["share", "mask"] = "share"
    annealed: bool = False

    @property
    def members(self) -> tuple[tuple[str, Buffer], ...]:
        """Names and buffers, in order."""
        assert isinstance(self.buffers, tuple)
        return self.buffers

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers, in the order of `source`."""
        return tuple(name for name, _ in self.members)

    @property
    def shares(self) -> tuple[float, ...]:
        """The fractions, in order; they may have any sum."""
        return self.fractions if isinstance(self.fractions, tuple) else (1.0,) * len(self.members)


@state
class MixtureState:
    """Hold everything that changes. `state["online"]` is the `BufferState` of that buffer."""

    buffers: Mapping[str, BufferState]
    fractions: jax.Array | None  # float32[S], as `set` left them; None unless the mixture is `annealed`
    beta: jax.Array  # float32[]
    counters: jax.Array  # uint32[4], see `COUNTERS`

    @property
    def refused(self) -> dict[str, jax.Array]:
        """Counters that indicate an error: empty batches and invalid indices."""
        return {name: self.counters[COUNTERS.index(name)] for name in ("empty_samples", "refused_out_of_range")}

    def __repr__(self) -> str:
        return "\n\n".join(
            [f"MixtureState({', '.join(self.buffers)})", *(f"{n}: {s!r}" for n, s in self.buffers.items())]
        )

    def __getitem__(self, name: str) -> BufferState:
        if name not in self.buffers:
            raise KeyError(f"MixtureState: buffer is '{name}'; expected one of {', '.join(self.buffers)}.")
        return self.buffers[name]
