"""The same rows as a state of another capacity, or in another storage: what `load` does when it is asked to.

What does not fit is given up first, the oldest rows of each lane, as if they had been overwritten, so that anchors close as
they always do. Then rows are written to the new storage in order, and what goes by slot follows them (`_places`). Rejected:
adding the rows anew, which forgets priorities, epochs and what was drawn.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import convert, write
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import slot_remap
from fbuf._checkpoint.slot_remap import Places
from fbuf._core.pytree import item_bytes
from fbuf._core.sample import TICKET
from fbuf._formats import checkpoint
from fbuf._host.ragged.values import MISSING
from fbuf._indexing import ring as _ring
from fbuf._interfaces.storage import Read
from fbuf.storages import Ragged

_CHUNK_BYTES = 8 * 1024 * 1024  # of rows moved at once


def moved(call: str, reader: Buffer, target: Buffer, state: BufferState) -> BufferState:
    """The state of `reader` as one of `target`, of another capacity or storage, with nothing drawn ahead.

    Raises:
      SchemaError: the writer or sampler is of a kind that nothing is known of; or a table of blocks has no room for the rows.
    """
    _check(call, reader, target)
    state = dataclasses.replace(state, ahead=None)
    if reader.geometry == target.geometry:
        places = slot_remap.same(state.ring, reader.geometry)
        return dataclasses.replace(state, rows=_rows(call, reader, target, state, places))
    lost = np.asarray(convert._may_have_lost_rows(reader, state))
    size = np.asarray(state.ring.size)
    excess = np.maximum(size - target.geometry.length, 0)
    if excess.any():
        most = reader.geometry.length - target.geometry.length
        anchors, sampler, ring = _given_up(reader, most, state, jnp.asarray(excess, jnp.int32))
        state = dataclasses.replace(state, anchors=anchors, sampler=sampler, ring=ring)
    places = slot_remap.packed(state.ring, reader.geometry, target.geometry, lost | (excess > 0))
    rows = _rows(call, reader, target, state, places)
    return slot_remap.relocated(target, state, places, rows)


def _check(call: str, reader: Buffer, target: Buffer) -> None:
    if isinstance(reader.storage, Ragged) != isinstance(target.storage, Ragged):
        raise checkpoint.SchemaError(
            f"{call}: rows of {reader.storage!r} cannot come to lie in {target.storage!r}; expected Ragged for ragged rows, "
            f"and for them alone. Use the storage that was saved."
        )
    if reader.geometry == target.geometry:
        return
    if not reader.writer.streams:
        raise checkpoint.SchemaError(
            f"{call}: {reader.writer!r} says itself where rows go, so that nobody else can move them; expected capacity "
            f"{reader.capacity}. Leave resize out, or add the rows anew: other.extend(other.init(example), rows)."
        )
    if not slot_remap.knows(reader):
        raise checkpoint.SchemaError(
            f"{call}: what {reader.sampler!r} keeps by slot only it knows; expected one of fbuf's samplers. Leave resize out."
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _given_up(buffer: Buffer, most: int, state: BufferState, count: jax.Array) -> Any:
    """Anchors, sampler and rings without the `count` int32[E] oldest rows of each lane."""
    _, _, anchors, change, token = write.evict_oldest(buffer, state, count, most, state.token)
    sampler = buffer.sampler.change(state.sampler, change, buffer.geometry, token)
    return anchors, sampler, _ring.evict(state.ring, count)


def _rows(call: str, reader: Buffer, target: Buffer, state: BufferState, places: Places) -> Any:
    """The rows in the target's storage: those of each lane in order of age."""
    spec, structure = reader.storage.spec(state.rows)
    geometry = target.geometry
    if isinstance(target.storage, Ragged):
        rows: Any = target.storage.open(geometry, spec, structure, state.rows.layout.leaves)
    else:
        rows = target.storage.init(geometry, spec, structure)
    step = max(_CHUNK_BYTES // max(geometry.lanes * sum(map(item_bytes, spec.values())), 1), 1)
    step = min(1 << (step.bit_length() - 1), max(places.number, 1))
    for start in range(0, places.number, step):
        old, new, keep = places.chunk(start, step)
        more = {TICKET: _values(reader, target, state, rows, old, keep)} if isinstance(target.storage, Ragged) else {}
        rows, wrong = _copied(reader, target, rows, state.rows, old, new, keep, more)
        if int(wrong):
            raise checkpoint.SchemaError(
                f"{call}: {int(wrong)} rows found no place in {target.storage!r}, or had expired; expected room for all. Give "
                f"it more: Deduplicated(blocks=...), or load into another storage."
            )
    return rows


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _copied(
    reader: Buffer, target: Buffer, rows: Any, source: Any, old: Any, new: Any, keep: Any, more: dict[str, Any]
) -> tuple[Any, jax.Array]:
    """The rows with some more, from slots int32[N, E] `old` to `new`; and how many were not there or found no room."""
    names = [name for name in reader.storage.spec(source)[0] if name not in more]
    if isinstance(target.storage, Ragged):
        names = [name for name in names if name in source.device]
    arrays, ok = reader.storage.read(source, [Read(name, old.reshape(-1)) for name in names])
    leaves = {n: a.reshape(old.shape + a.shape[1:]) for n, a in zip(names, arrays, strict=True)}
    wrong = jnp.zeros((), jnp.uint32)
    if ok is not None:
        wrong = jnp.sum(keep & ~jnp.broadcast_to(ok, (old.size,)).reshape(old.shape), dtype=jnp.uint32)
    rows, no_room = target.storage.write(rows, new, leaves | more, keep, jnp.zeros((), jnp.int32))
    return rows, wrong if no_room is None else wrong + no_room


def _values(reader: Buffer, target: Buffer, state: BufferState, rows: Any, old: np.ndarray, keep: np.ndarray) -> Any:
    """Tickets of ragged leaves, stored anew."""
    assert isinstance(target.storage, Ragged)
    read = reader.storage.read(state.rows, [Read(TICKET, jnp.asarray(old.reshape(-1)))])[0][0]
    lazy = reader.storage.split(state.rows, {TICKET: read})[1].open({})  # type: ignore[attr-defined]
    values = [lazy.get(name, MISSING) for name in lazy.names]
    return jnp.asarray(target.storage.put(rows, values, old.shape, target.geometry.length, keep, ()))
