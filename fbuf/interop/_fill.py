"""From a `Source` to a buffer that holds its rows: names, dtypes and room are checked first, then blocks are written.

One jitted, donated `extend` writes every block; the last is filled up with rows that its mask leaves out, so there is
one program and no copy of the buffer. Priorities go in with the rows where every row can be drawn; where a view decides
that, they are set afterwards, by the row that an anchor is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import state_ops
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import COUNTERS, BufferState
from fbuf._core.progress import Bar, Progress
from fbuf._core.pytree import nested
from fbuf._core.sample import Index
from fbuf._host.io.directory import rollback
from fbuf._interfaces.storage import Growable
from fbuf.interop._columns import Fields, blocks, chosen, converted, rows_a_block, without_last_axes
from fbuf.interop._source import Column, Source
from fbuf.samplers import Prioritized, Uniform
from fbuf.storages import Ragged

_REFUSED = COUNTERS.index("refused_rows")
_CLOSED = COUNTERS.index("refused_closed")


def fill(
    call: str,
    source: Source,
    buffer: Buffer | None,
    *,
    fields: Fields,
    dtypes: Mapping[str, str] | None,
    newest: int | None,
    progress: Progress,
    capacity: int | None = None,
) -> tuple[Buffer, BufferState]:
    """A buffer with the rows of `source`; arguments and errors as the public functions say."""
    if buffer is not None and buffer.lanes == 1 and source.lanes is None:
        source = _with_lane(source)
    taken = chosen(call, source.columns, fields)
    columns = {here: source.columns[there] for there, here in taken.items()}
    columns = converted(call, without_last_axes(columns) if fields == "ted" else columns, dtypes)
    if newest is not None and (not isinstance(newest, (int, np.integer)) or newest < 0):
        raise ValueError(f"{call}: newest is {newest!r}; expected an int >= 0, rows (a lane), or None for all.")
    steps = source.steps if newest is None else min(int(newest), source.steps)
    buffer = _buffer(call, source, steps, buffer, capacity)
    example = {name: jax.ShapeDtypeStruct(c.shape, c.dtype) for name, c in columns.items()}
    whole = source.structure is not None and fields is None
    rows_of = (lambda leaves: source.structure.unflatten(list(leaves.values()))) if whole else nested
    with (
        rollback(getattr(buffer.storage, "path", None)),
        contextlib.closing(Bar(progress, call, steps, " rows")) as bar,
    ):
        state = _filled(call, source, buffer, buffer.init(rows_of(example)), columns, rows_of, steps, bar)
    return buffer, state


def _with_lane(source: Source) -> Source:
    """The same rows as one lane, `[N, 1, ...]`."""

    def widened(read: Callable[[int, int], np.ndarray]) -> Callable[[int, int], np.ndarray]:
        return lambda first, last: read(first, last)[:, None]

    columns = {name: dataclasses.replace(c, read=widened(c.read)) for name, c in source.columns.items()}
    priority = None if source.priority is None else source.priority[:, None]
    mask = None if source.mask is None else widened(source.mask)
    return dataclasses.replace(source, columns=columns, lanes=1, priority=priority, mask=mask)


def _filled(
    call: str,
    source: Source,
    buffer: Buffer,
    state: BufferState,
    columns: Mapping[str, Column],
    rows_of: Callable[[dict[str, Any]], Any],
    steps: int,
    bar: Bar,
) -> BufferState:
    """The state with the newest `steps` rows of the source."""
    lanes = () if source.lanes is None else (source.lanes,)
    first = start = source.steps - steps
    block = max(1, min(steps, rows_a_block(columns.values(), source.lanes), buffer.geometry.length))
    if isinstance(buffer.storage, Growable):  # its table makes room by the write
        block = max(1, min(block, 256 // (source.lanes or 1)))
    given = source.priority if buffer.sampler.prioritized else None
    write: Callable[..., BufferState] = _write_in_place
    if isinstance(buffer.storage, Ragged):  # stores what is no array before the write, which no jitted function can
        write = _write
    came = np.zeros(buffer.geometry.lanes, np.int64)
    for rows in blocks(call, columns, first, source.steps, block, lanes):
        stop = min(start + block, source.steps)
        leaves = {name: _padded(leaf, block) for name, leaf in rows.items()}
        mask = np.ones((stop - start, *lanes), bool) if source.mask is None else source.mask(start, stop)
        priority = None
        if given is not None and buffer.dense:
            here = np.nan_to_num(given[start:stop], nan=source.largest)
            priority = _padded(here.astype(np.float32), block)
        came += mask.reshape(stop - start, -1).sum(axis=0)
        state = write(buffer, state, rows_of(leaves), _padded(mask, block), priority)
        jax.block_until_ready(state.token)  # else blocks queue up faster than they are written
        bar(stop - start)
        start = stop
    held = int(buffer.size(state)) - int(np.asarray(state.counters[_REFUSED]))
    if buffer.geometry.streams and held < came.sum():
        raise ValueError(
            f"{call}: {buffer.storage!r} had room for {held} of {came.sum()} rows only. Give it more, or take fewer: "
            f"newest={held // len(came)}."
        )
    if given is not None and not buffer.dense:
        state = _set_priorities(call, buffer, state, source, given[first:], block)
    return state


def _write(buffer: Buffer, state: BufferState, rows: Any, mask: Any, priority: Any) -> BufferState:
    if priority is None:
        return buffer.extend(state, rows, mask=mask)
    return buffer.extend(state, rows, mask=mask, priority=priority)


_write_in_place = jax.jit(_write, static_argnums=0, donate_argnums=1)


def _padded(rows: np.ndarray, block: int) -> np.ndarray:
    """`block` rows, the last of them zeros."""
    if len(rows) == block:
        return rows
    return np.concatenate([rows, np.zeros((block - len(rows), *rows.shape[1:]), rows.dtype)])


def _buffer(call: str, source: Source, steps: int, buffer: Buffer | None, capacity: int | None) -> Buffer:
    """The buffer given, or one with room for just these rows; raises if they do not fit."""
    lanes = source.lanes or 1
    if buffer is None:
        sampler = Uniform() if source.priority is None else Prioritized()
        room = capacity if capacity is not None else max(steps, 1) * lanes
        buffer = Buffer(room, sampler=sampler, lanes=source.lanes)
    elif capacity is not None:
        raise ValueError(f"{call}: both buffer and capacity are given; expected one of them. Drop capacity={capacity}.")
    if buffer.lanes != source.lanes:
        raise ValueError(
            f"{call}: rows come in {_lanes(source.lanes)}, but the buffer has {_lanes(buffer.lanes)}. "
            f"Use Buffer(..., lanes={source.lanes})."
        )
    if steps > buffer.geometry.length:
        raise ValueError(
            f"{call}: there are {steps * lanes} rows, but the buffer holds {buffer.capacity}. Use capacity={steps * lanes}, "
            f"or take the newest: newest={buffer.geometry.length}."
        )
    return buffer


def _lanes(lanes: int | None) -> str:
    return "one stream (lanes=None)" if lanes is None else f"{lanes} lanes"


def _set_priorities(
    call: str, buffer: Buffer, state: BufferState, source: Source, priority: np.ndarray, block: int
) -> BufferState:
    """Sets the priorities of rows that a view draws, by age; warns of those it does not."""
    if not buffer.geometry.streams:
        raise TypeError(
            f"{call}: {buffer.writer!r} puts rows anywhere, and {buffer.view!r} decides which are drawn, so that nobody knows "
            f"whose priorities these are. Use priorities=False, or view=fbuf.views.Row()."
        )
    lanes, length, _ = buffer.geometry
    capacity = buffer.capacity
    priority = priority.reshape(len(priority), lanes).astype(np.float32)
    there = np.ones(priority.shape, bool)
    if source.mask is not None:
        first = source.steps - len(priority)
        for start in range(0, len(priority), block):
            stop = min(start + block, len(priority))
            there[start:stop] = source.mask(first + start, first + stop).reshape(-1, lanes)
    # Rows left out took no room: the newest that came to a lane is its newest row.
    age = there.sum(axis=0, keepdims=True) - there[::-1].cumsum(axis=0)[::-1]
    held = np.asarray(state.ring.size)[None, :]
    kept = there & (age >= there.sum(axis=0, keepdims=True) - held)
    back = there.sum(axis=0, keepdims=True) - age  # 1: the newest
    slot = (np.asarray(state.ring.cursor)[None, :] - back) % length * lanes + np.arange(lanes)[None, :]
    slot = np.where(kept, slot, capacity).astype(np.int32)
    before = np.array(state.counters)  # a copy: the state is donated
    for start in range(0, len(priority), block):
        at = np.full((block, lanes), capacity, np.int32)
        at[: len(slot[start : start + block])] = slot[start : start + block]
        error = _padded(priority[start : start + block], block)
        at[np.isnan(error)] = capacity
        state = _update_in_place(buffer, state, jnp.asarray(at.reshape(-1)), jnp.asarray(error.reshape(-1)))
    refused = int(np.asarray(buffer.stats(state)["refused_closed"])) - int(np.asarray(before[_CLOSED]))
    if refused:
        number = int((kept & ~np.isnan(priority)).sum())
        warnings.warn(
            f"{call}: {refused} of {number} rows have a priority but are not drawn by {buffer.view!r}; theirs are left out.",
            stacklevel=4,
        )
    return dataclasses.replace(state, counters=jnp.asarray(before))


def _update(buffer: Buffer, state: BufferState, slot: jax.Array, error: jax.Array) -> BufferState:
    none = slot == jnp.int32(buffer.capacity)
    index = state_ops.index_of(buffer, state, slot)
    index = Index(slot, jnp.where(none, jnp.uint32(0), index.ticket))
    return buffer.update_priority(state, index, error)


_update_in_place = jax.jit(_update, static_argnums=0, donate_argnums=1)
