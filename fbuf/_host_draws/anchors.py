"""`HostAnchors`: the anchors of a state and of the rows collected since, in NumPy.

`fbuf._indexing` decides which rows open and close while it writes them. Rows of a `RowBlock` are not written yet: here each
of them opens the anchors that its view names, and closes those that it overwrites or leaves without earlier frames. No anchor
opens and closes within a block (`row_block.longest`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._host_draws.reads import FEW, HeldArrays, queue_of
from fbuf._host_draws.rings import Rings
from fbuf._host_draws.row_block import RowBlock
from fbuf._indexing.anchors import ANCHOR, CUT, END, RESET, START, TERMINATED

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
        self._no_ends = [0] * self._lanes
        self._decided: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # what the view's `opened` returns, by its arguments

    def follow(self, state: BufferState, arrays: HeldArrays, rings: Rings, block: RowBlock | None) -> int:
        """Read the anchors of a state with these arrays and rings, then of the rows of `block`. Return their number."""
        known, self._known = self._known, (None, 0)  # an error may come before the end
        now = state.header, -1 if block is None else block.cleared
        if now[0] is not known[0] or now[1] != known[1]:
            self._begin(state, rings, 0 if block is None else block.length)
        if block is not None and self._seen < block.count:
            self._add(arrays.read(state)[1], block)
        self._known = now
        return self.total

    def _begin(self, state: BufferState, rings: Rings, most: int) -> None:
        anchors, lanes = state.anchors, range(self._lanes)
        assert anchors is not None
        tail = _read(anchors.tail_flags)
        self._before: list[int] = _read(anchors.count).tolist()
        self._left = self._before.copy()
        queue = queue_of(state.sampler)
        self._head = [0] * self._lanes if queue is None else _read(queue.head).tolist()
        # Slots, row by row. Two lists, as the order of opens and closes would depend on how many rows are added at once.
        self.opened, self.closed = list[int](), list[int]()
        self._rings, self._cursor = rings, rings.cursor.tolist()
        self._newest: list[int] = tail[-1].tolist()
        undecided, step = (
            [0] * self._lanes if x is None else _read(x).tolist() for x in (anchors.pending, anchors.step)
        )
        self._memory: list[Any] = [
            self._view.memory(tail[:, lane].tolist(), undecided[lane], step[lane]) for lane in lanes
        ]
        # Slots, one of each lane after another; of one lane those of `opened` that were needed here.
        self._opened_by_lane = np.zeros((most + len(tail)) * self._lanes, np.int64)
        self._copied = 0  # how many of one lane
        self._more = [0] * self._lanes  # how many opened
        self.flags = np.zeros(most if self._plain else (most, self._lanes), np.uint8)  # of the rows of the block
        self._by_step = self.flags.reshape(-1, self._lanes)
        self._closes: Any = None  # what `_closed_by` returns
        self._bounds: np.ndarray[Any, Any] | None = None
        self._seen, self.total = 0, sum(self._left)

    def _add(self, stored: np.ndarray[Any, Any], block: RowBlock) -> None:
        """Open and close the anchors of the rows that are new in `block`."""
        step, last = self._seen, block.count
        if self._closes is None:
            self._closes = self._closed_by(stored, len(self._by_step))
        ends = self._ends(block, step, last)
        for stop in (*ends, last):
            while step < stop:
                step += self._add_uniform(step, self._no_ends, stop - step) or self._add_each(
                    step, self._no_ends, stored.item
                )
            if step < last:
                step += self._add_uniform(step, ends[step], 1) or self._add_each(step, ends[step], stored.item)
        self._seen, self.total = last, sum(self._left) + sum(self._more)

    def _ends(self, block: RowBlock, first: int, last: int) -> dict[int, list[int]]:
        """Return the flags of the rows that end episodes: by step, in their order, of each lane."""
        lanes = self._lanes
        ends: dict[int, list[int]] = {}
        for leaf, bits in self._bits:
            column = block.columns[leaf][first:last]
            if not column.tobytes().strip(b"\0"):  # NumPy's functions are slow where they did not run lately
                continue
            for number in column.reshape(-1).nonzero()[0].tolist():
                step, lane = divmod(number, lanes)
                ends.setdefault(first + step, [0] * lanes)[lane] |= bits
        return dict(sorted(ends.items())) if len(ends) > 1 else ends

    def _add_uniform(self, step: int, end: list[int], most: int) -> int:
        """Add a row that opens an anchor in every lane, or none in any.

        Return the number of rows added: up to `most` transitions where each does as the one before; 0 if lanes differ.
        """
        lanes, memory, before = self._lanes, self._memory[0], self._newest[0]
        if self._rings.next_slot is None or self._view.checks:
            return 0
        if lanes > 1 and any(x.count(x[0]) < lanes for x in (end, self._newest, self._more, self._memory)):
            return 0
        after = self._follows[before] | end[0]
        following, backs = self._decide((memory, after, before))
        if len(backs) > 1:
            return 0
        number = 1 if after or before or following != memory else most
        if after:
            self._by_step[step] = after
        self._newest, self._memory = [after] * lanes, [following] * lanes
        closes, opens, more = self._close(step, number), number * len(backs), self._more[0]
        if backs:
            capacity = self._length * lanes
            first = (self._cursor[0] + step - backs[0]) * lanes % capacity
            stop = first + number * lanes
            slots = range(first, stop) if stop <= capacity else [*range(first, capacity), *range(stop - capacity)]
            if lanes > 1:
                self._opened_by_lane[more * lanes : (more + opens) * lanes] = slots
            self._more = [more + opens] * lanes
            self.opened += slots
        if closes is None:
            self._bounds = None
        elif self._bounds is not None:
            bounds, shifts = _moved(lanes, opens, closes)
            self._bounds += bounds
            self._shifts += shifts
        return number

    def _add_each(self, step: int, end: list[int], stored: Item) -> int:
        """Add a row of each lane. Return 1, their number."""
        before, lanes = self._newest, self._lanes
        after = self._newest = [self._follows[b] | e for b, e in zip(before, end, strict=True)]
        if any(after):
            self._by_step[step] = after
        self._close(step, 1)
        self._bounds = None
        for lane, key in enumerate(zip(self._memory, after, before, strict=True)):
            self._memory[lane], backs = self._decide(key)
            for back in backs:
                if not self._view.checks or self._learns(lane, step, back, stored):
                    slot = (self._cursor[lane] + step - back) % self._length * lanes + lane
                    if lanes > 1:
                        self._opened_by_lane[self._more[lane] * lanes + lane] = slot
                    self._more[lane] += 1
                    self.opened.append(slot)
        return 1

    def _close(self, step: int, number: int) -> int | None:
        """Close the anchors that rows close. Return how many in each lane; None if that differs."""
        (slots, bounds), lanes = self._closes, self._lanes
        if bounds[step] == bounds[step + number]:
            return 0
        slots = slots[bounds[step] : bounds[step + number]]
        self.closed += slots
        closed = [0] * lanes if lanes > 1 else [len(slots)]
        for slot in slots if lanes > 1 else ():
            closed[slot % lanes] += 1
        self._head = [head + closes for head, closes in zip(self._head, closed, strict=True)]
        self._left = [left - closes for left, closes in zip(self._left, closed, strict=True)]
        return closed[0] if closed.count(closed[0]) == lanes else None

    def _decide(self, key: tuple[Any, int, int]) -> tuple[Any, tuple[int, ...]]:
        """Return what the view's `opened` does."""
        decided = self._decided.get(key)
        if decided is None:
            if len(self._decided) >= _MOST_KNOWN:
                self._decided.clear()
            decided = self._decided[key] = self._view.opened(*key)
        return decided

    def _closed_by(self, stored: np.ndarray[Any, Any], most: int) -> tuple[list[int], list[int]]:
        """Return the slots of held anchors that `most` rows close, row by row in order of their lanes, and where each begins.

        A row closes the anchor that it overwrites, and those that lack earlier frames from then on.
        """
        (cursor, size, *_), lanes, length, back = self._rings, self._lanes, self._length, self._view.back
        row = np.arange(-length, min(most + back - length, 0))[:, None]  # from the first of the block
        slot = (cursor + row) % length * lanes + np.arange(lanes)
        flags = stored.take(slot)
        began = np.maximum.accumulate(np.where(flags & START, row, -2 * length))
        step = np.maximum(length + np.maximum(began, row - back), length - size)
        closes = (flags & ANCHOR != 0) & (step < most) & (row >= -size)
        step, lane, slot = (np.broadcast_to(x, slot.shape)[closes] for x in (step, np.arange(lanes), slot))
        order = np.lexsort((lane, step))  # stable
        bounds = step[order].searchsorted(np.arange(most + 1)).tolist()
        return slot[order].tolist(), bounds

    def _flags(self, lane: int, step: int, stored: Item) -> int:
        """Return the flags of a row, counted from the first of the block."""
        if step >= 0:
            return int(self._by_step[step, lane])
        place = (self._cursor[lane] + step) % self._length
        return stored(place * self._lanes + lane)

    def _learns(self, lane: int, step: int, back: int, stored: Item) -> bool:
        """Return whether the window whose anchor is `back` rows before row `step` learns a row."""
        view = self._view
        first, last = step - back - view.back, step - back + view.ahead
        near = [self._flags(lane, row, stored) if row <= step else 0 for row in range(first, last + 1)]
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
            head, left = np.array((self._head[0], self._left[0]))[:, None]  # half as long as with int
            slot = queue.take(rank + head, mode="wrap").astype(np.int64)
            (new,) = (rank >= left).nonzero()
            if new.size <= FEW:
                for entry in new.tolist():
                    slot[entry] = self.opened[rank.item(entry) - self._left[0]]
            else:
                self._opened_by_lane[self._copied : len(self.opened)] = self.opened[self._copied :]
                self._copied = len(self.opened)
                slot[new] = self._opened_by_lane.take(rank.take(new) - self._left[0])
            return slot, new
        if self._bounds is None:
            # Of each lane what the state has, then what opened since.
            left, more, head, lane = np.array((self._left, self._more, self._head, range(self._lanes)))
            end = np.cumsum(left + more)
            first = end - left - more
            self._shifts = np.stack(((head - first) * self._lanes + lane, -first - left), 1).reshape(-1)
            self._bounds = np.stack((first + left, end), 1).reshape(-1)  # the last, as an error may come before
        part = self._bounds.searchsorted(rank, side="right")
        shifts = self._shifts.take(part)
        slot = queue.take(rank * self._lanes + shifts, mode="wrap").astype(np.int64)
        (new,) = (part & 1).nonzero()
        if new.size:
            slot[new] = self._opened_by_lane.take(
                (rank.take(new) + shifts.take(new)) * self._lanes + (part.take(new) >> 1)
            )
        return slot, new


def _following(before: int, reset_rows: bool) -> int:
    """Return the flags that a row has because of those of the row before."""
    if not reset_rows:
        return START if before & END else 0
    flags = RESET if before & (END | CUT) == END else 0
    return flags | START if before & CUT or (before & RESET and not flags) else flags


@functools.lru_cache(maxsize=256)
def _moved(lanes: int, opens: int, closes: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return what anchors that open and close in each of `lanes` add to `_bounds` and `_shifts`."""
    lane, more = np.arange(lanes), opens - closes
    bounds = np.stack((lane * more - closes, (lane + 1) * more), 1)
    shifts = np.stack(((closes - lane * more) * lanes, closes - lane * more), 1)
    return bounds.reshape(-1), shifts.reshape(-1)


def _read(array: jax.Array) -> np.ndarray[Any, Any]:
    """Return a copy of a small array in CPU memory."""
    return np.array(memoryview(array))
