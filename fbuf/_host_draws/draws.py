"""`HostDraws`: draws for NumPy and torch in NumPy, where the rows are in CPU memory, or in a store on the host.

A jitted draw of 256 small rows takes 200 to 500 us in a Python loop, most of it for dispatch. Here one program computes the
random bits of several draws. NumPy computes slots and generations, and reads rows as their storage says (`Storage.on_host`).
Batches equal those of `Buffer.sample` bit for bit. For priorities see `fbuf._host_draws.prioritized`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import random
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._host_draws.anchors import HostAnchors
from fbuf._host_draws.deferred import Deferred, ReplayEngine
from fbuf._host_draws.reads import BatchStructure, DrawnRows, HeldRows, HostBatch
from fbuf._host_draws.rings import HostRings, Rings
from fbuf._host_draws.row_block import RowBlock

_WORD = np.array(32)  # bits; NumPy takes half as long with an array as with an int
_AHEAD = 1 << 16  # rows whose random bits one call computes


@functools.lru_cache(maxsize=64)
def random_draws(size: int, impl: str, bits: Any) -> Any:
    """Return a jitted function from a key's data to those after each of several draws, and what `bits` makes of each key."""

    def of(key: jax.Array) -> Any:
        random.consume(key)
        return bits(key, size)

    def draws(key_data: jax.Array) -> Any:
        def one(key: jax.Array, _: None) -> Any:
            key, now = jax.random.split(key)
            return key, (jax.random.key_data(key), now if mapped else of(now))

        first = jax.random.wrap_key_data(key_data, impl=impl)
        after, each = jax.lax.scan(one, first, None, length=max(1, _AHEAD // size))[1]
        return after, jax.vmap(of)(each) if mapped else each

    mapped = impl == "threefry2x32"  # random numbers of others depend on what is mapped over
    return jax.jit(draws)


def uniform_bits(key: jax.Array, size: int) -> jax.Array:
    """Return the random words uint32[2, B] of a uniform draw."""
    return jnp.stack(random.pairs(key, size, random.BELOW))


class Drawn(NamedTuple):
    """Anchors that were drawn."""

    slot: np.ndarray[Any, Any]  # int64[B]
    chances: Callable[[str], np.ndarray[Any, Any]]  # computes "probability" or "weight" float32[B]
    new: np.ndarray[Any, Any] | None = None  # those that opened with collected rows, where known


def equal_chances(size: int, total: Any, name: str) -> np.ndarray[Any, Any]:
    """Return the "probability" or "weight" float32[B] of a uniform draw of `total` anchors."""
    return np.full(size, np.float32(1) / np.float32(total if name == "probability" else 1))


class HostDraws(Deferred):
    """Draws from states of one buffer.

    Args:
      buffer: Of the replay; `choose.host_draws` says which can have them.
      impl: Of its keys.
      view: The buffer's, in NumPy.
      names: Of the leaves of a row.
    """

    bits: Any = staticmethod(uniform_bits)
    word: Any = np.int64  # of the bits, in NumPy

    def __init__(self, buffer: Buffer, impl: str, view: Any, names: list[str]):
        self._buffer, self._geometry, self._impl = buffer, buffer.geometry, impl
        self._rings = HostRings(buffer.geometry)
        self._shape = self._geometry.lanes, self._geometry.length, buffer.lanes is not None
        self._size = 0  # of the last draw
        self._key: Any = None  # after it
        self._total, self._factor = 0, np.array(0)  # anchors of the last uniform draw
        self._next: Any = iter(())  # keys and random bits of the next draws
        self._view = view
        self._anchors = None if buffer.dense else HostAnchors(buffer, names, view)
        self._structure = BatchStructure(view.example)

    def draw(
        self, engine: ReplayEngine, block: RowBlock | None, key: Any, size: int, numbers: Any
    ) -> tuple[Any, HostBatch] | None:
        """Return the data of the next key and a batch of the engine's state with the rows of `block`.

        None if there are no anchors, if NumPy rounds this batch otherwise than XLA, or if a row cannot be read.
        """
        total = self._count(engine, block, size)
        if not total:
            return None
        state, anchors, more = engine.state, self._anchors, 0 if block is None else block.count
        after, bits = self._bits(key, size)
        drawn = self._drawn(engine, more, total, bits, size, numbers)
        if drawn is None:
            return None
        slot = drawn.slot
        read, flags, _ = engine.arrays.read(state)
        rows = HeldRows(*self._shape, read, flags, block, None if anchors is None else anchors.flags)
        rows.around(slot, self._rings.read(state.header), self._view.ahead, drawn.new)
        leaves = self._view.read(rows, slot)
        if leaves is None:
            return None
        self._key = after
        generations = self._rings.generations(state.header, more)

        def compute(name: str) -> Any:
            if name == "slot":
                return slot.astype(np.int32)
            if name == "generation":
                return generations(slot)
            return np.ones(size, bool) if name == "mask" else drawn.chances(name)

        return after, HostBatch(self._structure, leaves, DrawnRows(slot, compute))

    def compilations(self, state: BufferState, size: int, numbers: Any, block: RowBlock | None) -> list[Any]:
        """Return functions that lower the programs of such draws, but for the random bits; with the rows of `block`, if any."""
        return []

    def _count(self, engine: ReplayEngine, block: RowBlock | None, size: int) -> int:
        """Return the number of anchors of the engine's state with the rows of `block`; 0 also where only a program can draw."""
        if self._anchors is None:
            return self._rings.total(engine.state.header, 0 if block is None else block.count)
        return self._anchors.follow(engine.state, engine.arrays, self._rings.read(engine.state.header), block)

    def _drawn(self, engine: ReplayEngine, more: int, total: int, bits: Any, size: int, numbers: Any) -> Drawn | None:
        """Draw from `total` anchors, of a state and `more` rows in each lane. None: only a program can."""
        # As `random.randint_below`: the high word of a product of 64 and 32 bits. `total` has 31.
        if total != self._total:
            self._total, self._factor = total, np.array(total)
        rank, low = bits * self._factor
        low >>= _WORD
        rank += low
        rank >>= _WORD
        if self._anchors is None:
            slot, new = self._slots(self._rings.read(engine.state.header, more), rank), None
        else:
            slot, new = self._anchors.slots(engine.arrays.read(engine.state)[2], rank)
        return Drawn(slot, functools.partial(equal_chances, size, total), new)

    def _slots(self, rings: Rings, rank: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the slots of rows int64[B], counted lane by lane, oldest first."""
        (lanes, length, _), (cursor, sizes, *_) = self._geometry, rings
        if lanes == 1:
            return (rank + (cursor[0] - sizes[0])) % length
        ends = np.cumsum(sizes)
        lane = np.searchsorted(ends, rank, side="right")
        rank = rank - (ends - sizes)[lane]
        return (rank + (cursor - sizes)[lane]) % length * lanes + lane

    def _bits(self, key: Any, size: int) -> Any:
        """Return the data of the next key and the random bits of a draw."""
        last, self._key = self._key, None  # an error may come before the end
        if key is not last or size != self._size:
            self._next, self._size = iter(()), size
        drawn = next(self._next, None)
        if drawn is None:
            keys, bits = random_draws(size, self._impl, self.bits)(jax.device_put(key))
            bits = np.asarray(bits)
            bits = bits.astype(self.word) if self.word is np.int64 else bits.view(self.word)
            self._next = iter(zip(np.asarray(keys), bits, strict=True))
            drawn = next(self._next)
        return drawn
