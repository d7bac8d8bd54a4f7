"""Protocols of writers: which slots new rows take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

import jax
import numpy as np

from fbuf._core.pytree import Spec
from fbuf._core.slots import Geometry, Placement, Ring


@runtime_checkable
class ReadOnly(Protocol):
    """Optional method of a storage and a writer whose rows exist from the start and never change: both, or neither."""

    def refuse(self, call: str) -> NoReturn:
        """Raise TypeError for a method that would change rows."""


@runtime_checkable
class Streaming(Protocol):
    """A writer of one ring a lane: new rows replace the oldest, so neighbours in time are neighbours in the buffer.

    Optional member, read with `getattr`:
      row_by_row: bool, False. Whether one `place` of many rows equals one of each row. `Replay.add` may then collect rows.
    """

    @property
    def streams(self) -> bool:
        """True."""

    def init(self, geometry: Geometry) -> Ring:
        """Return the rings of an empty buffer."""

    def place(self, ring: Ring, geometry: Geometry, num: int, keep: jax.Array | None, skipped: int) -> Placement:
        """Choose slots for `num` rows a lane, those where `keep` bool[N, E]; `skipped` older rows are not stored."""

    def clear(self, ring: Ring) -> Ring:
        """Return empty rings; every index returned so far becomes stale."""

    def generation(self, ring: Ring, geometry: Geometry, slot: jax.Array) -> jax.Array:
        """Return uint32, different for successive rows of a slot; 0 for empty slots."""

    def resume(self, geometry: Geometry, count: np.ndarray) -> Ring:
        """Return the rings after int64[E] rows, any number, without a `clear`."""


@runtime_checkable
class Scattering(Protocol):
    """A writer that chooses a slot for every row. `own` is its state, a pytree of arrays.

    Rows arrive step by step, and lane by lane within a step. Any row may take any slot in [0, C), whatever its lane.

    Optional methods, read with `getattr`:
      stats(own): Scalars to log, from scalars of the state.
      clear(own, geometry, spec): The state without rows; by default that of `init`.
    """

    @property
    def streams(self) -> bool:
        """False."""

    def init(self, geometry: Geometry, spec: Spec) -> Any:
        """Return the state for an empty buffer; raise if rows lack a leaf it reads."""

    def choose(
        self, own: Any, geometry: Geometry, held: jax.Array, leaves: Mapping[str, jax.Array], keep: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Choose slots int32[N, E] for rows with leaves `[N, E, ...]`, those where `keep`; return them and the state.

        A row replaces the one in its slot; the last of several wins. Out-of-range slots are not stored. Slots 0 to
        `held` int32[] - 1 hold rows, and the others fill in order: a row that would leave an empty slot before it is
        refused and counted.
        """


Writer = Streaming | Scattering
