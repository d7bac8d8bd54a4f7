"""What a state says of every row, in one jitted call, on the host: the raw material of summaries and plots.

Rows come in order of arrival, step by step and of one step lane by lane. Of leaves only those are read that end episodes,
where the state does not know that itself, and the newest rows if they are to be compared; the latter by blocks, so that memory
does not grow with their number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._buffer import convert, operations, state_ops
from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import BufferState
from fbuf._buffer.summary.row_hash import hashed
from fbuf._core.dispatch import Operation
from fbuf._core.pytree import item_bytes
from fbuf._core.sample import TICKET
from fbuf._indexing import anchors, ring, scatter
from fbuf._interfaces.storage import RaggedStorage, Read

BLOCK_BYTES = 1 << 24
"""Bytes of rows that are read at once to compare them."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """Arrays of numpy; rows `[L, E]` in order of arrival, of which `held` are there. None: not known, or there is none."""

    held: np.ndarray  # bool
    age: np.ndarray  # int64, rows of the lane that came later; or, where rows lie in no order, that were put in later
    anchor: np.ndarray  # bool, can be drawn
    uniform: bool  # whether all anchors are equally likely
    probability: np.ndarray | None  # float32, in the next draw
    priority: np.ndarray | None  # float32
    draws: np.ndarray | None  # int32
    draws_since: str
    start: np.ndarray | None  # bool, first row of an episode
    end: np.ndarray | None  # bool, last row of an episode
    reset: np.ndarray | None  # bool, holds a final observation only
    hashes: dict[str, np.ndarray]  # uint32[M, 2] of the newest rows, by leaf
    stats: dict[str, Any]
    available: int


def _order(buffer: BufferConfig, state: BufferState) -> tuple[jax.Array, jax.Array]:
    """Slots int32[L, E] in order of arrival, and which of them hold a row."""
    lanes, length, _ = buffer.geometry
    if state.scatter is not None:
        rank = jnp.arange(buffer.capacity, dtype=jnp.int32)
        slot, held = scatter.by_age(state.scatter), rank < scatter.held(state.ring)
        return slot.reshape(length, lanes), held.reshape(length, lanes)
    age = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], (length, lanes))
    return ring.by_age(state.ring, buffer.geometry, age), age < state.ring.size[None, :]


def _hashes(buffer: BufferConfig, state: BufferState, slot: jax.Array, number: int) -> dict[str, jax.Array]:
    """uint32[M, 2] of each leaf of the rows at slots int32[M], C: none; and whether each was there."""
    spec, _ = buffer.storage.spec(state.rows)
    names = [name for name, leaf in spec.items() if name != TICKET]
    size = sum(item_bytes(spec[name]) for name in names)
    block = max(1, min(number, BLOCK_BYTES // max(size, 1)))
    padding = jnp.full((-number % block,), buffer.capacity, jnp.int32)

    def some(at: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        arrays, ok = buffer.storage.read(state.rows, [Read(name, at) for name in names])
        there = at < jnp.int32(buffer.capacity)
        return [hashed(array) for array in arrays], there if ok is None else there & ok

    found, there = lax.map(some, jnp.concatenate([slot, padding]).reshape(-1, block))
    flat = {name: array.reshape(-1, 2)[:number] for name, array in zip(names, found, strict=True)}
    return {**flat, TICKET: there.reshape(-1)[:number]}


def _ends(buffer: BufferConfig, state: BufferState, slot: jax.Array, held: jax.Array) -> dict[str, jax.Array]:
    """Where episodes begin and end."""
    if state.scatter is not None:
        return {}
    if state.anchors is not None:
        flags = jnp.where(held, state.anchors.flags[slot], jnp.uint8(0))
        bits = {"start": anchors.START, "end": anchors.END, "reset": anchors.RESET}
        return {name: anchors.has(flags, bit) for name, bit in bits.items()}
    if not buffer.ends:
        return {}
    at = jnp.where(held, slot, jnp.int32(buffer.capacity)).reshape(-1)
    values, _ = buffer.storage.read(state.rows, [Read(name, at) for name in buffer.ends])
    end = state_ops.ending(buffer, dict(zip(buffer.ends, values, strict=True)), held.shape)[0] & held
    first = held[:1] & ~convert._may_have_lost_rows(buffer, state)[None, :]
    start = jnp.concatenate([first, end[:-1] & held[1:]])
    return {"start": start, "end": end, "reset": jnp.zeros_like(end)}


def _look_core(
    buffer: BufferConfig, state: BufferState, fetched: Any, number: int
) -> tuple[BufferState, dict[str, Any]]:
    """`fetched`: what `Sampler.to_host` gave; `number`: how many of the newest rows are compared, a lane."""
    slot, held = _order(buffer, state)
    out: dict[str, Any] = {"held": held, **_ends(buffer, state, slot, held)}
    if state.scatter is not None:
        out |= {"number": state.scatter.number[slot], "newest": state.scatter.newest}
    if state.anchors is not None:
        out["anchor"] = held & anchors.has(state.anchors.flags[slot], anchors.OPEN)
    inspect = getattr(buffer.sampler, "inspect", None)
    if inspect is not None:
        said = inspect(state.sampler, state_ops.eligible_set(buffer, state), fetched)
        named = {"probability": said.probability, "priority": said.priority, "draws": said.draws}
        out |= {name: array[slot] for name, array in named.items() if array is not None}
    if number:
        behind = state.ring.size[None, :] - jnp.int32(number) + jnp.arange(number, dtype=jnp.int32)[:, None]
        newest = jnp.take_along_axis(slot, jnp.maximum(behind, jnp.int32(0)), axis=0)
        newest = jnp.where(behind >= jnp.int32(0), newest, jnp.int32(buffer.capacity)).reshape(-1)
        out["hashes"] = _hashes(buffer, state, newest, newest.shape[0])
    stats = operations.stats.core(buffer, state)[1]
    available = buffer.sampler.available(state.sampler, jnp.sum(state_ops.count(state), dtype=jnp.int32))
    return state, {**out, "stats": stats, "available": available}


look = Operation(_look_core)


def seen(buffer: BufferConfig, state: BufferState, compare: int = 0) -> Seen:
    """Everything about every row; of at most `compare` of the newest rows (a lane its share) what they hold. Eager."""
    lanes, length, _ = buffer.geometry
    to_host = getattr(buffer.sampler, "to_host", None)
    fetched = None if to_host is None else jax.device_put(to_host(state.sampler))
    number = min(-(-compare // lanes), length)
    raw: dict[str, Any] = jax.device_get(look(buffer, state, fetched, static=(number,))[1])
    held = raw["held"]
    if "number" in raw:
        arrived = [raw[name].astype(np.uint64) for name in ("number", "newest")]
        low_high = [(a[..., 0] | a[..., 1] << np.uint64(32)).astype(np.int64) for a in arrived]
        age = np.where(held, low_high[1] - low_high[0], 0)
    else:
        age = np.where(held, held.sum(axis=0)[None, :] - 1 - np.arange(length)[:, None], 0)
    hashes = dict(raw.get("hashes", {}))
    there = hashes.pop(TICKET, None)
    return Seen(
        held=held,
        age=age,
        anchor=raw.get("anchor", held),
        uniform=hasattr(buffer.sampler, "inspect") and "probability" not in raw,
        probability=raw.get("probability"),
        priority=raw.get("priority"),
        draws=raw.get("draws"),
        draws_since=getattr(buffer.sampler, "since", ""),
        start=raw.get("start"),
        end=raw.get("end"),
        reset=raw.get("reset"),
        hashes={name: array[there] for name, array in hashes.items()},
        stats={name: np.asarray(value).item() for name, value in raw["stats"].items()},
        available=int(raw["available"]),
    )


def whole_rows(buffer: BufferConfig) -> bool:
    """Whether arrays are all that rows hold, so that two rows can be compared."""
    return not isinstance(buffer.storage, RaggedStorage)
