"""What can be looked at: a `Replay`, a buffer with its state, a checkpoint, a data set, or a file of another library."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from fbuf import datasets, interop
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import compatibility, load
from fbuf._checkpoint.save import save
from fbuf._formats import checkpoint, dataset
from fbuf._replay import Replay
from fbuf.plot import _style
from fbuf.sharded import ShardedState
from fbuf.storages import Compressed, Memmap


@contextlib.contextmanager
def opened(call: str, source: Any) -> Iterator[tuple[Buffer, BufferState]]:
    """Yield the buffer and state of a source. What was made of a file of another library is removed afterwards.

    Raises:
      TypeError: it is no source. FileNotFoundError: nothing is at the path.
      SchemaError, ValueError: as `fbuf.load` and `fbuf.interop.from_file`.
    """
    if isinstance(source, Replay):
        source = source.buffer, source.state
    with tempfile.TemporaryDirectory(prefix="fbuf-") as folder:
        if isinstance(source, tuple) and len(source) == 2:
            buffer, state = _style.opened(call, *source)
            if not isinstance(state, ShardedState):
                yield buffer, state
                return
            source = os.path.join(folder, "shards")  # they load as one buffer
            save(source, buffer, state)
        if not isinstance(source, (str, os.PathLike)):
            kind = type(source).__name__
            fix = f"Write {call}(replay)."
            raise TypeError(f"{call}: source is {kind}; expected a Replay, (buffer, state) or a path. {fix}")
        yield _of_path(call, os.path.expanduser(os.fspath(source)), folder)


def _of_path(call: str, path: str, folder: str) -> tuple[Buffer, BufferState]:
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, f"{call}: there is no checkpoint, data set or file at {path}.")
    if dataset.is_dataset(path):
        return datasets.open(path)
    try:
        if os.path.isfile(path):
            raise checkpoint.CheckpointNotFound
        with checkpoint.read(path, verify="lazy") as saved:
            meta = saved.meta
    except checkpoint.CheckpointNotFound:
        return interop.from_file(path).save(os.path.join(folder, "rows"))
    if "mixture" in meta:
        names = ", ".join(map(str, meta["names"]))
        fix = "mixture, states = fbuf.load(path); fbuf.plot.episode((mixture[name], states[name]))"
        raise TypeError(f"{call}: {path} holds a mixture of {names}; expected one buffer. Write {fix}.")
    buffer = compatibility.match(call, path, meta, None, None).reader
    storage: Any = buffer.storage
    if isinstance(storage, Compressed | Memmap):
        buffer = dataclasses.replace(buffer, storage=dataclasses.replace(storage, path=None))  # leave its files alone
    return load.load(path, buffer, verify="lazy")
