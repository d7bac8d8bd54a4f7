"""Check the arguments of `RayReplay`."""

from __future__ import annotations

import os
import re
from typing import Any

from fbuf._buffer.buffer import Buffer
from fbuf._core import arguments
from fbuf._core.text_table import counted
from fbuf._members import split
from fbuf.limits import Limit
from fbuf.storages import Ragged


def check_service(buffer: Any, shards: Any, limit: Limit | None, path: Any, save_every: Any) -> None:
    """Raise unless the arguments fit together."""
    call = "RayReplay"
    if not isinstance(buffer, Buffer):
        raise TypeError(f"{call}: buffer is {type(buffer).__name__}; expected a Buffer.")
    arguments.check_int(call, "shards", shards)
    arguments.check_int(call, "save_every", save_every, 0)
    if save_every and path is None:
        raise ValueError(f"{call}: save_every is {save_every}, but path is None. Use path='/data/replay'.")
    if limit is not None and shards > 1:
        raise ValueError(
            f"{call}: limit is {limit!r}, but shards is {shards}: shards that wait for one another could deadlock. Use "
            f"shards=1."
        )
    if isinstance(buffer.storage, Ragged):
        raise TypeError(f"{call}: {buffer.storage!r} has no arrays to send. Use storages.Compressed().")
    folder = buffer.storage.folder
    if folder is not None:
        raise ValueError(
            f"{call}: the storage's path is {folder!r}, a folder for one store. Leave it out: rows are then in "
            f"a temporary folder of each actor, and RayReplay(..., path=) keeps checkpoints."
        )
    if buffer.prefetch:
        raise ValueError(f"{call}: prefetch is 1; expected 0. Use client.batches(prefetch=2).")


def check_path(path: Any, shards: int) -> None:
    """Raise if the checkpoints under `path` are of more shards."""
    names = os.listdir(path) if path is not None and os.path.isdir(path) else []
    saved = max((int(name[6:]) + 1 for name in names if re.fullmatch(r"shard-\d{5}", name)), default=0)
    if saved > shards:  # of fewer, not all may have been saved before the service ended
        raise ValueError(
            f"RayReplay: {os.fspath(path)} has checkpoints of {counted(saved, 'shard')}, but shards is {shards}. Use "
            f"shards={saved}, or another path."
        )


def check_shards(buffer: Buffer, shards: int) -> Buffer:
    """Return the buffer of one shard; raise for parts that need all rows, or their order, in one place."""
    if shards == 1:
        return buffer
    for name, value in (("capacity", buffer.capacity), ("lanes", buffer.lanes)):
        if value is not None:
            split.check_multiple("RayReplay", name, value, shards)
    split.check_split("RayReplay", buffer, shards, alone="shards=1")
    return split.member_of(buffer, shards)
