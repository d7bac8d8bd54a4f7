"""Read rows from a host store in two steps: prepare on the device, fetch now or later.

Device leaves and tickets are gathered at once, since later writes change them. A ticket's row never changes, so host leaves
can be fetched on demand, or prefetched (`fbuf._host.store.read_ahead`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fbuf._bridge import callbacks
from fbuf._core.pytree import item_bytes
from fbuf._core.sample import TICKET
from fbuf._core.x64 import in_jax
from fbuf._interfaces.storage import Read
from fbuf.storages import _array_rows
from fbuf.storages._host_rows import SideRows

COPIES = 2
"""Copies of prefetched rows in the store: the next to be collected, and the last."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SideHeld:
    """Some reads, as far as they can be done on the device."""

    number: Array  # uint32[], the number of the store's request; 0: none
    tickets: tuple[Array, ...]  # uint32[B, ..., 2]
    device: tuple[Array, ...]  # device leaves, [B, ..., item]
    sources: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})
    """Of each read, its leaf and its index in `device` or `tickets`."""


def _from_store(rows: SideRows, name: str) -> bool:
    """Return whether a read needs the store; tickets of ragged leaves do not."""
    return name in rows.layout.columns and name != TICKET


def prepare_read(rows: SideRows, reads: Sequence[Read]) -> SideHeld:
    """Gather what later writes may change."""
    device: list[Array] = []
    tickets: list[Array] = []
    known: dict[int, int] = {}
    sources = []
    for r in reads:
        if not _from_store(rows, r.name):
            sources.append((r.name, len(device)))
            device.append(_array_rows.read(rows.ticket if r.name == TICKET else rows.device[r.name], r.slot))
        else:
            if id(r.slot) not in known:
                known[id(r.slot)] = len(tickets)
                tickets.append(_array_rows.read(rows.ticket, r.slot))
            sources.append((r.name, known[id(r.slot)]))
    return SideHeld(jnp.zeros((), jnp.uint32), tuple(tickets), tuple(device), tuple(sources))


def start_read(rows: SideRows, held: SideHeld) -> SideHeld:
    """Start prefetching the host leaves."""
    columns = rows.layout.columns
    wanted = [(columns.index(name), held.tickets[at]) for name, at in held.sources if _from_store(rows, name)]
    if not wanted:
        return held
    return dataclasses.replace(held, number=callbacks.request(rows.id, wanted))


def finish_read(rows: SideRows, held: SideHeld, strict: bool, ahead: bool = True) -> tuple[list[Array], Array | None]:
    """Fetch all host leaves in one callback, and return them with the others; see `Storage.read`.

    `ahead`: they may have been prefetched.
    """
    columns, spec = rows.layout.columns, rows.layout.spec
    out: list[Array | None] = [None if _from_store(rows, name) else held.device[at] for name, at in held.sources]
    side = [(i, name, at) for i, (name, at) in enumerate(held.sources) if _from_store(rows, name)]
    if not side:
        return [a for a in out if a is not None], None
    items = {name: in_jax(spec[name]) for _, name, _ in side}
    requests = [
        (columns.index(name), held.tickets[at], (tuple(items[name].shape), items[name].dtype)) for _, name, at in side
    ]
    arrays, present = callbacks.read(rows.id, requests, strict=strict, number=held.number if ahead else None)
    ok = jnp.ones((), bool)
    for (i, *_), array, there in zip(side, arrays, present, strict=True):
        out[i] = array
        if there.ndim:
            there = jnp.all(there, axis=tuple(range(1, there.ndim)))
        ok = ok & there
    return [a for a in out if a is not None], ok


def host_bytes(rows: SideRows, held: SideHeld) -> int:
    """Return the bytes that a store keeps for prefetched rows."""
    spec = rows.layout.spec
    host = [(name, held.tickets[at].shape[:-1]) for name, at in held.sources if _from_store(rows, name)]
    return COPIES * sum(item_bytes(spec[name]) * int(np.prod(shape, dtype=np.int64)) for name, shape in host)
