"""`HostDraws`: draws for NumPy and torch in NumPy, where the rows are in CPU memory and all equally likely.

A jitted draw of 256 small rows takes 200 to 500 us in a Python loop, most of it for dispatch. Here one program computes the
random bits of several draws. Slots, generations and reads of rows are computed by NumPy in the memory of the state's arrays.
Batches equal those of `Buffer.sample` bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from fbuf._algorithms import random
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._replay import host_reads
from fbuf._replay.host_reads import HostBatch
from fbuf._replay.host_rings import HostRings, generation
from fbuf._replay.row_block import RowBlock
from fbuf.samplers import Uniform

_AHEAD = 1 << 13  # rows whose random bits one call computes


@functools.lru_cache(maxsize=64)
def random_draws(size: int, impl: str) -> Any:
    """Return a jitted function from a key's data to those after each of several draws, and the random bits of each."""

    def draws(key_data: jax.Array) -> Any:
        def one(key: jax.Array, _: None) -> Any:
            key, now = jax.random.split(key)
            random.consume(now)
            return key, (jax.random.key_data(key), *random.pairs(now, size, random.BELOW))

        first = jax.random.wrap_key_data(key_data, impl=impl)
        return jax.lax.scan(one, first, None, length=max(1, _AHEAD // size))[1]

    return jax.jit(draws)


class HostDraws:
    """Draws from states of one buffer.

    Args:
      buffer, state: Of the replay; `host_draws` says which can have them.
      impl: Of its keys.
    """

    def __init__(self, buffer: Buffer, state: BufferState, impl: str):
        self._geometry, self._lanes, self._impl = buffer.geometry, buffer.lanes, impl
        self._rings = HostRings(buffer.geometry)
        self._size = 0  # of the last draw
        self._key: Any = None  # after it
        self._next: Any = iter(())  # keys and random bits of the next draws
        self._structure = host_reads.structure_of(state.rows)

    def draw(self, state: BufferState, block: RowBlock | None, key: Any, size: int) -> tuple[Any, HostBatch] | None:
        """Return the data of the next key and a batch of the state with the rows of `block`; None if there are none."""
        lanes, length, _ = self._geometry
        count = 0 if block is None else block.count
        cursor, held, lap = self._rings.read(state.header, count)
        total = int(held.sum())
        if not total:
            return None
        self._key, first, second = self._bits(key, size)
        # As `random.randint_below`: the high word of a product of 64 and 32 bits.
        rank = first * total
        rank += second * total >> 32
        rank = (rank >> 32).view(np.int64)
        lane: Any = 0
        if lanes > 1:
            ends = np.cumsum(held)
            lane = np.searchsorted(ends, rank, side="right")
            rank -= (ends - held)[lane]
        position = (rank + (cursor - held)[lane]) % length
        ticket = generation(position, cursor[lane], lap[lane])
        slot = position * lanes + lane if lanes > 1 else position
        leaves = host_reads.take(state.rows, slot)
        if block is not None and count:
            step = rank - held[lane] + count  # in the block, negative for rows that are written
            (new,) = (step >= 0).nonzero()
            if new.size:
                at = step[new] if self._lanes is None else (step[new], lane[new] if lanes > 1 else 0)
                for leaf, column in zip(leaves, block.columns, strict=True):
                    leaf[new] = column[at]
        chance = np.full(size, np.float32(1) / np.float32(total))
        leaves += [
            slot.astype(np.int32),
            ticket.astype(np.uint32),
            chance,
            np.ones(size, np.float32),
            np.ones(size, bool),
        ]
        return self._key, HostBatch(leaves, self._structure)

    def _bits(self, key: Any, size: int) -> Any:
        """Return the data of the next key and the random bits of a draw."""
        if key is not self._key or size != self._size:
            self._next, self._size = iter(()), size
        drawn = next(self._next, None)
        if drawn is None:
            keys, *bits = map(np.asarray, random_draws(size, self._impl)(jax.device_put(key)))
            self._next = iter(zip(keys, *(part.astype(np.uint64) for part in bits), strict=True))
            drawn = next(self._next)
        return drawn


def host_draws(buffer: Buffer, state: BufferState, impl: str) -> HostDraws | None:
    """Return the draws of a uniform buffer whose rows NumPy can read; None for others."""
    equal = type(buffer.sampler) is Uniform and host_reads.can_read(buffer, state)
    return HostDraws(buffer, state, impl) if equal else None
