"""Route updates of rows back to their buffers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._buffer.buffer import Buffer
from fbuf._core.sample import Index
from fbuf._interfaces.writer import ReadOnly
from fbuf._mixture.draw import count_up
from fbuf._mixture.state import MixtureConfig, MixtureIndex, MixtureState


def of(index: MixtureIndex, number: int, buffer: Buffer) -> Index:
    """Return the rows of one buffer as its index; other rows are masked with slot C and ticket 0."""
    mine = index.source == jnp.int32(number)
    return Index(jnp.where(mine, index.slot, jnp.int32(buffer.capacity)), jnp.where(mine, index.ticket, jnp.uint32(0)))


def window_index(mixture: MixtureConfig, state: MixtureState, index: MixtureIndex) -> tuple[MixtureState, MixtureIndex]:
    """Call `Buffer.window_index` for each buffer. Masked rows have source S and slot and ticket 0."""
    leaves = [index.source[:, None], index.slot[:, None], index.ticket[:, None]]
    for number, (name, buffer) in enumerate(mixture.members):
        rows = buffer.window_index(state[name], of(index, number, buffer))
        mine, there = index.source[:, None] == jnp.int32(number), rows.slot < jnp.int32(buffer.capacity)
        source = jnp.where(there, jnp.int32(number), jnp.int32(len(mixture.members)))
        window = source, jnp.where(there, rows.slot, jnp.int32(0)), rows.ticket
        leaves = [jnp.where(mine, new, old) for new, old in zip(window, leaves, strict=True)]
    return state, MixtureIndex(*leaves)


def _nowhere(index: MixtureIndex, size: int, mask: Any) -> jax.Array:
    """Return the rows with an invalid source that are not masked, by the index or by `mask`, uint32[]."""
    none = (index.source < jnp.int32(0)) | (index.source >= jnp.int32(size))
    masked = (index.source == jnp.int32(size)) & (index.ticket == jnp.uint32(0))
    return jnp.sum(none & ~masked & (True if mask is None else mask), dtype=jnp.uint32)


def update_priority(
    mixture: MixtureConfig, state: MixtureState, index: MixtureIndex, td_error: Any, mask: Any, eta: Any
) -> tuple[MixtureState, None]:
    """Call `Buffer.update_priority` for each buffer with priorities."""
    states = dict(state.buffers)
    for number, (name, buffer) in enumerate(mixture.members):
        if buffer.sampler.prioritized:
            own = of(index, number, buffer)
            states[name] = buffer.update_priority(states[name], own, td_error, mask=mask, eta=eta)
    of_rows = mask if index.slot.ndim == 2 else None  # else it is of the errors of windows
    counters = count_up(state, refused_out_of_range=_nowhere(index, len(mixture.members), of_rows))
    return dataclasses.replace(state, buffers=states, counters=counters), None


def update_rows(
    mixture: MixtureConfig, state: MixtureState, index: MixtureIndex, fields: Any, mask: Any
) -> tuple[MixtureState, None]:
    """Call `Buffer.update_rows` for each buffer whose rows can change."""
    states, kept = dict(state.buffers), jnp.zeros((), jnp.uint32)
    for number, (name, buffer) in enumerate(mixture.members):
        if isinstance(buffer.writer, ReadOnly):
            theirs = (index.source == jnp.int32(number)) & (index.ticket != jnp.uint32(0))
            kept = kept + jnp.sum(theirs & (True if mask is None else mask), dtype=jnp.uint32)
        else:
            states[name] = buffer.update_rows(states[name], of(index, number, buffer), fields, mask=mask)
    outside = _nowhere(index, len(mixture.members), mask)
    counters = count_up(state, refused_out_of_range=outside, refused_read_only=kept)
    return dataclasses.replace(state, buffers=states, counters=counters), None
