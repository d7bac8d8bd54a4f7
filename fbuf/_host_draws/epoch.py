"""`EpochDraws`: draws of `Epoch` in NumPy.

The position in the epoch stays in NumPy between draws. `settle` puts it into the state before anything else reads or writes
that. Programs of the sampler begin an epoch, and compute some thousands of places of its order at once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.dispatch import with_fields
from fbuf._host_draws.deferred import ReplayEngine
from fbuf._host_draws.draws import Drawn, HostDraws, equal_chances
from fbuf._host_draws.row_block import RowBlock
from fbuf.samplers import Epoch
from fbuf.samplers._epoch import EpochPosition

_AHEAD = 1 << 14  # places of an order that one call computes
Numbers = np.ndarray[Any, Any]


@functools.lru_cache(maxsize=64)
def begin(sampler: Epoch, impl: str) -> Any:
    """Return a jitted function from a position, anchors int32[E] and a key's data to the position where an epoch begins."""

    def begun(position: EpochPosition, counts: jax.Array, key_data: jax.Array) -> EpochPosition:
        return sampler.begun(position, counts, jax.random.wrap_key_data(key_data, impl=impl))

    return jax.jit(begun)


@functools.lru_cache(maxsize=64)
def order(buffer: Buffer, number: int) -> Any:
    """Return a jitted function from a position and a place to the anchors at `number` places of its order from there on."""
    sampler: Any = buffer.sampler

    def ordered(position: EpochPosition, first: jax.Array) -> jax.Array:
        place, size = first + jnp.arange(number, dtype=jnp.int32), jnp.sum(position.start, dtype=jnp.int32)
        numbers: jax.Array = sampler.numbers_at(position, place, size, buffer.geometry)
        return numbers

    return jax.jit(ordered)


def key_words(key: jax.Array, size: int) -> jax.Array:
    """Return the data of a key, which names the order of an epoch that begins with it."""
    return jax.random.key_data(key)


def _masked(compute: Any, number: int, capacity: int, name: str) -> Any:
    """Return what `compute` does, of a batch of which `number` entries are rows."""
    found = compute(name)
    found[number:] = capacity if name == "slot" else 0
    return found


class _Position(NamedTuple):
    """A position in an epoch, in NumPy."""

    of: EpochPosition  # as in a state, but for `taken`
    start: Numbers  # int64[E]
    closed: Numbers  # int64[E], without those that collected rows closed
    before: Numbers  # int64[E], of the lanes before
    total: int
    taken: int
    order: tuple[Any, ...]  # what names it


class _Draw(NamedTuple):
    """A draw while it is made."""

    position: _Position  # before it
    counts: Numbers  # int64[E], anchors
    closed: Numbers  # int64[E], since the epoch began, with collected rows; perhaps newer ones too
    number: Numbers | None  # int32[N], the anchors drawn by their numbers in the epoch; None where an epoch begins
    taken: int = 0  # places of the order, after it
    left: int = 0  # anchors that are left, as far as the end of the epoch depends on it


