"""Keep a column whose rows may be stacks of frames: plain chunks until it is known what the rows are.

The first rows are stored as plain chunks, and each is compared with the row before it in its lane, for every way in which a
row of this shape can be a stack. Only rows that differ from the one before count. If half of the first of these are shifted
(the first row of an episode is not), the column becomes a `FrameStream` and the stored rows are converted; otherwise it stays
plain for good. These are stacks that the user stores; `fbuf.views._transition` builds and pads those of `stack=`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.codecs import Zstd
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.columns.frame_stream import FrameStream, Stacking, as_bytes, predecessors, remember, stackings
from fbuf._host.types import Array, Batch, ColumnStats, DType, Fetch, Shape, StoreCorrupted, flat, ranges

_TELLING = 16  # rows that differ from the one before, seen before it is decided
_PATIENCE = 1024  # rows seen at most
_AT_ONCE = 64  # rows of a lane
_LOOKED_AT = 128  # rows of a batch


@dataclass(frozen=True)
class Seen:
    """Count rows that differ from the one before, and how many of them are shifted, for each way to stack."""

    telling: int
    shifted: tuple[int, ...]


@dataclass
class Staged:
    """Hold a batch staged for what the column becomes."""

    inner: ChunkedColumn | FrameStream
    staged: Any
    seen: Seen
    watching: bool

    @property
    def incompressible(self) -> bool:
        """Return whether the column should keep its rows as they are."""
        return bool(self.staged.incompressible)


class StackedColumn:
    """The newest `depth` rows of each lane, as plain chunks or as a stream of frames."""

    def __init__(self, codec: Zstd, shape: Shape, dtype: DType, lanes: int, depth: int, cache: int = 0) -> None:
        self.cache = cache
        self.candidates = stackings(shape, dtype.itemsize)
        self.lanes = lanes
        self.depth = depth
        self.row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.inner: ChunkedColumn | FrameStream = ChunkedColumn(codec, shape, dtype, lanes, depth, cache)
        self.watching = True
        self._codec = codec
        self._seen = Seen(0, (0,) * len(self.candidates))
        self._last = np.zeros((lanes, self.row), np.uint8)
        self._known = np.zeros(lanes, bool)

    def plain(self) -> ChunkedColumn:
        """Return the column as chunks of rows."""
        assert isinstance(self.inner, ChunkedColumn)
        return self.inner

    def stream(self, stacking: Stacking) -> FrameStream:
        """Return an empty stream of such stacks."""
        return FrameStream(self._codec, stacking, self.lanes, self.depth, self.cache)

    def size(self, count: Array) -> int:
        """Return the bytes of the rows, and of the last row of each lane."""
        return self.inner.size(count) + self._last.nbytes

    def column_stats(self, count: Array) -> ColumnStats:
        """Count the chunks of rows, or of frames."""
        return self.inner.column_stats(count)

    # ---------------------------------------------------------------- writing

    def stage(self, batch: Batch, rows: Array) -> Staged:
        """Stage a batch in the form that its rows turn out to have. Readers see no change."""
        inner, seen, watching = self.inner, self._seen, self.watching
        if watching:
            seen = self._look(batch, rows)
            undecided = seen.telling < _TELLING
            watching = undecided and int(batch.after.sum()) < _PATIENCE
            best = int(np.argmax(seen.shifted))
            if not undecided and 2 * seen.shifted[best] >= seen.telling:
                inner = self._converted(batch.before, self.candidates[best])
            if isinstance(inner, ChunkedColumn):
                inner.probed = watching  # rows that wait do not become a ring
        return Staged(inner, inner.stage(batch, rows), seen, watching)

    def _look(self, batch: Batch, rows: Array) -> Seen:
        step, lane, before = predecessors(batch)
        told = np.flatnonzero((before >= 0) | self._known[lane])
        told = told[np.argsort(step[told], kind="stable")][:_LOOKED_AT]
        step, lane, before = step[told], lane[told], before[told]
        new, old = (as_bytes(rows[s, lane][:, None])[:, 0] for s in (step, before))
        old[before < 0] = self._last[lane[before < 0]]
        differ = (old != new).any(axis=1)
        old, new = old[differ], new[differ]
        shifted = list(self._seen.shifted)
        for i, s in enumerate(self.candidates):
            a, b = (x.reshape(-1, s.outer, s.frames, s.inner) for x in (old, new))
            shifted[i] += int(s.follows(a, b, s.frames - 1).sum())
        return Seen(self._seen.telling + len(new), tuple(shifted))

    def _converted(self, count: Array, stacking: Stacking) -> ChunkedColumn | FrameStream:
        """Return the stored rows as a stream of frames; unchanged if they are damaged."""
        stream, low = self.stream(stacking), np.maximum(count - self.depth, 0)
        start = int(low.min())
        while start < int(count.max()):
            first, stop = np.clip(start, low, count), np.clip(start + _AT_ONCE, low, count)
            lane, row = ranges(first, stop)
            data = np.empty((len(lane), self.row), np.uint8)
            fetch = self.inner.fetch(lane, row, np.ones(len(lane), bool), count, np.zeros(1, np.int64))
            try:
                fetch.run([flat(data)])
            except StoreCorrupted:
                return self.inner
            rows = np.zeros((_AT_ONCE, self.lanes, self.row), np.uint8)
            keep = np.zeros((_AT_ONCE, self.lanes), bool)
            rows[row - start, lane], keep[row - start, lane] = data, True
            batch = Batch([rows], keep, first, stop, False)
            staged = stream.stage(batch, rows)
            stream.reserve(staged)
            stream.commit(batch, rows, staged)
            start += _AT_ONCE
        return stream

    def reserve(self, staged: Staged) -> None:
        """Store the encoded bytes. The last step that can fail."""
        staged.inner.reserve(staged.staged)

    def cancel(self, staged: Staged) -> None:
        """Undo `reserve`; a stream made for the batch is dropped."""
        staged.inner.cancel(staged.staged)

    def commit(self, batch: Batch, rows: Array, staged: Staged) -> None:
        """Make a staged batch readable and drop expired rows."""
        staged.inner.commit(batch, rows, staged.staged)
        self.inner, self._seen = staged.inner, staged.seen
        if staged.watching:
            remember(self._last, self._known, batch, as_bytes(rows))
        elif self.watching:
            self.watching, self._last = False, self._last[:0]

    def resume(self, count: Array, watching: bool) -> None:
        """Resume from a checkpoint whose lanes have `count` rows: the last row of each is read back."""
        self.watching = watching
        stream = self.inner if isinstance(self.inner, FrameStream) else None
        last, known = (stream.last, stream.known) if stream is not None else (self._last, self._known)
        for lane in np.flatnonzero(count).tolist() if watching or stream is not None else ():
            at = np.array([lane]), count[lane : lane + 1] - 1
            try:
                self.inner.fetch(*at, np.ones(1, bool), count, np.zeros(1, np.int64)).run([flat(last[lane])])
                known[lane] = True
            except StoreCorrupted:  # a read of it raises; the next row is then stored in full
                continue
        if not watching:
            self._last = self._last[:0]

    def compact(self, count: Array) -> None:
        """Free memory where that pays."""
        self.inner.compact(count)

    def next_job(self, count: Array, least: int | None) -> Any:
        """Return chunks to recompress."""
        return self.inner.next_job(count, least)

    # ---------------------------------------------------------------- reading

    def fetch(self, lane: Array, count: Array, present: Array, rows: Array, starts: Array) -> Fetch:
        """Say how to fetch rows, as `ColumnData.fetch` describes it."""
        return self.inner.fetch(lane, count, present, rows, starts)
