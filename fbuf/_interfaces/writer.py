"""Protocols of writers: which slots new rows take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

import jax
import numpy as np

from fbuf._core.geometry import Geometry, Placement, Ring
from fbuf._core.pytree import Spec


@runtime_checkable
class ReadOnly(Protocol):
    """What a storage and a writer have besides if rows are there from the beginning and stay: both, or neither."""

    def refuse(self, call: str) -> NoReturn:
        """Raises TypeError for a verb that would change rows."""


@runtime_checkable
class Writer(Protocol):
    """Says which slots new rows take: a `Streaming` or a `Scattering`."""

    @property
    def streams(self) -> bool:
        """Whether rows replace the oldest of their lane, so that neighbours in time are neighbours in the buffer."""


@runtime_checkable
class Streaming(Protocol):
    """What a writer has besides if it `streams`: rings, one a lane."""

    def init(self, geometry: Geometry) -> Ring:
        """The rings of an empty buffer."""

    def place(self, ring: Ring, geometry: Geometry, num: int, keep: jax.Array | None, skipped: int) -> Placement:
        """Slots for `num` rows a lane, those where `keep` bool[N, E]; `skipped` older ones are not kept at all."""

    def clear(self, ring: Ring) -> Ring:
        """Empty, and every index handed out so far is stale."""

    def generation(self, ring: Ring, geometry: Geometry, slot: jax.Array) -> jax.Array:
        """uint32, tells the rows apart that lie in a slot one after another; 0 where none does."""

    def resume(self, geometry: Geometry, count: np.ndarray) -> Ring:
        """The rings after int64[E] rows, any number of them, and no `clear`."""


@runtime_checkable
class Scattering(Protocol):
    """What a writer has besides if it does not: it names a slot for every row. What it remembers is a pytree of arrays.

    Rows come step by step, and of one step lane by lane; any of them may take any slot in [0, C). Lanes are no more than that:
    rows that come side by side.
    """

    def init(self, geometry: Geometry, spec: Spec) -> Any:
        """What it remembers of an empty buffer; raises if rows lack what it looks at."""

    def choose(
        self, own: Any, geometry: Geometry, held: jax.Array, leaves: Mapping[str, jax.Array], keep: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Slots int32[N, E] for rows with leaves `[N, E, ...]`, those where `keep`; and what it remembers then.

        A row replaces the one in its slot; of several the last. It is not kept where its slot is out of range. Slots 0 to
        `held` int32[] - 1 hold rows; the others are filled in this order, and a row that would leave one before it empty is
        refused and counted.
        """


@runtime_checkable
class Reporting(Protocol):
    """What a scattering writer has besides if it remembers something worth logging."""

    def stats(self, own: Any) -> dict[str, jax.Array]:
        """Scalars, from scalars of what it remembers only."""


@runtime_checkable
class Forgetting(Protocol):
    """What a scattering writer has besides if what it remembers outlives the rows in part; else `clear` calls its `init`."""

    def clear(self, own: Any, geometry: Geometry, spec: Spec) -> Any:
        """What it remembers after all rows are forgotten."""
