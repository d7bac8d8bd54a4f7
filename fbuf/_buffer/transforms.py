"""Transforms of rows before storage, and of batches after the view.

    extend: rows -> on_write -> writer.place -> ...          on_read observes the stored rows
    sample: ... -> view.assemble -> on_read -> Sample.data

Where a batch's mask is False, leaves that a transform made are set to zero by a select, which XLA fuses with the transform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fbuf._buffer.state import BufferConfig, BufferState, Transforms, generation_of, operation
from fbuf._core import control_flow
from fbuf._core.component import state
from fbuf._core.pytree import PyTree, item_bytes, named_leaves
from fbuf._core.row_format import RowFormat
from fbuf._core.slots import zero_unless
from fbuf._interfaces.storage import Read
from fbuf._interfaces.transform import Context
from fbuf.transforms import Chain

_READ = 0x7264  # folded into the key of the transforms' random numbers


@state
class Reading:
    """The random seed and memory that `on_read` uses for one draw."""

    seed: Array | None  # uint32[2], of the draw's key; None unless a stage is keyed
    memory: dict[str, Any]  # of the stages, when the batch was drawn


def check_parts(buffer: BufferConfig) -> None:
    """Raise if the transforms do not fit the other parts."""
    if buffer.on_write is None:
        return
    if buffer.writer.read_only:
        raise ValueError(f"Buffer: on_write is {buffer.on_write!r} of a stored data set. Use on_read.")
    if buffer.storage.ragged:
        raise ValueError(f"Buffer: on_write is {buffer.on_write!r}, but {buffer.storage!r} holds objects. Use on_read.")
    if buffer.on_write.keyed:
        name = next(n for n, stage in buffer.on_write if stage.keyed)
        raise ValueError(f"Buffer: stage '{name}' of on_write, {buffer.on_write[name]!r}, needs a key. Use on_read.")
    if buffer.on_read is not None:
        both = set(buffer.on_write.remembers) & set(buffer.on_read.remembers)
        if both:
            name = min(both)
            raise ValueError(f"Buffer: on_write and on_read both have a stage '{name}' with memory. Rename one.")


def write(
    buffer: BufferConfig, known: Transforms, leaves: dict[str, Array], mask: Array | None, shape: tuple[int, int]
) -> tuple[dict[str, Array], Transforms]:
    """Return rows `[N, E, ...]` as they are stored, by name, and the transforms with the new memory of `on_write`."""
    if buffer.on_write is None:
        return leaves, known
    assert known.given is not None
    kept = jnp.ones(shape, bool) if mask is None else mask
    rows = known.given.structure.unflatten(leaves.values())
    rows, memory = buffer.on_write.write(rows, Context(len(shape), 0, True, kept, None, known.write))
    return named_leaves(rows), Transforms(known.given, memory, known.read)


def observe(
    buffer: BufferConfig, known: Transforms, leaves: dict[str, Array], mask: Array | None, shape: tuple[int, int]
) -> Transforms:
    """Return the transforms once `on_read` has seen rows `[N, E, ...]` that are stored."""
    if buffer.on_read is None:
        return known
    kept = jnp.ones(shape, bool) if mask is None else mask
    return Transforms(known.given, known.write, buffer.on_read.observe(known.read, leaves, kept))


def reading(buffer: BufferConfig, state: BufferState, key: Array) -> Reading | None:
    """Return seed and memory of `on_read`, which is not None, for a draw with `key`; None if it needs neither."""
    # The key may be of any implementation.
    seed = jax.random.bits(jax.random.fold_in(key, _READ), (2,), jnp.uint32) if buffer.on_read.keyed else None
    known = {} if state.transforms is None else state.transforms.read
    return Reading(seed, known) if seed is not None or jax.tree.leaves(known) else None


def read(buffer: BufferConfig, data: PyTree, mask: Array, by: Reading | None) -> PyTree:
    """Return a batch after `on_read`, which is not None, with zeros where `mask` bool[B] is False."""
    key = None if by is None or by.seed is None else jax.random.wrap_key_data(by.seed, impl="threefry2x32")
    lead, exists = 1, mask
    if buffer.view.rule.window:
        lead = 2
        rows = data.get("mask") if isinstance(data, dict) and buffer.view.adds else None
        shape = (mask.shape[0], buffer.view.rule.window)
        if rows is None or rows.shape != shape:
            rows = jnp.ones(shape, bool)
        exists = rows & mask[:, None]
    memory = {} if by is None else by.memory
    out = buffer.on_read.apply(data, Context(lead, lead - 1 or None, False, exists, key, memory))
    if not jax.tree.leaves(out):
        raise ValueError(f"Buffer: on_read, {buffer.on_read!r}, returns {out!r}; expected arrays. Return the batch.")
    before = {id(leaf) for leaf in jax.tree.leaves(data)}
    for name, leaf in named_leaves(out).items():
        if jnp.shape(leaf)[:1] != mask.shape:
            raise ValueError(
                f"Buffer: on_read, {buffer.on_read!r}, makes leaf '{name}' of shape {list(jnp.shape(leaf))} for a batch of "
                f"{mask.shape[0]}; expected [{mask.shape[0]}, ...]. Keep the batch's axis first in every leaf."
            )
    return jax.tree.map(lambda leaf: leaf if id(leaf) in before else zero_unless(mask, jnp.asarray(leaf)), out)


def trial(buffer: BufferConfig, leaves: dict[str, Array], was: RowFormat | None, shape: tuple[int, int]) -> Any:
    """Return rows `[N, E, ...]` as they would be stored, for `plan`."""
    if buffer.on_write is None or was is None:
        return leaves
    rows = was.structure.unflatten(leaves.values())
    memory = buffer.on_write.opened(was.example)[0]
    context = Context(len(shape), 0, True, jnp.ones(shape, bool), None, memory)
    return named_leaves(buffer.on_write.write(rows, context)[0])


def stats(buffer: BufferConfig, state: BufferState) -> dict[str, Array]:
    """Return scalars to log."""
    if state.transforms is None:
        return {}
    out = {} if buffer.on_write is None else buffer.on_write.stats(state.transforms.write)
    return out if buffer.on_read is None else out | buffer.on_read.stats(state.transforms.read)


BLOCK_BYTES = 1 << 24
"""Bytes of rows that `fit_transforms` reads at once."""


@operation
def _observe(buffer: BufferConfig, state: BufferState, stages: Chain) -> tuple[BufferState, dict[str, Any]]:
    """Return the memory of `stages` after all rows held."""
    spec, _ = buffer.storage.spec(state.rows)
    names = stages.watches(spec)
    capacity = buffer.capacity
    block = max(1, min(capacity, BLOCK_BYTES // max(1, sum(item_bytes(spec[name]) for name in names))))

    def more(number: Array, memory: Any) -> Any:
        slot = number.astype(jnp.int32) * jnp.int32(block) + jnp.arange(block, dtype=jnp.int32)
        inside = slot < jnp.int32(capacity)
        at = jnp.where(inside, slot, jnp.int32(0))
        exists = inside & (generation_of(buffer, state, at) != jnp.uint32(0))
        arrays, ok = buffer.storage.read(
            state.rows, [Read(n, jnp.where(exists, at, jnp.int32(capacity))) for n in names]
        )
        exists = exists if ok is None else exists & ok
        return stages.observe(memory, {n: a[:, None] for n, a in zip(names, arrays, strict=True)}, exists[:, None])

    return state, control_flow.fori_loop(0, -(-capacity // block), more, stages.init(spec))


@operation
def refit(buffer: BufferConfig, state: BufferState, stages: Chain) -> tuple[BufferState, None]:
    """Replace the memory of `stages` of `on_read` by that for the rows held; in a sharded buffer, for those of all shards."""
    known = state.transforms
    assert known is not None
    read = known.read | _observe.core(buffer, state, stages)[1]
    return state.replace(transforms=dataclasses.replace(known, read=read)), None


def fit_transforms(buffer: BufferConfig, state: BufferState, *, since: BufferConfig | None = None) -> BufferState:
    """Return a state, of `since` or else of `buffer`, with the memory of the stages of `buffer.on_read` for its rows.

    Stages that `since` had under the same name keep their memory. Cost: O(C) if another stage has memory.
    """
    was, stages = state.transforms, Chain() if buffer.on_read is None else buffer.on_read
    kept: dict[str, Any] = {}
    if since is not None and was is not None:
        kept = {name: was.read[name] for name in same_stages(since.on_read, stages) if name in was.read}
    new = _without(stages, kept)
    if new.remembers:
        read = kept | _observe(since or buffer, state, static=(new,))[1]
    else:
        read = kept | new.init(buffer.storage.spec(state.rows)[0])
    row_format, write = (None, {}) if was is None else (was.given, was.write)
    some = row_format is not None or bool(jax.tree.leaves(read))
    return dataclasses.replace(state, transforms=Transforms(row_format, write, read) if some else None)


def new_stages(was: BufferConfig, buffer: BufferConfig) -> Chain:
    """Return the stages of `on_read` that `was` has not under the same name."""
    stages = Chain() if buffer.on_read is None else buffer.on_read
    return _without(stages, same_stages(was.on_read, stages))


def _without(stages: Chain, names: Container[str]) -> Chain:
    return Chain(tuple((name, stage) for name, stage in stages if name not in names))


def same_stages(one: Chain | None, other: Chain) -> list[str]:
    """Return the names under which both chains have the same stage."""
    return [name for name, stage in one or () if name in other and other[name] == stage]
