"""Anchors and sampler of rows that are there from the beginning (`writers.Frozen`): made in one pass over them, in blocks.

The rows arrive once more, oldest first, a block at a time, and nothing but the leaves that end episodes (and the sampler's
stamp) is read of them; so memory is bounded by a block, whatever the capacity. As no row ever goes, what a log would say is
counted from the flags once (`fbuf._openrows`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbuf import _anchors, _openrows, _verbs
from fbuf._bufferconfig import BufferConfig
from fbuf._dispatch import Verb
from fbuf._state import BufferState
from fbuf._tree import tree_bytes
from fbuf._typing import Read, Ring

BLOCK = 1 << 16
"""Rows of a block."""


def _index_rows_core(
    buffer: BufferConfig, state: BufferState, sampler: Any, other: BufferConfig
) -> tuple[BufferState, tuple[_anchors.Anchors | None, Any]]:
    """The anchors and the sampler that all rows make; `sampler` is what `fresh_sampler(other)` gave."""
    empty = _verbs.empty_state(other, state.rows)
    sampler = empty.sampler if sampler is None else sampler
    if other.dense and not tree_bytes(sampler):
        return state, (None, sampler)
    geometry = other.geometry
    names = (() if other.dense else other.ends) + (() if other.sampler.stamp is None else (other.sampler.stamp,))

    block = min(BLOCK, geometry.capacity)

    def arrive(number: jax.Array, carry: Any) -> Any:
        anchors, sampler, token = carry
        start = number.astype(jnp.int32) * jnp.int32(block)
        slot = start + jnp.arange(block, dtype=jnp.int32)[:, None]
        there = slot < jnp.int32(geometry.capacity)
        values, _ = buffer.storage.read(state.rows, [Read(name, slot.reshape(-1)) for name in names])
        leaves = dict(zip(names, values, strict=True))
        stamp = _verbs.stamp_of(other, leaves, slot.shape)
        if anchors is None:
            change = _anchors.dense(slot, there, None, stamp)
        else:
            end, terminated = _verbs.ending(other, leaves, slot.shape)
            before = Ring(cursor=start[None], size=start[None], lap=jnp.ones((1,), jnp.uint32))
            count = jnp.minimum(jnp.int32(geometry.capacity) - start, jnp.int32(block))[None]
            anchors, change, token = _anchors.extend(
                anchors, other.view, geometry, before, end, terminated, None, stamp, None, token, arrive=count
            )
        change = dataclasses.replace(change, newest_stamp=_verbs.largest(stamp, there))
        return anchors, other.sampler.change(sampler, change, geometry, token), token

    blocks = -(-geometry.capacity // block)
    anchors, sampler, _ = lax.fori_loop(0, blocks, arrive, (empty.anchors, sampler, state.token))
    if anchors is not None and anchors.before is not None:
        anchors = dataclasses.replace(anchors, before=_openrows.counted(anchors.flags))
    return state, (anchors, sampler)


index_rows = Verb(_index_rows_core)


def filled(buffer: BufferConfig, call: str, state: BufferState) -> BufferState:
    """A state whose rows are there, with their anchors."""
    fresh = _verbs.fresh_sampler(buffer, call)
    anchors, sampler = index_rows(buffer, state, fresh, static=(buffer,))[1]
    return dataclasses.replace(state, anchors=anchors, sampler=sampler)
