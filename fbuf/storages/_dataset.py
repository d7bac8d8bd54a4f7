"""`DataSet`: the rows of a data set on the disk, read by slot; the state only refers to it.

Row r of the data set is always in slot r, so there are no tickets, and reads name rows by slot.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.arguments import check_int
from fbuf._core.component import component
from fbuf._core.pytree import Leaves, Spec
from fbuf._core.slots import Geometry
from fbuf._formats import dataset as dataset_files
from fbuf._formats.checkpoint import SchemaError
from fbuf._interfaces.storage import Read, Storage
from fbuf.storages import _host_rows
from fbuf.storages._array_rows import HostPlan
from fbuf.storages._host_rows import Layout, SideHeld, SideRows


@component
class DataSet(Storage):
    """Read the rows of a data set, with `writers.Frozen`; `fbuf.datasets.open(path)` returns the whole buffer.

    Attributes:
      path: The data set's folder.
      memory: Bytes of memory for leaves of less than 1 KiB a row, the smallest first; the others are read from the files. Flags
        and leaves of at most 256 values are always in memory, an eighth of a byte and one byte a row.
      cache: Bytes of decoded chunks kept for each large leaf, as for `Compressed`.

    Memory besides: 18 bytes for each chunk of 8 rows, and the dictionaries in use, about 4 bytes a row. The files may be larger
    than memory; the system caches frequently read pages.

    Cost: a read is one callback, one file read per run of adjacent chunks, and one decompression per chunk.

    Example:
      >>> import fbuf
      >>> fbuf.storages.DataSet("/data/Pong/1")
      DataSet(path='/data/Pong/1')
    """

    path: str
    memory: int = 1 << 28
    cache: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise TypeError(f"DataSet: path is {self.path!r}; expected the folder of a data set.")
        object.__setattr__(self, "path", os.path.expanduser(os.fspath(self.path)))
        for name in ("memory", "cache"):
            check_int("DataSet", name, getattr(self, name), 0, " of bytes")

    read_only = True

    @property
    def folder(self) -> str:
        return self.path

    def _refuse(self, call: str) -> NoReturn:
        """Raise TypeError: rows do not change."""
        raise TypeError(f"{call}: {self!r} is read-only. Use writer=fbuf.writers.Frozen(), and only methods that read.")

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        return tuple(spec)

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        _host_rows.refuse_tracing("DataSet")
        return _rows(self._open(geometry, spec), geometry, spec, structure)

    def _open(self, geometry: Geometry, spec: Spec) -> dataset_files.DataSet:
        dataset = dataset_files.DataSet.open(self.path, memory=self.memory, cache=self.cache)
        try:
            if (geometry.lanes, geometry.length) != (1, dataset.rows):
                raise ValueError(
                    f"DataSet: the buffer has capacity {geometry.capacity} in {geometry.lanes} lanes; expected "
                    f"{dataset.rows} in one, as {self.path} has. Write fbuf.datasets.open({self.path!r})."
                )
            texts = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in spec.items()}
            if texts != dataset.schema.texts:
                raise ValueError(
                    f"DataSet: rows of {self.path} are {dataset.schema.texts}; expected {texts}. Pass an example like them, "
                    f"or write fbuf.datasets.open({self.path!r})."
                )
        except BaseException:
            dataset.close()
            raise
        return dataset

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        layout = _layout(geometry, spec, structure, tuple(spec))
        return SideRows(jax.ShapeDtypeStruct((2,), jnp.uint32), None, {}, None, 0, layout)

    def plan_host(self, geometry: Geometry, spec: Spec, trial: Leaves | None, ratio: float | None) -> HostPlan:
        with self._open(geometry, spec) as dataset:
            size = dataset.store.nbytes
        return size, "the rest is on disk", size

    def spec(self, rows: SideRows) -> tuple[Spec, Any]:
        if not isinstance(rows, SideRows) or rows.ticket is not None:
            raise TypeError("DataSet: another storage made this state. Use the buffer that made it.")
        return rows.layout.spec, rows.layout.structure

    def write(
        self, rows: SideRows, slot: jax.Array, leaves: Leaves, keep: jax.Array | None, token: jax.Array
    ) -> tuple[SideRows, None]:
        self._refuse("Buffer.extend")

    def update(self, rows: SideRows, slot: jax.Array, leaves: Leaves, token: jax.Array) -> tuple[SideRows, None]:
        self._refuse("Buffer.update_rows")

    def clear(self, rows: SideRows) -> SideRows:
        self._refuse("Buffer.clear")

    def read(self, rows: SideRows, reads: Sequence[Read]) -> tuple[list[jax.Array], jax.Array | None]:
        return _host_rows.finish_read(rows, self.prepare_read(rows, reads), strict=True, ahead=False)[0], None

    def prepare_read(self, rows: SideRows, reads: Sequence[Read]) -> SideHeld:
        capacity = jnp.int32(rows.layout.rows)
        tickets: list[jax.Array] = []
        known: dict[int, int] = {}
        sources = []
        for read in reads:
            at = known.setdefault(id(read.slot), len(tickets))
            if at == len(tickets):
                inside = (read.slot >= jnp.int32(0)) & (read.slot < capacity)
                low = jnp.where(inside, read.slot + jnp.int32(1), jnp.int32(0)).astype(jnp.uint32)
                tickets.append(jnp.stack([low, jnp.zeros_like(low)], axis=-1))
            sources.append((read.name, at))
        return SideHeld(jnp.zeros((), jnp.uint32), tuple(tickets), (), tuple(sources))

    start_read = staticmethod(_host_rows.start_read)
    held_bytes = staticmethod(_host_rows.host_bytes)
    nbytes = staticmethod(_host_rows.nbytes)
    bytes_per_leaf = staticmethod(_host_rows.bytes_per_leaf)

    def finish_read(self, rows: SideRows, pending: SideHeld) -> tuple[list[jax.Array], jax.Array | None]:
        return _host_rows.finish_read(rows, pending, strict=True)[0], None  # no row expires

    def to_arrays(self, rows: SideRows) -> dict[str, Any]:
        """Return path and identity of the data set as JSON: the rows stay in their files."""
        store: Any = _host_rows.store_of(rows)
        text = json.dumps({"path": store.path, "identity": store.identity, "rows": store.rows})
        return {"dataset": np.frombuffer(text.encode(), np.uint8)}

    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        about = _saved_reference(arrays)
        fix = (
            "Restore the data set, or pass its path: fbuf.load(path, dataclasses.replace(buffer, "
            "storage=fbuf.storages.DataSet('/its/path')))."
        )
        try:
            dataset = self._open(geometry, spec)
        except FileNotFoundError as error:
            what = f"fbuf.load: {self.path} should hold the saved rows. {error.strerror} {fix}"
            raise FileNotFoundError(error.errno, what) from error
        except ValueError as error:
            raise SchemaError(f"fbuf.load: the data set at {self.path} is not the saved one: {error} {fix}") from error
        if about["identity"] != dataset.identity:
            dataset.close()
            raise SchemaError(
                f"fbuf.load: the data set at {self.path} has identity {dataset.identity}; expected {about['identity']}: its "
                f"segments were rewritten, or added. {fix}"
            )
        return _rows(dataset, geometry, spec, structure)


def _rows(dataset: dataset_files.DataSet, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
    layout = _layout(geometry, spec, structure, dataset.schema.names)
    return _host_rows.open_rows(dataset.store, None, {}, None, layout)


def _layout(geometry: Geometry, spec: Spec, structure: Any, columns: tuple[str, ...]) -> Layout:
    return _host_rows.layout_of(geometry, spec, structure, columns)._replace(rows=geometry.capacity)


def _saved_reference(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `to_arrays` wrote. Raises SchemaError."""
    with contextlib.suppress(KeyError, ValueError, RecursionError):
        text = bytes(np.asarray(arrays["dataset"]))
        about = json.loads(text.decode()) if len(text) < 1 << 20 else None
        if type(about) is dict and type(about.get("identity")) is str:
            return about
    raise SchemaError("fbuf.load: the checkpoint does not name a data set. Load another checkpoint.")
