"""Rows in a host store, named by tickets: the state of `Compressed`, `Host` and similar storages, and its operations.

The state holds the ticket of the row in each slot (uint64 as a pair, 0 for none), the store's id, and the leaves on the
device. The store never overwrites a ticket's row, so an old state reads its own rows or learns that they have expired, and
two successors of one state cannot read each other's rows. The state is not pickled, and `init` is not traced.

A read has two steps. Device leaves and tickets are gathered at once, since later writes change them. A ticket's row never
changes, so host leaves are fetched on demand, or prefetched (`fbuf._host.store.read_ahead`).
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._bridge import callbacks, lifetime
from fbuf._bridge.lazy_rows import length_name
from fbuf._core.control_flow import order_after_reads
from fbuf._core.dispatch import OnHost, replaced
from fbuf._core.pytree import Leaves, Spec, in_jax, item_bytes, register_node, tree_bytes
from fbuf._core.sample import TICKET
from fbuf._core.slots import Geometry, read_rows, write_rows
from fbuf._core.text_table import WHOLE, spec_text
from fbuf._host import failed_writes
from fbuf._host.columns.spec import one_by_one
from fbuf._host.ragged.column import RaggedLeaf
from fbuf._host.store.store import Column, Store
from fbuf._host.types import RowStore
from fbuf._interfaces.storage import HostRead, LeafBytes, Read, Storage
from fbuf.storages import _array_rows


class Layout(NamedTuple):
    """The static part of a host storage's state."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    columns: tuple[str, ...]  # names of the leaves on the host, in the store's order
    structure: Any  # treedef of one row
    streams: bool = True  # whether writes replace the oldest row and name no slots
    leaves: tuple[RaggedLeaf, ...] = ()  # of `Ragged`, leaves that are not arrays
    rows: int = 0  # of `DataSet`, which has no tickets

    @property
    def spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        rows = zip(self.names, self.shapes, self.dtypes, strict=True)
        return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape, dtype in rows}

    @property
    def in_store(self) -> frozenset[str]:
        """Leaves whose reads need the store; tickets of ragged leaves do not."""
        return frozenset(self.columns) - {TICKET}


