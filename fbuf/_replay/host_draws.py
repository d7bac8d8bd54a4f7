"""`HostDraws`: draws for NumPy and torch in NumPy, where the rows are in CPU memory and all anchors equally likely.

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
from fbuf._replay.host_anchors import HostAnchors
from fbuf._replay.host_reads import HeldArrays, HeldRows, HostBatch
from fbuf._replay.host_rings import HostRings, Rings, generation
from fbuf._replay.row_block import RowBlock
from fbuf.samplers import Uniform

_AHEAD = 1 << 13  # rows whose random bits one call computes
_LANES = 64  # beyond, a program is faster than a loop over the lanes of each row


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
      buffer: Of the replay; `host_draws` says which can have them.
      impl: Of its keys.
      view: The buffer's, in NumPy.
      names: Of the leaves of a row.
    """

    def __init__(self, buffer: Buffer, impl: str, view: Any, names: list[str]):
        self._buffer, self._geometry, self._impl = buffer, buffer.geometry, impl
        self._rings = HostRings(buffer.geometry)
        self._size = 0  # of the last draw
        self._key: Any = None  # after it
        self._next: Any = iter(())  # keys and random bits of the next draws
        self._view = view
        self._anchors = None if buffer.dense else HostAnchors(buffer, names, view)
        self._structure = host_reads.structure_of(view.example)

    def draw(
        self, state: BufferState, arrays: HeldArrays, block: RowBlock | None, key: Any, size: int
    ) -> tuple[Any, HostBatch] | None:
        """Return the data of the next key and a batch of the state, of these arrays, with the rows of `block`.

        None if there are no anchors, or if NumPy rounds this batch otherwise than XLA.
        """
        lanes, count = self._geometry.lanes, 0 if block is None else block.count
        rings = self._rings.read(state.header, count)
        if self._anchors is None:
            total = int(rings.size.sum())
        else:
            total = self._anchors.follow(state, self._rings.read(state.header), block)
        if not total:
            return None
        after, first, second = self._bits(key, size)
        self._key = None  # an interrupt may come before the end
        # As `random.randint_below`: the high word of a product of 64 and 32 bits.
        rank = first * total
        rank += second * total >> 32
        rank = (rank >> 32).view(np.int64)
        leaves, flags, queue = arrays.read(state)
        if self._anchors is None:
            (slot, lane), fresh = self._slots(rings, rank), None
        else:
            (slot, lane), fresh = self._anchors.slots(queue, rank), self._anchors.flags
        rows = HeldRows(self._buffer, leaves, flags, self._rings.read(state.header).cursor, block, fresh)
        view = self._view
        rows.around(slot, lane, view.back, view.ahead)
        leaves = view.read(rows, slot)
        if leaves is None:
            return None
        position = slot // lanes if lanes > 1 else slot
        written, before = (
            rings.lap.astype(np.uint32),
            generation(0, 0, rings.lap).astype(np.uint32),
        )  # in this lap, or before
        ticket = np.where(position < rings.cursor[lane], written[lane], before[lane])
        chance = np.full(size, np.float32(1) / np.float32(total))
        leaves += [
            slot.astype(np.int32),
            ticket,
            chance,
            np.ones(size, np.float32),
            np.ones(size, bool),
        ]
        self._key = after
        return after, HostBatch(leaves, self._structure)

    def _slots(self, rings: Rings, rank: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
        """Return the slots of rows int64[B], counted lane by lane, oldest first; and their lanes, 0 of one."""
        (lanes, length, _), (cursor, held, _) = self._geometry, rings
        if lanes == 1:
            return (rank + (cursor[0] - held[0])) % length, 0
        ends = np.cumsum(held)
        lane = np.searchsorted(ends, rank, side="right")
        rank = rank - (ends - held)[lane]
        return (rank + (cursor - held)[lane]) % length * lanes + lane, lane

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


def host_draws(buffer: Buffer, impl: str, view: Any, names: list[str]) -> HostDraws | None:
    """Return the draws of a uniform buffer whose rows, of leaves `names`, a view reads in NumPy; None for others."""
    if view is None or type(buffer.sampler) is not Uniform or buffer.sampler.by_episode:
        return None
    return HostDraws(buffer, impl, view, names) if buffer.dense or buffer.geometry.lanes <= _LANES else None
