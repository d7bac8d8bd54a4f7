"""`MixtureConfig`: the buffers and settings of a mixture, for the functions that work on its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fbuf._buffer.buffer import Buffer


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """The fields of a `Mixture`, unchecked, and what follows from them."""

    buffers: Mapping[str, Buffer] | tuple[tuple[str, Buffer], ...]
    fractions: Mapping[str, float] | tuple[float, ...] | None = None
    quota: str = "exact"
    target: str = "union"
    beta: float = 1.0
    normalize: str | None = "batch"
    if_empty: str = "share"
    annealed: bool = False

    @property
    def members(self) -> tuple[tuple[str, Buffer], ...]:
        """Names and buffers, in order."""
        assert isinstance(self.buffers, tuple)
        return self.buffers

    @property
    def names(self) -> tuple[str, ...]:
        """Of the buffers, in the order of `source`."""
        return tuple(name for name, _ in self.members)

    @property
    def shares(self) -> tuple[float, ...]:
        """The fractions, in order; they need not come to 1."""
        return self.fractions if isinstance(self.fractions, tuple) else (1.0,) * len(self.members)
