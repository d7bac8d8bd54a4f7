"""`HostAnchors`: the anchors of a state and of the rows collected since, in NumPy.

`fbuf._indexing` decides which rows open and close while it writes them. Rows of a `RowBlock` are not written yet: here each
of them opens the anchors that its view names, and closes the one that it replaces. No anchor opens and closes within a block
(`row_block.longest`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._indexing.anchors import CUT, END, OPEN, RESET, TERMINATED
from fbuf._replay.host_rings import Rings
from fbuf._replay.row_block import RowBlock


class HostAnchors:
    """Anchors in the order of `fbuf._indexing.anchor_log`.

    Args:
      buffer: A uniform one, of windows without frames before their anchor; episodes end by flags.
      names: Of the leaves of a row.
      opens: Whether a row opens the one before it, and itself, from the flags of both.
    """

    def __init__(self, buffer: Buffer, names: list[str], opens: Any):
        rule, (self._lanes, self._length, _) = buffer.rule, buffer.geometry
        self._bits = [(names.index(n), END | TERMINATED if n == rule.terminated else END) for n in rule.ends]
        self._plain = buffer.lanes is None
        self._opens, self._resets = opens, rule.reset_rows
        self._known: tuple[Any, int] = None, 0

    def follow(self, state: BufferState, rings: Rings, block: RowBlock | None) -> int:
        """Read the anchors of a state with these rings, and then of the rows of `block`. Return their number."""
        count = 0 if block is None else block.count
        known = state.header, -1 if block is None else block.cleared
        if known[0] is not self._known[0] or known[1] != self._known[1]:
            self._known = known
            self._begin(state, 0 if block is None else block.length)
        if block is not None and self._seen < count:
            self._add(state, rings, block)
        return self.total

    def _begin(self, state: BufferState, most: int) -> None:
        assert state.anchors is not None
        queue, flags = state.sampler, state.anchors.tail_flags
        self._head, self._left, newest = (np.array(memoryview(x)).tolist() for x in (queue.head, queue.count, flags))
        self._newest: list[int] = newest[-1]
        self._opened = np.zeros((self._lanes, 2 * most), np.int64)  # slots, by lane
        self._more = [0] * self._lanes  # how many
        self.flags = np.zeros(most if self._plain else (most, self._lanes), np.uint8)  # of the rows of the block
        self._seen = 0
        self._count()

    def _count(self) -> None:
        number = [left + more for left, more in zip(self._left, self._more, strict=True)]
        self.total = sum(number)
        if self._lanes > 1:
            self._ends = np.cumsum(number)
            self._by_lane = np.array([self._ends - number, self._head, self._left])

    def _add(self, state: BufferState, rings: Rings, block: RowBlock) -> None:
        """Open and close the anchors of the rows that are new in `block`."""
        assert state.anchors is not None
        first, last, lanes, length = self._seen, block.count, self._lanes, self._length
        ends = [(block.columns[leaf][first:last].reshape(-1).tolist(), bits) for leaf, bits in self._bits]
        fresh = self.flags.reshape(-1, lanes)
        cursor, size = rings.cursor.tolist(), rings.size.tolist()
        before, resets, opens = np.asarray(memoryview(state.anchors.flags)), self._resets, self._opens
        opened, more, newest = self._opened, self._more, self._newest
        for number in range((last - first) * lanes):
            step, lane = divmod(number, lanes)
            step += first
            place = (cursor[lane] + step) % length
            slot = place * lanes + lane
            if size[lane] + step >= length and before[slot] & OPEN:  # overwritten
                self._head[lane] += 1
                self._left[lane] -= 1
            flags, previous = 0, newest[lane]
            for column, bits in ends:
                if column[number]:
                    flags |= bits
            if resets and previous & (END | CUT) == END:
                flags |= RESET
            opens_previous, opens_own = opens(previous, flags)
            if opens_previous:
                opened[lane, more[lane]] = slot - lanes if place else slot + (length - 1) * lanes
                more[lane] += 1
            if opens_own:
                opened[lane, more[lane]] = slot
                more[lane] += 1
            newest[lane] = fresh[step, lane] = flags
        self._seen = last
        self._count()

    def slots(self, state: BufferState, rank: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
        """Return the slots of anchors int64[B], counted lane by lane, oldest first; and their lanes, 0 of one."""
        lane: Any = 0
        lanes, head, left = self._lanes, self._head[0], self._left[0]
        if lanes > 1:
            lane = np.searchsorted(self._ends, rank, side="right")
            begins, head, left = self._by_lane[:, lane]
            rank = rank - begins
        place = (rank + head) % self._length
        at = place * lanes + lane if lanes > 1 else place
        slot = np.asarray(memoryview(state.sampler.slot)).take(at).astype(np.int64)
        if any(self._more):
            beyond = rank - left
            (new,) = (beyond >= 0).nonzero()
            if new.size:
                slot[new] = self._opened[lane[new] if lanes > 1 else 0, beyond[new]]
        return slot, lane
