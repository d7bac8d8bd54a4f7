"""Priorities on the host: one tree that changes, and immutable states that name versions of it.

The leaves of one version are in the arrays. Every other version stores the leaves by which it differs from a neighbour on
the way there, so reading it walks there, exchanging leaves step by step. A state therefore reads its own priorities, and a
draw is a pure function of version and random numbers, whenever it runs. A program that carries its state on never walks.
If there is no memory for a difference, all other versions are dropped, and the leaves are written in small parts.

Differences are kept for the newest versions only: up to an eighth of the leaves in all, 4 to 256 versions. The version used
least recently is dropped first; a state of a dropped version gets an error, never other priorities.

Source: Baker 1978, "Shallow binding in Lisp 1.5" (rerooting).
"""

from __future__ import annotations

import dataclasses
import threading
from typing import NamedTuple

import numpy as np

from fbuf._host.types import Array, HostObject, StoreClosed, records_errors

_FAN_OUT = 8
_FEW = 256  # leaves written together when memory is short
_PART = 8192  # queries or nodes; measured: 4,096 to 16,384 queries are alike, 65,536 take 1.1 to 1.9 times as long
_SMALLEST = np.float32(2.0**-126)


class Layout(NamedTuple):
    """Where the levels of a tree are; see `fbuf._algorithms.sum_tree.layout` and `fbuf._algorithms.sum_tree.middle`."""

    counts: tuple[int, ...]  # nodes of each level, leaves first
    offsets: tuple[int, ...]  # of each level, then the total
    middle: int  # level from which a draw goes on with its second number


