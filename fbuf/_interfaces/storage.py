"""Base class of storages: where rows are kept and how they are read."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fbuf._core.pytree import Leaves, PyTree, Spec
from fbuf._core.slots import Geometry


class Read(NamedTuple):
    """One gather of a view: leaf `name` at `slot`; zeros where the slot is C."""

    name: str
    slot: Any  # int32[B, ...]; None in `View.assemble` of a prefetched batch, which needs the names only
    # int32[B, U], slots of overlapping reads of this leaf: slot[b] = pool[b, start[b]:][:T]
    pool: jax.Array | None = None
    start: jax.Array | None = None  # int32[B]; a storage where reads are costly reads the pool once


HostRead = Callable[[Sequence[tuple[int, np.ndarray[Any, Any]]]], "list[np.ndarray[Any, Any]] | None"]
"""Read pairs of a leaf's number and slots int64[...], modulo C, into new arrays `[..., *item]`; None where it cannot."""


class Storage(abc.ABC):
    """Hold rows by slot. `spec` maps each leaf's name to the shape and dtype of one row.

    A storage on the device needs three methods: derive it from `fbuf.parts.ArrayStorage`. What has a default here belongs to
    storages that mask rows, send them to the host, keep files, grow, read ahead, or hold more than arrays.
    """

    grows: bool = False  # whether its space can run out, so that old rows are evicted, and be enlarged by `grow`
    ragged: bool = False  # whether rows hold more than arrays: text, objects, leaves of any shape
    read_only: bool = False  # whether rows exist from the start and never change; so says the writer, then
    sends: bool = False  # whether `send` stores the rows, which may fail, before the state changes

    @property
    def row_by_row(self) -> bool:
        """Whether one `write` of many rows equals one of each row, and rows need not outlive the process.

        `Replay.add` may then collect rows.
        """
        return False

    @property
    def masks_expired(self) -> bool:
        """Whether a row that was dropped is masked (zeros) rather than an error."""
        return False

    @property
    def exact(self) -> tuple[str, ...]:
        """Leaves, or subtrees, that keep the 64 bits of NumPy's dtypes."""
        return ()

    @property
    def folder(self) -> str | None:
        """Path of its files; None: it has none, or the system chooses it."""
        return None

    @property
    def in_files(self) -> bool:
        """Whether rows are in files, so that they may outlive the process, and eager calls wait for errors."""
        return False

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        """Return the names of the leaves kept on the host."""
        return ()

    @abc.abstractmethod
    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> Any:
        """Return empty rows."""

    @abc.abstractmethod
    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> Any:
        """Return the result of `init` as `jax.ShapeDtypeStruct`s."""

    @abc.abstractmethod
    def spec(self, rows: Any) -> tuple[Spec, Any]:
        """Return spec and treedef of one row."""

    @abc.abstractmethod
    def write(
        self, rows: Any, slot: jax.Array, leaves: Leaves, keep: jax.Array | None, token: jax.Array
    ) -> tuple[Any, jax.Array | None]:
        """Write leaves `[N, E, ...]` to distinct slots int32[N, E], where `keep`.

        Also return how many rows did not fit, uint32[], or None if all rows always fit.
        """

    @abc.abstractmethod
    def read(self, rows: Any, reads: Sequence[Read]) -> tuple[list[jax.Array], jax.Array | None]:
        """Return an array for each read, zeros at slot C; and bool[B], whether all rows of a draw were present, or None."""

    @abc.abstractmethod
    def update(self, rows: Any, slot: jax.Array, leaves: Leaves, token: jax.Array) -> tuple[Any, jax.Array | None]:
        """Replace some leaves `[B, ...]` of existing rows in distinct slots; slot C is skipped.

        Also return how many rows did not fit, as `write` does; those stay unchanged.
        """

    def clear(self, rows: Any) -> Any:
        """Return the rows with all of them dropped; the writer's rings say that there are none."""
        return rows

    @abc.abstractmethod
    def nbytes(self, rows: Any) -> dict[str, int]:
        """Return present bytes: `device`, `host`, `disk`. Eager."""

    @abc.abstractmethod
    def to_arrays(self, rows: Any) -> dict[str, Any]:
        """Return arrays from which `from_arrays` builds the rows; arrays and packed leaves of the state as they are. Eager."""

    @abc.abstractmethod
    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> Any:
        """Build rows from `to_arrays`, in any process. Eager."""

    def plan_host(
        self, geometry: Geometry, spec: Spec, trial: Leaves | None, ratio: float | None
    ) -> tuple[int, str, int]:
        """Return host bytes of a full buffer, how they are known, and the bytes without compression."""
        return 0, "none", 0

    def plan_disk(self, geometry: Geometry, spec: Spec, trial: Leaves | None, ratio: float | None) -> int:
        """Return the bytes on disk of a full buffer."""
        return 0

    def forecast(self, geometry: Geometry, spec: Spec, trial: Leaves | None) -> Forecast | None:
        """Return how full the table of distinct blocks will be, from rows `[N, E, ...]`; None: there is none. Eager."""
        return None

    def bytes_per_leaf(self, rows: Any) -> dict[str, LeafBytes]:
        """Return the bytes of each leaf, at most `nbytes` in all; {}: unknown. Eager."""
        return {}

    def stats(self, rows: Any, exists: jax.Array) -> dict[str, jax.Array]:
        """Return scalars to log, from scalars of the state; the buffer holds `exists` int32[] rows."""
        return {}

    # Reads that start early (`Buffer(prefetch=1)`); by default rows are read at once. `finish_read` of what `prepare_read`
    # gave equals `read`, with or without `start_read`, whatever was written to the rows since.

    def prepare_read(self, rows: Any, reads: Sequence[Read]) -> Any:
        """Return a pytree of arrays: everything the reads need that later writes may change."""
        return self.read(rows, reads)

    def start_read(self, rows: Any, pending: Any) -> Any:
        """Ask the host to start reading; return `pending` without waiting. Only a hint."""
        return pending

    def finish_read(self, rows: Any, pending: Any) -> tuple[list[jax.Array], jax.Array | None]:
        """Wait, and return what `read` returns."""
        return list(pending[0]), pending[1]

    def held_bytes(self, rows: Any, pending: Any) -> int:
        """Return the host bytes of reads in progress, from shapes."""
        return 0

    def on_host(self, rows: Any) -> HostRead | None:
        """Return what reads these rows, in CPU memory, for `Replay` in NumPy; None: only `read` can. Eager.

        It is dropped before the state is donated. Where it returns None the same batch is read by `read`, which then raises, or
        masks, what is missing.
        """
        return None

    # Of a storage that `sends`.

    def send(
        self, rows: Any, leaves: Leaves, keep: jax.Array | None, slot: jax.Array | None, token: jax.Array
    ) -> tuple[Any, dict[str, jax.Array], jax.Array]:
        """Store leaves `[N, E, ...]` where `keep`, None: all; return rows and leaves for `write`, and bool[N, E], the rows that
        are stored.

        `slot` int32[N, E] where a writer replaces any row; then all rows are stored, or none. An error is kept for the next
        call that takes the state (`fbuf._bridge.lifetime.Owner.raise_failed`).
        """
        raise NotImplementedError(_missing(self, "send"))

    # Of a storage that `grows`.

    def needs_eviction(self, rows: Any, more: jax.Array) -> jax.Array | None:
        """Return bool[], whether old rows must be evicted before `more` int32[] rows; None: never."""
        return None

    def drop(self, rows: Any, slot: jax.Array, token: jax.Array) -> tuple[Any, jax.Array]:
        """Drop the rows in slots int32[A, E] before a write, where `needs_eviction`; slot C is skipped."""
        raise NotImplementedError(_missing(self, "drop"))

    def grow(self, rows: Any, blocks: Any = None) -> tuple[Any, Any]:
        """Return storage and rows with `blocks` blocks, or half as many again. Eager."""
        raise NotImplementedError(_missing(self, "grow"))

    # Of a storage whose rows are `in_files`.

    def resume(
        self, geometry: Geometry, spec: Spec, structure: Any, verify: str
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows at its path, int64[E] rows each lane ever had, int64[E] rows it still holds, and bool[C], which slots
        were cut. Eager.

        Row `count` of a lane is at position `count % L`, as if a `Ring` had written them all. `verify`: "full" or "lazy".
        """
        raise TypeError(f'Buffer.resume: {self!r} keeps no files. Use storages.Memmap(path="/data/replay").')

    def cut(self, rows: Any, slot: jax.Array, token: jax.Array) -> Any:
        """Record in the files that a cut follows the rows in slots int32[B]; slot C is skipped."""
        return rows

    def flush(self, rows: Any) -> Any:
        """Wait until every row is on disk. Eager."""

    # Of a `ragged` storage.

    def describe(self, call: str, example: PyTree) -> tuple[PyTree, Any]:
        """Return the arrays of a row, as the state and views see it, and the other leaves."""
        return example, ()

    def open(self, geometry: Geometry, spec: Spec, structure: Any, leaves: Any) -> Any:
        """Return empty rows that also hold `leaves`. Eager."""
        raise NotImplementedError(_missing(self, "open"))

    def parse(self, call: str, rows: Any, data: PyTree, lead: tuple[int | None, ...], axes: str) -> Any:
        """Check rows; return leaves `[*lead, *item]` by name, and values that `put_values` must store first, or None."""
        raise NotImplementedError(_missing(self, "parse"))

    def put_values(
        self, rows: Any, values: Any, shape: tuple[int, int], length: int, mask: Any, after: Any
    ) -> np.ndarray:
        """Store values; return their tickets uint32[N, E, 2]. Eager."""
        raise NotImplementedError(_missing(self, "put_values"))

    def split(self, rows: Any, data: Any) -> tuple[PyTree, Any]:
        """Split a view's leaves into the user's part and the tickets that `Sample.lazy` reads, or None."""
        return data, None

    def changeable(self, call: str, rows: Any, names: Sequence[str]) -> Spec:
        """Return the spec of the leaves that `update_rows` can replace; raise if `names` has another leaf."""
        return self.spec(rows)[0]

    def with_capacity(self, rows: Any, geometry: Geometry) -> Any:
        """Return the same rows, same slots, with space for more. Eager."""
        raise NotImplementedError(_missing(self, "with_capacity"))


def _missing(storage: Storage, method: str) -> str:
    return f"{type(storage).__name__}: write def {method}; see fbuf.parts.Storage."


class Forecast(NamedTuple):
    """How full the table of distinct blocks of a full buffer will be."""

    blocks: int | None  # distinct blocks; None: unknown
    places: int  # capacity of the table, in distinct blocks
    wanted: int | None  # capacity that would hold all rows, with a margin
    load: float | None  # of the fullest table if every row were held: distinct blocks over places
    rows: int  # approximate number of rows held, at most C
    gives_way: str  # what happens to the others: "", "retired" or "refused"
    known: str  # source of the estimate


class LeafBytes(NamedTuple):
    """Bytes of one leaf, by place."""

    device: int = 0
    host: int = 0
    disk: int = 0
