"""Base classes of writers: which slots new rows take."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.pytree import Spec
from fbuf._core.slots import Geometry, Placement, Ring


class Writer(abc.ABC):
    """Choose the slots of new rows. Derive a writer from `Streaming` or `Scattering`."""

    streams: bool  # whether new rows replace the oldest of their lane
    read_only: bool = False  # whether rows exist from the start and never change; so says the storage, then
    # Whether one `place` of many rows equals one of each row; `Replay.add` may then collect rows.
    row_by_row: bool = False
    reads_rows: bool = False  # whether it reads values of rows inside jit

    def refuse(self, call: str) -> None:
        """Raise TypeError for a method that would change rows, if it is `read_only`."""


class Streaming(Writer):
    """A writer of one ring a lane: new rows replace the oldest, so neighbours in time are neighbours in the buffer."""

    streams = True

    @abc.abstractmethod
    def init(self, geometry: Geometry) -> Ring:
        """Return the rings of an empty buffer."""

    @abc.abstractmethod
    def place(self, ring: Ring, geometry: Geometry, num: int, keep: jax.Array | None, skipped: int) -> Placement:
        """Choose slots for `num` rows a lane, those where `keep` bool[N, E]; `skipped` older rows are not stored."""

    @abc.abstractmethod
    def clear(self, ring: Ring) -> Ring:
        """Return empty rings; every index returned so far becomes stale."""

    @abc.abstractmethod
    def generation(self, ring: Ring, geometry: Geometry, slot: jax.Array) -> jax.Array:
        """Return uint32, different for successive rows of a slot; 0 for empty slots."""

    @abc.abstractmethod
    def resume(self, geometry: Geometry, count: np.ndarray) -> Ring:
        """Return the rings after int64[E] rows, any number, without a `clear`."""


class Scattering(Writer):
    """A writer that chooses a slot for every row. Its state is a pytree of arrays.

    Rows arrive step by step, and lane by lane within a step. Any row may take any slot in [0, C), whatever its lane.
    """

    streams = False

    @abc.abstractmethod
    def init(self, geometry: Geometry, spec: Spec) -> Any:
        """Return the state for an empty buffer; raise if rows lack a leaf it reads."""

    @abc.abstractmethod
    def choose(
        self, state: Any, geometry: Geometry, count: jax.Array, leaves: Mapping[str, jax.Array], keep: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Choose slots int32[N, E] for rows with leaves `[N, E, ...]`, those where `keep`; return them and the state.

        A row replaces the one in its slot; the last of several wins. Out-of-range slots are not stored. Slots 0 to
        `count` int32[] - 1 hold rows, and the others fill in order: a row that would leave an empty slot before it is
        refused and counted.
        """

    def settle(self, geometry: Geometry, before: Any, after: Any, failed: jax.Array | None) -> Any:
        """Return the state once the rows are written: that of `choose`, or if `failed` bool[] that before it.

        None: the storage cannot fail. Where it can, this method copies the state; override it for one with an array of C rows.
        """
        return after if failed is None else jax.tree.map(lambda old, new: jnp.where(failed, old, new), before, after)

    def clear(self, state: Any, geometry: Geometry, spec: Spec) -> Any:
        """Return the state without rows."""
        return self.init(geometry, spec)

    def stats(self, state: Any) -> dict[str, jax.Array]:
        """Return scalars to log, from scalars of the state."""
        return {}
