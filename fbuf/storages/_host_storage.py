"""`Host`, `Memmap`, and the methods shared by all storages that keep leaves in a host store.

A storage says which leaves are stored there and how (`_columns`) and opens the store (`_open`), with rows in files in a
folder (`open_folder`). The rest is in `_host_rows`. Files are written with `pwrite`, so that a full disk raises OSError; a
mapping would end the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import numpy as np

from fbuf._bridge import lifetime
from fbuf._core.arguments import check_int
from fbuf._core.component import component, to_config
from fbuf._core.pytree import Leaves, Spec, name_of
from fbuf._core.sample import TICKET
from fbuf._core.slots import Geometry
from fbuf._host.codecs import Codec
from fbuf._host.columns.raw_file import SUM, spare
from fbuf._host.columns.spec import Column
from fbuf._host.io.directory import Folder
from fbuf._host.memory.file_arena import HEADER
from fbuf._host.memory.lazy_array import within
from fbuf._host.store.store import Store
from fbuf.storages import _array_rows, _host_rows
from fbuf.storages._array_rows import HostPlan
from fbuf.storages._host_rows import HostRows, SideRows

_INDEX_BYTES = 18  # a chunk


def checked_path(call: str, path: Any) -> str:
    """Return a path as text."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise TypeError(f"{call}: path is {path!r}; expected the path of a folder, or None. Write path='/data/replay'.")
    return os.path.expanduser(os.fspath(path))


@contextlib.contextmanager
def open_folder(
    storage: Any, geometry: Geometry, slack: int, columns: Sequence[Column], resume: str = ""
) -> Iterator[Folder]:
    """Open the folder of a storage for a store; publish it afterwards. On failure release it, and remove a new store.

    `resume`: "" for a new store; "full" or "lazy" to continue the store in the folder.
    """
    identity = {
        "lanes": geometry.lanes,
        "length": geometry.length,
        "slack": slack,
        "columns": [
            {"name": c.name, "shape": list(c.shape), "dtype": str(c.dtype), "codec": _codec_json(c)} for c in columns
        ],
    }
    settings: dict[str, Any] = {"resume": bool(resume), "verify": resume != "lazy", "sync": storage.sync}
    call, path = type(storage).__name__, storage.path
    lifetime.sweep()
    try:
        opened = Folder(call, path, identity, **settings)
    except BlockingIOError:  # perhaps held by unreachable states
        gc.collect()
        lifetime.sweep()
        opened = Folder(call, path, identity, **settings)
    try:
        yield opened
        if not resume:
            opened.publish()
    except BaseException:
        opened.discard()
        raise


def check_sync(call: str, sync: Any) -> None:
    """Raise ValueError unless it is a number of seconds >= 0, or None."""
    if sync is not None and (isinstance(sync, bool) or not isinstance(sync, (int, float)) or not 0 <= sync < math.inf):
        raise ValueError(f"{call}: sync is {sync!r}; expected seconds >= 0 between waits for the disk, or None.")


def _codec_json(column: Column) -> Any:
    """Return a codec as JSON, to be compared; a custom codec by its repr."""
    try:
        return to_config(column.codec)
    except TypeError:
        kind = type(column.codec)
        return {"own": f"{kind.__module__}.{kind.__qualname__}", "value": repr(column.codec)}


