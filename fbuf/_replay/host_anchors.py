"""`HostAnchors`: the anchors of a state and of the rows collected since, in NumPy.

`fbuf._indexing` decides which rows open and close while it writes them. Rows of a `RowBlock` are not written yet: here each
of them opens the anchors that its view names, and closes those that it overwrites or leaves without earlier frames. No anchor
opens and closes within a block (`row_block.longest`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
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
        self._view, self._resets = view, rule.reset_rows
        self._known: tuple[Any, int] = None, 0

    def follow(self, state: BufferState, arrays: HeldArrays, rings: Rings, block: RowBlock | None) -> int:
        """Read the anchors of a state with these arrays and rings, then of the rows of `block`. Return their number."""
        count = 0 if block is None else block.count
        known = state.header, -1 if block is None else block.cleared
        if known[0] is not self._known[0] or known[1] != self._known[1]:
            self._known = known
            self._begin(state, rings, 0 if block is None else block.length)
        if block is not None and self._seen < count:
            self._add(arrays.read(state)[1].item, block)
        return self.total

    def _begin(self, state: BufferState, rings: Rings, most: int) -> None:
        anchors, lanes = state.anchors, range(self._lanes)
        assert anchors is not None
        tail = _read(anchors.tail_flags)
        self._left = _read(anchors.count).tolist()
        self._head = _read(state.sampler.head).tolist() if isinstance(state.sampler, AnchorQueue) else [0] * self._lanes
        self._closed = [
            -self._length - 1
        ] * self._lanes  # the newest that closed, counted from the first row of the block
        self.changes = list[int]()  # slots that opened, and -1 less those that closed, in this order
        self._cursor, self._size = rings.cursor.tolist(), rings.size.tolist()
        self._newest: list[int] = tail[-1].tolist()
        undecided, step = (
            [0] * self._lanes if x is None else _read(x).tolist() for x in (anchors.pending, anchors.step)
        )
        self._memory = [self._view.memory(tail[:, lane].tolist(), undecided[lane], step[lane]) for lane in lanes]
        self._opened = np.zeros((self._lanes, most + len(tail)), np.int64)  # slots, by lane
        self._more = [0] * self._lanes  # how many
        self.flags = np.zeros(most if self._plain else (most, self._lanes), np.uint8)  # of the rows of the block
        self._seen = 0
        self._count()

    def _count(self) -> None:
        number = [left + more for left, more in zip(self._left, self._more, strict=True)]
        self.total = sum(number)
        if self._lanes > 1:
            ends = list(accumulate(number))
            first = [end - count for end, count in zip(ends, number, strict=True)]
            shift = [head - rank for head, rank in zip(self._head, first, strict=True)]
            queued = [rank + left for rank, left in zip(first, self._left, strict=True)]
            self._by_lane = np.array((ends, shift, queued))

    def _add(self, held: Item, block: RowBlock) -> None:
        """Open and close the anchors of the rows that are new in `block`."""
        first, last, lanes, length = self._seen, block.count, self._lanes, self._length
        columns = [(block.columns[leaf][first:last].reshape(-1).tolist(), bits) for leaf, bits in self._bits]
        fresh, number = self.flags.reshape(-1, lanes), 0
        resets, view, memory, checks = self._resets, self._view, self._memory, self._view.checks
        for step in range(first, last):
            every, after = self._newest, list[int]()
            for before in every:
                flags = 0
                for column, bits in columns:
                    if column[number]:
                        flags |= bits
                if resets:
                    if before & (END | CUT) == END:
                        flags |= RESET
                    if before & CUT or before & RESET and not flags & RESET:
                        flags |= START
                elif before & END:
                    flags |= START
                after.append(flags)
                number += 1
            fresh[step], self._newest = after, after
            for lane in range(lanes):
                if self._size[lane] + step >= length:
                    self._close(lane, step, held)
                for back in view.opened(memory[lane], after[lane], every[lane]):
                    if not checks or self._learns(lane, step, back, held):
                        slot = (self._cursor[lane] + step - back) % length * lanes + lane
                        self._opened[lane, self._more[lane]] = slot
                        self._more[lane] += 1
                        self.changes.append(slot)
        self._seen = last
        self._count()

    def _flags(self, lane: int, step: int, held: Item) -> int:
        """Return the flags of a row, counted from the first of the block."""
        if step >= 0:
            return int(self.flags.reshape(-1, self._lanes)[step, lane])
        place = (self._cursor[lane] + step) % self._length
        return held(place * self._lanes + lane)

    def _close(self, lane: int, step: int, held: Item) -> None:
        """Close the anchor that row `step` overwrites, and those that lack earlier frames from then on."""
        oldest, lacking = step + 1 - self._length, 0  # rows from the oldest that stays
        while lacking < self._view.back and not self._flags(lane, oldest + lacking, held) & START:
            lacking += 1
        for row in range(max(oldest - 1, self._closed[lane] + 1), min(oldest + lacking, 0)):
            slot = (self._cursor[lane] + row) % self._length * self._lanes + lane
            if held(slot) & ANCHOR:
                self._head[lane] += 1
                self._left[lane] -= 1
                self.changes.append(-1 - slot)
        self._closed[lane] = max(oldest + lacking - 1, self._closed[lane])

    def _learns(self, lane: int, step: int, back: int, held: Item) -> bool:
        """Return whether the window whose anchor is `back` rows before row `step` learns a row."""
        view = self._view
        first, last = step - back - view.back, step - back + view.ahead
        near = [self._flags(lane, row, held) if row <= step else 0 for row in range(first, last + 1)]
        return bool(view.learns(np.array([near], np.uint8)))

    def slots(self, queue: np.ndarray[Any, Any], rank: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
        """Return the slots of anchors int64[B], counted lane by lane, oldest first; and their lanes, 0 of one."""
        lanes, length = self._lanes, self._length
        if lanes == 1:
            lane, shift, queued = None, self._head[0], self._left[0]
        else:
            ends, *parts = self._by_lane
            lane = ends.searchsorted(rank, side="right")
            shift, queued = (part.take(lane) for part in parts)
        place = rank + shift
        if lane is not None or shift + self.total > length:
            place %= length
        slot = queue.take(place if lane is None else place * lanes + lane).astype(np.int64)
        if any(self._more):
            beyond = rank - queued
            (new,) = (beyond >= 0).nonzero()
            if new.size:
                slot[new] = self._opened[0 if lane is None else lane[new], beyond[new]]
        return slot, 0 if lane is None else lane


def _read(array: jax.Array) -> np.ndarray[Any, Any]:
    """Return a copy of a small array in CPU memory."""
    return np.array(memoryview(array))
