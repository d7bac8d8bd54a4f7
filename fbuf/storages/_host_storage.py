"""`Host`, and the methods shared by all storages that keep leaves in a host store.

A storage says which leaves are stored there and how (`_columns`) and opens the store (`_open`). The rest is in `_host_rows`
and `_host_reads`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from fbuf._core.component import component
from fbuf._core.geometry import Geometry
from fbuf._core.pytree import Spec, name_of
from fbuf._host.codecs.base import Codec
from fbuf._host.columns.spec import Column
from fbuf._host.store.store import Store
from fbuf._interfaces.storage import LeafBytes, Read
from fbuf.storages import _array_rows, _host_reads, _host_rows, _on_disk
from fbuf.storages._host_reads import SideHeld
from fbuf.storages._host_rows import SideRows


class Hosted:
    """What `Compressed`, `Host` and their like share; they have these fields and call `_check` when made."""

    keys: tuple[str, ...] | None
    slack: int | None
    on_expired: str

    @property
    def _least(self) -> int:
        """Bytes a row from which on a leaf goes to the host unless `keys` says which do."""
        return 0

    path: str | None = None
    """Folder of the rows, of those kept in files."""

    sync: float | None = None
    """Seconds after which a write waits for the disk, of those kept in files."""

    @property
    def in_files(self) -> bool:
        """Whether the rows on the host are in files, not in memory."""
        return self.path is not None

    def _check(self) -> None:
        name = type(self).__name__
        if isinstance(self.keys, str):
            raise TypeError(f"{name}: keys is {self.keys!r}; expected a tuple of names. Write keys=({self.keys!r},).")
        if self.keys is not None:
            object.__setattr__(self, "keys", tuple(name_of(key) for key in self.keys))
        _host_rows.check(name, self.slack, self.on_expired)
        if self.path is not None:
            object.__setattr__(self, "path", _on_disk.checked(name, self.path))
        _on_disk.check_sync(name, self.sync)

    def _codec(self, name: str, leaf: jax.ShapeDtypeStruct) -> Codec | None:
        """How the rows of a leaf become bytes; None: as they are."""
        return None

    def _cache(self) -> int:
        """Bytes of decoded rows kept for later reads."""
        return 0

    def _columns(self, spec: Spec) -> tuple[Column, ...]:
        keys = self.host_keys(spec)
        return tuple(Column(n, tuple(spec[n].shape), np.dtype(spec[n].dtype), self._codec(n, spec[n])) for n in keys)

    def _slack(self, geometry: Geometry) -> int:
        return _host_rows.default_slack(geometry, self.slack)

    def _open(self, geometry: Geometry, spec: Spec, resume: str = "") -> Store:
        """A new store, or the one that lies in our folder."""
        lanes, length, streams = geometry
        columns, slack, cache = self._columns(spec), self._slack(geometry), self._cache()
        if not self.in_files:
            return Store(columns, lanes=lanes, length=length, slack=slack, cache=cache, streams=streams)
        if not streams:
            raise ValueError(
                f"{type(self).__name__}: rows in files are streams, but the writer replaces any row; expected one that "
                f"replaces the oldest. Use writers.Ring(), or a storage without a path."
            )
        name, sync = type(self).__name__, self.sync
        with _on_disk.folder(name, self.path, geometry, slack, columns, sync, resume) as folder:
            return Store(columns, lanes=lanes, length=length, slack=slack, cache=cache, folder=folder)

    @property
    def masks_expired(self) -> bool:
        return self.on_expired == "mask"

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        return _array_rows.choose(type(self).__name__, self.keys, spec, self._least)

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        _host_rows.refuse_tracing(type(self).__name__)
        return _host_rows.adopt(self._open(geometry, spec), geometry, spec, structure, self.host_keys(spec))

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        return _host_rows.abstract(geometry, spec, structure, self.host_keys(spec))

    def plan_host(
        self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None, ratio: float | None
    ) -> tuple[int, str, int]:
        if self.in_files:
            return _on_disk.plan_memory(geometry, self._columns(spec), self._slack(geometry))
        return _host_rows.plan_host(geometry, self._columns(spec), self._slack(geometry), trial, ratio)

    def plan_disk(
        self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None, ratio: float | None
    ) -> int:
        if not self.in_files:
            return 0
        return _on_disk.plan_disk(geometry, self._columns(spec), self._slack(geometry), trial, ratio)

    def spec(self, rows: SideRows) -> tuple[Spec, Any]:
        if not isinstance(rows, SideRows):
            name = type(self).__name__
            raise TypeError(f"{name}: this state keeps its rows on the device. Use the buffer that made it.")
        return rows.layout.spec, rows.layout.structure

    def write(
        self,
        rows: SideRows,
        slot: jax.Array,
        leaves: Mapping[str, jax.Array],
        keep: jax.Array | None,
        token: jax.Array,
    ) -> tuple[SideRows, None]:
        return _host_rows.write(rows, slot, leaves, keep, token), None

    def read(self, rows: SideRows, reads: Sequence[Read]) -> tuple[list[jax.Array], jax.Array | None]:
        return _host_reads.finish_read(
            rows, _host_reads.prepare_read(rows, reads), strict=not self.masks_expired, ahead=False
        )

    def prepare_read(self, rows: SideRows, reads: Sequence[Read]) -> SideHeld:
        return _host_reads.prepare_read(rows, reads)

    def start_read(self, rows: SideRows, held: SideHeld) -> SideHeld:
        return _host_reads.start_read(rows, held)

    def finish_read(self, rows: SideRows, held: SideHeld) -> tuple[list[jax.Array], jax.Array | None]:
        return _host_reads.finish_read(rows, held, strict=not self.masks_expired)

    def held_bytes(self, rows: SideRows, held: SideHeld) -> int:
        return _host_reads.host_bytes(rows, held)

    def update(
        self, rows: SideRows, slot: jax.Array, leaves: Mapping[str, jax.Array], token: jax.Array
    ) -> tuple[SideRows, None]:
        return _host_rows.update(rows, slot, leaves, token), None

    def clear(self, rows: SideRows) -> SideRows:
        return _host_rows.clear(rows)

    def nbytes(self, rows: SideRows) -> dict[str, int]:
        return _host_rows.nbytes(rows)

    def bytes_per_leaf(self, rows: SideRows) -> dict[str, LeafBytes]:
        return _host_rows.bytes_per_leaf(rows)

    def to_arrays(self, rows: SideRows) -> dict[str, Any]:
        return _host_rows.to_arrays(rows)

    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        columns, slack, cache = self._columns(spec), self._slack(geometry), self._cache()
        if not self.in_files:
            return _host_rows.from_arrays(arrays, geometry, spec, structure, columns, slack, cache)
        name = type(self).__name__
        try:
            with _on_disk.folder(name, self.path, geometry, slack, columns, self.sync) as folder:
                return _host_rows.from_arrays(arrays, geometry, spec, structure, columns, slack, cache, folder)
        except (FileExistsError, BlockingIOError) as error:
            raise type(error)(
                error.errno,
                f"{name}: rows are loaded into a folder of their own, and {self.path} is taken. What lies there stays as it "
                f"is. To load them give another path: dataclasses.replace(buffer, "
                f"storage=dataclasses.replace(buffer.storage, path=...)); go on with the rows that are there: "
                f"buffer.resume(example); or remove that folder.",
            ) from error

    def resume(
        self, geometry: Geometry, spec: Spec, structure: Any, verify: str
    ) -> tuple[SideRows, np.ndarray, np.ndarray]:
        name, keys = type(self).__name__, self.host_keys(spec)
        _host_rows.refuse_tracing(name, "resume")
        if self.path is None:
            where = "a temporary folder" if self.in_files else "memory"
            raise ValueError(
                f"Buffer.resume: {self!r} keeps its rows in {where}, and they are gone with its states; expected a path. "
                f'Write {name if self.in_files else "Memmap"}(path="/data/replay").'
            )
        missing = [leaf for leaf in spec if leaf not in keys]
        if missing:
            raise ValueError(
                f"Buffer.resume: leaf '{missing[0]}' is kept on the device, not in the files of {self!r}; expected all leaves "
                f"to be in files. Leave keys out, of the buffer that writes them too."
            )
        store = self._open(geometry, spec, resume=verify)
        return *_host_rows.resume(store, geometry, spec, structure, keys), store.held

    def flush(self, rows: SideRows) -> None:
        cast(Store, _host_rows.store_of(rows)).flush()


@component
class Host(Hosted):
    """Rows whose leaves are numpy arrays on the host.

    Attributes:
      keys: Leaves (or subtrees) that go to the host; None: all of them.
      slack: Rows kept beyond the capacity, so that a state a little old reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      on_expired: What a read of a row dropped since does: "raise", or "mask" (zeros, and `mask` False).

    Cost: a write or read is one callback and one copy of its rows.

    Example:
      >>> import fbuf
      >>> fbuf.storages.Host(keys=("obs",)).keys
      ('obs',)
    """

    keys: tuple[str, ...] | None = None
    slack: int | None = None
    on_expired: str = "raise"

    def __post_init__(self) -> None:
        self._check()
