"""Arrays about every row of a state, from one jitted call: the data of summaries and plots.

Rows are in order of arrival, step by step and lane by lane within a step. It reads the leaves that end episodes, if the state
has no flags, and the newest rows, if they are compared; these in blocks, which bounds memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms.block_grid import to_bits
from fbuf._buffer import convert, read
from fbuf._buffer import state as _state
from fbuf._buffer.state import BufferConfig, BufferState, operation
from fbuf._buffer.summary import statistics
from fbuf._core.pytree import item_bytes
from fbuf._core.sample import TICKET
from fbuf._indexing import anchors
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.storage import Read

BLOCK_BYTES = 1 << 24
"""Bytes of rows that are compared at once."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """numpy arrays [L, E] of rows in order of arrival; `exists` marks those in the buffer. None: unknown or absent."""

    exists: np.ndarray  # bool
    age: np.ndarray  # int64, newer rows of the lane; with a Scattering writer, of all lanes
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

    def episode_lengths(self) -> tuple[np.ndarray, int] | None:
        """Return lengths int64[K] of complete episodes, and the number of others; None: ends are unknown."""
        if self.start is None or self.end is None or self.reset is None:
            return None
        return statistics.episode_lengths(self.exists, self.start, self.end, self.reset)


def _hashes(buffer: BufferConfig, state: BufferState, slot: jax.Array, number: int) -> dict[str, jax.Array]:
    """Return hashes uint32[M, 2] of each leaf of the rows at slots int32[M] (C: no row), and which rows were present."""
    spec, _ = buffer.storage.spec(state.rows)
    names = [name for name, leaf in spec.items() if name != TICKET]
    size = sum(item_bytes(spec[name]) for name in names)
    block = max(1, min(number, BLOCK_BYTES // max(size, 1)))
    padding = jnp.full((-number % block,), buffer.capacity, jnp.int32)

    def some(at: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        arrays, ok = buffer.storage.read(state.rows, [Read(name, at) for name in names])
        inside = at < jnp.int32(buffer.capacity)
        return [hashed(array) for array in arrays], inside if ok is None else inside & ok

    found, inside = lax.map(some, jnp.concatenate([slot, padding]).reshape(-1, block))
    flat = {name: array.reshape(-1, 2)[:number] for name, array in zip(names, found, strict=True)}
    return {**flat, TICKET: inside.reshape(-1)[:number]}


def _ends(buffer: BufferConfig, state: BufferState, slot: jax.Array, exists: jax.Array) -> dict[str, jax.Array]:
    """Return the flags of first, last and reset rows of episodes."""
    if state.scatter is not None:
        return {}
    if state.anchors is not None:
        flags = jnp.where(exists, state.anchors.flags[slot], jnp.uint8(0))
        bits = {"start": anchors.START, "end": anchors.END, "reset": anchors.RESET}
        return {name: anchors.has(flags, bit) for name, bit in bits.items()}
    if not buffer.ends:
        return {}
    at = jnp.where(exists, slot, jnp.int32(buffer.capacity)).reshape(-1)
    values, _ = buffer.storage.read(state.rows, [Read(name, at) for name in buffer.ends])
    flags = _state.ending(buffer, dict(zip(buffer.ends, values, strict=True)), exists.shape)
    end = anchors.has(flags, anchors.END) & exists
    first = exists[:1] & ~convert.may_have_lost_rows(buffer, state)[None, :]
    start = jnp.concatenate([first, end[:-1] & exists[1:]])
    return {"start": start, "end": end, "reset": jnp.zeros_like(end)}


@operation
def look(buffer: BufferConfig, state: BufferState, number: int) -> tuple[BufferState, dict[str, Any]]:
    """Collect arrays; `number` of the newest rows per lane are compared."""
    slot, exists = _state.arrival_order(buffer, state)
    out: dict[str, Any] = {"exists": exists, **_ends(buffer, state, slot, exists)}
    if state.scatter is not None:
        out |= {"number": state.scatter.number[slot], "newest": state.scatter.newest}
    if state.anchors is not None:
        out["anchor"] = _state.is_anchor(state, slot, exists)
        if buffer.view.rule.window:
            out["flags"] = jnp.where(exists, state.anchors.flags[slot], jnp.uint8(0))
    said = buffer.sampler.inspect(state.sampler, _state.anchor_set(buffer, state))
    if said is not None:
        out |= {name: array[slot] for name, array in said._asdict().items() if array is not None}
    priority = buffer.sampler.priority(state.sampler, slot)
    if priority is not None:
        out["priority"] = priority
    if number:
        behind = state.ring.size[None, :] - jnp.int32(number) + jnp.arange(number, dtype=jnp.int32)[:, None]
        newest = jnp.take_along_axis(slot, jnp.maximum(behind, jnp.int32(0)), axis=0)
        newest = jnp.where(behind >= jnp.int32(0), newest, jnp.int32(buffer.capacity)).reshape(-1)
        out["hashes"] = _hashes(buffer, state, newest, newest.shape[0])
    stats = read.stats.core(buffer, state)[1]
    available = buffer.sampler.available(state.sampler, jnp.sum(_state.anchor_count(state), dtype=jnp.int32))
    return state, {**out, "stats": stats, "available": available}


@operation
def row_flags(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, tuple[jax.Array, jax.Array]]:
    """Return which rows uint8[L, E] in order of arrival are held, and their flags, 0 where there is none."""
    assert state.anchors is not None
    slot, exists = _state.arrival_order(buffer, state)
    return state, (exists, jnp.where(exists, state.anchors.flags[slot], jnp.uint8(0)))


def unlearnt(buffer: BufferConfig, state: BufferState, flags_of: Callable[[], Any]) -> dict[str, Any]:
    """Return the number of rows held that no window learns, reset rows aside; nothing under a trace, or without windows.

    Args:
      flags_of: Returns what `row_flags` does.
    """
    if state.anchors is None or not buffer.view.rule.window or isinstance(state.anchors.flags, jax.core.Tracer):
        return {}
    found = flags_of()
    if isinstance(found[1], jax.core.Tracer):  # a state from outside the trace
        return {}
    return {"unlearnt": jnp.int32(count_unlearnt(buffer, *jax.device_get(found)))}


def count_unlearnt(buffer: Any, exists: np.ndarray, flags: np.ndarray) -> int:
    """Return how many of the rows held no window learns, from their flags uint8[L, E] in order of arrival."""
    return int((exists & ((flags & anchors.RESET) == 0) & ~buffer.view.learnt(flags)).sum())


def seen(buffer: BufferConfig, state: BufferState, compare: int = 0) -> Seen:
    """Return arrays about every row, and hashes of at most `compare` of the newest rows. Eager."""
    return seen_of(buffer, jax.device_get(look(buffer, state, static=(newest_of_each(buffer, compare),))[1]))


def seen_without_rows(buffer: BufferConfig, state: BufferState) -> Seen:
    """Return arrays about every row of a state whose `rows` are None; episodes only if the state has flags. Eager."""
    if state.anchors is None:  # ends would be read from rows
        buffer = dataclasses.replace(buffer, episode_end=())
    return seen_of(buffer, jax.device_get(jax.jit(lambda state: look.core(buffer, state, 0)[1])(state)))


def newest_of_each(buffer: BufferConfig, compare: int) -> int:
    """Return how many of the newest rows of each lane are compared."""
    lanes, length, _ = buffer.geometry
    return min(-(-compare // lanes), length)


def seen_of(buffer: BufferConfig, raw: dict[str, Any]) -> Seen:
    """Return the arrays of `look`."""
    exists = raw["exists"]
    if "number" in raw:
        arrived = [raw[name].astype(np.uint64) for name in ("number", "newest")]
        low_high = [(a[..., 0] | a[..., 1] << np.uint64(32)).astype(np.int64) for a in arrived]
        age = np.where(exists, low_high[1] - low_high[0], 0)
    else:
        age = np.where(exists, exists.sum(axis=0)[None, :] - 1 - np.arange(len(exists))[:, None], 0)
    hashes = dict(raw.get("hashes", {}))
    readable = hashes.pop(TICKET, None)
    return Seen(
        exists=exists,
        age=age,
        anchor=raw.get("anchor", exists),
        uniform=type(buffer.sampler).inspect is not Sampler.inspect and "probability" not in raw,
        draws_since=buffer.sampler.since,
        hashes={name: array[readable] for name, array in hashes.items()},
        stats={name: np.asarray(value).item() for name, value in raw["stats"].items()}
        | ({"unlearnt": count_unlearnt(buffer, exists, raw["flags"])} if "flags" in raw else {}),
        available=int(raw["available"]),
        **{name: raw.get(name) for name in ("probability", "priority", "draws", "start", "end", "reset")},
    )


# Hashes of rows. Bits are compared, so two NaNs are equal, and 0 and -0 are not. They are not cryptographic; among 2^20
# random rows two agree with probability 3e-8.


def hashed(rows: jax.Array) -> jax.Array:
    """Return 64-bit hashes uint32[N, 2] of rows `[N, ...]` of any dtype but keys.

    Each word is mixed with its position, and the results are added, so XLA compiles it to one pass.
    """
    if jnp.issubdtype(rows.dtype, jnp.complexfloating):
        rows = jnp.stack([rows.real, rows.imag], axis=-1)
    words = to_bits(rows).reshape(rows.shape[0], -1)
    if words.dtype.itemsize == 8:
        words = jnp.concatenate([words.astype(jnp.uint32), (words >> words.dtype.type(32)).astype(jnp.uint32)], axis=1)
    elif words.dtype.itemsize < 4 and words.shape[1]:
        words = _joined(words)
    words = words.astype(jnp.uint32)
    place = jnp.arange(words.shape[1], dtype=jnp.uint32)[None, :]
    first = mixed(words ^ mixed(place + jnp.uint32(0x9E3779B9)))
    second = mixed(first + (place + jnp.uint32(1)) * jnp.uint32(0x85EBCA6B))
    return jnp.stack([jnp.sum(half, axis=1, dtype=jnp.uint32) for half in (first, second)], axis=-1)


def _joined(words: jax.Array) -> jax.Array:
    """Return uint32[N, M] from words of 8 or 16 bits, padded with zeros."""
    several = 4 // words.dtype.itemsize
    padded = jnp.pad(words, ((0, 0), (0, -words.shape[1] % several)))
    parts = padded.reshape(words.shape[0], -1, several).astype(jnp.uint32)
    shift = jnp.arange(several, dtype=jnp.uint32) * jnp.uint32(8 * words.dtype.itemsize)
    return jnp.sum(parts << shift[None, None, :], axis=2, dtype=jnp.uint32)


def mixed(word: jax.Array) -> jax.Array:
    """Return uint32, every bit of which depends on every bit of `word` (the finaliser of MurmurHash3)."""
    word = (word ^ (word >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> jnp.uint32(16))


def distinct(hashes: np.ndarray) -> int:
    """Return the number of distinct hashes among uint32[N, 2]."""
    return int(np.unique(_whole(hashes)).size)


def together(parts: list[np.ndarray]) -> np.ndarray:
    """Return hashes uint32[N, 2] of rows from those of their leaves, in order."""
    whole = np.zeros(len(parts[0]), np.uint64)
    for part in parts:
        whole = (whole ^ (whole >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) + _whole(part)
    return whole.view(np.uint32).reshape(-1, 2)


def _whole(hashes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(hashes, np.uint32).view(np.uint64)[:, 0]
