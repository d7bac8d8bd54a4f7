"""Batches for NumPy and torch whose rows NumPy reads: those of a state as its storage says, and those of a `RowBlock`.

XLA reads large arrays with several threads on CPUs, which costs more than NumPy's reads of some hundred rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fbuf._buffer.state import BufferState
from fbuf._core.pytree import PyTree, flat_keys
from fbuf._core.sample import Index, Sample, deferring
from fbuf._host_draws.rings import Rings
from fbuf._host_draws.row_block import RowBlock
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._interfaces.storage import HostRead, Storage
from fbuf.samplers._epoch import EpochState

FEW = 8  # rows that a loop copies faster than NumPy, whose functions are slow where they did not run lately


class BatchStructure:
    """The structure of batches of data such as `example`."""

    def __init__(self, example: PyTree):
        structure: Any = jax.tree.structure(example)
        self._structure, self._keys = structure, flat_keys(structure)

    def batch(self, leaves: list[Any], compute: Callable[[Sample, str], Any], last: Any) -> Sample:
        """Return a batch, as `unflatten`, which takes longer between calls of torch."""
        data = self._structure.unflatten(leaves) if self._keys is None else dict(zip(self._keys, leaves, strict=True))
        batch: Sample = deferring(Sample, compute, data=data, ragged=None, last=last)
        return batch


class DrawnRows:
    """Rows of a batch.

    Args:
      slot: int64[B], which nothing changes; also where entries are masked.
      compute: Computes what a `Sample` calls "probability", "weight" or "mask", and "slot" and "generation" of its index.
    """

    def __init__(self, slot: np.ndarray[Any, Any], compute: Callable[[str], np.ndarray[Any, Any]]):
        self.slot, self.compute = slot, compute

    def index(self, convert: Any) -> Index:
        """Return the index as `convert` makes its arrays."""
        index: Index = deferring(Index, lambda _, name: convert(self.compute(name)), _drawn=self)
        return index


def drawn_rows(index: Index) -> DrawnRows | None:
    """Return what an index is computed from; None unless it is of a `HostBatch` and nothing of it was read."""
    fields = vars(index)
    return None if "slot" in fields or "generation" in fields else fields.get("_drawn")


class HostBatch:
    """A `Sample` as NumPy arrays that nothing else refers to.

    Most programs that draw uniformly read the data alone, and each other array would cost a microsecond.

    Args:
      structure: Of the data.
      leaves: Of the data.
      rows: What the rest of the batch is computed from.
    """

    def __init__(self, structure: BatchStructure, leaves: list[np.ndarray[Any, Any]], rows: DrawnRows):
        self.leaves, self.rows, self._structure = leaves, rows, structure
        self.last: np.ndarray[Any, Any] | None = None

    def to_numpy(self) -> Sample:
        """Return a batch of arrays."""
        return self._converted(np.asarray)

    def to_torch(self) -> Sample:
        """Return a batch of tensors."""
        return self._converted(_from_numpy())

    def _converted(self, convert: Any) -> Sample:
        rows = self.rows

        def compute(_: Sample, name: str) -> Any:
            return rows.index(convert) if name == "index" else convert(rows.compute(name))

        last = None if self.last is None else convert(self.last)
        return self._structure.batch(list(map(convert, self.leaves)), compute, last)


@functools.cache
def _from_numpy() -> Any:
    from fbuf.torch._dtypes import import_torch

    return import_torch("Replay.sample").from_numpy


class At(NamedTuple):
    """Where rows are: in slots of the state, modulo C, except for those that are in a `RowBlock`."""

    slot: np.ndarray[Any, Any]
    new: Any = None  # which are in the block, if any; few as a list
    index: Any = None  # of these in the columns of the block; so of each of few


def queue_of(sampler: Any) -> AnchorQueue | None:
    """Return the queue of anchors that a sampler's state is or has; None if it has none."""
    queue = sampler.log if isinstance(sampler, EpochState) else sampler
    return queue if isinstance(queue, AnchorQueue) else None


