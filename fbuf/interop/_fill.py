"""From a `Source` to a buffer that holds its rows: names, dtypes and room are checked first, then blocks are written.

One jitted, donated `extend` writes every block; the last is filled up with rows that its mask leaves out, so there is
one program and no copy of the buffer. Priorities go in with the rows where every row can be drawn; where a view decides
that, they are set afterwards, by the row that an anchor is.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf import _verbs
from fbuf._buffer import Buffer
from fbuf._sample import Index
from fbuf._state import COUNTERS, BufferState
from fbuf._tree import nested
from fbuf.interop._progress import Progress, reporter
from fbuf.interop._source import DTYPES, Column, Source
from fbuf.samplers import Prioritized, Uniform
from fbuf.storages import Ragged

BLOCK_BYTES = 8 * 2**20
Fields = Mapping[str, str] | Sequence[str] | str | None
"""Which leaves to take: `{name there: name here}`, names, "ted" (see `TED`), or None: all."""

TED = {
    "observation": "obs",
    "action": "action",
    "next/reward": "reward",
    "next/terminated": "terminated",
    "next/truncated": "truncated",
}
"""What `fields="ted"` takes of torchrl's layout: each observation once; `next/observation` is that of the next row."""
_TED_SCALARS = ("reward", "terminated", "truncated")  # `[N, 1]` there, `[N]` here
_CLOSED = COUNTERS.index("refused_closed")
_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def fill(
    call: str,
    source: Source,
    buffer: Buffer | None,
    *,
    capacity: int | None,
    fields: Fields,
    dtypes: Mapping[str, str] | None,
    newest: int | None,
    progress: Progress,
) -> tuple[Buffer, BufferState]:
    """A buffer with the rows of `source`; arguments and errors as the public functions say."""
    columns = chosen(call, source, fields)
    if not columns:
        raise ValueError(f"{call}: there are no leaves; expected at least one.")
    columns = {name: _cast(call, name, column, (dtypes or {}).get(name)) for name, column in columns.items()}
    if unknown := [name for name in dtypes or () if name not in columns]:
        raise ValueError(
            f"{call}: dtypes has '{unknown[0]}', but leaves are {', '.join(columns)} (as they are called here)."
        )
    if newest is not None and (not isinstance(newest, (int, np.integer)) or newest < 0):
        raise ValueError(f"{call}: newest is {newest!r}; expected an int >= 0, rows (a lane), or None for all.")
    steps = source.steps if newest is None else min(int(newest), source.steps)
    buffer = _buffer(call, source, steps, buffer, capacity)
    lanes = () if source.lanes is None else (source.lanes,)
    example = {name: jax.ShapeDtypeStruct(c.shape, c.dtype) for name, c in columns.items()}
    whole = source.structure is not None and fields is None
    rows_of = (lambda leaves: source.structure.unflatten(list(leaves.values()))) if whole else nested
    state = buffer.init(rows_of(example))
    first = source.steps - steps
    size = sum(math.prod(c.shape) * c.dtype.itemsize for c in columns.values()) * (source.lanes or 1)
    block = max(1, min(steps, BLOCK_BYTES // max(size, 1), buffer.geometry.length))
    given = source.priority if buffer.sampler.prioritized else None
    write: Callable[..., BufferState] = _write_in_place
    if isinstance(buffer.storage, Ragged):  # stores what is no array before the write, which no jitted function can
        write = _write
    report = reporter(progress, steps, call)
    for start in range(first, source.steps, block):
        stop = min(start + block, source.steps)
        leaves = {name: _padded(_block(call, name, c, start, stop, lanes), block) for name, c in columns.items()}
        mask = np.ones((stop - start, *lanes), bool) if source.mask is None else source.mask(start, stop)
        priority = None
        if given is not None and buffer.dense:
            here = np.nan_to_num(given[start:stop], nan=source.largest)
            priority = _padded(here.astype(np.float32), block)
        state = write(buffer, state, rows_of(leaves), _padded(mask, block), priority)
        jax.block_until_ready(state.token)  # else blocks queue up faster than they are written
        report(stop - first)
    if given is not None and not buffer.dense:
        state = _set_priorities(call, buffer, state, source, given[first:], block)
    return buffer, state


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


def chosen(call: str, source: Source, fields: Fields) -> dict[str, Column]:
    """The columns to take, by their names here.

    Raises:
      ValueError: one is not in the source, cannot be read, or two get the same name.
    """
    there = ", ".join(source.columns) or "none"
    squeezed: tuple[str, ...] = ()
    if isinstance(fields, str):
        if fields != "ted":
            raise ValueError(f'{call}: fields is {fields!r}; expected a dict, a sequence of names, "ted" or None.')
        squeezed = _TED_SCALARS
        fields = {name: here for name, here in TED.items() if name in source.columns or name != "next/truncated"}
    if fields is None:
        fields = {name: name for name in source.columns}
    elif not isinstance(fields, Mapping):
        fields = {name: name for name in fields}
    out: dict[str, Column] = {}
    for name, here in fields.items():
        name, here = (x if isinstance(x, str) else "/".join(x) for x in (name, here))
        if name not in source.columns:
            raise ValueError(f"{call}: fields has '{name}', which is not there; expected some of: {there}.")
        column = source.columns[name]
        if column.refused:
            rest = [n for n, c in source.columns.items() if not c.refused]
            raise ValueError(f"{call}: {column.refused} Leave it out: fields={rest}.")
        if here in out:
            raise ValueError(
                f"{call}: fields gives two leaves the name '{here}'. Rename one: fields={{'{name}': ...}}."
            )
        out[here] = _squeezed(column) if here in squeezed else column
    return out


def _squeezed(column: Column) -> Column:
    """Without its last axis, if that is 1."""
    if column.shape[-1:] != (1,):
        return column
    return dataclasses.replace(column, shape=column.shape[:-1], read=lambda a, b: column.read(a, b)[..., 0])


def _cast(call: str, name: str, column: Column, wanted: str | None) -> Column:
    """The column in the dtype asked for, or as JAX can hold it; what would change a value raises when it comes."""
    came, wide = column.dtype, jax.config.read("jax_enable_x64")
    exact = wanted is None
    if wanted is None:
        if came.name not in _NARROW or wide:
            return column
        wanted = _NARROW[came.name]
        if came.kind in "fc":
            raise TypeError(
                f"{call}: leaf '{name}' is {came.name}; JAX holds {wanted} unless jax_enable_x64 is on. "
                f"Say that it may be rounded: dtypes={{'{name}': '{wanted}'}}."
            )
    to = DTYPES.get(wanted if isinstance(wanted, str) else np.dtype(wanted).name)
    if to is None or (to.name in _NARROW and not wide):
        usable = [n for n in DTYPES if wide or n not in _NARROW]
        raise TypeError(f"{call}: dtypes['{name}'] is {wanted!r}; expected one of {', '.join(usable)}.")

    def read(first: int, last: int) -> np.ndarray:
        rows = column.read(first, last)
        with np.errstate(all="ignore"):
            cast = rows.astype(to)
        if (exact or to.kind in "iub") and not np.array_equal(cast.astype(came), rows):
            raise ValueError(
                f"{call}: leaf '{name}' is {came.name}, and rows {first} to {last - 1} hold values that {to.name} cannot. "
                f"Turn jax_enable_x64 on, or say what they are to become: dtypes={{'{name}': 'float32'}}."
            )
        return cast

    return dataclasses.replace(column, dtype=to, read=read)


def _block(call: str, name: str, column: Column, first: int, last: int, lanes: tuple[int, ...]) -> np.ndarray:
    rows = column.read(first, last)
    expected = (last - first, *lanes, *column.shape)
    if rows.shape != expected or rows.dtype != column.dtype:
        raise ValueError(
            f"{call}: rows {first} to {last - 1} of '{name}' came as {rows.dtype}{list(rows.shape)}; expected "
            f"{column.dtype}{list(expected)}. The source changed while it was read, or is damaged."
        )
    return rows


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
    index = _verbs.index_of(buffer, state, slot)
    index = Index(slot, jnp.where(none, jnp.uint32(0), index.ticket))
    return buffer.update_priority(state, index, error)


_update_in_place = jax.jit(_update, static_argnums=0, donate_argnums=1)
