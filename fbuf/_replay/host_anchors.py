"""`HostAnchors`: the anchors of a state and of the rows collected since, in NumPy.

`fbuf._indexing` decides which rows open and close while it writes them. Rows of a `RowBlock` are not written yet: here each
of them opens the anchors that its view names, and closes those that it overwrites or leaves without earlier frames. No anchor
opens and closes within a block (`row_block.longest`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._indexing.anchors import ANCHOR, CUT, END, RESET, START, TERMINATED
from fbuf._replay.host_reads import HeldArrays, queue_of
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
        self._each = [[self._each_alike(opens, closes) for closes in (0, 1)] for opens in (0, 1)]
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
        self._before: list[int] = _read(anchors.count).tolist()
        self._left = self._before.copy()
        queue = queue_of(state.sampler)
        self._head = [0] * self._lanes if queue is None else _read(queue.head).tolist()
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
        self._closing: list[list[int]] = []
        self._bounds: np.ndarray[Any, Any] | None = None
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
        follows, memory, checks = self._follows, self._memory, self._view.checks
        left, more, head = self._left, self._more, self._head
        for step in range(first, last):
            every, number = self._newest, (step - first) * lanes
            after = [follows[b] | end for b, end in zip(every, ended[number : number + lanes], strict=True)]
            self._newest = after
            if any(after):
                self._by_step[step] = after
            keys, closed = list(zip(memory, after, every, strict=True)), closing.pop()
            if lanes > 1 and self._add_alike(step, keys, closed):
                continue
            self._bounds = None
            for number in closed:
                lane = number % lanes
                head[lane] += 1
                left[lane] -= 1
                self.changes.append(-1 - number)
            for lane, key in enumerate(keys):
                memory[lane], backs = self._decide(key)
                for back in backs:
                    if not checks or self._learns(lane, step, back, held.item):
                        slot = (self._cursor[lane] + step - back) % length * lanes + lane
                        self._opened[lane, more[lane]] = slot
                        more[lane] += 1
                        self.changes.append(slot)
        self._seen, self.total = last, sum(left) + sum(more)

    def _add_alike(self, step: int, keys: list[Any], closed: list[int]) -> bool:
        """Add a row that does the same in each of several lanes, at once: it opens an anchor or none, and closes one or none.

        False if it does not.
        """
        lanes, length = self._lanes, self._length
        beside = not closed or closed == list(range(closed[0], closed[0] + lanes))
        if not beside or self._view.checks or self._rings.next_slot is None or keys.count(keys[0]) != lanes:
            return False
        memory, backs = self._decide(keys[0])
        if len(backs) > 1 or self._more.count(self._more[0]) != lanes:
            return False
        self._memory[:] = [memory] * lanes
        opens, closes = len(backs), len(closed) // lanes
        if closes:
            self._head[:] = [number + 1 for number in self._head]
            self._left[:] = [number - 1 for number in self._left]
            self.changes += [-1 - slot for slot in closed]
        if opens:
            first = (self._cursor[0] + step - backs[0]) % length * lanes
            slots = list(range(first, first + lanes))
            self._opened[:, self._more[0]] = slots
            self._more[:] = [number + 1 for number in self._more]
            self.changes += slots
        if self._bounds is not None:
            bounds, shifts = self._each[opens][closes]
            self._bounds += bounds
            self._shifts += shifts
        return True

    def _each_alike(self, opens: int, closes: int) -> Any:
        """Return what `_add_alike` adds to `_bounds` and `_shifts`."""
        lane, more = np.arange(self._lanes), opens - closes
        bounds = np.stack((lane * more - closes, (lane + 1) * more), 1)
        shifts = np.stack(((closes - lane * more) * self._lanes, closes - lane * more), 1)
        return bounds.reshape(-1), shifts.reshape(-1)

    def _decide(self, key: tuple[Any, int, int]) -> tuple[Any, tuple[int, ...]]:
        """Return what the view's `opened` does."""
        decided = self._decided.get(key)
        if decided is None:
            if len(self._decided) >= _MOST_KNOWN:
                self._decided.clear()
            decided = self._decided[key] = self._view.opened(*key)
        return decided

    def _closed_by(self, held: np.ndarray[Any, Any], most: int) -> list[list[int]]:
        """Return the slots of held anchors that each of `most` rows closes, in order of their lanes; the last row first.

        A row closes the anchor that it overwrites, and those that lack earlier frames from then on.
        """
        (cursor, size, *_), lanes, length, back = self._rings, self._lanes, self._length, self._view.back
        row = np.arange(-length, min(most + back - length, 0))[:, None]  # from the first of the block
        slot = (cursor + row) % length * lanes + np.arange(lanes)
        flags = held.take(slot)
        began = np.maximum.accumulate(np.where(flags & START, row, -2 * length))
        step = np.maximum(length + np.maximum(began, row - back), length - size)
        closes = (flags & ANCHOR != 0) & (step < most) & (row >= -size)
        step, lane, slot = (np.broadcast_to(x, slot.shape)[closes] for x in (step, np.arange(lanes), slot))
        order = np.lexsort((lane, step))  # stable
        bounds = step[order].searchsorted(np.arange(most + 1)).tolist()
        slots = slot[order].tolist()
        return [slots[begin:end] for begin, end in pairwise(bounds)][::-1]

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

    def counts(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the anchors of each lane int64[E], and how many the collected rows closed."""
        before, left, more = np.array((self._before, self._left, self._more))
        return left + more, before - left

    def slots(self, queue: np.ndarray[Any, Any], rank: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
        """Return the slots of anchors int64[B], counted lane by lane, oldest first; and which opened with collected rows.

        Only the rows of these may be among the collected ones: an anchor opens with the last of its rows.
        """
        if self._lanes == 1:
            slot = queue.take(rank + self._head[0], mode="wrap").astype(np.int64)
            (new,) = (rank >= self._left[0]).nonzero()
            if new.size:
                slot[new] = self._opened[0].take(rank.take(new) - self._left[0])
            return slot, new
        if self._bounds is None:
            # Of each lane what the state has, then what opened since.
            left, more, head, lane = np.array((self._left, self._more, self._head, range(self._lanes)))
            end = np.cumsum(left + more)
            first = end - left - more
            self._bounds = np.stack((first + left, end), 1).reshape(-1)
            self._shifts = np.stack(((head - first) * self._lanes + lane, -first - left), 1).reshape(-1)
        part = self._bounds.searchsorted(rank, side="right")
        shifts = self._shifts.take(part)
        slot = queue.take(rank * self._lanes + shifts, mode="wrap").astype(np.int64)
        (new,) = (part & 1).nonzero()
        if new.size:
            slot[new] = self._opened[part.take(new) >> 1, rank.take(new) + shifts.take(new)]
        return slot, new


def _following(before: int, reset_rows: bool) -> int:
    """Return the flags that a row has because of those of the row before."""
    if not reset_rows:
        return START if before & END else 0
    flags = RESET if before & (END | CUT) == END else 0
    return flags | START if before & CUT or (before & RESET and not flags) else flags


def _read(array: jax.Array) -> np.ndarray[Any, Any]:
    """Return a copy of a small array in CPU memory."""
    return np.array(memoryview(array))