class Tree:
    """Leaves float32[C] >= 0 with their sums. Not thread-safe."""

    def __init__(self, layout: Layout, least: bool):
        counts, offsets, _ = layout
        self.layout = layout
        raw = np.zeros(offsets[-1] + 16, np.float32)
        start = -(raw.ctypes.data // 4) % 16  # eight siblings in one cache line
        self._nodes = raw[start : start + offsets[-1]]
        self._least = np.full(offsets[-1] - offsets[1] if least else 0, np.inf, np.float32)
        levels = range(1, len(counts))
        self._children = [self._nodes[offsets[i - 1] : offsets[i]].reshape(-1, _FAN_OUT) for i in levels]
        self._level = [self._nodes[offsets[i] :][: counts[i]] for i in levels]
        self._whole = True  # parents are what they should be; a write that was cut short leaves them to the next call

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        return self._nodes.nbytes + self._least.nbytes

    @property
    def leaves(self) -> Array:
        """Return float32[C], a view."""
        return self._nodes[: self.layout.counts[0]]

    def roots(self) -> tuple[np.float32, np.float32]:
        """Return the sum of all leaves and the least above 0: infinite if there is none, 0 if it is not tracked."""
        self._mend()
        least = self._least[-_FAN_OUT] if self._least.size else np.float32(0)
        return self._level[-1][0], least

    def exchange(self, index: Array, leaf: Array) -> Array:
        """Write leaves and return the old ones; of equal indices the last wins. The same call with the old leaves undoes it.

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

    def clear(self) -> None:
        """Set all leaves to 0, without allocating."""
        self._nodes[:] = 0
        self._least[:] = np.inf
        self._whole = True

    def fill(self, leaves: Array) -> None:
        """Write the first leaves, float32[A]. Cost: O(C)."""
        self._whole = False
        self.leaves[: len(leaves)] = leaves
        self._mend()

    def draw(self, top: Array, bottom: Array) -> Array:
        """Return intp[B], the leaves that float32[B] in [0, 1) select: `top` down to the middle level, `bottom` below it.

        Cost: O(B log C).
        """
        self._mend()
        index = np.empty(top.shape, np.intp)
        for start in range(0, len(top), _PART):
            part = slice(start, start + _PART)
            index[part] = self._descend(top[part], bottom[part])
        return index

    # ---------------------------------------------------------------- writing

    def _mend(self) -> None:
        if not self._whole:
            self._sweep(1)
            self._whole = True

    def _raise(self, index: Array) -> None:
        """Recompute the ancestors of leaves: node by node, then whole levels where these have no more nodes."""
        node, counts = index, self.layout.counts
        dense = next(i for i in range(1, len(counts)) if counts[i] <= len(index))
        for i in range(1, dense):
            node = node >> 3
            self._level[i - 1][node] = _sums(self._children[i - 1].take(node, axis=0))
            if self._least.size:
                self._low(i)[node] = _lows(self._lower(i).take(node, axis=0), i)
        self._sweep(dense)

    def _sweep(self, first: int) -> None:
        """Recompute all levels from `first` on."""
        for i in range(first, len(self.layout.counts)):
            for start in range(0, self.layout.counts[i], _PART):
                part = slice(start, start + _PART)
                self._level[i - 1][part] = _sums(self._children[i - 1][part])
                if self._least.size:
                    self._low(i)[part] = _lows(self._lower(i)[part], i)

    def _low(self, level: int) -> Array:
        """Return the least below each node of a level."""
        start = self.layout.offsets[level] - self.layout.offsets[1]
        return self._least[start : start + self.layout.counts[level]]

    def _lower(self, level: int) -> Array:
        """Return that of the children of each node, float32[nodes, 8]; for level 1 the leaves themselves."""
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
    """Return float32[B] with 0 for values below 2^-126 and NaN."""
    return np.where(leaf >= _SMALLEST, leaf, np.float32(0))


def _sums(children: Array) -> Array:
    """Return the sums of float32[A, 8] in the one order that `_choose` relies on."""
    pairs = children[:, ::2] + children[:, 1::2]
    halves = pairs[:, ::2] + pairs[:, 1::2]
    return halves[:, 0] + halves[:, 1]


def _lows(children: Array, level: int) -> Array:
    """Return the least of float32[A, 8]; of leaves the least above 0."""
    if level == 1:
        children = np.where(children > 0, children, np.float32(np.inf))
    pairs = np.minimum(children[:, :4], children[:, 4:])
    pairs = np.minimum(pairs[:, :2], pairs[:, 2:])
    return np.minimum(pairs[:, 0], pairs[:, 1])


def _scaled(uniform: Array, total: Array | np.float32) -> Array:
    """Return `uniform * total` without its last bit, as `fbuf._algorithms.sum_tree` does."""
    product: Array = uniform * total
    bits = product.view(np.int32)
    bits &= np.int32(-2)
    return product


def _choose(children: Array, node: Array, query: Array, first: Array) -> Array:
    """Descend from nodes intp[B] to one of their children float32[B, 8] each, by three halvings.

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
    """Return bool[B]: go right, where the query is not below the left of float32[B, 2] and the right is above 0."""
    left = sides[:, 0]
    go: Array = query >= left
    go &= sides[:, 1] > 0
    np.subtract(query, left, out=query, where=go)
    return go


_MOST_VERSIONS, _LEAST_VERSIONS = 256, 4
_A_VERSION = 500  # bytes of one beside its leaves: objects, and the heads of arrays


def most_bytes(layout: Layout, least: bool) -> int:
    """Return an upper bound of `Priorities.nbytes`, if no single write or `clear` exceeds what is kept of all versions."""
    nodes = layout.offsets[-1] + least * (layout.offsets[-1] - layout.offsets[1])
    return 4 * nodes + _slack(layout) * _A_LEAF + _MOST_VERSIONS * _A_VERSION


_A_LEAF = np.dtype(np.intp).itemsize + 4


def _slack(layout: Layout) -> int:
    """Return how many differing leaves are kept of all versions."""
    return max(layout.counts[0] // 8, 4096)


@dataclasses.dataclass(slots=True)
class _Step:
    """How a version differs from its neighbour `toward` the current one: by some leaves, or by the whole tree."""

    toward: int
    index: Array  # intp[B]
    leaf: Array  # float32[B]
    tree: Tree | None = None

    @property
    def size(self) -> int:
        return len(self.index) if self.tree is None else self.tree.layout.offsets[-1]

    @property
    def nbytes(self) -> int:
        return _A_VERSION + (len(self.index) * _A_LEAF if self.tree is None else self.tree.nbytes)


class Priorities(HostObject):
    """Leaves float32[C] by version, with their sum and least. Thread-safe.

    Attributes:
      first: The version that there is at first.
      last_error: What a call raised last.
    """

    def __init__(self, layout: Layout, least: bool):
        self.last_error: Exception | None = None
        self.layout, self.least = layout, least
        self._tree = Tree(layout, least)
        # Neighbours that are nearer to the one here come later, and so do those asked for later.
        self.first = 1
        self._steps: dict[int, _Step | None] = {self.first: None}
        self._here = self._newest = self.first
        self._kept = 0  # leaves in all steps
        self._most = _slack(layout)
        self._lock = threading.Lock()
        self._closed = False

    # ---------------------------------------------------------------- verbs

    @records_errors
    def write(self, version: int, index: Array, leaf: Array) -> int:
        """Write leaves; return a new version, or the same if nothing is written.

        Args:
          index: int32[B]; one outside [0, C) is skipped, of equal ones the last wins.
          leaf: float32[B].
        Raises:
          RuntimeError: the version has expired; all others are as they were.
          MemoryError: nothing could be allocated even after all other versions were dropped. This one is dropped, too.
        """
        with self._lock:
            self._walk(version)
            try:
                at, new = self._inside(index, leaf)
                if not at.size:
                    return version
                step = _Step(0, at, new)
                self._exchange(step)
                return self._advance(step)
            except MemoryError:
                self._forget()
                for start in range(0, len(index), _FEW):
                    part = slice(start, start + _FEW)
                    at, new = self._inside(index[part], leaf[part])
                    if at.size:
                        self._tree.exchange(at, new)
                return self._here

    def _inside(self, index: Array, leaf: Array) -> tuple[Array, Array]:
        """Return the indices intp[A] in [0, C), and their leaves."""
        inside = (index >= 0) & (index < self.layout.counts[0])
        return index[inside].astype(np.intp), normal(leaf[inside])

    @records_errors
    def draw(self, version: int, top: Array, bottom: Array) -> tuple[Array, Array, np.float32, np.float32]:
        """Draw from a version; see `Tree.draw`.

        Returns:
          intp[B], the leaves float32[B], the sum of all and the least above 0.
        Raises:
          RuntimeError: the version has expired.
        """
        with self._lock:
            self._walk(version)
            index = self._tree.draw(top, bottom)
            return index, self._tree.leaves.take(index), *self._tree.roots()

    @records_errors
    def clear(self, version: int) -> int:
        """Set all leaves to 0 in a new version. Cost: O(C)."""
        with self._lock:
            self._walk(version)
            try:
                nothing = np.zeros(0, np.intp)
                step = _Step(0, nothing, np.zeros(0, np.float32), Tree(self.layout, self.least))
                self._exchange(step)
                return self._advance(step)
            except MemoryError:
                self._forget()
                self._tree.clear()
                return self._here

    @records_errors
    def leaves(self, version: int, index: Array | None = None) -> Array:
        """Return a copy of the leaves float32[C], or of those at `index` int[...], each in [0, C)."""
        with self._lock:
            self._walk(version)
            leaves = self._tree.leaves
            return leaves.copy() if index is None else leaves.take(index)

    def fill(self, leaves: Array) -> None:
        """Write the first leaves, float32[A], of the only version."""
        with self._lock:
            self._tree.fill(np.where(np.isnan(leaves), leaves, normal(leaves)))  # for the check of a loaded state

    # ---------------------------------------------------------------- versions

    def _walk(self, version: int) -> None:
        """Make a version the current one."""
        if version == self._here:
            return
        if self._closed:
            raise StoreClosed("Priorities: they are closed; expected an open store. Make a new buffer with `init`.")
        way, at = list[_Step](), version
        while at != self._here:
            step = self._steps.get(at)
            if step is None:
                raise RuntimeError(
                    f"fbuf: the priorities of this BufferState have expired: the host keeps those of the newest "
                    f"{len(self._steps)} states. Carry on the state that `sample`, `extend`, `add` and `update_priority` "
                    f'return; with samplers.Prioritized(on="device") old states keep theirs.'
                )
            way.append(step)
            at = step.toward
        froms = [version, *(step.toward for step in way)]
        for i in reversed(range(len(way))):
            step, source, here = way[i], froms[i], self._here
            self._exchange(step)
            step.toward = source
            del self._steps[here], self._steps[source]
            self._steps[here], self._steps[source] = step, None
            self._here = source

    def _exchange(self, step: _Step) -> None:
        """Put the leaves of a step in place, and those that were there into the step."""
        if step.tree is None:
            step.leaf = self._tree.exchange(step.index, step.leaf)
        else:
            self._tree, step.tree = step.tree, self._tree

    def _advance(self, step: _Step) -> int:
        """Return a new version, from which `step` leads back to the current one."""
        self._newest += 1
        step.toward = self._newest
        self._steps[self._here] = step
        self._steps[self._newest] = None
        self._here = self._newest
        self._kept += step.size
        while len(self._steps) > _LEAST_VERSIONS and (self._kept > self._most or len(self._steps) > _MOST_VERSIONS):
            gone = self._steps.pop(next(iter(self._steps)))
            self._kept -= 0 if gone is None else gone.size
        return self._newest

    def _forget(self) -> None:
        """Drop all versions, and begin a new one with the leaves of the current one: states of the others have expired."""
        self._newest += 1
        self._here, self._steps, self._kept = self._newest, {self._newest: None}, 0

    # ---------------------------------------------------------------- what the registry asks

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tree and of the differences of older versions."""
        steps = list(self._steps.values())
        return self._tree.nbytes + sum(_A_VERSION if step is None else step.nbytes for step in steps)

    def stats(self) -> dict[str, int]:
        """Count leaves above 0, versions, and leaves kept for older versions."""
        live = int(np.count_nonzero(self._tree.leaves))
        return {"rows_live": live, "versions": len(self._steps), "kept": self._kept, "nbytes": self.nbytes}

    def close(self) -> None:
        """Free the tree; later calls raise StoreClosed."""
        with self._lock:
            self._closed, self._here = True, 0
            self._steps = {}
            self._tree = Tree(Layout((1, 1), (0, 8, 16), 0), False)