class HeldArrays:
    """NumPy's views of the arrays of a state, and the read of its rows in `storage`, which the next draw uses again.

    A view that outlives the state would make the next write copy the rows: `release` them before.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.lent: Any = None  # header of a state that the caller may donate
        self.release()

    def release(self) -> None:
        """Drop the views."""
        self._header: Any = None
        self._known: tuple[HostRead | None, Any, Any] = None, None, None

    def read(self, state: BufferState) -> tuple[HostRead | None, Any, Any]:
        """Return the read of the rows, the flags and the queue of anchors; None where there is none."""
        if state.header is self._header:
            return self._known
        self.release()
        rows = self._storage.on_host(state.rows)
        flags = None if state.anchors is None else np.asarray(memoryview(state.anchors.flags))
        anchors = queue_of(state.sampler)
        queue = None if anchors is None else np.asarray(memoryview(anchors.slot))
        known = rows, flags, queue
        if state.header is not self.lent:
            self._known, self._header = known, state.header
        return known


class HeldRows:
    """Rows of a state and those collected since, by slot.

    Args:
      lanes, length: Of the buffer's geometry.
      by_lane: Whether collected rows have a dimension of lanes.
      read, flags: Of the state, from `HeldArrays`.
      block: The collected rows, or None.
      fresh: The flags of the collected rows.
    """

    def __init__(
        self, lanes: int, length: int, by_lane: bool, read: Any, flags: Any, block: RowBlock | None, fresh: Any
    ):
        self.lanes, self._length, self._by_lane = lanes, length, by_lane
        self._read, self._flags, self._block, self._fresh = read, flags, block, fresh
        self._near: np.ndarray[Any, Any] | None = None  # entries of a batch some of whose rows may be in the block
        self._few: list[int] = []  # them, if few
        self._begin: Any = 0  # the slot of the first row of the block, less its lane; of each of these entries

    def around(self, slot: np.ndarray[Any, Any], rings: Rings, ahead: int, new: np.ndarray[Any, Any] | None) -> None:
        """Prepare to read rows around slots int64[B], up to `ahead` after them, in the block or a state of these rings.

        Only those of the entries `new` may be in the block. By default these are found by their slots. Of an anchor whose
        earlier rows the block overwrites, which are of another episode, no collected row is read.
        """
        if self._block is None or not self._block.count:
            return
        first: Any = rings.next_slot
        if new is None:
            cursor = first // self.lanes if first is not None else rings.cursor.take(slot % self.lanes)
            begin, number = (cursor - ahead) * self.lanes, (self._block.count + ahead) * self.lanes
            step = slot - begin
            if first is None or not 0 <= begin <= self._length * self.lanes - number:
                step %= self._length * self.lanes
            (new,) = (step.view(np.uint64) < number).nonzero()  # those before are large
        if new.size:
            self._near = new
            self._begin = first if first is not None else rings.cursor.take(slot.take(new) % self.lanes) * self.lanes
            self._few = new.tolist() if new.size <= FEW and first is not None else []

    def at(self, slot: np.ndarray[Any, Any], by_step: bool = False) -> At:
        """Return the places of slots int64[B], [B, T], or if `by_step` [T, B], in range modulo C."""
        if self._near is None or self._block is None:
            return At(slot)
        if self._few:
            return self._at_few(slot, by_step, self._block.count)
        step = slot.take(self._near, -1 if by_step else 0)
        step -= self._begin if by_step or step.ndim == 1 or np.ndim(self._begin) == 0 else self._begin[:, None]
        step %= self._length * self.lanes
        found = (step < self._block.count * self.lanes).nonzero()
        if not found[0].size:
            return At(slot)
        entry, index = self._near.take(found[by_step]), step[found]
        new: Any = (found[0], entry) if by_step else (entry, *found[1:])
        return At(slot, new, np.divmod(index, self.lanes) if self._by_lane else index)

    def _at_few(self, slot: np.ndarray[Any, Any], by_step: bool, count: int) -> At:
        new: list[Any] = []
        index: list[Any] = []
        capacity = self._length * self.lanes
        for entry in self._few:
            places = [slot.item(entry)] if slot.ndim == 1 else (slot[:, entry] if by_step else slot[entry]).tolist()
            for time, place in enumerate(places):
                step = (place - self._begin) % capacity
                if step < count * self.lanes:
                    new.append(entry if slot.ndim == 1 else (time, entry) if by_step else (entry, time))
                    index.append(divmod(step, self.lanes) if self._by_lane else step)
        return At(slot, new, index) if new else At(slot)

    def flags(self, at: At) -> np.ndarray[Any, Any]:
        """Return the flags of rows, uint8[B]."""
        flags: np.ndarray[Any, Any] = self._flags.take(at.slot, mode="wrap")
        if at.new is not None:
            _put(flags, at, self._fresh)
        return flags

    def read(self, wanted: Sequence[tuple[Sequence[int], At]]) -> list[np.ndarray[Any, Any]] | None:
        """Return leaves of rows, `[B, item]`, by numbers and places; one call, as a store decodes what several need once.

        None if only the program can read them, or can tell why not.
        """
        leaves: list[np.ndarray[Any, Any]] | None
        leaves = self._read([(number, at.slot) for numbers, at in wanted for number in numbers])
        if leaves is not None and self._near is not None and self._block is not None:
            each = iter(leaves)
            for numbers, at in wanted:
                for number, leaf in zip(numbers, each, strict=False):
                    if at.new is not None:
                        _put(leaf, at, self._block.columns[number])
        return leaves


def _put(leaf: np.ndarray[Any, Any], at: At, column: np.ndarray[Any, Any]) -> None:
    """Set the rows that are in the block."""
    if isinstance(at.new, list):
        for entry, index in zip(at.new, at.index, strict=True):
            leaf[entry] = column[index]
    else:
        leaf[at.new] = column[at.index]
