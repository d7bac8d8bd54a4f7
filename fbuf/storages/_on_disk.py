"""The folder of a storage with rows in files: opening it, its identity, and the room it takes."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from fbuf._bridge import lifetime
from fbuf._core.component import to_config
from fbuf._core.geometry import Geometry
from fbuf._host.columns.raw_file import SUM, spare
from fbuf._host.columns.spec import Column
from fbuf._host.io.directory import Folder
from fbuf._host.memory.file_arena import HEADER
from fbuf.storages import _host_rows
from fbuf.storages._array_rows import Leaves

_INDEX_BYTES = 18  # a chunk


def checked_path(call: str, path: Any) -> str:
    """Return a path as text."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise TypeError(f"{call}: path is {path!r}; expected the path of a folder, or None. Write path='/data/replay'.")
    return os.path.expanduser(os.fspath(path))


@contextlib.contextmanager
def folder(
    storage: Any, geometry: Geometry, slack: int, columns: Sequence[Column], resume: str = ""
) -> Iterator[Folder]:
    """Open the folder of a storage for a store; publish it afterwards, or release it on failure.

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
        held = Folder(call, path, identity, **settings)
    except BlockingIOError:  # perhaps held by unreachable states
        gc.collect()
        lifetime.sweep()
        held = Folder(call, path, identity, **settings)
    try:
        yield held
        if not resume:
            held.publish()
    except BaseException:
        held.close()
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
