"""How rows are read out of a host store: what a read depends on is held first, and collected then or later.

Device leaves and tickets are gathered at once, since later writes change the leaves and the table. What a ticket names
does not change, so the host leaves can be fetched when they are wanted, or asked for ahead (`fbuf._host.store.read_ahead`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge import callbacks
from fbuf._core.pytree import item_bytes
from fbuf._core.sample import TICKET
from fbuf._interfaces.storage import Read
from fbuf.storages import _array_rows
from fbuf.storages._host_rows import SideRows

COPIES = 2
"""Of the rows asked for ahead, in the store: the next to be collected and the last."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SideHeld:
    """Some reads, as far as they can be done on the device."""

    number: jax.Array  # uint32[], of the request for the rest; 0: there is none
    tickets: tuple[jax.Array, ...]  # uint32[B, ..., 2]
    device: tuple[jax.Array, ...]  # leaves that lie on the device, [B, ..., item]
    sources: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})
    """Of each read, the leaf and which of `device`, or of `tickets`, is its own."""


def _from_store(rows: SideRows, name: str) -> bool:
    """Whether a read asks the store for something; the tickets of ragged leaves can be read as well."""
    return name in rows.layout.columns and name != TICKET


def prepare_read(rows: SideRows, reads: Sequence[Read]) -> SideHeld:
    """What reads depend on that writes may change."""
    device: list[jax.Array] = []
    tickets: list[jax.Array] = []
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
    """The same, asked for ahead."""
    columns = rows.layout.columns
    wanted = [(columns.index(name), held.tickets[at]) for name, at in held.sources if _from_store(rows, name)]
    if not wanted:
        return held
    return dataclasses.replace(held, number=callbacks.request(rows.id, wanted))


def finish_read(
    rows: SideRows, held: SideHeld, strict: bool, ahead: bool = True
) -> tuple[list[jax.Array], jax.Array | None]:
    """All host leaves in one callback, and the rest; see `Storage.read`. `ahead`: they may have been asked for."""
    columns, spec = rows.layout.columns, rows.layout.spec
    out: list[jax.Array | None] = [None if _from_store(rows, name) else held.device[at] for name, at in held.sources]
    side = [(i, name, at) for i, (name, at) in enumerate(held.sources) if _from_store(rows, name)]
    if not side:
        return [a for a in out if a is not None], None
    requests = [
        (columns.index(name), held.tickets[at], (tuple(spec[name].shape), spec[name].dtype)) for _, name, at in side
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
    """Bytes that a store keeps for what is asked for ahead."""
    spec = rows.layout.spec
    host = [(name, held.tickets[at].shape[:-1]) for name, at in held.sources if _from_store(rows, name)]
    return COPIES * sum(item_bytes(spec[name]) * int(np.prod(shape, dtype=np.int64)) for name, shape in host)
