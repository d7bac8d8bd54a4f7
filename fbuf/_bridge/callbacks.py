"""Connect jitted code with host stores: callbacks for rows and priorities, and the guard in front of them.

On CPU they are `jax.experimental.buffer_callback`s, whose operands and results are the arrays themselves; elsewhere
io/pure callbacks. The platform that is lowered for chooses. Rules: numpy only inside, never JAX; operand views are
read-only; outputs are always filled.

A read depends on its tickets. A write depends on the token of the reads before it and on one element of the ticket table
that the write before it made; otherwise XLA could run two writes of one jit in either order. A write has a side effect; a
read is a pure function of id and tickets, which name immutable bytes, also when it was started early by `request`. A write
that fails raises nothing, because a donated state would be lost: `send`ed rows get no tickets, and `lifetime` keeps the error.
Priorities are ordered by versions alone: a write takes and returns one, a draw is a pure function of one.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fbuf._bridge.lifetime import find, join_id, split_id
from fbuf._concurrency.interrupts import uninterrupted
from fbuf._core import control_flow
from fbuf._core.pytree import DTYPES
from fbuf._core.sub_byte import SUB_BYTE, from_bytes, to_bytes
from fbuf._host import failed_writes
from fbuf._host.priorities import Priorities
from fbuf._host.store.store import Store
from fbuf._host.types import LOST, RowStore, without_traceback

Shape = tuple[int, ...]
"""Shape and dtype of one row of a leaf."""

# ---------------------------------------------------------------------------------------------- the guard

_guard_p = Primitive("fbuf_host_store")
_guard_p.multiple_results = True
_guard_p.def_impl(lambda *operands, what, shards: list(operands))
_guard_p.def_abstract_eval(lambda *operands, what, shards: list(operands))


_KEPT = {
    "rows": ("rows live", "one store, one stream of rows", "storages.Device()"),
    "priorities": ("priorities live", "one store, one tree of them", 'samplers.Prioritized(on="device")'),
}
"""What may be on the host, why there is one of it, and what to use instead."""


_SHARDS: contextvars.ContextVar[int] = contextvars.ContextVar("shards", default=1)


def store_on_each_device(shards: int) -> contextlib.AbstractContextManager[None]:
    """Let callbacks that are traced inside run on so many devices, each with a store of its own."""
    return control_flow.while_tracing(_SHARDS, shards)


def _refuse_vmap(operands: Any, dims: Any, *, what: str, shards: int) -> Any:
    lives, why, instead = _KEPT[what]
    raise TypeError(
        f"fbuf: a buffer whose {lives} on the host cannot be vmapped: {why}. For parallel "
        f"environments use Buffer(..., lanes=E); for several independent buffers in one vmap use {instead}."
    )


def _lower_guard(context: Any, *operands: Any, what: str, shards: int) -> Any:
    axes = getattr(context.module_context, "axis_context", None)
    mesh = getattr(axes, "mesh", None)
    if mesh is not None and mesh.size == shards and getattr(axes, "manual_axes", ()) == frozenset(mesh.axis_names):
        return operands
    devices = getattr(axes, "num_devices", None)
    if devices is None:
        devices = getattr(mesh, "size", 1)
    if shards > 1:
        raise ValueError(
            f"fbuf: each of {shards} shards has a store on the host, but this shard_map is over {devices} devices, or leaves "
            f"an axis automatic. Use the mesh of the Sharded, with all axes manual."
        )
    if devices is not None and devices > 1:
        raise ValueError(
            f"fbuf: a host store serves one device, but this computation spans {devices} (an input is sharded or "
            f"replicated). Put state and rows on one device, jax.device_put(x, jax.devices()[0]), or use "
            f"{_KEPT[what][2]}."
        )
    return operands


batching.primitive_batchers[_guard_p] = _refuse_vmap
mlir.register_lowering(_guard_p, _lower_guard)
ad.primitive_jvps[_guard_p] = lambda primals, tangents, **how: (_guard_p.bind(*primals, **how), list(tangents))


def guard(*operands: Array, what: str = "rows") -> list[Array]:
    """Return the operands; refuse vmap at trace time and several devices at compile time.

    `what` is on the host: "rows" or "priorities".
    """
    return list(_guard_p.bind(*operands, what=what, shards=_SHARDS.get()))


# ------------------------------------------------------------------------------------------- host functions


def view(buffer: Any) -> np.ndarray:
    """Return an operand of a callback, read-only: it is the memory of an immutable array."""
    array = np.asarray(buffer)
    array.flags.writeable = False
    return array


def _typed(store: Any, column: int, array: np.ndarray) -> np.ndarray:
    """Return the array, as numbers of 64 bits where it is pairs of uint32 and its column has 64 bits."""
    columns = getattr(store, "columns", ())
    pairs = array.dtype == np.uint32 and columns and columns[column].dtype in DTYPES
    return array.view(columns[column].dtype)[..., 0] if pairs else array


def _write_rows(masked: bool, context: Any, out: Any, id: Any, token: Any, after: Any, *rows: Any) -> None:
    number = join_id(view(id))
    store = find(number)
    arrays = [_typed(store, i, view(r)) for i, r in enumerate(rows[masked:])]
    keep = view(rows[0]) if masked else None
    tickets, error = store.try_write(arrays, keep)
    if error is not None:
        wanted = tickets.size if keep is None else np.count_nonzero(keep)
        failed_writes.record(number, error, int(wanted - np.count_nonzero(tickets)))
    np.asarray(out)[...] = tickets[..., None].view(np.uint32)


def _write_slots(
    context: Any, out: Any, id: Any, token: Any, after: Any, table: Any, state: Any, slots: Any, *rows: Any
) -> None:
    known, table, number = _tickets(view(state)), _tickets(view(table)), join_id(view(id))
    store = cast(Store, find(number))  # no other takes slots
    before = (int(known[0]), table) if table.size == store.lanes * store.length else None
    arrays, wanted = [_typed(store, i, view(r)) for i, r in enumerate(rows)], view(slots)
    tickets, error = store.try_write(arrays, None, wanted, before)
    if error is not None:
        failed_writes.record(
            number, error, int(np.count_nonzero((wanted >= 0) & (wanted < store.lanes * store.length)))
        )
    kept = tickets[tickets != 0]
    made = kept[:1] if kept.size else known
    np.asarray(out[0])[...] = tickets[..., None].view(np.uint32)
    np.asarray(out[1])[...] = made[..., None].view(np.uint32)


def _read_rows(columns: tuple[int, ...], strict: bool, context: Any, out: Any, id: Any, *tickets: Any) -> None:
    store = find(join_id(view(id)))
    _fetch(store, store.read, columns, _TOO_OLD if strict else None, out, tickets)


def _request_rows(columns: tuple[int, ...], context: Any, out: Any, id: Any, *tickets: Any) -> None:
    number = 0
    with contextlib.suppress(Exception):  # a hint: errors are raised when the rows are collected
        wanted = [(c, _tickets(view(t))) for c, t in zip(columns, tickets, strict=True)]
        number = find(join_id(view(id))).request(wanted)
    np.asarray(out)[...] = number


def _collect_rows(
    columns: tuple[int, ...], strict: bool, context: Any, out: Any, id: Any, number: Any, *tickets: Any
) -> None:
    store = find(join_id(view(id)))
    why = _OVERTAKEN if strict else None
    _fetch(store, functools.partial(store.collect, int(view(number))), columns, why, out, tickets)


_INSTEAD = 'to get a mask instead, use on_expired="mask".'
_TOO_OLD = "this BufferState is too old", f"Carry on the state that `sample`, `extend` and `add` return; {_INSTEAD}"
_OVERTAKEN = (
    "the batch was prefetched, and more rows than the slack were written since",
    f"Write fewer rows between two draws, or keep more with slack=; {_INSTEAD}",
)


def _fetch(
    store: RowStore,
    read: Callable[..., Any],
    columns: tuple[int, ...],
    strict: tuple[str, str] | None,
    out: Any,
    tickets: Sequence[Any],
) -> None:
    """Fill the arrays, and bool of what was there, in `out`; `strict`: why rows have expired, and what to do, to raise that."""
    arrays, present = out[: len(columns)], out[len(columns) :]
    wanted = [_tickets(view(t)) for t in tickets]
    ok = read([(c, t, _typed(store, c, np.asarray(a))) for c, t, a in zip(columns, wanted, arrays, strict=True)])
    start = 0
    for is_present, ticket in zip(present, wanted, strict=True):
        np.asarray(is_present)[...] = ok[start : start + ticket.size].reshape(ticket.shape)
        start += ticket.size
    if strict and not ok.all():
        missing = np.concatenate([t.reshape(-1) for t in wanted])[~ok]
        text = (
            f"fbuf: {missing.size} of {ok.size} rows have expired: {strict[0]}; the store has dropped row {missing[0]}"
        )
        error = RuntimeError(f"{text}. {strict[1]}")
        store.last_error = without_traceback(error)
        raise error


def _update_rows(
    columns: tuple[int, ...], context: Any, out: Any, id: Any, token: Any, after: Any, *operands: Any
) -> None:
    number, (tickets, keep, *fields) = join_id(view(id)), operands
    store = cast(Store, find(number))  # no other changes rows
    values = {c: _typed(store, c, view(f)) for c, f in zip(columns, fields, strict=True)}
    new, error = store.try_update_rows(_tickets(view(tickets)), view(keep), values)
    if error is not None:
        failed_writes.record(number, error, int(np.count_nonzero(new == LOST)))
    np.asarray(out)[...] = new[..., None].view(np.uint32)


def _tickets(pairs: np.ndarray) -> np.ndarray:
    """Return uint64[...] of uint32[..., 2], low word first."""
    return np.ascontiguousarray(pairs).view(np.uint64)[..., 0]


@functools.cache
def _bind(function: Callable[..., None], *static: Any) -> Callable[..., None]:
    """Return the same object for the same arguments: JAX caches compiled programs by it."""
    return functools.partial(function, *static)


# --------------------------------------------------------------------------------------------- the callbacks


def call(
    function: Callable[..., None],
    shapes: Any,
    operands: Sequence[Array],
    effect: bool,
    elsewhere: Sequence[Array] | None = None,
) -> Any:
    """Run `function(context, out, *operands)` on the host; `out` are arrays to fill.

    Off CPUs, where operands are copied to the host, `elsewhere` are the operands, if given.
    """
    function = _bind(uninterrupted, function)
    on_cpu = functools.partial(_call_on_cpu, function, shapes, effect)
    off_cpu = functools.partial(_call_elsewhere, function, shapes, effect)
    if elsewhere is None:
        made = lax.platform_dependent(*operands, cpu=on_cpu, default=off_cpu)
    else:
        made = lax.platform_dependent(
            tuple(operands),
            tuple(elsewhere),
            cpu=lambda arrays, _: on_cpu(*arrays),
            default=lambda _, others: off_cpu(*others),
        )
    return control_flow.vary_like(made, operands)


def _call_on_cpu(function: Callable[..., None], shapes: Any, effect: bool, *operands: Array) -> Any:
    from jax.experimental.buffer_callback import buffer_callback

    results, structure = jax.tree.flatten(shapes)
    dtypes = tuple(np.dtype(x.dtype) for x in (*results, *operands))
    if not SUB_BYTE.isdisjoint(dtype.name for dtype in dtypes):  # NumPy would read and write past their memory
        wide = [jax.ShapeDtypeStruct(x.shape, np.uint8) if x.dtype.name in SUB_BYTE else x for x in results]
        with_views = _bind(_with_views, function, dtypes)
        out = _call_on_cpu(with_views, jax.tree.unflatten(structure, wide), effect, *map(to_bytes, operands))
        return jax.tree.unflatten(structure, map(from_bytes, jax.tree.leaves(out), dtypes))
    vmap_method = None if effect else "broadcast_all"
    return buffer_callback(function, shapes, has_side_effect=effect, vmap_method=vmap_method)(*operands)


def _with_views(
    function: Callable[..., None], dtypes: tuple[np.dtype, ...], context: Any, out: Any, *operands: Any
) -> None:
    """Run `function` with views of its results and operands as these dtypes."""
    several = isinstance(out, (list, tuple))
    results = list(out) if several else [out]
    arrays = [np.asarray(x).view(dtype) for x, dtype in zip([*results, *operands], dtypes, strict=True)]
    function(context, arrays[: len(results)] if several else arrays[0], *arrays[len(results) :])


def _call_elsewhere(function: Callable[..., None], shapes: Any, effect: bool, *operands: Array) -> Any:
    def fill(*arrays: Any) -> Any:
        lead = () if effect else np.shape(arrays[0])[:-1]  # the id leaf is uint32[2], more under vmap
        out = jax.tree.map(lambda s: np.zeros(lead + s.shape, s.dtype), shapes)
        function(None, out, *(np.asarray(a) for a in arrays))
        return out

    if effect:
        return jax.experimental.io_callback(fill, shapes, *operands)
    return jax.pure_callback(fill, shapes, *operands, vmap_method="broadcast_all")


def write(id: Array, token: Array, after: Array, rows: Sequence[Array], keep: Array | None) -> Array:
    """Write rows to the store. An error of the store is raised by `failed_writes.raise_failed`.

    Args:
      id: uint32[2], names the store.
      token: int32[], orders this after the reads before it.
      after: uint32[1, 2], a piece of the ticket table, orders this after the writes before it.
      rows: One array a column, `[N, E, item]`.
      keep: bool[N, E], or None for all.
    Returns:
      Tickets uint32[N, E, 2], 0 where `keep` is False, and of rows that are not stored.
    """
    shape = jax.ShapeDtypeStruct((*rows[0].shape[:2], 2), jnp.uint32)
    rows = [lax.stop_gradient(r) for r in rows]
    operands = rows if keep is None else [keep, *rows]
    write = _bind(_write_rows, keep is not None)
    return call(write, shape, guard(id, token, after, *operands), effect=True)


def write_slots(
    id: Array, token: Array, after: Array, table: Array, state: Array, rows: Sequence[Array], slots: Array
) -> tuple[Array, Array]:
    """Write rows to a store without streams, each to replace the one in its slot int32[N, E]; no slot occurs twice.

    Args:
      table: uint32[C, 2], tickets by slot. On CPU the store may look at it, at no cost; elsewhere it would be copied to the
        host with every write, so that it does not.
      state: uint32[1, 2], what this gave when the state was made, 0 at first.
    Returns:
      Tickets uint32[N, E, 2], 0 where a slot is out of range, and all 0 if the store failed; and the new `state`.
    """
    shapes = (jax.ShapeDtypeStruct((*rows[0].shape[:2], 2), jnp.uint32), jax.ShapeDtypeStruct((1, 2), jnp.uint32))
    rows = [lax.stop_gradient(r) for r in rows]
    operands = guard(id, token, after, table, state, slots, *rows)
    elsewhere = [*operands[:3], operands[2], *operands[4:]]
    tickets, made = call(_write_slots, shapes, operands, effect=True, elsewhere=elsewhere)
    return tickets, made


def read(
    id: Array, requests: Sequence[tuple[int, Array, jax.ShapeDtypeStruct]], strict: bool, number: Array | None = None
) -> tuple[list[Array], list[Array]]:
    """Read rows by ticket: one array a request, and bool of its tickets' shape: was the row there?

    Args:
      requests: (column of the store, tickets uint32[..., 2], item).
      strict: Raise where a row has expired.
      number: uint32[], what `request` gave for these tickets: they may be there already. The value is the same.
    """
    (id,) = guard(id)
    shapes = [jax.ShapeDtypeStruct((*t.shape[:-1], *item.shape), item.dtype) for _, t, item in requests]
    shapes += [jax.ShapeDtypeStruct(t.shape[:-1], np.dtype(bool)) for _, t, _ in requests]
    columns, tickets = tuple(c for c, _, _ in requests), [t for _, t, _ in requests]
    if number is None:
        out = call(_bind(_read_rows, columns, strict), shapes, (id, *tickets), effect=False)
    else:
        out = call(_bind(_collect_rows, columns, strict), shapes, guard(id, number, *tickets), effect=False)
    return out[: len(columns)], out[len(columns) :]


def request(id: Array, requests: Sequence[tuple[int, Array]]) -> Array:
    """Start a read of (column, tickets uint32[..., 2]) in the store; return its number, uint32[].

    Neither dropped nor repeated, but only a hint: `read` gives the same rows without.
    """
    operands = guard(id, *(t for _, t in requests))
    shape = jax.ShapeDtypeStruct((), jnp.uint32)
    return call(_bind(_request_rows, tuple(c for c, _ in requests)), shape, operands, effect=True)


def update_rows(
    id: Array, token: Array, after: Array, tickets: Array, keep: Array, fields: Mapping[int, Array]
) -> tuple[Array, Array]:
    """Store rows again with some leaves `[B, item]` replaced; return tickets uint32[B, 2] (the old where not).

    Also return bool[B], which rows were not stored because the store failed; `failed_writes.raise_failed` raises the error.
    `token` and `after` order it as they do `write`.
    """
    values = [lax.stop_gradient(v) for v in fields.values()]
    shape = jax.ShapeDtypeStruct(tickets.shape, jnp.uint32)
    operands = guard(id, token, after, tickets, keep, *values)
    new = call(_bind(_update_rows, tuple(fields)), shape, operands, effect=True)
    lost = jnp.all(new == jnp.uint32(0xFFFFFFFF), axis=-1)
    return jnp.where(lost[:, None], tickets, new), lost


def _of(id: Any) -> Priorities:
    return cast(Priorities, find(join_id(view(id))))


def _write_leaves(context: Any, out: Any, id: Any, token: Any, version: Any, slot: Any, leaf: Any) -> None:
    np.asarray(out)[...] = split_id(_of(id).write(join_id(view(version)), view(slot), view(leaf)))


def _clear_leaves(context: Any, out: Any, id: Any, version: Any) -> None:
    np.asarray(out)[...] = split_id(_of(id).clear(join_id(view(version))))


def _draw_leaves(context: Any, out: Any, id: Any, version: Any, top: Any, bottom: Any) -> None:
    """Draw. Under `vmap` over keys every operand has a leading axis, along which id and version are equal."""
    index, leaf, mass, least = (np.asarray(x) for x in out)
    drawn = _of(id).draw(join_id(view(version)), view(top).reshape(-1), view(bottom).reshape(-1))
    index[...], leaf[...] = drawn[0].reshape(index.shape), drawn[1].reshape(leaf.shape)
    mass[...], least[...] = drawn[2:]


def _read_leaves(context: Any, out: Any, id: Any, version: Any, slot: Any) -> None:
    np.asarray(out)[...] = _of(id).leaves(join_id(view(version)), view(slot))


_VERSION = jax.ShapeDtypeStruct((2,), jnp.uint32)


def write_priorities(id: Array, token: Array, version: Array, slot: Array, leaf: Array) -> Array:
    """Write leaves float32[B] in a version uint32[2]; return the new one. Slots int32[B] out of range are skipped, the last
    of equal ones wins.
    """
    operands = guard(id, token, version, slot, lax.stop_gradient(leaf), what="priorities")
    return call(_write_leaves, _VERSION, operands, effect=True)


def clear_priorities(id: Array, version: Array) -> Array:
    """Return the version uint32[2] with all leaves 0."""
    return call(_clear_leaves, _VERSION, guard(id, version, what="priorities"), effect=True)


def draw_priorities(id: Array, version: Array, top: Array, bottom: Array) -> tuple[Array, Array, Array, Array]:
    """Draw leaves from a version by `fbuf._algorithms.sum_tree.uniforms`: int32[B] and float32[B], the sum float32[] of
    all, and the least float32[] above 0.
    """
    id, version = guard(id, version, what="priorities")
    number = jax.ShapeDtypeStruct((), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(top.shape, jnp.int32), jax.ShapeDtypeStruct(top.shape, jnp.float32), number, number]
    index, leaf, mass, least = call(_draw_leaves, shapes, (id, version, top, bottom), effect=False)
    return index, leaf, mass, least


def read_priorities(id: Array, version: Array, slot: Array) -> Array:
    """Return the leaves float32[...] of a version in slots int32[...], each in [0, C)."""
    id, version = guard(id, version, what="priorities")
    return call(_read_leaves, jax.ShapeDtypeStruct(slot.shape, jnp.float32), (id, version, slot), effect=False)