class SideRows(OnHost):
    """The rows of a host storage: a pytree node that keeps its store open."""

    __slots__ = ("device", "id", "last", "layout", "owner", "slot", "ticket")

    def __init__(self, id: Any, ticket: Any, device: Any, last: Any, slot: int, layout: Layout):
        self.id = id  # uint32[2], names the store
        self.ticket = ticket  # uint32[C, 2], row in each slot; 0: none
        self.device = device  # leaves that stay on the device, [C, ...] by name
        self.last = last  # uint32[1, 2], which write made this state; None where rows are streams
        self.slot = slot  # static: owner group
        self.layout = layout  # static
        self.owner = lifetime.owner_of(slot, id)

    def replace(self, ticket: Any, device: Any, last: Any = None) -> SideRows:
        """Return rows of the same store with other tickets and device leaves."""
        return SideRows(self.id, ticket, device, self.last if last is None else last, self.slot, self.layout)

    def with_leaves(self, leaves: dict[int, Any]) -> SideRows:
        """Return the node with other leaves at these positions, also if a write of the store failed."""
        children = replaced((self.id, self.ticket, self.device, self.last), leaves)
        return SideRows(*children, self.slot, self.layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> SideRows:
        copied = [jnp.array(x, copy=True) if isinstance(x, Array) else x for x in jax.tree.leaves(self)]
        structure: Any = jax.tree.structure(self)
        return structure.unflatten(copied)

    def __reduce__(self) -> Any:
        raise TypeError(
            "fbuf: the state of a host storage cannot be pickled, because its rows are in this process's store. Save it with "
            "fbuf.save(path, buffer, state), or pass the rows: jax.device_get(buffer.rows(state))."
        )

    def outline(self) -> tuple[int | None, dict[str, tuple[str, str]]]:
        """Return the capacity, and shape and storage of each leaf, for display."""
        layout = self.layout
        capacity = layout.rows if self.ticket is None else self.ticket.shape[0]
        shown = {n: s for n, s in layout.spec.items() if n not in (TICKET, *map(length_name, layout.columns))}
        cells = {
            n or WHOLE: (spec_text(s.shape, s.dtype), "host" if n in layout.columns else "device")
            for n, s in shown.items()
        }
        ragged = {leaf.name: (f"{leaf.kind} {leaf.dtype}".rstrip(), "host") for leaf in layout.leaves}
        return capacity, cells | {n: cell for n, cell in ragged.items() if n not in cells}

    def __repr__(self) -> str:
        return f"SideRows(host={self.layout.columns}, device={tuple(self.device)})"


def _flatten(rows: SideRows) -> tuple[tuple[Any, Any, Any, Any], tuple[int, Layout]]:
    if failed_writes.failed and rows.owner is not None:  # a state that a call takes is flattened before it is donated
        rows.owner.raise_failed()
    return (rows.id, rows.ticket, rows.device, rows.last), (rows.slot, rows.layout)


register_node(SideRows, ("id", "ticket", "device", "last"), _flatten)


def refuse_tracing(call: str, verb: str = "init") -> None:
    """Raise TypeError under a trace: a store's id would become a constant."""
    if lifetime.traced():
        raise TypeError(
            f"{call}: `{verb}` of a host storage cannot be traced, since it opens a store. Call buffer.{verb}(example) "
            f"outside jit, vmap and scan and pass the state in; for shapes alone use buffer.plan(example)."
        )


def adopt(
    store: RowStore,
    geometry: Geometry,
    spec: Spec,
    structure: Any,
    columns: tuple[str, ...],
    arrays: Mapping[str, Any] | None = None,
) -> SideRows:
    """Return rows over a store: empty, or with the tickets and device leaves of such arrays."""
    rest = {n: leaf for n, leaf in spec.items() if n not in columns}
    ticket, last = (geometry.capacity, 2), (1, 2)

    def words(name: str, shape: tuple[int, ...]) -> jax.Array:
        return jnp.zeros(shape, jnp.uint32) if arrays is None else _array_rows.as_device_array(arrays[name], jnp.uint32)

    if arrays is None:
        device = _array_rows.allocate(geometry.capacity, rest)
    else:
        device = {n: _array_rows.as_device_array(arrays[f"device:{n}"], leaf.dtype) for n, leaf in rest.items()}
    layout = layout_of(geometry, spec, structure, columns)
    return open_rows(store, words("ticket", ticket), device, None if geometry.streams else words("last", last), layout)


def open_rows(store: RowStore, ticket: Any, device: Any, last: Any, layout: Layout) -> SideRows:
    """Return rows that keep a store open."""
    owned = lifetime.open_store(store, layout)
    rows = SideRows(jnp.asarray(lifetime.split_id(owned.id)), ticket, device, last, owned.slot, layout)
    rows.owner = owned
    return rows


def grouped(parts: Mapping[int, SideRows]) -> dict[int, SideRows]:
    """Return the rows of shards, by number, with nodes that keep the stores of all open, so that they can be joined."""
    owners = {number: part.owner for number, part in parts.items() if part.owner is not None}
    group = lifetime.open_group(owners, next(iter(parts.values())).layout)
    made = {
        n: SideRows(part.id, part.ticket, part.device, part.last, group.slot, part.layout) for n, part in parts.items()
    }
    for rows in made.values():
        rows.owner = group
    return made


def resume(
    store: Store, geometry: Geometry, spec: Spec, structure: Any, columns: tuple[str, ...]
) -> tuple[SideRows, np.ndarray, np.ndarray]:
    """Return the rows of an existing store, how many each lane ever had, int64[E], and which slots were cut, bool[C].

    Warns of damage in its files.
    """
    if store.warning:
        warnings.warn(store.warning, RuntimeWarning, stacklevel=4)
    count, tickets, cuts = store.newest()
    rows = adopt(store, geometry, spec, structure, columns)
    pairs = np.ascontiguousarray(tickets.reshape(-1)).view(np.uint32).reshape(-1, 2)
    return rows.replace(jnp.asarray(pairs), rows.device), count, cuts.reshape(-1)


def layout_of(geometry: Geometry, spec: Spec, structure: Any, columns: tuple[str, ...]) -> Layout:
    """Return the static part of the rows' state."""
    return Layout(
        names=tuple(spec),
        shapes=tuple(tuple(leaf.shape) for leaf in spec.values()),
        dtypes=tuple(str(leaf.dtype) for leaf in spec.values()),
        columns=columns,
        structure=structure,
        streams=geometry.streams,
    )


def abstract(geometry: Geometry, spec: Spec, structure: Any, columns: tuple[str, ...]) -> SideRows:
    """Return the rows' shapes, without a store."""
    capacity = geometry.capacity
    rest = {n: s for n, s in spec.items() if n not in columns}
    return SideRows(
        id=jax.ShapeDtypeStruct((2,), jnp.uint32),
        ticket=jax.ShapeDtypeStruct((capacity, 2), jnp.uint32),
        device={n: jax.ShapeDtypeStruct((capacity, *s.shape), s.dtype) for n, s in rest.items()},
        last=None if geometry.streams else jax.ShapeDtypeStruct((1, 2), jnp.uint32),
        slot=0,
        layout=layout_of(geometry, spec, structure, columns),
    )


def plan_host(
    geometry: Geometry, columns: tuple[Column, ...], slack: int, trial: Leaves | None, ratio: float | None
) -> tuple[int, str, int]:
    """Return host bytes of a full store: exact without a codec, else by trial, by ratio, or the raw upper bound."""
    columns = columns if geometry.streams else tuple(one_by_one(c) for c in columns)
    number = geometry.lanes * (geometry.length + slack)
    raw = number * sum(c.nbytes for c in columns)
    if all(c.codec is None for c in columns):
        return raw, "exact", raw
    if ratio is not None:
        return int(raw / ratio), "ratio given", raw
    if trial is None:
        return raw, "raw upper bound", raw
    rows = trial[columns[0].name].shape[0] * geometry.lanes
    host = sum(_trial(geometry, c, slack, np.asarray(trial[c.name])) for c in columns)
    return host, f"sample of {rows} rows", raw


def _trial(geometry: Geometry, column: Column, slack: int, rows: np.ndarray) -> int:
    """Return bytes of one leaf in a full store, measured with rows `[N, E, item]`."""
    number = geometry.lanes * (geometry.length + slack)
    if column.codec is None:
        return number * column.nbytes
    store = Store((column,), lanes=geometry.lanes, length=geometry.length, slack=slack)
    try:
        half, first = len(rows) // 2, None
        for start in range(0, len(rows), 64):  # in small writes; dictionaries are trained in the first half
            if first is None and start >= half:
                first = store.stats()
            store.write([rows[start : start + 64]], None)
        last = store.stats()
    finally:
        store.close()
    if first is None or last["chunks"] == first["chunks"]:  # incompressible, or too few rows
        return number * column.nbytes
    a_chunk = (last["payload_bytes"] - first["payload_bytes"]) / (last["chunks"] - first["chunks"])
    return int(last["nbytes"] - last["payload_bytes"] + number / column.codec.chunk * a_chunk)


def send(
    rows: SideRows, leaves: Leaves, keep: Array | None, slot: Array | None, token: Array
) -> tuple[SideRows, dict[str, Array], Array]:
    """Write host leaves to the store; return the rows, all leaves with their tickets, and bool[N, E], which are stored."""
    side = [leaves[n] for n in rows.layout.columns if n != TICKET]
    if slot is None:
        tickets = callbacks.write(rows.id, token, last_write(rows), side, keep)
    else:  # slots of dropped rows are out of range
        tickets, last = callbacks.write_slots(rows.id, token, last_write(rows), rows.ticket, rows.last, side, slot)
        rows = rows.replace(rows.ticket, rows.device, last)
    return rows, {**leaves, TICKET: tickets}, jnp.any(tickets != jnp.uint32(0), axis=-1)


def write(rows: SideRows, slot: Array, leaves: Leaves, keep: Array | None, token: Array) -> tuple[SideRows, None]:
    """Write the tickets of rows that `send` stored, and their other leaves to the device."""
    device = write_rows({TICKET: rows.ticket, **rows.device}, slot, leaves, token)
    return rows.replace(device.pop(TICKET), device), None


def last_write(rows: SideRows) -> Array:
    """Return uint32[1, 2] of the ticket table, which depends on the previous write."""
    return lax.slice(rows.ticket, (0, 0), (1, 2))


def update(rows: SideRows, slot: Array, leaves: Leaves, token: Array) -> tuple[SideRows, Array | None]:
    """Write device leaves in place, and host leaves as new rows under new tickets, so that old states keep theirs.

    Also return how many rows the store failed to write, uint32[], which stay unchanged.
    """
    side = {rows.layout.columns.index(n): x for n, x in leaves.items() if n in rows.layout.columns}
    lost = None
    if side:
        rows, is_lost, token = _updated(rows, slot, side, token)
        slot = jnp.where(is_lost, jnp.int32(rows.ticket.shape[0]) + jnp.arange(slot.size, dtype=jnp.int32), slot)
        lost = jnp.sum(is_lost, dtype=jnp.uint32)
    return rows.replace(rows.ticket, write_rows(rows.device, slot, leaves, token)), lost


def cut(rows: SideRows, slot: Array, token: Array) -> SideRows:
    """Record in the store that a cut follows the rows in slots int32[B]."""
    return _updated(rows, slot, {}, token)[0]


def _updated(rows: SideRows, slot: Array, side: Mapping[int, Array], token: Array) -> tuple[SideRows, Array, Array]:
    """Return the rows after an update of distinct slots int32[B]; bool[B], rows that could not be written; and the token."""
    keep = (slot >= jnp.int32(0)) & (slot < jnp.int32(rows.ticket.shape[0]))
    token, (old,) = order_after_reads(token, (read_rows(rows.ticket, slot),))
    new, lost = callbacks.update_rows(rows.id, token, last_write(rows), old, keep, side)
    ticket = write_rows({TICKET: rows.ticket}, slot, {TICKET: new}, token)[TICKET]
    return rows.replace(ticket, rows.device), lost, token


def store_of(rows: SideRows) -> RowStore:
    """Return the store. Eager."""
    return lifetime.find(lifetime.join_id(np.asarray(rows.id)))


def nbytes(rows: SideRows) -> dict[str, int]:
    """Return the bytes on the device, of the store in memory, and on the disk."""
    store = store_of(rows)
    return {"device": tree_bytes(rows), "host": store.nbytes, "disk": store.disk}


def bytes_per_leaf(rows: SideRows) -> dict[str, LeafBytes]:
    """Return the bytes by leaf: on the device, and in the store's columns; without tickets and row updates."""
    store: Any = store_of(rows)
    size = {name: LeafBytes(device=tree_bytes(array)) for name, array in rows.device.items()}
    return size | {name: LeafBytes(host=memory, disk=disk) for name, (memory, disk) in store.sizes().items()}


def to_arrays(rows: SideRows) -> dict[str, Any]:
    """Return tickets, device leaves and the store's own arrays, with prefixes."""
    arrays: dict[str, Any] = {"ticket": rows.ticket}
    if rows.last is not None:
        arrays["last"] = rows.last
    arrays |= {f"device:{n}": a for n, a in rows.device.items()}
    arrays |= {f"store:{n}": a for n, a in store_of(rows).to_arrays().items()}
    return arrays


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


def prepare_read(rows: SideRows, reads: Sequence[Read]) -> SideHeld:
    """Gather what later writes may change."""
    device: list[Array] = []
    tickets: list[Array] = []
    known: dict[int, int] = {}
    sources, hosted = [], rows.layout.in_store
    for r in reads:
        if r.name not in hosted:
            sources.append((r.name, len(device)))
            device.append(read_rows(rows.ticket if r.name == TICKET else rows.device[r.name], r.slot))
        else:
            if id(r.slot) not in known:
                known[id(r.slot)] = len(tickets)
                tickets.append(read_rows(rows.ticket, r.slot))
            sources.append((r.name, known[id(r.slot)]))
    return SideHeld(jnp.zeros((), jnp.uint32), tuple(tickets), tuple(device), tuple(sources))


def start_read(rows: SideRows, pending: SideHeld) -> SideHeld:
    """Start prefetching the host leaves."""
    columns = rows.layout.columns
    wanted = [
        (columns.index(name), pending.tickets[at]) for name, at in pending.sources if name in rows.layout.in_store
    ]
    if not wanted:
        return pending
    return dataclasses.replace(pending, number=callbacks.request(rows.id, wanted))


def finish_read(
    rows: SideRows, pending: SideHeld, strict: bool, ahead: bool = True
) -> tuple[list[Array], Array | None]:
    """Fetch all host leaves in one callback, and return them with the others; see `Storage.read`.

    `ahead`: they may have been prefetched.
    """
    columns, spec, hosted = rows.layout.columns, rows.layout.spec, rows.layout.in_store
    out: list[Any] = [None if name in hosted else pending.device[at] for name, at in pending.sources]
    side = [(i, name, at) for i, (name, at) in enumerate(pending.sources) if name in hosted]
    if not side:
        return out, None
    requests = [(columns.index(name), pending.tickets[at], in_jax(spec[name])) for _, name, at in side]
    arrays, present = callbacks.read(rows.id, requests, strict=strict, number=pending.number if ahead else None)
    ok = jnp.ones((), bool)
    for (i, *_), array, row_ok in zip(side, arrays, present, strict=True):
        out[i] = array
        if row_ok.ndim:
            row_ok = jnp.all(row_ok, axis=tuple(range(1, row_ok.ndim)))
        ok = ok & row_ok
    return out, ok


def on_host(rows: SideRows) -> HostRead | None:
    """Return what reads rows in NumPy, once every write before this state is done. It leaves every error to `finish_read`."""
    layout, tickets = rows.layout, _array_rows.in_numpy(rows.ticket).view(np.uint64)[:, 0]
    store = lifetime.join_id(_array_rows.in_numpy(rows.id))
    device = {name: _array_rows.in_numpy(array) for name, array in rows.device.items()}
    column = {name: number for number, name in enumerate(layout.columns)}
    leaves = [(device.get(name), column.get(name, 0), leaf.shape, leaf.dtype) for name, leaf in layout.spec.items()]

    def read(reads: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray] | None:
        if store in failed_writes.failed:
            return None
        out, requests, known = list[np.ndarray](), list[Any](), dict[int, np.ndarray]()
        for number, slot in reads:
            array, at, shape, dtype = leaves[number]
            if array is not None:
                out.append(_array_rows.take(array, slot))
                continue
            ticket = known.get(key := id(slot))
            if ticket is None:
                ticket = known[key] = _array_rows.take(tickets, slot)
            out.append(np.empty((*slot.shape, *shape), dtype))
            requests.append((at, ticket, out[-1]))
        try:
            return out if not requests or lifetime.find(store).read(requests).all() else None
        except Exception:
            return None

    return read


def host_bytes(rows: SideRows, pending: SideHeld) -> int:
    """Return the bytes that a store keeps for prefetched rows."""
    spec = rows.layout.spec
    host = [(name, pending.tickets[at].shape[:-1]) for name, at in pending.sources if name in rows.layout.in_store]
    return COPIES * sum(item_bytes(spec[name]) * int(np.prod(shape, dtype=np.int64)) for name, shape in host)


class HostRows(Storage):
    """The methods of a storage that use the rows of a `HostStorage`."""

    keys: tuple[str, ...] | None
    on_expired: str

    @property
    def exact(self) -> tuple[str, ...]:
        return self.keys or ()

    @functools.cached_property
    def masks_expired(self) -> bool:
        return self.on_expired == "mask"

    def spec(self, rows: SideRows) -> tuple[Spec, Any]:
        if not isinstance(rows, SideRows):
            name = type(self).__name__
            raise TypeError(f"{name}: another storage made this state. Use the buffer that made it.")
        return rows.layout.spec, rows.layout.structure

    sends = True
    send = staticmethod(send)
    write = staticmethod(write)
    update = staticmethod(update)
    cut = staticmethod(cut)
    prepare_read = staticmethod(prepare_read)
    start_read = staticmethod(start_read)
    held_bytes = staticmethod(host_bytes)
    on_host = staticmethod(on_host)
    nbytes = staticmethod(nbytes)
    bytes_per_leaf = staticmethod(bytes_per_leaf)
    to_arrays = staticmethod(to_arrays)

    def read(self, rows: SideRows, reads: Sequence[Read]) -> tuple[list[Array], Array | None]:
        pending = prepare_read(rows, reads)
        return finish_read(rows, pending, strict=not self.masks_expired, ahead=False)

    def finish_read(self, rows: SideRows, pending: SideHeld) -> tuple[list[Array], Array | None]:
        return finish_read(rows, pending, strict=not self.masks_expired)
