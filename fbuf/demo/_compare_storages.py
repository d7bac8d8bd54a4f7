"""Compare storages on the same frames: bytes, time of a write and of a read, and their batches.

The storages take turns, write by write and batch by batch, so other load affects all. A write and a read are those of the
training step: 4 rows of 8 games, and 32 transitions of 4-frame stacks, each one donated `jit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

import fbuf
from fbuf._interfaces.storage import Storage
from fbuf.demo import _dqn

ROWS = 20_000  # compared at most: the newest of a run
MOST_LOAD = 0.85  # of a block table before it grows; soon after, rows would be evicted
FITTED = 100  # steps of all lanes that a table is fitted to, at most
READS = 51  # batches timed
_GROUP = 25  # writes averaged before the median: `Compressed` compresses once for many writes


class Blocks(NamedTuple):
    """A table of distinct blocks, at the end of a run."""

    block: str  # lines x bytes of a block
    load: float  # share of its slots in use
    slots: int
    grown: int  # how often it grew
    evicted: int  # rows refused or evicted for lack of slots


@dataclass
class Column:
    """The figures of one storage."""

    storage: str
    rows: int
    device_bytes: int
    host_bytes: int
    write: float  # seconds per row
    read: float  # seconds per batch
    identical: bool  # every batch is that of the first storage, bit for bit
    blocks: Blocks | None


def fitted_storage(name: str, rows: _dqn.Rows, capacity: int) -> Storage:
    """Return a storage of `_dqn.STORAGES`; a block table is fitted to rows `[N, E, ...]`."""
    storage = _dqn.STORAGES[name]()
    if isinstance(storage, fbuf.storages.Deduplicated):
        return storage.fit({leaf: x[:FITTED] for leaf, x in rows.items()}, capacity, _dqn.LANES)
    return storage


class TableGrowth:
    """Grow the block table of a deduplicated storage before rows must be evicted.

    Attributes:
      grown: How often the table grew.
    """

    def __init__(self, buffer: fbuf.Buffer) -> None:
        self.grown = 0
        self._watch(buffer)

    def _watch(self, buffer: fbuf.Buffer) -> None:
        self._buffer = buffer
        self._load = jax.jit(lambda replay: buffer.stats(replay)["blocks_load"])

    def is_due(self, replay: fbuf.BufferState) -> bool:
        """Return whether to call `grow`."""
        return self._buffer.storage.grows and float(self._load(replay)) > MOST_LOAD

    def grow(self, replay: fbuf.BufferState) -> tuple[fbuf.Buffer, fbuf.BufferState]:
        """Return the larger buffer, for which everything compiles again, and its state."""
        buffer, replay = self._buffer.grow(replay)
        self.grown += 1
        self._watch(buffer)
        return buffer, replay

    def blocks(self, replay: fbuf.BufferState) -> Blocks | None:
        """Return the figures of the current table; None without one."""
        storage = self._buffer.storage
        if not isinstance(storage, fbuf.storages.Deduplicated):
            return None
        stats = {name: np.asarray(value).item() for name, value in self._buffer.stats(replay).items()}
        evicted = int(stats["refused_rows"] + stats["retired_rows"])
        lines, pixels = storage.block
        return Blocks(f"{lines}x{pixels}", stats["blocks_load"], storage.blocks, self.grown, evicted)


def newest(buffer: fbuf.Buffer, replay: fbuf.BufferState, number: int) -> _dqn.Rows:
    """Return at most `number` of the newest rows, `[N, E, ...]`, numpy."""
    steps = min(number, int(buffer.size(replay))) // _dqn.LANES
    last = buffer.rows(replay, last=max(1, steps))
    complete = np.asarray(last.mask).all(axis=1)
    return jax.tree.map(lambda x: np.asarray(x)[complete], last.data)


def compare(
    rows: _dqn.Rows, progress: Callable[[int, dict[str, str]], None] = lambda done, shown: None
) -> list[Column]:
    """Write `rows` `[N, E, ...]` to every storage and draw batches with the same keys.

    Args:
      rows: In order of time; a remainder of less than one write is left out.
      progress: Called with the writes and batches done, `number_of_turns` in all.
    Returns:
      One column per storage, in the order of `_dqn.STORAGES`; batches are compared with those of the first.
    """
    trials = [_Trial(name, rows) for name in _dqn.STORAGES]
    writes = _number_of_writes(rows)
    for i in range(writes):
        part = {name: x[i * _dqn.ROWS_PER_STEP : (i + 1) * _dqn.ROWS_PER_STEP] for name, x in rows.items()}
        for trial in _rotate(trials, i):
            trial.write(part)
        progress(i + 1, {})
    for i in range(READS + 1):
        batches = {trial.name: trial.read(i) for trial in _rotate(trials, i)}
        for trial in trials:
            trial.identical &= _same(batches[trials[0].name], batches[trial.name])
        progress(writes + i + 1, {})
    return [trial.column() for trial in trials]


def number_of_turns(rows: _dqn.Rows) -> int:
    """Return how far `compare` counts."""
    return _number_of_writes(rows) + READS + 1


def _number_of_writes(rows: _dqn.Rows) -> int:
    return len(rows["action"]) // _dqn.ROWS_PER_STEP


def _rotate(trials: list[_Trial], turn: int) -> list[_Trial]:
    """Let each storage go first in turn, since the call before decides what is in the caches."""
    at = turn % len(trials)
    return trials[at:] + trials[:at]


def _same(one: fbuf.Sample, other: fbuf.Sample) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


class _Trial:
    """One storage during the comparison."""

    def __init__(self, name: str, rows: _dqn.Rows) -> None:
        self.name, self.identical = name, True
        capacity = _number_of_writes(rows) * _dqn.ROWS_PER_STEP * _dqn.LANES
        buffer = _dqn.make_buffer(fitted_storage(name, rows, capacity), capacity)
        self._replay = buffer.init(_dqn.example_row())
        self._growth = TableGrowth(buffer)
        self._use(buffer)
        self._writes: list[float] = []
        self._reads: list[float] = []

    def _use(self, buffer: fbuf.Buffer) -> None:
        self._buffer = buffer
        self._compiled = False
        self._extend = jax.jit(buffer.extend, donate_argnums=0)
        self._sample = jax.jit(lambda replay, key: buffer.sample(replay, key, _dqn.BATCH_SIZE), donate_argnums=0)

    def write(self, rows: _dqn.Rows) -> None:
        if self._growth.is_due(self._replay):
            buffer, self._replay = self._growth.grow(self._replay)
            self._use(buffer)
        start = time.perf_counter()
        self._replay = jax.block_until_ready(self._extend(self._replay, rows))
        if self._compiled:
            self._writes.append(time.perf_counter() - start)
        self._compiled = True

    def read(self, turn: int) -> fbuf.Sample:
        """Return the batch of this turn, numpy; the first turn compiles and is not timed."""
        key = jax.random.key(turn)
        start = time.perf_counter()
        self._replay, batch = jax.block_until_ready(self._sample(self._replay, key))
        if turn:
            self._reads.append(time.perf_counter() - start)
        return jax.tree.map(np.asarray, batch)

    def column(self) -> Column:
        sizes: dict[str, Any] = self._buffer.nbytes(self._replay)
        groups = [self._writes[i : i + _GROUP] for i in range(0, max(1, len(self._writes) - _GROUP + 1), _GROUP)]
        write = float(np.median([np.mean(group) for group in groups])) if self._writes else float("nan")
        return Column(
            storage=self.name,
            rows=int(self._buffer.size(self._replay)),
            device_bytes=sizes["device"],
            host_bytes=sizes["host"],
            write=write / (_dqn.ROWS_PER_STEP * _dqn.LANES),
            read=float(np.median(self._reads)),
            identical=self.identical,
            blocks=self._growth.blocks(self._replay),
        )
