"""Every storage on the same frames: bytes, time of a write and of a read, and whether their batches are the same.

The storages take turns, lot by lot and batch by batch, so that what else the machine does meets all of them. A write and a
read are those of the training step: 4 rows of 8 games, and 32 transitions of 4-frame stacks, each one donated `jit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

import fbuf
from fbuf._interfaces.storage import Growable, Storage
from fbuf.demo import _dqn

ROWS = 20_000  # compared at most: the newest of a run
CROWDED = 0.85  # load from which a table of blocks is made larger; soon after rows would give way
FITTED = 100  # steps of all lanes that a table is fitted to, at most
READS = 51  # batches timed
_GROUP = 25  # lots whose times are averaged before the median: `Compressed` works once for many lots


class Blocks(NamedTuple):
    """A table of distinct blocks, at the end of a run."""

    block: str  # lines x bytes of a block
    load: float  # of its places
    places: int
    grown: int  # times it was made larger
    gone: int  # rows refused or retired for want of places


@dataclass
class Column:
    """What one storage showed."""

    storage: str
    rows: int
    device_bytes: int
    host_bytes: int
    write: float = 0.0  # s a row
    read: float = 0.0  # s a batch
    identical: bool = True  # every batch, bit for bit, to those of the first storage
    blocks: Blocks | None = None


def fitted(name: str, rows: _dqn.Rows, capacity: int) -> Storage:
    """A storage of `_dqn.STORAGES`; a table of blocks gets blocks and places that suit rows `[N, E, ...]`."""
    storage = _dqn.STORAGES[name]()
    if isinstance(storage, fbuf.storages.Deduplicated):
        return storage.fit({leaf: x[:FITTED] for leaf, x in rows.items()}, capacity, _dqn.LANES)
    return storage


class Room:
    """Makes the table of a storage that has one larger, before rows have to give way.

    Attributes:
      grown: Times it did.
    """

    def __init__(self, buffer: fbuf.Buffer) -> None:
        self.grown = 0
        self._watch(buffer)

    def _watch(self, buffer: fbuf.Buffer) -> None:
        self._buffer = buffer
        self._load = jax.jit(lambda replay: buffer.stats(replay)["blocks_load"])

    def crowded(self, replay: fbuf.BufferState) -> bool:
        """Whether it is time to `grow`."""
        return isinstance(self._buffer.storage, Growable) and float(self._load(replay)) > CROWDED

    def grow(self, replay: fbuf.BufferState) -> tuple[fbuf.Buffer, fbuf.BufferState]:
        """The buffer to use from now on, for which everything compiles again, and its state."""
        buffer, replay = self._buffer.grow(replay)
        self.grown += 1
        self._watch(buffer)
        return buffer, replay

    def blocks(self, replay: fbuf.BufferState) -> Blocks | None:
        """Of the table as it is now; None: there is none."""
        storage = self._buffer.storage
        if not isinstance(storage, fbuf.storages.Deduplicated):
            return None
        stats = {name: np.asarray(value).item() for name, value in self._buffer.stats(replay).items()}
        gone = int(stats["refused_rows"] + stats["retired_rows"])
        lines, pixels = storage.block
        return Blocks(f"{lines}x{pixels}", stats["blocks_load"], storage.blocks, self.grown, gone)


def newest(buffer: fbuf.Buffer, replay: fbuf.BufferState, number: int) -> _dqn.Rows:
    """At most `number` of the newest rows, `[N, E, ...]`, numpy."""
    steps = min(number, int(buffer.size(replay))) // _dqn.LANES
    last = buffer.last(replay, max(1, steps))
    there = np.asarray(last.mask).all(axis=1)
    return jax.tree.map(lambda x: np.asarray(x)[there], last.data)


def compare(
    rows: _dqn.Rows, progress: Callable[[int, dict[str, str]], None] = lambda done, shown: None
) -> list[Column]:
    """Writes `rows` `[N, E, ...]` into every storage and draws batches with the same keys.

    Args:
      rows: In order of time; a rest of less than a lot is left out.
      progress: Called with lots and batches done, `number_of_turns` in all.
    Returns:
      A column a storage, in the order of `_dqn.STORAGES`; the first is what the others' batches are compared with.
    """
    sides = [_Side(name, rows) for name in _dqn.STORAGES]
    lots = _lots(rows)
    for i in range(lots):
        lot = {name: x[i * _dqn.ROWS_PER_STEP : (i + 1) * _dqn.ROWS_PER_STEP] for name, x in rows.items()}
        for side in _turned(sides, i):
            side.write(lot)
        progress(i + 1, {})
    for i in range(READS + 1):
        batches = {side.name: side.read(i) for side in _turned(sides, i)}
        first = batches[sides[0].name]
        for side in sides:
            side.identical &= _same(first, batches[side.name])
        progress(lots + i + 1, {})
    return [side.column() for side in sides]


def number_of_turns(rows: _dqn.Rows) -> int:
    """How far `compare` counts."""
    return _lots(rows) + READS + 1


def _lots(rows: _dqn.Rows) -> int:
    return len(rows["action"]) // _dqn.ROWS_PER_STEP


def _turned(sides: list[_Side], turn: int) -> list[_Side]:
    """Each goes first in its turn: what runs before a call decides what its caches hold."""
    at = turn % len(sides)
    return sides[at:] + sides[:at]


def _same(one: fbuf.Sample, other: fbuf.Sample) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


@dataclass
class _Side:
    """One storage while it is compared."""

    name: str
    rows: _dqn.Rows = field(repr=False)
    identical: bool = True

    def __post_init__(self) -> None:
        capacity = _lots(self.rows) * _dqn.ROWS_PER_STEP * _dqn.LANES
        buffer = _dqn.make_buffer(fitted(self.name, self.rows, capacity), capacity)
        self._replay = buffer.init(_dqn.example_row())
        self._room = Room(buffer)
        self._use(buffer)
        self._writes: list[float] = []
        self._reads: list[float] = []

    def _use(self, buffer: fbuf.Buffer) -> None:
        self._buffer = buffer
        self._compiled = False
        self._extend = jax.jit(buffer.extend, donate_argnums=0)
        self._sample = jax.jit(lambda replay, key: buffer.sample(replay, key, _dqn.BATCH_SIZE), donate_argnums=0)

    def write(self, lot: _dqn.Rows) -> None:
        if self._room.crowded(self._replay):
            buffer, self._replay = self._room.grow(self._replay)
            self._use(buffer)
        start = time.perf_counter()
        self._replay = jax.block_until_ready(self._extend(self._replay, lot))
        if self._compiled:
            self._writes.append(time.perf_counter() - start)
        self._compiled = True

    def read(self, turn: int) -> fbuf.Sample:
        """The batch of this turn, numpy; the first turn compiles and is not timed."""
        key = jax.random.key(turn)
        start = time.perf_counter()
        self._replay, batch = jax.block_until_ready(self._sample(self._replay, key))
        if turn:
            self._reads.append(time.perf_counter() - start)
        return jax.tree.map(np.asarray, batch)

    def column(self) -> Column:
        sizes: dict[str, Any] = self._buffer.nbytes(self._replay)
        held = int(self._buffer.size(self._replay))
        groups = [self._writes[i : i + _GROUP] for i in range(0, max(1, len(self._writes) - _GROUP + 1), _GROUP)]
        write = float(np.median([np.mean(group) for group in groups])) if self._writes else float("nan")
        return Column(
            self.name,
            held,
            sizes["device"],
            sizes["host"],
            write / (_dqn.ROWS_PER_STEP * _dqn.LANES),
            float(np.median(self._reads)),
            self.identical,
            self._room.blocks(self._replay),
        )
