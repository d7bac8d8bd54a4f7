"""The tree of `fbuf._algorithms.sum_tree` in numpy: the same layout, the same float32 operations in the same order, so the
same bits.

Every step is taken for all queries, or all indices, of a call at once; a level costs some twenty numpy calls in a draw and six
in a write, whatever the batch. Queries go down in lots whose siblings stay in the processor's cache.

What differs: beside the sums lies, if asked for, the least positive leaf below each node, without leaves of its own; and leaves
below 2^-126, which some processors take for 0, are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fbuf._host.types import Array

_FAN_OUT = 8
_LOT = 8192  # queries; measured: 4,096 to 16,384 are alike, all of 65,536 at once take 1.1 to 1.9 times as long
_SMALLEST = np.float32(2.0**-126)


class Layout(NamedTuple):
    """Where the levels of a tree lie; see `fbuf._algorithms.sum_tree.layout` and `fbuf._algorithms.sum_tree.middle`."""

    counts: tuple[int, ...]  # nodes of each level, leaves first
    offsets: tuple[int, ...]  # of each level, then the total
    middle: int  # level from which a draw goes on with its second number


class Tree:
    """Leaves float32[C] >= 0 with their sums. Not for several threads at once."""

    def __init__(self, layout: Layout, least: bool):
        counts, offsets, _ = layout
        self.layout = layout
        self._nodes = _aligned(offsets[-1])
        self._least = np.full(offsets[-1] - offsets[1] if least else 0, np.inf, np.float32)
        levels = range(1, len(counts))
        self._children = [self._nodes[offsets[i - 1] : offsets[i]].reshape(-1, _FAN_OUT) for i in levels]
        self._level = [self._nodes[offsets[i] :][: counts[i]] for i in levels]
        self._whole = True  # parents are what they should be; a write that was cut short leaves them to the next call

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._nodes.nbytes + self._least.nbytes

    @property
    def leaves(self) -> Array:
        """float32[C], a view."""
        return self._nodes[: self.layout.counts[0]]

    def roots(self) -> tuple[np.float32, np.float32]:
        """The sum of all leaves, and the least of those above 0: infinite if there is none, 0 if nobody asked."""
        self._mend()
        least = self._least[-_FAN_OUT] if self._least.size else np.float32(0)
        return self._level[-1][0], least

    def exchange(self, index: Array, leaf: Array) -> Array:
        """Writes leaves; of equal indices the last wins. Gives the old ones, with which the same call undoes it.

        Args:
          index: intp[B], in [0, C).
          leaf: float32[B].
        Cost: O(B log C), no more than O(B + C / 7). On an exception the leaves are as they were.
        """
        self._mend()
        old = self._nodes.take(index)
        try:
            self._whole = False
            self._nodes[index] = leaf
            self._raise(index)
            self._whole = True
        except BaseException:
            self._nodes[index] = old
            raise
        return old

    def fill(self, leaves: Array) -> None:
        """Writes the first leaves, float32[A]. Cost: O(C)."""
        self._whole = False
        self.leaves[: len(leaves)] = leaves
        self._mend()

    def draw(self, top: Array, bottom: Array) -> Array:
        """intp[B], the leaves that float32[B] in [0, 1) fall on, `top` down to the middle level and `bottom` from there.

        Cost: O(B log C).
        """
        self._mend()
        index = np.empty(top.shape, np.intp)
        for start in range(0, len(top), _LOT):
            lot = slice(start, start + _LOT)
            index[lot] = self._descend(top[lot], bottom[lot])
        return index

    # ---------------------------------------------------------------- writing

    def _mend(self) -> None:
        if not self._whole:
            self._sweep(1)
            self._whole = True

    def _raise(self, index: Array) -> None:
        """Recomputes what lies above leaves: node by node, then whole levels where they hold no more nodes than that."""
        node, counts = index, self.layout.counts
        dense = next(i for i in range(1, len(counts)) if counts[i] <= len(index))
        for i in range(1, dense):
            node = node >> 3
            self._level[i - 1][node] = _sums(self._children[i - 1].take(node, axis=0))
            if self._least.size:
                self._low(i)[node] = _lows(self._lower(i).take(node, axis=0), i)
        self._sweep(dense)

    def _sweep(self, first: int) -> None:
        """Recomputes all levels from `first` on."""
        for i in range(first, len(self.layout.counts)):
            self._level[i - 1][:] = _sums(self._children[i - 1])
            if self._least.size:
                self._low(i)[:] = _lows(self._lower(i), i)

    def _low(self, level: int) -> Array:
        """The least below each node of a level."""
        start = self.layout.offsets[level] - self.layout.offsets[1]
        return self._least[start : start + self.layout.counts[level]]

    def _lower(self, level: int) -> Array:
        """Of the children of each: float32[nodes, 8]; of level 1 the leaves themselves."""
        if level == 1:
            return self._children[0]
        start, stop = (self.layout.offsets[i] - self.layout.offsets[1] for i in (level - 1, level))
        return self._least[start:stop].reshape(-1, _FAN_OUT)

    # ---------------------------------------------------------------- drawing

    def _descend(self, top: Array, bottom: Array) -> Array:
        depth, middle = len(self.layout.counts) - 1, self.layout.middle
        node, first = np.zeros(len(top), np.intp), np.arange(0, 2 * len(top), 2)
        query = _scaled(top, self._level[-1][0])
        for i in range(depth, middle, -1):
            node = _choose(self._children[i - 1].take(node, axis=0), node, query, first)
        if middle:
            query = _scaled(bottom, self._level[middle - 1].take(node))
            for i in range(middle, 0, -1):
                node = _choose(self._children[i - 1].take(node, axis=0), node, query, first)
        return np.minimum(node, self.layout.counts[0] - 1)


def normal(leaf: Array) -> Array:
    """float32[B] with 0 for what is below 2^-126, or is no number."""
    return np.where(leaf >= _SMALLEST, leaf, np.float32(0))


def _aligned(number: int) -> Array:
    """float32 zeros, eight siblings in one cache line."""
    raw = np.zeros(number + 16, np.float32)
    start = -(raw.ctypes.data // 4) % 16
    return raw[start : start + number]


def _sums(children: Array) -> Array:
    """Sums of float32[A, 8] in the one order that `_choose` relies on."""
    pairs = children[:, ::2] + children[:, 1::2]
    halves = pairs[:, ::2] + pairs[:, 1::2]
    return halves[:, 0] + halves[:, 1]


def _lows(children: Array, level: int) -> Array:
    """The least of float32[A, 8]; of leaves those above 0."""
    if level == 1:
        children = np.where(children > 0, children, np.float32(np.inf))
    pairs = np.minimum(children[:, :4], children[:, 4:])
    pairs = np.minimum(pairs[:, :2], pairs[:, 2:])
    return np.minimum(pairs[:, 0], pairs[:, 1])


def _scaled(uniform: Array, total: Array | np.float32) -> Array:
    """`uniform * total` without its last bit, as `fbuf._algorithms.sum_tree` has it."""
    product: Array = uniform * total
    bits = product.view(np.int32)
    bits &= np.int32(-2)
    return product


def _choose(children: Array, node: Array, query: Array, first: Array) -> Array:
    """Goes from nodes intp[B] to one of the children float32[B, 8] of each, by three halvings.

    `query` float32[B] is then less by what lies to the left. `first` is [0, 2, 4, ...].
    """
    pairs = children[:, ::2] + children[:, 1::2]
    halves = pairs[:, ::2] + pairs[:, 1::2]
    at = first + _halve(halves, query)  # which half, counting through all queries; then which pair, then which child
    go = _halve(pairs.reshape(-1, 2).take(at, axis=0), query)
    at += at
    at += go
    go = _halve(children.reshape(-1, 2).take(at, axis=0), query)
    at += at
    at += go
    at &= _FAN_OUT - 1
    at += node << 3
    return at


def _halve(sides: Array, query: Array) -> Array:
    """bool[B], to the right: not below the left of float32[B, 2], and there is something on the right."""
    left = sides[:, 0]
    go: Array = query >= left
    go &= sides[:, 1] > 0
    np.subtract(query, left, out=query, where=go)
    return go
