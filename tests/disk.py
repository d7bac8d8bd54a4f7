"""Stores in files, for tests that start other processes: nothing here imports pytest, so that those start quickly."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import zlib
from typing import Any

import numpy as np

from fbuf._host import filearena
from fbuf._host.codec import Codec, Zstd
from fbuf._host.folder import Folder
from fbuf._host.store import Column, Store


@dataclasses.dataclass(frozen=True)
class Deflate:
    """A codec of the user's own."""

    chunk: int = 4

    def encode(self, rows: np.ndarray) -> bytes:
        return zlib.compress(rows.tobytes())

    def decode(self, data: bytes | memoryview, out: np.ndarray) -> None:
        out[...] = np.frombuffer(zlib.decompress(data), out.dtype).reshape(out.shape)


def columns_of(*codecs: Codec | None, shape: Any = (5,), dtype: Any = "uint8") -> tuple[Column, ...]:
    return tuple(Column(f"c{i}", shape, np.dtype(dtype), c) for i, c in enumerate(codecs))


def identity(columns: tuple[Column, ...], lanes: int, length: int, slack: int) -> dict[str, Any]:
    described = [
        {
            "name": c.name,
            "shape": list(c.shape),
            "dtype": str(c.dtype),
            "codec": None if c.codec is None else repr(c.codec),
        }
        for c in columns
    ]
    return {"lanes": lanes, "length": length, "slack": slack, "columns": described}


def make(
    path: Any,
    columns: tuple[Column, ...],
    *,
    lanes: int = 1,
    length: int = 16,
    slack: int = 4,
    resume: bool = False,
    verify: bool = True,
    arrays: Any = None,
) -> Store:
    folder = Folder("Memmap", path and str(path), identity(columns, lanes, length, slack), resume=resume, verify=verify)
    try:
        if arrays is not None:
            store = Store.from_arrays(columns, arrays, lanes=lanes, length=length, slack=slack, folder=folder)
        else:
            store = Store(columns, lanes=lanes, length=length, slack=slack, folder=folder)
        if not resume:
            folder.publish()
    except BaseException:
        folder.close()
        raise
    return store


def killable(path: str, resume: bool) -> Store:
    columns = (*columns_of(None, Zstd(chunk=4), shape=(96,)), Column("small", (), np.dtype("int64"), Deflate(chunk=3)))
    filearena._SMALL = 65_536
    return make(path, columns, lanes=3, length=200, slack=20, resume=resume)


def numbered(count: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Rows [N, 3, ...] that say their lane and count, and more of the like."""
    number = count * 3 + np.arange(3)
    if shape == ():
        return number.astype(np.int64)
    return np.repeat(number[..., None].astype("<u4"), 24, -1).view(np.uint8)


def fetch(store: Store, tickets: Any, column: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Reads into an output full of rubbish, so that what is not written shows."""
    tickets = np.asarray(tickets, np.uint64)
    spec = store.columns[column]
    out = np.full(tickets.size * spec.nbytes, 171, np.uint8).view(spec.dtype).reshape(*tickets.shape, *spec.shape)
    return out, store.read([(column, tickets, out)])


FOLDER = f"{tempfile.gettempdir()}/fbuf-tests-{os.getpid()}"
"""Of what `somewhere` names; removed when the tests are done (`conftest`)."""


def somewhere(name: str) -> str:
    """A path for a storage in a table of storages; before it is used there: `fresh`."""
    return f"{FOLDER}/{name}"


def fresh(storage: Any) -> Any:
    """The storage, with nothing at its path: a value that buffers can be made of again and again."""
    if isinstance(getattr(storage, "path", None), str):
        shutil.rmtree(storage.path, ignore_errors=True)
    return storage
