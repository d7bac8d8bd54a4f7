"""Check the arguments of `RayReplay`."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from fbuf._buffer.buffer import Buffer
from fbuf._core import arguments
from fbuf._core.text_table import counted
from fbuf._interfaces.sampler import draws_once
from fbuf._interfaces.view import EligibilityRule
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
    folder = getattr(buffer.storage, "path", None)
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
    call, sampler = "RayReplay", buffer.sampler
    for name, value in (("capacity", buffer.capacity), ("lanes", buffer.lanes)):
        if value is not None and value % shards:
            low = value - value % shards
            near = f"{low} or {low + shards}" if low else f"{shards}"
            raise ValueError(f"{call}: {name} is {value}, not a multiple of the {shards} shards. Use {near}.")
    if not buffer.writer.streams:
        raise TypeError(
            f"{call}: {buffer.writer!r} needs all rows in one place; expected writers.Ring(). Use shards=1."
        )
    mixes = getattr(sampler, "uniform", None) is not None
    if draws_once(sampler) or mixes or getattr(sampler, "on_host", False) or not hasattr(sampler, "mass"):
        raise TypeError(
            f"{call}: {sampler!r} cannot draw from several shards. Use samplers.Prioritized(), or shards=1."
        )
    if buffer.lanes is None and (buffer.view.rule != EligibilityRule() or sampler.by_episode):
        reader = sampler if sampler.by_episode else buffer.view
        raise ValueError(
            f"{call}: {reader!r} reads neighbouring rows, but without lanes those are in several shards. Use lanes={shards}, "
            f"or another multiple of {shards}."
        )
    for role, stages in (("on_write", buffer.on_write), ("on_read", buffer.on_read)):
        if stages is not None and stages.remembers:
            raise TypeError(
                f"{call}: stage '{stages.remembers[0]}' of {role} keeps statistics of one shard. Use shards=1."
            )
    lanes = None if buffer.lanes is None else buffer.lanes // shards
    return dataclasses.replace(buffer, capacity=buffer.capacity // shards, lanes=lanes, batch_size=None)