class EpochDraws(HostDraws):
    """Draws from the epochs of states of one buffer. Batches without anchors are drawn by programs."""

    bits: Any = staticmethod(key_words)
    word: Any = np.uint32

    def __init__(self, buffer: Buffer, impl: str, view: Any, names: list[str]):
        super().__init__(buffer, impl, view, names)
        assert isinstance(buffer.sampler, Epoch)
        self._sampler = buffer.sampler
        self.drop()
        self._ahead: tuple[Any, int, Numbers] = None, 0, np.zeros(0, np.int32)  # of an order, places from one on
        self._draw: Any = None

    def drop(self) -> None:
        """Forget the position."""
        self._read_from: EpochPosition | None = None  # that of the state after which `_position` is
        self._position: Any = None
        self._waits = False  # `_position` is not in the state

    def draw(self, engine: ReplayEngine, block: RowBlock | None, key: Any, size: int, numbers: Any) -> Any:
        """Draw as `HostDraws`; entries beyond the last anchor of the epoch are masked."""
        batch = super().draw(engine, block, key, size, numbers)
        if batch is not None:
            position, *_, number, taken, left = self._draw
            drawn = batch[1]
            if number.size < size:
                for leaf in drawn.leaves:
                    leaf[number.size :] = 0
                drawn.rows.compute = functools.partial(_masked, drawn.rows.compute, number.size, self._buffer.capacity)
            drawn.last = np.array(left < self._least(size))
            self._position, self._waits = position._replace(taken=taken), True
        return batch

    def settle(self, engine: ReplayEngine) -> None:
        """Put the position into the state, if it waits."""
        state, position = engine.state, self._position
        if self._waits and state.sampler.position is self._read_from:
            home = state.header.sharding if state.header.committed else None
            of = with_fields(position.of, {"taken": jax.device_put(np.int32(position.taken), home)})
            engine.state = with_fields(state, {"sampler": with_fields(state.sampler, {"position": of})})
            self._read_from, self._position = of, position._replace(of=of)
        self._waits = False

    def compilations(self, state: BufferState, size: int, numbers: Any, block: RowBlock | None) -> list[Any]:
        """Return those that begin an epoch, and continue its order."""
        position = state.sampler.position
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=self._impl)))
        return [
            functools.partial(begin(self._sampler, self._impl).lower, position, position.start, key),
            functools.partial(order(self._buffer, self._places(size)).lower, position, np.int32(0)),
        ]

    def _least(self, size: int) -> int:
        """Return the rows of the smallest batch."""
        return size if self._sampler.drop_last else 1

    def _count(self, engine: ReplayEngine, block: RowBlock | None, size: int) -> int:
        """Return the number of anchors, 0 also if they are too few for a batch; find those to draw.

        Where an epoch begins, the collected rows are written first, so that of its anchors none has closed in the state.
        """
        self._draw = self._find(engine, block, size)
        if self._draw.number is None and block is not None and block.count:
            engine.flush()
            if block.count:  # they could not be stored
                return 0
            self._draw = self._find(engine, block, size)
        total = int(self._draw.counts.sum())
        return total if total >= self._least(size) else 0

    def _drawn(self, engine: ReplayEngine, more: int, total: int, bits: Any, size: int, numbers: Any) -> Drawn | None:
        position, counts, closed, number, *_ = self._draw
        if number is None:
            begun = begin(self._sampler, self._impl)(position.of, engine.state.sampler.held, jax.device_put(bits))
            position, closed = _in_numpy(begun), np.zeros_like(closed)
            self._draw = self._search(_Draw(position, counts, closed, None), size)
            number = self._draw.number
        rank = number.astype(np.int64)  # of the epoch; then of all anchors, lane by lane
        if counts.size == 1:
            rank -= closed[0]
        else:
            shift = np.cumsum(counts) - counts - closed - position.before
            rank += shift.take(self._lane(position, rank))
        if rank.size < size:
            rank = np.concatenate([rank, np.broadcast_to(rank[:1], size - rank.size)])  # to be masked
        if self._anchors is None:
            slot, new = self._slots(self._rings.read(engine.state.header, more), rank), None
        else:
            slot, new = self._anchors.slots(engine.arrays.read(engine.state)[2], rank)
        return Drawn(slot, functools.partial(equal_chances, size, position.total), new)

    def _find(self, engine: ReplayEngine, block: RowBlock | None, size: int) -> _Draw:
        """Find the anchors to draw from a state and collected rows."""
        header, more = engine.state.header, 0 if block is None else block.count
        rings = self._rings.read(header)
        if self._anchors is None:
            counts = self._rings.read(header, more).size
            closed = rings.size + more - counts
        else:
            self._anchors.follow(engine.state, engine.arrays, rings, block)
            counts, closed = self._anchors.counts()
        at = engine.state.sampler.position
        if at is not self._read_from:
            self._read_from, self._position, self._waits = at, _in_numpy(at), False
        position = self._position
        return self._search(_Draw(position, counts, position.closed + closed, None), size)

    def _search(self, draw: _Draw, size: int) -> _Draw:
        """Find the next anchors of an epoch, as `Epoch.draw_some`."""
        position, _, closed, *_ = draw
        total, taken, least = position.total, position.taken, self._least(size)
        some = bool(closed.any())  # have closed
        place, found, numbers, wide = taken, 0, list[Numbers](), size + size // 8 + 8
        oldest = position.before + closed
        while place < total and found < (size + least if some else size):
            number = self._order(position, place, min(wide, total - place), size)
            place += number.size
            if some:
                live = number >= (oldest[0] if oldest.size == 1 else oldest.take(self._lane(position, number)))
                upto = found + np.cumsum(live)
                passed, found = int(upto.searchsorted(size, side="right")), int(upto[-1])
                number = number[:passed][live[:passed]]
            else:
                passed, found = min(number.size, size - found), found + number.size
                number = number[:passed]
            numbers.append(number)
            taken += passed
        if found < least:
            return draw
        number = numbers[0] if len(numbers) == 1 else np.concatenate(numbers)
        return draw._replace(number=number, taken=taken, left=found - size if some else total - taken)

    def _lane(self, position: _Position, number: Numbers) -> Numbers:
        """Return the lanes of anchors of the epoch."""
        return (position.before + position.start).searchsorted(number, side="right")

    def _places(self, size: int) -> int:
        """Return the places that one call of `order` computes."""
        return min(max(_AHEAD, 2 * size + 16), self._buffer.capacity)

    def _order(self, position: _Position, place: int, number: int, size: int) -> Numbers:
        """Return the anchors int32[N] at places of the order."""
        name, first, ahead = self._ahead
        if name != position.order or not first <= place <= first + ahead.size - number:
            first_place = jax.device_put(np.int32(place))
            ahead = np.asarray(order(self._buffer, self._places(size))(position.of, first_place))
            first, self._ahead = place, (position.order, place, ahead)
        return ahead[place - first : place - first + number]


def _in_numpy(position: EpochPosition) -> _Position:
    start, closed = (np.array(memoryview(x)).astype(np.int64) for x in (position.start, position.closed))
    names = [None if x is None else bytes(memoryview(x)) for x in (position.key, position.order)]
    before, total, taken = np.cumsum(start) - start, int(start.sum()), int(np.array(memoryview(position.taken)))
    return _Position(position, start, closed, before, total, taken, (*names, total))
