"""Checked calls of the methods that `Replay`, `plan` and `checked` make too: arguments are checked, then the core runs.

`extend` and `update_priority` are one dispatch of checks and core; `extend_checked` checks at once, and dispatches the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._buffer import checks, prefetch, priorities, read, write
from fbuf._buffer.state import BufferConfig, BufferState
from fbuf._core import pytree
from fbuf._core.dispatch import Operation
from fbuf._core.sample import Sample

_operation = functools.partial(Operation, scope=False)  # what it calls has a scope


@_operation
def extend(
    buffer: BufferConfig, state: BufferState, rows: Any, priority: Any, mask: Any, call: str
) -> tuple[BufferState, Any]:
    """Return the state of `extend` or `add`."""
    return extend_checked(buffer, state, rows, priority, mask, call, inline=True)


def extend_checked(
    buffer: BufferConfig,
    state: BufferState,
    rows: Any,
    priority: Any,
    mask: Any,
    call: str,
    slots: bool = False,
    inline: bool = False,
    repeats: bool = False,
) -> tuple[BufferState, Any]:
    """Return the state of `extend` or `add`, and with `slots` where a writer that replaces any row put each row.

    With `inline` the write is part of the operation that calls this, and has checked the state. `repeats`: see `write.extend`.
    """
    checks.check_writable(call, buffer)
    leaves, values, shape, priority, mask = checks.check_rows(call, buffer, state, rows, priority, mask)
    if shape[0] == 0:
        return state, jnp.zeros(shape, jnp.int32) if slots else None
    if values is not None:
        leaves = write.store_values(buffer, state, leaves, values, shape, mask)
    static = shape, (not call.endswith("add")) + (buffer.lanes is not None), slots, repeats
    if inline:
        return write.extend.inline(buffer, state, leaves, priority, mask, *static)
    return write.extend(buffer, state, leaves, priority, mask, static=static)


@_operation
def update_priority(
    buffer: BufferConfig, state: BufferState, index: Any, td_error: Any, mask: Any, eta: Any
) -> tuple[BufferState, None]:
    """Return the state of `update_priority`."""
    arguments = checks.check_errors("Buffer.update_priority", buffer, index, td_error, mask, eta)
    return priorities.update_priority.inline(buffer, state, *arguments)


def sample(
    buffer: BufferConfig, state: BufferState, key: jax.Array, batch_size: int | None, options: dict[str, Any]
) -> tuple[BufferState, Sample]:
    """Return what `sample` does, with 64-bit leaves as pairs (`fbuf._core.pytree`)."""
    call = "Buffer.sample"
    checks.check_state(call, buffer, state)
    size, checked = checks.check_draw(call, "sample(state, key, batch_size)", buffer, key, batch_size, options)
    if not buffer.prefetch:
        return read.sample(buffer, state, key, checked, static=(size,))
    if size != buffer.batch_size:
        raise ValueError(
            f"{call}: batch_size is {size}, but the state holds a batch of {buffer.batch_size} drawn ahead. Leave it out, or "
            f"write dataclasses.replace(buffer, batch_size={size}) and buffer.convert(other, state)."
        )
    return prefetch.sample(buffer, state, key, checked)


def peek(
    buffer: BufferConfig, state: BufferState, key: jax.Array, batch_size: int | None, options: dict[str, Any]
) -> tuple[BufferState, Sample]:
    """Return the batch of `peek`, and a state whose counters include its masked rows."""
    call = "Buffer.peek"
    checks.check_state(call, buffer, state)
    size, checked = checks.check_draw(call, "peek(state, key, batch_size)", buffer, key, batch_size, options)
    state, batch = read.sample(buffer, state, key, checked, static=(size,))
    return state, exact(call, buffer, state, batch)


def exact(call: str, buffer: BufferConfig, state: BufferState, batch: Any) -> Any:
    """Return a batch, or rows, with 64-bit leaves as NumPy arrays."""
    if not buffer.storage.exact:
        return batch
    return dataclasses.replace(batch, data=pytree.exact(call, buffer.storage.spec(state.rows)[0], batch.data))