def plan_memory(geometry: Geometry, columns: Sequence[Column], slack: int) -> tuple[int, str, int]:
    """Return the bytes of memory of a full store: index and open chunks of encoded columns, without dictionaries."""
    depth, total = geometry.length + slack, 0
    for column in columns:
        if column.codec is not None and column.nbytes:
            k = column.codec.chunk
            total += geometry.lanes * ((depth // k + 2) * _INDEX_BYTES + k * column.nbytes)
    return total, "the rest is on disk", total


def plan_disk(
    geometry: Geometry, columns: tuple[Column, ...], slack: int, trial: Leaves | None, ratio: float | None
) -> int:
    """Return an estimate of the bytes of a full store's files."""
    depth = geometry.length + slack
    plain = (
        sum(c.nbytes + SUM for c in columns if c.codec is None and c.nbytes) * geometry.lanes * (depth + spare(depth))
    )
    encoded = tuple(c for c in columns if c.codec is not None and c.nbytes)
    if not encoded:
        return plain
    payload = _host_rows.plan_host(geometry, encoded, slack, trial, ratio)[0]
    headers = sum(HEADER * geometry.lanes * (depth // c.codec.chunk) for c in encoded if c.codec is not None)
    return plain + payload + headers


class HostStorage(HostRows):
    """The base class of `Compressed`, `Host` and similar storages, which have these fields."""

    slack: int | None

    _least = property(lambda self: 0)
    """Leaves of at least this many bytes a row are on the host, unless `keys` is given."""

    path: str | None = None
    """Folder of the rows, if they are in files."""

    sync: float | None = None
    """Seconds after which a write waits for the disk, if rows are in files."""

    cache: int = 0
    """Bytes of decoded rows to cache."""

    @property
    def folder(self) -> str | None:
        return self.path

    @property
    def in_files(self) -> bool:
        return self.path is not None

    @property
    def row_by_row(self) -> bool:
        return not self.in_files  # rows in files must outlive the process

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.keys, str) or not (self.keys is None or isinstance(self.keys, Iterable)):
            fix = f" Write keys=({self.keys!r},)." if isinstance(self.keys, str) else ""
            raise TypeError(f"{name}: keys is {self.keys!r}; expected a tuple of names.{fix}")
        if self.keys is not None:
            object.__setattr__(self, "keys", tuple(name_of(key) for key in self.keys))
        if self.slack is not None:
            check_int(name, "slack", self.slack, 0, " of rows beyond the capacity, or None")
        if self.path is not None:
            object.__setattr__(self, "path", checked_path(name, self.path))
        check_sync(name, self.sync)

    def _codec(self, name: str, leaf: jax.ShapeDtypeStruct) -> Codec | None:
        """Return how rows of a leaf are encoded; None: as they are."""
        return None

    def _columns(self, spec: Spec) -> tuple[Column, ...]:
        keys = self.host_keys(spec)
        return tuple(Column(n, tuple(spec[n].shape), np.dtype(spec[n].dtype), self._codec(n, spec[n])) for n in keys)

    def _slack(self, geometry: Geometry) -> int:
        """Return the rows a lane keeps beyond its length, so that a slightly old state still reads its own."""
        if self.slack is None:
            return max(16, min(geometry.length // 16, 4096))
        return -(-self.slack // geometry.lanes)

    def _open(self, geometry: Geometry, spec: Spec, resume: str = "") -> Store:
        """Return a new store, or the one in the folder."""
        columns, settings = self._columns(spec), self._settings(geometry)
        if not self.in_files:
            return Store(columns, **settings)
        if not geometry.streams:
            raise ValueError(f"{type(self).__name__}: the writer replaces any row. Use writers.Ring(), or no path.")
        with open_folder(self, geometry, settings["slack"], columns, resume) as folder:
            return Store(columns, **settings, folder=folder)

    def _settings(self, geometry: Geometry) -> dict[str, Any]:
        """Return the arguments of a store besides columns and folder."""
        lanes, length, streams = geometry
        return dict(lanes=lanes, length=length, slack=self._slack(geometry), cache=self.cache, streams=streams)

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        if TICKET in spec:
            raise ValueError(
                f"{type(self).__name__}: a leaf is named '{TICKET}', like a part of the state. Rename the leaf."
            )
        return _array_rows.select_leaves(type(self).__name__, self.keys, spec, self._least)

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        _host_rows.refuse_tracing(type(self).__name__)
        return _host_rows.adopt(self._open(geometry, spec), geometry, spec, structure, self.host_keys(spec))

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        return _host_rows.abstract(geometry, spec, structure, self.host_keys(spec))

    def plan_host(self, geometry: Geometry, spec: Spec, trial: Leaves | None, ratio: float | None) -> HostPlan:
        if self.in_files:
            return plan_memory(geometry, self._columns(spec), self._slack(geometry))
        return _host_rows.plan_host(geometry, self._columns(spec), self._slack(geometry), trial, ratio)

    def plan_disk(self, geometry: Geometry, spec: Spec, trial: Leaves | None, ratio: float | None) -> int:
        if not self.in_files:
            return 0
        return plan_disk(geometry, self._columns(spec), self._slack(geometry), trial, ratio)

    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        columns, settings, stored = self._columns(spec), self._settings(geometry), within(arrays, "store:")

        def loaded(folder: Folder | None) -> SideRows:
            store = Store.from_arrays(columns, stored, **settings, folder=folder)
            return _host_rows.adopt(store, geometry, spec, structure, tuple(c.name for c in columns), arrays)

        if not self.in_files:
            return loaded(None)
        try:
            with open_folder(self, geometry, settings["slack"], columns) as folder:
                return loaded(folder)
        except (FileExistsError, BlockingIOError) as error:
            raise type(error)(
                error.errno,
                f"{type(self).__name__}: {self.path} already exists and was not modified. Load into a storage with another "
                f"path, dataclasses.replace(buffer.storage, path=...), or continue its rows with buffer.resume(example).",
            ) from error

    def resume(
        self, geometry: Geometry, spec: Spec, structure: Any, verify: str
    ) -> tuple[SideRows, np.ndarray, np.ndarray, np.ndarray]:
        name, keys = type(self).__name__, self.host_keys(spec)
        _host_rows.refuse_tracing(name, "resume")
        if self.path is None:
            where = "a temporary folder" if self.in_files else "memory"
            raise ValueError(
                f"Buffer.resume: {self!r} keeps its rows in {where}, which is freed with its states; expected a path. "
                f'Write {name if self.in_files else "Memmap"}(path="/data/replay").'
            )
        missing = [leaf for leaf in spec if leaf not in keys]
        if missing:
            raise ValueError(f"Buffer.resume: leaf '{missing[0]}' of {self!r} is on the device. Leave out keys.")
        store = self._open(geometry, spec, resume=verify)
        rows, count, cuts = _host_rows.resume(store, geometry, spec, structure, keys)
        return rows, count, store.resumed, cuts

    def flush(self, rows: SideRows) -> None:
        cast(Store, _host_rows.store_of(rows)).flush()


@component
class Host(HostStorage):
    """Store leaves as NumPy arrays on the host, if they are too large for the device and do not compress.

    Attributes:
      keys: Leaves (or subtrees) on the host, by their paths, `("obs/image",)`; None: all of them.
      slack: Rows kept beyond the capacity, so that a slightly old state still reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      on_expired: A read of a row evicted since raises ("raise"), or returns zeros with `mask` False ("mask").

    Leaves keep 64 bits without `jax_enable_x64` if `keys` names them and the example has NumPy's int64, uint64 or float64.
    Outside jit they are written from NumPy arrays and returned as NumPy arrays, by `Replay` also as tensors. JAX cannot hold
    them: a method inside jit that takes or returns them raises TypeError, and so does `init` if the view, the writer or a
    transform reads them. But views read rewards, as float32 rounded once, and episode ids, which are compared in full. Take
    them out of a batch before you pass it to jit, which would narrow them.

    Cost: a write or read is one callback and one copy of its rows; `Replay.sample` for NumPy or torch needs no callback.

    Example:
      >>> import fbuf, numpy as np
      >>> buffer = fbuf.Buffer(100, storage=fbuf.storages.Host(keys=("id",)))
      >>> replay = fbuf.Replay(buffer, {"id": np.int64(0), "reward": 0.0})
      >>> replay.add({"id": np.int64(2**40), "reward": 1.0})
      >>> replay.sample(1).data["id"]
      array([1099511627776])
    """

    keys: tuple[str, ...] | None = None
    slack: int | None = None
    on_expired: Literal["raise", "mask"] = "raise"


@component
class Memmap(HostStorage):
    """Store leaves in files.

    A write that fails (full or broken disk) leaves the rows unchanged and raises OSError; after a jitted step the next call
    that takes its state does. A killed process loses no row whose write returned: `Buffer.resume` finds them. After a power
    failure the rows synced by `Buffer.flush`, or by a write every `sync` seconds, are safe if fewer rows than the slack were
    written later (for encoded leaves except the newest `chunk - 1` of a lane). `resume` checks which later rows are complete:
    each has a checksum of its contents and identity, so damaged, missing, older and foreign bytes are detected. Files are
    sparse and grow with the rows. A folder serves one store at a time, and holds nothing else.

    Attributes:
      path: The folder, created if missing; it must not hold a store yet (`Buffer.resume` continues one). None: a temporary
        folder (in `tempfile.gettempdir()`), removed with the last state, and at exit.
      keys: Leaves (or subtrees) in files; None: all. With leaves on the device the rows cannot be resumed. Leaves named here
        may have 64 bits, as in `Host`.
      slack: Rows kept beyond the capacity, so that a slightly old state still reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      on_expired: A read of a row evicted since raises ("raise"), or returns zeros with `mask` False ("mask").
      sync: Seconds after which a write waits until everything is on the disk; 0: each write; None: only `Buffer.flush`.
    Raises:
      TypeError, ValueError: a setting is invalid. `init` raises FileExistsError (the folder is not empty), BlockingIOError
        (another store holds it), OSError (it cannot be created).

    Cost: a write or read is one callback and one copy of its rows, if the pages are in memory; a write adds a checksum, at
      about 8 GB/s and a few microseconds a leaf. On disk a sixteenth more rows than capacity and slack (16 to 1024 a lane), so
      that writes never touch readable rows, and 8 bytes a row and leaf.

    Example:
      >>> import fbuf
      >>> fbuf.storages.Memmap("/data/replay").path
      '/data/replay'
    """

    path: str | None = None
    keys: tuple[str, ...] | None = None
    slack: int | None = None
    on_expired: Literal["raise", "mask"] = "raise"
    sync: float | None = None

    in_files = True
