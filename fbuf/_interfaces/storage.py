"""Protocols of storages: where rows are kept and how they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from fbuf._core.geometry import Geometry
from fbuf._core.pytree import PyTree, Spec


class Read(NamedTuple):
    """One gather a view asks for: leaf `name` at `slot`; zeros where the slot is C."""

    name: str
    slot: Any  # int32[B, ...]; None in `View.assemble` of a batch that was drawn ahead, where only names are left
    # int32[B, U], slots of overlapping reads of this leaf: slot[b] = pool[b, start[b]:][:T]
    pool: jax.Array | None = None
    start: jax.Array | None = None  # int32[B]; a storage for which rows are dear reads the pool once


@runtime_checkable
class Storage(Protocol):
    """Holds rows by slot. `spec` maps each leaf's name to the shape and dtype of one row."""

    @property
    def masks_expired(self) -> bool:
        """Whether a row that was dropped is masked (zeros) rather than an error."""

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        """Names of the leaves kept on the host."""

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> Any:
        """Empty rows."""

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> Any:
        """What `init` gives, as `jax.ShapeDtypeStruct`s, for `plan`."""

    def plan_host(
        self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None, ratio: float | None
    ) -> tuple[int, str, int]:
        """Host bytes of a full buffer, how they are known, and the bytes if nothing compressed."""

    def spec(self, rows: Any) -> tuple[Spec, Any]:
        """Spec and treedef of one row."""

    def write(
        self,
        rows: Any,
        slot: jax.Array,
        leaves: Mapping[str, jax.Array],
        keep: jax.Array | None,
        token: jax.Array,
    ) -> tuple[Any, jax.Array | None]:
        """Writes leaves `[N, E, ...]` to slots int32[N, E]; nothing where `keep` is False. No slot twice.

        Also how many rows it had no room for, uint32[], or None where there is always room.
        """

    def read(self, rows: Any, reads: Sequence[Read]) -> tuple[list[jax.Array], jax.Array | None]:
        """One array a read, zeros at slot C; and, where rows can expire, bool[B]: all of this draw's rows were there."""

    def update(
        self, rows: Any, slot: jax.Array, leaves: Mapping[str, jax.Array], token: jax.Array
    ) -> tuple[Any, jax.Array | None]:
        """Replaces some leaves `[B, ...]` of rows already there; slot C is skipped, no other slot comes twice.

        Also how many rows it had no room for, as `write`; those stay as they were.
        """

    def clear(self, rows: Any) -> Any:
        """Forgets every row."""

    def nbytes(self, rows: Any) -> dict[str, int]:
        """Bytes held now: `device`, `host`, `disk`. Eager."""

    def to_arrays(self, rows: Any) -> dict[str, Any]:
        """Everything needed to build these rows again, as plain arrays: those of the state as they are. Eager."""

    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> Any:
        """The inverse of `to_arrays`, in any process. Eager."""


@runtime_checkable
class Requesting(Protocol):
    """What a storage has besides if a read can be begun ahead (`Buffer(prefetch=1)`); one that has not reads at once.

    `finish_read(rows, start_read(rows, prepare_read(rows, reads)))` is `read(rows, reads)`, with or without `start_read`,
    whatever was written to the rows after `prepare_read`.
    """

    def prepare_read(self, rows: Any, reads: Sequence[Read]) -> Any:
        """A pytree of arrays: what the reads depend on that later writes may change. Starts nothing."""

    def start_read(self, rows: Any, held: Any) -> Any:
        """The same, after asking the host to begin; only a hint. Returns at once."""

    def finish_read(self, rows: Any, held: Any) -> tuple[list[jax.Array], jax.Array | None]:
        """What `read` returns; waits for what was begun."""

    def held_bytes(self, rows: Any, held: Any) -> int:
        """Host bytes taken by what is begun ahead, from shapes."""


