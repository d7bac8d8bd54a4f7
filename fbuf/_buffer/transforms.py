"""Transforms in the path of rows: before they are stored, and after they are read.

    extend: rows -> on_write -> writer.place -> ...          on_read looks at the rows that are stored
    sample: ... -> view.assemble -> on_read -> Sample.data

Where a batch's mask is False its leaves are zeros after transforms too: of those that a transform made, not of those it left
alone. That is a select in the transform's own kernel; a branch for batches without such rows would keep XLA from fusing it
with what makes the leaf, and cost a copy of the batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import BufferState, Transforms
from fbuf._core import arguments
from fbuf._core.component import state
from fbuf._core.pytree import PyTree, Spec, named_leaves, spec_of, zero_unless
from fbuf._core.row_format import RowFormat, given
from fbuf._interfaces.storage import RaggedStorage
from fbuf._interfaces.transform import Context
from fbuf._interfaces.writer import ReadOnly

_READ = 0x7264  # what tells the random numbers of transforms from the sampler's and the view's


@state
class Reading:
    """What `on_read` goes by, of one draw."""

    seed: jax.Array | None  # uint32[2], of the draw's key; None where no stage wants one
    memory: dict[str, Any]  # what its stages knew then


def check_parts(buffer: BufferConfig) -> None:
    """Raises if rows cannot pass through these transforms."""
    if buffer.on_write is None:
        return
    if isinstance(buffer.writer, ReadOnly):
        raise ValueError(
            f"Buffer: on_write is {buffer.on_write!r}, but the rows of {buffer.storage!r} are there already; expected None. "
            f"Use on_read, or make a data set of changed rows with fbuf.datasets.preprocess(...)."
        )
    if isinstance(buffer.storage, RaggedStorage):
        raise ValueError(
            f"Buffer: on_write is {buffer.on_write!r}, but rows of {buffer.storage!r} hold what is no array; expected None. "
            f"Use on_read, or change the rows before `extend`."
        )
    if buffer.on_write.keyed:
        name = next(n for n, stage in buffer.on_write if getattr(stage, "keyed", False))
        raise ValueError(
            f"Buffer: stage '{name}' of on_write, {buffer.on_write[name]!r}, needs a key, but `extend` has none; expected it "
            f"at read. Put it into on_read, where it draws anew for each batch."
        )
    if buffer.on_read is not None:
        both = set(buffer.on_write.remembers) & set(buffer.on_read.remembers)
        if both:
            name = min(both)
            raise ValueError(
                f"Buffer: on_write and on_read both have a stage '{name}' that remembers something; expected two names, for "
                f"`stats`. Write on_read={{'{name}_read': ...}}."
            )


def stored(call: str, buffer: BufferConfig, example: PyTree) -> tuple[PyTree, RowFormat | None]:
    """A row like `example` as it is stored, as shapes, and what it was; the example itself, and None, without `on_write`.

    Raises:
      ValueError, TypeError: it is no row; or a stage does not fit it.
    """
    if buffer.on_write is None:
        return example, None
    arguments.check_spec(call, spec_of(example))
    was = given(example)
    return buffer.on_write.opened(was.example)[1], was


def empty(buffer: BufferConfig, spec: Spec, was: RowFormat | None) -> Transforms | None:
    """What transforms know before the first row; `spec` is of the rows that are stored."""
    write = {} if buffer.on_write is None or was is None else buffer.on_write.opened(was.example)[0]
    read = {} if buffer.on_read is None else buffer.on_read.init(spec)
    return Transforms(was, write, read) if was is not None or jax.tree.leaves(read) else None


def given_of(state: BufferState) -> RowFormat | None:
    """What rows are before `on_write`."""
    return None if state.transforms is None else state.transforms.given


def write(
    buffer: BufferConfig,
    state: BufferState,
    leaves: dict[str, jax.Array],
    mask: jax.Array | None,
    shape: tuple[int, int],
) -> tuple[dict[str, jax.Array], Transforms | None]:
    """Rows `[N, E, ...]` as they are stored, by name, and what transforms know then."""
    if buffer.on_write is None and state.transforms is None:
        return leaves, None
    known = state.transforms
    assert known is not None
    there = jnp.ones(shape, bool) if mask is None else mask
    memory = known.write
    if buffer.on_write is not None:
        assert known.given is not None
        rows = known.given.structure.unflatten(leaves.values())
        rows, memory = buffer.on_write.write(rows, Context(len(shape), 0, True, there, None, memory))
        leaves = named_leaves(rows)
    read = known.read if buffer.on_read is None else buffer.on_read.observe(known.read, leaves, there)
    return leaves, Transforms(known.given, memory, read)


def reading(buffer: BufferConfig, state: BufferState, key: jax.Array) -> Reading | None:
    """What `on_read` will go by for a draw with `key` from the state as it is."""
    if buffer.on_read is None:
        return None
    seed = None
    if buffer.on_read.keyed:
        seed = jax.random.bits(jax.random.fold_in(key, _READ), (2,), jnp.uint32)  # of any kind of key
    known = {} if state.transforms is None else state.transforms.read
    return Reading(seed, known) if seed is not None or jax.tree.leaves(known) else None


def read(buffer: BufferConfig, data: PyTree, mask: jax.Array, by: Reading | None) -> PyTree:
    """A batch after `on_read`: zeros where `mask` bool[B] is False."""
    if buffer.on_read is None:
        return data
    key = None if by is None or by.seed is None else jax.random.wrap_key_data(by.seed, impl="threefry2x32")
    lead, there = 1, mask
    if buffer.view.rule.window:
        lead = 2
        rows = data.get("mask") if isinstance(data, dict) else None
        shape = (mask.shape[0], buffer.view.rule.window)
        if rows is None or rows.shape != shape:
            rows = jnp.ones(shape, bool)
        there = rows & mask[:, None]
    memory = {} if by is None else by.memory
    out = buffer.on_read.apply(data, Context(lead, lead - 1 or None, False, there, key, memory))
    before = {id(leaf) for leaf in jax.tree.leaves(data)}
    for name, leaf in named_leaves(out).items():
        if jnp.shape(leaf)[:1] != mask.shape:
            raise ValueError(
                f"Buffer: on_read, {buffer.on_read!r}, makes leaf '{name}' of shape {list(jnp.shape(leaf))} for a batch of "
                f"{mask.shape[0]}; expected [{mask.shape[0]}, ...]. Keep the batch's axis first in every leaf."
            )
    return jax.tree.map(lambda leaf: leaf if id(leaf) in before else zero_unless(mask, jnp.asarray(leaf)), out)


def trial(buffer: BufferConfig, leaves: dict[str, jax.Array], was: RowFormat | None, shape: tuple[int, int]) -> Any:
    """Rows `[N, E, ...]` as they would be stored, for `plan`."""
    if buffer.on_write is None or was is None:
        return leaves
    rows = was.structure.unflatten(leaves.values())
    memory = buffer.on_write.opened(was.example)[0]
    context = Context(len(shape), 0, True, jnp.ones(shape, bool), None, memory)
    return named_leaves(buffer.on_write.write(rows, context)[0])


def stats(buffer: BufferConfig, state: BufferState) -> dict[str, jax.Array]:
    """Scalars worth logging."""
    if state.transforms is None:
        return {}
    out = {} if buffer.on_write is None else buffer.on_write.stats(state.transforms.write)
    return out if buffer.on_read is None else out | buffer.on_read.stats(state.transforms.read)
