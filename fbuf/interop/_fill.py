"""Fill a buffer from a `Source`: check names, dtypes and room, then write blocks.

One jitted, donated `extend` writes every block; the last is padded with masked rows, so one program serves all and nothing
copies the buffer. Priorities are written with the rows if every row can be sampled, else afterwards by the rows' anchors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.prioritized import prioritized
from fbuf._buffer.state import COUNTERS, BufferState, index_of
from fbuf._core.arguments import check_int
from fbuf._core.progress import Bar, Progress
from fbuf._core.pytree import needs_x64, nested, to_pairs
from fbuf._core.sample import Index
from fbuf._host.io.directory import rollback
from fbuf._rows import columns as _columns
from fbuf.datasets._arrays.segments import length_of, split_blocks
from fbuf.storages import Ragged

Source = Any  # `interop._source.Source`, which imports this module

_REFUSED = COUNTERS.index("refused_rows")
_CLOSED = COUNTERS.index("refused_closed")


def fill(
    source: Source, buffer: Buffer | None, *, capacity: int | None, newest: int | None, progress: Progress
) -> tuple[Buffer, BufferState]:
    """Return a buffer with the rows of `source`; arguments and errors as for `Source.into`."""
    call = source.call
    if not isinstance(buffer, Buffer | None):
        fix = "Write replay.state = source.into(replay.buffer)[1]." if hasattr(buffer, "buffer") else ""
        raise TypeError(f"{call}: buffer is {type(buffer).__name__}; expected a Buffer. {fix}".rstrip())
    if source.tables is not None and (buffer is None or newest is not None or buffer.lanes is not None):
        raise ValueError(
            f"{call}: data is an iterable of unknown length; expected a buffer of one stream, and no newest=. Write "
            f"into(fbuf.Buffer(n)), which keeps the newest n rows, or save(path)."
        )
    if buffer is not None and buffer.lanes == 1 and source.lanes is None:
        source = _with_lane(source)
    example, blocks, known = source.stored(() if buffer is None else buffer.storage.exact)
    if newest is not None:
        check_int(call, "newest", newest, 0, ", or None for all")
    steps = known if newest is None else min(int(newest), known)
    buffer = _buffer(source, max(steps, 0), buffer, capacity)
    keep = source.structure if source.fields is None else None
    rows_of = nested if keep is None else lambda leaves: keep.unflatten(list(leaves.values()))
    lanes = source.lanes
    block = max(1, min(_columns.rows_per_block(example.values(), lanes), buffer.geometry.length))
    block = block if steps < 0 else max(1, min(block, steps))
    if buffer.storage.grows:  # its table makes room by the write
        block = max(1, min(block, 256 // (lanes or 1)))
    first, last = known - steps, known
    with rollback(buffer.storage.folder), contextlib.closing(Bar(progress, call, max(steps, 0), " rows")) as bar:
        parts = blocks(first, last, block) if steps >= 0 else split_blocks(blocks(0, 0, block), block)
        state = buffer.init(rows_of(example))
        state = _write_rows(source, buffer, state, parts, first if steps >= 0 else 0, block, rows_of, bar)
    return buffer, state


def _with_lane(source: Source) -> Source:
    """Return the same rows as one lane, `[N, 1, ...]`."""

    def widened(read: Callable[[int, int], np.ndarray]) -> Callable[[int, int], np.ndarray]:
        return lambda first, last: read(first, last)[:, None]

    columns = {name: dataclasses.replace(c, read=widened(c.read)) for name, c in source.columns.items()}
    priority = None if source.priority is None else source.priority[:, None]
    mask = None if source.mask is None else widened(source.mask)
    return dataclasses.replace(source, columns=columns, lanes=1, priority=priority, mask=mask)


def _write_rows(
    source: Source,
    buffer: Buffer,
    state: BufferState,
    parts: Iterable[_columns.Block],
    first: int,
    block: int,
    rows_of: Callable[[dict[str, Any]], Any],
    bar: Bar,
) -> BufferState:
    """Return the state with the rows of all parts, which begin with row `first` of the source."""
    call = source.call
    lanes = () if source.lanes is None else (source.lanes,)
    start = first
    priorities = source.priority if buffer.sampler.prioritized else None
    # Ragged stores values outside arrays, which a jitted function cannot.
    write: Callable[..., BufferState] = _write if isinstance(buffer.storage, Ragged) else _write_in_place
    total = 0
    for rows in parts:
        stop = start + length_of(rows)
        leaves = {name: _columns.padded(leaf, block) for name, leaf in rows.items()}
        if write is _write_in_place:
            leaves = {n: to_pairs(call, x, x.dtype) if needs_x64(x.dtype) else x for n, x in leaves.items()}
        mask = np.ones((stop - start, *lanes), bool) if source.mask is None else source.mask(start, stop)
        priority = None
        if priorities is not None and buffer.dense:
            part = np.nan_to_num(priorities[start:stop], nan=source.largest)
            priority = _columns.padded(part.astype(np.float32), block)
        total += int(mask.sum())
        state = write(buffer, state, rows_of(leaves), _columns.padded(mask, block), priority)
        jax.block_until_ready(state.header)  # else blocks queue up faster than they are written
        bar(stop - start)
        start = stop
    stored = int(buffer.size(state)) - int(np.asarray(state.counters[_REFUSED]))
    if buffer.geometry.streams and stored < total and source.tables is None:
        raise ValueError(
            f"{call}: {buffer.storage!r} held {stored} of {total} rows. Use newest={stored // buffer.geometry.lanes}."
        )
    if priorities is not None and not buffer.dense:
        state = _set_priorities(call, buffer, state, source, priorities[first:], block)
    return state


def _write(buffer: Buffer, state: BufferState, rows: Any, mask: Any, priority: Any) -> BufferState:
    return buffer.extend(state, rows, priority=priority, mask=mask)


_write_in_place = jax.jit(_write, static_argnums=0, donate_argnums=1)


def _buffer(source: Source, steps: int, buffer: Buffer | None, capacity: int | None) -> Buffer:
    """Return the buffer passed, or one with room for exactly these rows. Raises ValueError if they do not fit."""
    call, lanes = source.call, source.lanes or 1
    if buffer is None:
        room = capacity if capacity is not None else max(steps, 1) * lanes
        if source.priority is None:
            buffer = Buffer(room, lanes=source.lanes)
        else:
            alpha, beta = source.exponents
            buffer = prioritized(room, alpha=alpha, beta=beta, lanes=source.lanes)
    elif capacity is not None:
        raise ValueError(f"{call}: both buffer and capacity are given; expected one of them. Drop capacity={capacity}.")
    if buffer.lanes != source.lanes:
        of_rows, here = ("one stream (lanes=None)" if n is None else f"{n} lanes" for n in (source.lanes, buffer.lanes))
        raise ValueError(
            f"{call}: rows are in {of_rows}, but buffer has {here}. Use Buffer(..., lanes={source.lanes})."
        )
    if steps > buffer.geometry.length:
        raise ValueError(
            f"{call}: there are {steps * lanes} rows, but the buffer holds {buffer.capacity}. Use capacity={steps * lanes}, "
            f"or take the newest: newest={buffer.geometry.length}."
        )
    return buffer


def _set_priorities(
    call: str, buffer: Buffer, state: BufferState, source: Source, priority: np.ndarray, block: int
) -> BufferState:
    """Set the priorities of rows that a view samples; warn of those it does not."""
    if not buffer.geometry.streams:
        raise TypeError(f"{call}: {buffer.writer!r} stores rows unordered. Use priorities=False, or view=views.Row().")
    lanes, length, _ = buffer.geometry
    capacity = buffer.capacity
    priority = priority.reshape(len(priority), lanes).astype(np.float32)
    mask = np.ones(priority.shape, bool)
    if source.mask is not None:
        mask = source.mask(source.steps - len(priority), source.steps).reshape(-1, lanes)
    # Masked rows took no slot: `back` counts the rows of a lane from its newest, 1.
    back = mask[::-1].cumsum(axis=0)[::-1]
    kept = mask & (back <= np.asarray(state.ring.size)[None, :])
    slot = (np.asarray(state.ring.cursor)[None, :] - back) % length * lanes + np.arange(lanes)[None, :]
    slot = np.where(kept, slot, capacity).astype(np.int32)
    before = np.array(state.counters)  # a copy: the state is donated
    for start in range(0, len(priority), block):
        at = np.full((block, lanes), capacity, np.int32)
        at[: len(slot[start : start + block])] = slot[start : start + block]
        error = _columns.padded(priority[start : start + block], block)
        at[np.isnan(error)] = capacity
        state = _update_in_place(buffer, state, jnp.asarray(at.reshape(-1)), jnp.asarray(error.reshape(-1)))
    refused = int(np.asarray(buffer.stats(state)["refused_closed"])) - int(np.asarray(before[_CLOSED]))
    if refused:
        number = int((kept & ~np.isnan(priority)).sum())
        text = f"{call}: {refused} of {number} rows have a priority but are not drawn by {buffer.view!r}."
        warnings.warn(text, stacklevel=4)
    return state.replace(counters=jnp.asarray(before))


def _update(buffer: Buffer, state: BufferState, slot: jax.Array, error: jax.Array) -> BufferState:
    none = slot == jnp.int32(buffer.capacity)
    index = index_of(buffer, state, slot)
    index = Index(slot, jnp.where(none, jnp.uint32(0), index.generation))
    return buffer.update_priority(state, index, error)


_update_in_place = jax.jit(_update, static_argnums=0, donate_argnums=1)
