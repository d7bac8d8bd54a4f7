"""`HostAnchors`: the anchors of a state and of the rows collected since, in NumPy.

`fbuf._indexing` decides which rows open and close while it writes them. Rows of a `RowBlock` are not written yet: here each
of them opens the anchors that its view names, and closes those that it overwrites or leaves without earlier frames. No anchor
opens and closes within a block (`row_block.longest`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._indexing.anchors import ANCHOR, CUT, END, RESET, START, TERMINATED
from fbuf._replay.host_reads import HeldArrays
from fbuf._replay.host_rings import Rings
from fbuf._replay.row_block import RowBlock

_MOST_KNOWN = 4096
Item = Callable[[int], int]
"""An element of an array by its index, as `ndarray.item`."""


class HostAnchors:
    """Anchors in the order of `fbuf._indexing.anchor_log`.

    Args:
      buffer: A uniform one, of a view in NumPy; episodes end by flags.
      names: Of the leaves of a row.
      view: The view in NumPy: `opened`, `memory`, and perhaps `checks` with `learns`.
    """

    def __init__(self, buffer: Buffer, names: list[str], view: Any):
        rule, (self._lanes, self._length, _) = buffer.rule, buffer.geometry
        self._bits = [(names.index(n), END | TERMINATED if n == rule.terminated else END) for n in rule.ends]
        self._plain = buffer.lanes is None
        self._view = view
        # Flags that a row has because of those of the row before.
        self._follows = [_following(before, rule.reset_rows) for before in range(256)]
        self._known: tuple[Any, int] = None, 0
        self._decided: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # what the view's `opened` returns, by its arguments

    def follow(self, state: BufferState, arrays: HeldArrays, rings: Rings, block: RowBlock | None) -> int:
        """Read the anchors of a state with these arrays and rings, then of the rows of `block`. Return their number."""
        cleared = -1 if block is None else block.cleared
        if state.header is not self._known[0] or cleared != self._known[1]:
            self._known = state.header, cleared
            self._begin(state, rings, 0 if block is None else block.length)
        if block is not None and self._seen < block.count:
            self._add(arrays.read(state)[1], block)
        return self.total

    def _begin(self, state: BufferState, rings: Rings, most: int) -> None:
        anchors, lanes = state.anchors, range(self._lanes)
        assert anchors is not None
        tail = _read(anchors.tail_flags)
        self._left = _read(anchors.count).tolist()
        self._head = _read(state.sampler.head).tolist() if isinstance(state.sampler, AnchorQueue) else [0] * self._lanes
        self.changes = list[int]()  # slots that opened, and -1 less those that closed, in this order
        self._rings, self._cursor = rings, rings.cursor.tolist()
        self._newest: list[int] = tail[-1].tolist()
        undecided, step = (
            [0] * self._lanes if x is None else _read(x).tolist() for x in (anchors.pending, anchors.step)
        )
        self._memory: list[Any] = [
            self._view.memory(tail[:, lane].tolist(), undecided[lane], step[lane]) for lane in lanes
        ]
        self._opened = np.zeros((self._lanes, most + len(tail)), np.int64)  # slots, by lane
        self._more = [0] * self._lanes  # how many
        self.flags = np.zeros(most if self._plain else (most, self._lanes), np.uint8)  # of the rows of the block
        self._by_step = self.flags.reshape(-1, self._lanes)
        self._closing: list[tuple[int, int]] = []
        self._seen, self.total = 0, sum(self._left)

    def _add(self, held: np.ndarray[Any, Any], block: RowBlock) -> None:
        """Open and close the anchors of the rows that are new in `block`."""
        first, last, lanes, length = self._seen, block.count, self._lanes, self._length
        closing = self._closing = self._closing or self._closed_by(held, len(self._by_step))
        ended = [0] * ((last - first) * lanes)
        for leaf, bits in self._bits:
            column = block.columns[leaf][first:last].reshape(-1).tolist()
            if any(column):
                ended = [flags | bits if end else flags for flags, end in zip(ended, column, strict=True)]
        follows, opened, cursor, checks = self._follows, self._opened, self._cursor, self._view.checks
        left, more, head, memory, decided = self._left, self._more, self._head, self._memory, self._decided
        for step in range(first, last):
            every, number = self._newest, step * lanes
            ends = ended[number - first * lanes : number - (first - 1) * lanes]
            after = [follows[flags] | end for flags, end in zip(every, ends, strict=True)]
            self._newest = after
            if any(after):
                self._by_step[step] = after
            for lane, key in enumerate(zip(memory[:], after, every, strict=True)):
                while closing[-1][0] == number:
                    head[lane] += 1
                    left[lane] -= 1
                    self.changes.append(-1 - closing.pop()[1])
                number += 1
                memory[lane], backs = decided.get(key) or self._decide(key)
                for back in backs:
                    if not checks or self._learns(lane, step, back, held.item):
                        slot = (cursor[lane] + step - back) % length * lanes + lane
                        opened[lane, more[lane]] = slot
                        more[lane] += 1
                        self.changes.append(slot)
        self._seen, self.total = last, sum(left) + sum(more)

    def _decide(self, key: tuple[Any, int, int]) -> tuple[Any, tuple[int, ...]]:
        if len(self._decided) >= _MOST_KNOWN:
            self._decided.clear()
        self._decided[key] = self._view.opened(*key)
        return self._decided[key]

    def _closed_by(self, held: np.ndarray[Any, Any], most: int) -> list[tuple[int, int]]:
        """Return the held anchors that `most` rows close: `step * lanes + lane` of the row, last first, and their slots.

        A row closes the anchor that it overwrites, and those that lack earlier frames from then on.
        """
        (cursor, size, *_), lanes, length, back = self._rings, self._lanes, self._length, self._view.back
        row = np.arange(-length, min(most + back - length, 0))[:, None]  # from the first of the block
        slot = (cursor + row) % length * lanes + np.arange(lanes)
        flags = held.take(slot)
        began = np.maximum.accumulate(np.where(flags & START, row, -2 * length))
        step = np.maximum(length + np.maximum(began, row - back), length - size)
        closes = (flags & ANCHOR != 0) & (step < most) & (row >= -size)
        number, slot = (step * lanes + np.arange(lanes))[closes], slot[closes]
        order = number.argsort(kind="stable")[::-1]
        return [(-1, -1), *zip(number[order].tolist(), slot[order].tolist(), strict=True)]

    def _flags(self, lane: int, step: int, held: Item) -> int:
        """Return the flags of a row, counted from the first of the block."""
        if step >= 0:
            return int(self._by_step[step, lane])
        place = (self._cursor[lane] + step) % self._length
        return held(place * self._lanes + lane)

    def _learns(self, lane: int, step: int, back: int, held: Item) -> bool:
        """Return whether the window whose anchor is `back` rows before row `step` learns a row."""
        view = self._view
        first, last = step - back - view.back, step - back + view.ahead
        near = [self._flags(lane, row, held) if row <= step else 0 for row in range(first, last + 1)]
        return bool(view.learns(np.array([near], np.uint8)))

    def slots(self, queue: np.ndarray[Any, Any], rank: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the slots of anchors int64[B], counted lane by lane, oldest first."""
        if self._lanes == 1:
            slot = queue.take(rank + self._head[0], mode="wrap").astype(np.int64)
            (new,) = (rank >= self._left[0]).nonzero()
            if new.size:
                slot[new] = self._opened[0].take(rank.take(new) - self._left[0])
            return slot
        bounds, shift, end = list[int](), list[int](), 0
        for lane, (left, more, head) in enumerate(zip(self._left, self._more, self._head, strict=True)):
            first, queued = end, end + left
            end = queued + more
            bounds += queued, end
            shift += (head - first) * self._lanes + lane, -queued
        # of each lane what the state has, then what opened since
        part = np.array(bounds).searchsorted(rank, side="right")
        shifts = np.array(shift).take(part)
        slot = queue.take(rank * self._lanes + shifts, mode="wrap").astype(np.int64)
        (new,) = (part & 1).nonzero()
        if new.size:
            slot[new] = self._opened[part.take(new) >> 1, rank.take(new) + shifts.take(new)]
        return slot


def _following(before: int, reset_rows: bool) -> int:
    """Return the flags that a row has because of those of the row before."""
    if not reset_rows:
        return START if before & END else 0
    flags = RESET if before & (END | CUT) == END else 0
    return flags | START if before & CUT or (before & RESET and not flags) else flags


def _read(array: jax.Array) -> np.ndarray[Any, Any]:
    """Return a copy of a small array in CPU memory."""
    return np.array(memoryview(array))
