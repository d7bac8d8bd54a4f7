"""`DataSet`: the rows of a data set on the disk, read by slot; nothing of them is in the state but where to ask.

Row r of the data set lies in slot r, for good: so there are no tickets to keep, and a read names rows by their slots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge import lifetime
from fbuf._core.component import component
from fbuf._core.geometry import Geometry
from fbuf._core.pytree import Spec, tree_bytes
from fbuf._formats import dataset as _dataset
from fbuf._formats.checkpoint import SchemaError
from fbuf._interfaces.storage import LeafBytes, Read
from fbuf.storages import _host_reads, _host_rows
from fbuf.storages._host_reads import SideHeld
from fbuf.storages._host_rows import Layout, SideRows


@component
class DataSet:
    """The rows of a data set, for `writers.Frozen`; `fbuf.datasets.open(path)` makes the whole buffer.

    Attributes:
      path: The data set's folder.
      memory: Bytes of memory granted to leaves of less than 1 KiB a row, the smallest first; the others are read from the
        files. Flags and leaves of at most 256 values are always in memory, an eighth of a byte and one byte a row.
      cache: Bytes of decoded chunks kept for each large leaf, as for `Compressed`.

    Memory beside that: 18 bytes for each chunk of 8 rows, and the dictionaries that draws have met, some 4 bytes a row. The
    files may be larger than memory; what is read often the system keeps in its page cache.

    Cost: a read is one callback, one look into a file for each distinct run of chunks, and one decompression for each chunk.

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
            raise TypeError(
                f"DataSet: path is {self.path!r}; expected the folder of a data set. Write DataSet('/data/Pong/1')."
            )
        object.__setattr__(self, "path", os.path.expanduser(os.fspath(self.path)))
        for name in ("memory", "cache"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(
                    f"DataSet: {name} is {value!r}; expected bytes, an int >= 0. 64 MiB are {name}=1 << 26."
                )

    @property
    def masks_expired(self) -> bool:
        return False

    def refuse(self, call: str) -> NoReturn:
        """Raises TypeError: rows do not change."""
        raise TypeError(f"{call}: {self!r} is read-only; expected a verb that reads. Use writer=fbuf.writers.Frozen().")

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        return tuple(spec)

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        _host_rows.refuse_tracing("DataSet")
        return self._rows(self._open(geometry, spec), geometry, spec, structure)

    def _open(self, geometry: Geometry, spec: Spec) -> _dataset.DataSet:
        dataset = _dataset.DataSet.open(self.path, memory=self.memory, cache=self.cache)
        try:
            if (geometry.lanes, geometry.length) != (1, dataset.rows):
                raise ValueError(
                    f"DataSet: the buffer has capacity {geometry.capacity} in {geometry.lanes} lanes, but {self.path} has "
                    f"{dataset.rows} rows in one; expected as many. Write fbuf.Buffer({dataset.rows}, ...), without lanes, or "
                    f"fbuf.datasets.open({self.path!r})."
                )
            texts = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in spec.items()}
            if texts != dataset.schema.texts:
                raise ValueError(
                    f"DataSet: rows of {self.path} are {dataset.schema.texts}; expected {texts}. Give an example like them, or "
                    f"write fbuf.datasets.open({self.path!r})."
                )
        except BaseException:
            dataset.close()
            raise
        return dataset

    def _rows(self, dataset: _dataset.DataSet, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        owned = lifetime.open_store(dataset.store)
        rows = SideRows(
            id=jnp.asarray(lifetime.split_id(owned.id)),
            ticket=None,
            device={},
            last=None,
            slot=owned.slot,
            layout=_layout(geometry, spec, structure, dataset.schema.names),
        )
        rows.owner = owned
        return rows

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        layout = _layout(geometry, spec, structure, tuple(spec))
        return SideRows(jax.ShapeDtypeStruct((2,), jnp.uint32), None, {}, None, 0, layout)

    def plan_host(
        self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None, ratio: float | None
    ) -> tuple[int, str, int]:
        dataset = self._open(geometry, spec)
        try:
            size = dataset.store.nbytes
            return size, "the rest is on disk", size
        finally:
            dataset.close()

    def spec(self, rows: SideRows) -> tuple[Spec, Any]:
        if not isinstance(rows, SideRows) or rows.ticket is not None:
            raise TypeError("DataSet: this state has its rows elsewhere. Use the buffer that made it.")
        return rows.layout.spec, rows.layout.structure

    def write(
        self,
        rows: SideRows,
        slot: jax.Array,
        leaves: Mapping[str, jax.Array],
        keep: jax.Array | None,
        token: jax.Array,
    ) -> tuple[SideRows, None]:
        self.refuse("Buffer.extend")

    def update(
        self, rows: SideRows, slot: jax.Array, leaves: Mapping[str, jax.Array], token: jax.Array
    ) -> tuple[SideRows, None]:
        self.refuse("Buffer.update_rows")

    def clear(self, rows: SideRows) -> SideRows:
        self.refuse("Buffer.clear")

    def read(self, rows: SideRows, reads: Sequence[Read]) -> tuple[list[jax.Array], jax.Array | None]:
        return _there(_host_reads.finish_read(rows, self.prepare_read(rows, reads), strict=True, ahead=False))

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

    def start_read(self, rows: SideRows, held: SideHeld) -> SideHeld:
        return _host_reads.start_read(rows, held)

    def finish_read(self, rows: SideRows, held: SideHeld) -> tuple[list[jax.Array], jax.Array | None]:
        return _there(_host_reads.finish_read(rows, held, strict=True))

    def held_bytes(self, rows: SideRows, held: SideHeld) -> int:
        return _host_reads.host_bytes(rows, held)

    def nbytes(self, rows: SideRows) -> dict[str, int]:
        store = _host_rows.store_of(rows)
        return {"device": tree_bytes(rows), "host": store.nbytes, "disk": store.disk}

    def bytes_per_leaf(self, rows: SideRows) -> dict[str, LeafBytes]:
        return _host_rows.bytes_per_leaf(rows)

    def to_arrays(self, rows: SideRows) -> dict[str, Any]:
        """Where the rows lie and which they are, as JSON: they stay where they are."""
        store: Any = _host_rows.store_of(rows)
        text = json.dumps({"path": store.path, "identity": store.identity, "rows": store.rows})
        return {"dataset": np.frombuffer(text.encode(), np.uint8)}

    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        about = _reference(arrays)
        fix = (
            "Put the data set back, or say where it is: fbuf.load(path, dataclasses.replace(buffer, "
            "storage=fbuf.storages.DataSet('/its/path')))."
        )
        try:
            dataset = self._open(geometry, spec)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                error.errno,
                f"fbuf.load: the rows that were saved are those of the data set at {self.path}. {error.strerror} {fix}",
            ) from error
        except ValueError as error:
            raise SchemaError(
                f"fbuf.load: another data set than that of the save lies at {self.path}: {error} {fix}"
            ) from error
        if about["identity"] != dataset.identity:
            dataset.close()
            raise SchemaError(
                f"fbuf.load: the data set at {self.path} has identity {dataset.identity}; expected {about['identity']}, of "
                f"the one that was saved: its pieces were made anew, or others were added. {fix}"
            )
        return self._rows(dataset, geometry, spec, structure)


def _layout(geometry: Geometry, spec: Spec, structure: Any, columns: tuple[str, ...]) -> Layout:
    return _host_rows.layout_of(geometry, spec, structure, columns)._replace(rows=geometry.capacity)


def _there(read: tuple[list[jax.Array], jax.Array | None]) -> tuple[list[jax.Array], None]:
    """No row ever expires: whether each was there need not be asked."""
    return read[0], None


def _reference(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What `to_arrays` said. Raises SchemaError."""
    try:
        text = bytes(np.asarray(arrays["dataset"]))
        about = json.loads(text.decode()) if len(text) < 1 << 20 else None
        if type(about) is dict and type(about.get("identity")) is str:
            return about
    except (KeyError, ValueError, RecursionError):
        pass
    raise SchemaError("fbuf.load: what was saved does not name a data set; expected one. Load another checkpoint.")
