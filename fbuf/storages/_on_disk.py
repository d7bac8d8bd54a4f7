"""Storages whose rows lie in files: the folder they open, what it says of them, and how much room they take."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from fbuf._bridge import lifetime
from fbuf._core.component import to_config
from fbuf._core.geometry import Geometry
from fbuf._host.columns.raw_file import SUM, spare
from fbuf._host.columns.spec import Column
from fbuf._host.io.directory import Folder
from fbuf._host.memory.file_arena import HEADER
from fbuf.storages import _host_rows

_INDEX_BYTES = 18  # a chunk


def checked(call: str, path: Any) -> str:
    """A path as text."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise TypeError(f"{call}: path is {path!r}; expected the path of a folder, or None. Write path='/data/replay'.")
    return os.path.expanduser(os.fspath(path))


@contextlib.contextmanager
def folder(
    call: str,
    path: str | None,
    geometry: Geometry,
    slack: int,
    columns: Sequence[Column],
    sync: float | None = None,
    resume: str = "",
) -> Iterator[Folder]:
    """A folder to open a store in, which is there for others to see once that is done; given up if it fails.

    `resume`: "", for a new store; "full" or "lazy", to go on with the one that lies there.
    """
    identity = {
        "lanes": geometry.lanes,
        "length": geometry.length,
        "slack": slack,
        "columns": [
            {"name": c.name, "shape": list(c.shape), "dtype": str(c.dtype), "codec": _codec(c)} for c in columns
        ],
    }
    settings: dict[str, Any] = {"resume": bool(resume), "verify": resume != "lazy", "sync": sync}
    lifetime.sweep()
    try:
        held = Folder(call, path, identity, **settings)
    except BlockingIOError:  # perhaps by states that nobody can reach any more
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
    """Raises unless it is a number of seconds >= 0, or None."""
    if sync is not None and (isinstance(sync, bool) or not isinstance(sync, (int, float)) or not 0 <= sync < math.inf):
        raise ValueError(
            f"{call}: sync is {sync!r}; expected seconds >= 0 after which a write waits for the disk, or None. Write sync=60."
        )


def _codec(column: Column) -> Any:
    """A codec as JSON, to be compared; one of the user's own by what it prints."""
    try:
        return to_config(column.codec)
    except TypeError:
        kind = type(column.codec)
        return {"own": f"{kind.__module__}.{kind.__qualname__}", "value": repr(column.codec)}


def plan_memory(geometry: Geometry, columns: Sequence[Column], slack: int) -> tuple[int, str, int]:
    """Bytes of memory of a full store: the index and the open chunks of encoded columns (not their dictionaries)."""
    depth, total = geometry.length + slack, 0
    for column in columns:
        if column.codec is not None and column.nbytes:
            k = column.codec.chunk
            total += geometry.lanes * ((depth // k + 2) * _INDEX_BYTES + k * column.nbytes)
    return total, "the rest is on disk", total


def plan_disk(
    geometry: Geometry,
    columns: tuple[Column, ...],
    slack: int,
    trial: Mapping[str, jax.Array] | None,
    ratio: float | None,
) -> int:
    """Bytes of files of a full store, as far as that can be known."""
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