@runtime_checkable
class Growable(Protocol):
    """What a storage has besides if its room for rows can run out, and be enlarged."""

    def needs_eviction(self, rows: Any, more: jax.Array) -> jax.Array | None:
        """bool[], whether old rows are to be given up before `more` int32[] come; None: never."""

    def drop(self, rows: Any, slot: jax.Array, token: jax.Array) -> tuple[Any, jax.Array]:
        """Drop the rows in slots int32[A, E] before a write, where `needs_eviction`; slot C is skipped."""

    def stats(self, rows: Any, held: jax.Array) -> dict[str, jax.Array]:
        """Scalars worth logging, from scalars of the state only; `held` int32[] rows are in the buffer."""

    def grow(self, rows: Any, blocks: Any = None) -> tuple[Any, Any]:
        """The storage and its rows with more room: by half, or as `blocks` says. Eager."""


@runtime_checkable
class Resumable(Protocol):
    """What a storage has besides if its rows can outlive the process."""

    def resume(self, geometry: Geometry, spec: Spec, structure: Any, verify: str) -> tuple[Any, np.ndarray, np.ndarray]:
        """The rows that lie at its path; int64[E], how many each lane ever had; int64[E], how many of these are held. Eager.

        Row `count` of a lane lies at position `count % L`, as if a `Ring` had written them all. `verify`: "full" or "lazy".
        """

    def flush(self, rows: Any) -> None:
        """Waits until every row is on the disk. Eager."""

    def plan_disk(
        self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None, ratio: float | None
    ) -> int:
        """Bytes on disk of a full buffer."""


@runtime_checkable
class Recording(Protocol):
    """What a storage has besides if rows hold what no array can: text, objects, leaves of any shape."""

    def describe(self, call: str, example: PyTree) -> tuple[PyTree, Any]:
        """The arrays of a row, as the state and views see it, and what else rows hold."""

    def open(self, geometry: Geometry, spec: Spec, structure: Any, leaves: Any) -> Any:
        """Empty rows that hold `leaves` besides. Eager."""

    def parse(self, call: str, rows: Any, given: PyTree, lead: tuple[int | None, ...], axes: str) -> Any:
        """Checked rows: `leaves` `[*lead, *item]` by name, and `values` that `put` must store first, or None."""

    def put(self, rows: Any, values: Any, shape: tuple[int, int], length: int, mask: Any, after: Any) -> np.ndarray:
        """Stores values; tickets uint32[N, E, 2]. Eager."""

    def split(self, rows: Any, data: Any) -> tuple[PyTree, Any]:
        """What a view made of the leaves: the user's part, and the tickets that `Sample.lazy` reads."""

    def with_capacity(self, rows: Any, geometry: Geometry) -> Any:
        """The same rows in the same slots with room for more. Eager."""


class Forecast(NamedTuple):
    """What the blocks of a full buffer will make of the tables they share."""

    blocks: int | None  # distinct blocks; None: nobody knows
    places: int  # for distinct blocks
    wanted: int | None  # places that would hold all rows with some to spare
    load: float | None  # of the fullest table, if every row were held: distinct blocks over places
    rows: int  # about how many rows will be held, at most C
    gives_way: str  # what happens to the others: "", "retired" or "refused"
    known: str  # how it is known


@runtime_checkable
class Forecasting(Protocol):
    """A storage whose room depends on what its rows hold."""

    def forecast(self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None) -> Forecast:
        """How far its tables will fill, from rows `[N, E, ...]`. Eager."""


class LeafBytes(NamedTuple):
    """Bytes of one leaf, by place."""

    device: int = 0
    host: int = 0
    disk: int = 0


@runtime_checkable
class Weighing(Protocol):
    """What a storage has besides if it can say how much each leaf takes."""

    def bytes_per_leaf(self, rows: Any) -> dict[str, LeafBytes]:
        """Bytes by leaf, at most what `nbytes` says in all: the rest is nobody's. Eager."""
