"""Stores in files. Nothing here imports pytest or Hypothesis: other processes start with it quickly."""

import os
import shutil
import tempfile

import numpy as np

from fbuf._host.io.directory import Folder
from fbuf._host.store.store import Store


def identity(columns, lanes, length, slack):
    described = [
        {"name": c.name, "shape": list(c.shape), "dtype": str(c.dtype), "codec": c.codec and repr(c.codec)}
        for c in columns
    ]
    return {"lanes": lanes, "length": length, "slack": slack, "columns": described}


def make(path, columns, *, resume=False, verify=True, arrays=None, **sizes):
    sizes = {"lanes": 1, "length": 16, "slack": 4} | sizes
    folder = Folder("Memmap", path and str(path), identity(columns, **sizes), resume=resume, verify=verify)
    try:
        if arrays is not None:
            store = Store.from_arrays(columns, arrays, **sizes, folder=folder)
        else:
            store = Store(columns, **sizes, folder=folder)
        if not resume:
            folder.publish()
    except BaseException:
        folder.close()
        raise
    return store


def flip(path, *places, by=1):
    data = bytearray(path.read_bytes())
    for at in places:
        data[at] ^= by
    path.write_bytes(data)


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def numbered(count, shape):
    number = count * 3 + np.arange(3)
    if shape == ():
        return number.astype(np.int64)
    return np.repeat(number[..., None].astype("<u4"), 24, -1).view(np.uint8)


FOLDER = f"{tempfile.gettempdir()}/fbuf-tests-{os.getpid()}"
"""Of what `somewhere` names; removed when the tests are done (`conftest`)."""


def somewhere(name):
    """A path for a storage in a table of storages; before it is used there: `fresh`."""
    return f"{FOLDER}/{name}"


def fresh(storage):
    """The storage, with nothing at its path: a value that buffers can be made of again and again."""
    if isinstance(getattr(storage, "path", None), str):
        shutil.rmtree(storage.path, ignore_errors=True)
    return storage
