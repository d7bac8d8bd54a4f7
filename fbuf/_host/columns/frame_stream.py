"""Keep a column of frame stacks as a stream of single frames: each frame is stored once.

A row whose first frames are the last of the row before it adds only the others: one as a rule, none if it repeats that row,
all of them at the start of an episode or where rows come in any order. Rows are compared byte by byte. The frames are a
`ChunkedColumn` whose rows live as long as a stack shows them; each row is one byte in `RowEnds`. `Stacking` says how the
bytes `[outer, frames, inner]` of a row are a stack, on its first or its last axis, with the newest frame last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from fbuf._host.codecs import Zstd
from fbuf._host.columns import chunked
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.types import Array, Batch, ColumnStats, Fetch, corrupted, flat, ranges

_DEEPEST = 16  # frames of a stack
_CHANNELS = (1, 2, 3, 4)  # of a frame, side by side with those of its neighbours on the axis of the stack
_SMALLEST = 256  # bytes of a row; below, what is known of a row would weigh more than what is saved


@dataclass(frozen=True)
class Stacking:
    """How a row is a stack: bytes `[outer, frames, inner]`."""

    outer: int
    frames: int
    inner: int

    @property
    def frame(self) -> int:
        """Return the bytes of a frame."""
        return self.outer * self.inner

    @property
    def at_once(self) -> int:
        """Return how many stacks to compare together: those that fit a processor's cache."""
        return max((1 << (19 if self.outer > 1 else 21)) // (self.frame * self.frames), 1)

    @property
    def word(self) -> np.dtype[Any]:
        """Return the dtype in which pixels are moved."""
        return np.dtype(f"u{self.inner}" if self.inner in (1, 2, 4, 8) else f"V{self.inner}")

    def split(self, rows: Array) -> Array:
        """Return uint8[N, E, outer, frames, inner] of rows `[N, E, *shape]`; a view if they are C-contiguous."""
        return as_bytes(rows).reshape(*rows.shape[:2], self.outer, self.frames, self.inner)

    def follows(self, before: Array, after: Array, shared: int, scratch: Array | None = None) -> Array:
        """Return bool[...]: whether the last `shared` frames of stacks `before` are the first of stacks `after`.

        Args:
          before: uint8[..., outer, frames, inner], as is `after`.
          scratch: bool[of a byte a byte of `after`, or more], to work in; new memory costs as much as the comparison.
        """
        lead, size = after.shape[:-3], self.frames * self.inner
        at = (self.frames - shared) * self.inner
        # Of four bytes numpy compares words fastest; on the last axis shifted frames are a byte or so off.
        word = next(w for w in (4, 2, 1) if self.inner % w == 0) if self.outer == 1 else 1
        new, old = (a.reshape(*lead, self.outer * size) for a in (after, before))
        new, old = new[..., : new.shape[-1] - at].view(f"u{word}"), old[..., at:].view(f"u{word}")
        shape = (*lead, self.outer * size // word)
        number = math.prod(shape)
        differ = (np.empty(number, bool) if scratch is None else scratch[:number]).reshape(shape)
        skipped = at // word
        np.not_equal(new, old, out=differ[..., skipped:])
        if self.outer == 1:
            return np.asarray(~differ[..., skipped:].any(axis=-1))
        differ[..., :skipped] = False
        # What a pixel's neighbour gave is not looked at: the lower bytes of a word, or the first of `size`.
        if size in (2, 4, 8):
            return np.asarray(differ.view(f"<u{size}").max(axis=-1) < 1 << 8 * at)
        return np.asarray(~differ.reshape(*lead, self.outer, size)[..., at:].any(axis=(-2, -1)))

    def fresh(self, before: Array, after: Array) -> Array:
        """Return uint8[M], frames of each stack of `after` with which the one of `before` does not end; 0 if they are equal."""
        added = np.full(len(after), self.frames, np.uint8)
        for shared in range(self.frames, 0, -1):
            first = (after[:, :, 0] == before[:, :, self.frames - shared]).all(axis=(1, 2))
            maybe = np.flatnonzero(first & (added == self.frames))
            if len(maybe):
                found = maybe[self.follows(before[maybe], after[maybe], shared)]
                added[found] = self.frames - shared
        return added


def as_bytes(rows: Array) -> Array:
    """Return uint8[N, E, row] of rows `[N, E, *shape]`; a view if they are C-contiguous."""
    size = math.prod(rows.shape[2:]) * rows.dtype.itemsize
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(*rows.shape[:2], size)


def stackings(shape: tuple[int, ...], itemsize: int) -> tuple[Stacking, ...]:
    """Return every way in which rows of this shape can be stacks."""
    total = math.prod(shape) * itemsize
    found = []
    if len(shape) < 2 or total < _SMALLEST:
        return ()
    axes = (1, shape[0]), (total // (shape[-1] * itemsize), shape[-1])
    for channels in _CHANNELS:
        for outer, length in axes:
            frames, rest = divmod(length, channels)
            if not rest and 2 <= frames <= _DEEPEST:
                found.append(Stacking(outer, frames, total // outer // frames))
    return tuple(dict.fromkeys(found))


_AT_ONCE = 16  # rows that are copied to be compared


class PickedFrames:
    """Frames of stacks as an array `[F, E, frame]`, assembled slice by slice to avoid a copy of the whole."""

    def __init__(self, stacking: Stacking, stacks: Array, source: Array) -> None:
        self.shape = (*source.shape, stacking.frame)
        self._stacking = stacking
        self._stacks = stacks
        self._source = source  # int64[F, E], frame of all stacks

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: Any) -> Array:
        source = self._source[at]
        outer, depth, inner = self._stacking.outer, self._stacking.frames, self._stacking.inner
        if outer == 1:
            return self._stacks.reshape(-1, inner).take(source, axis=0, mode="clip")
        stack, frame = np.divmod(source, depth)
        pixels = self._stacks.reshape(-1, outer, depth * inner).view(self._stacking.word)[stack, :, frame]
        return pixels.view(np.uint8).reshape(*source.shape, self.shape[2])


@dataclass
class Staged:
    """Hold a batch whose frames are encoded, not yet visible."""

    stacks: Array  # uint8[N, E, outer, frames, inner], the rows
    added: Array  # uint8[N, E], frames of each row that are new; 0 where it is not kept
    end: Array  # int64[N, E], frames of the lane up to each row
    frames: Array  # uint8[F, E, frame], the new ones (`PickedFrames`)
    batch: Batch  # of frames
    inner: chunked.Staged
    incompressible: bool = False


class FrameStream:
    """The newest `depth` rows of each lane, as the frames they show."""

    def __init__(self, codec: Zstd, stacking: Stacking, lanes: int, depth: int, cache: int = 0) -> None:
        self.stacking = stacking
        self.depth = depth
        self.lanes = lanes
        # Room for a frame a row, and more as it is needed.
        self.plane = ChunkedColumn(codec, (stacking.frame,), np.dtype(np.uint8), lanes, depth + stacking.frames, cache)
        self.plane.probed = True
        self.ends = RowEnds(lanes, depth)
        self.count: Array = np.zeros(lanes, np.int64)  # frames of each lane
        self.low: Array = np.zeros(lanes, np.int64)  # the oldest that a row shows
        self.last = np.zeros((lanes, stacking.outer, stacking.frames, stacking.inner), np.uint8)
        self.known = np.zeros(lanes, bool)  # whether `last` is the lane's last row

    # ---------------------------------------------------------------- size

    def size(self, count: Array) -> int:
        """Return the bytes of the frames, of the row ends, and of the last row of each lane."""
        return self.plane.size(self.count) + self.ends.size(count) + self.last.nbytes

    def column_stats(self, count: Array) -> ColumnStats:
        """Count the chunks of frames."""
        return self.plane.column_stats(self.count, self.low)

    # ---------------------------------------------------------------- writing

    def stage(self, batch: Batch, rows: Array) -> Staged:
        """Encode the frames that a batch adds. Readers see no change."""
        stacks = self.stacking.split(rows)
        added = self._added(batch, stacks)
        end = np.cumsum(added, axis=0, dtype=np.int64)
        picked, keep = self._frames(stacks, added, end)
        end += self.count
        after = end[-1]
        frames = cast(Array, picked)
        level = keep is None and bool((self.count == self.count[0]).all())
        frame_batch = Batch([frames], keep, self.count, after, level, (self.low, self._low(batch, end)))
        return Staged(stacks, added, end, frames, frame_batch, self.plane.stage(frame_batch, frames))

    def _added(self, batch: Batch, stacks: Array) -> Array:
        """Return uint8[N, E], the number of frames that each row adds."""
        n, lanes = stacks.shape[:2]
        added = np.zeros((n, lanes), np.uint8)
        if batch.keep is None:
            shift, most = np.zeros((n, lanes), bool), self.stacking.frames - 1
            shift[0] = self.known & self.stacking.follows(self.last, stacks[0], most)
            block = max(self.stacking.at_once // lanes, 1)
            scratch = np.empty(min(block, n) * lanes * stacks[0, 0].size, bool)
            for i in range(1, n, block):
                j = min(i + block, n)
                shift[i:j] = self.stacking.follows(stacks[i - 1 : j - 1], stacks[i:j], most, scratch)
            added[shift] = 1
            if shift.all():
                return added
            step, lane = np.nonzero(~shift)
            before = step - 1
        else:
            step, lane, before = predecessors(batch)
        for i in range(0, len(step), _AT_ONCE):
            s, e, b = (a[i : i + _AT_ONCE] for a in (step, lane, before))
            earlier = b < 0
            old = stacks[b, e]
            old[earlier] = self.last[e[earlier]]
            new = self.stacking.fresh(old, stacks[s, e])
            added[s, e] = np.where(earlier & ~self.known[e], self.stacking.frames, new)
        return added

    def _frames(self, stacks: Array, added: Array, end: Array) -> tuple[PickedFrames, Array | None]:
        """Return the new frames `[F, E, frame]`, and which of them exist (None: all)."""
        n, lanes = added.shape
        depth, total = self.stacking.frames, end[-1]
        if (added == 1).all():
            return PickedFrames(self.stacking, stacks, np.arange(n * lanes).reshape(n, lanes) * depth + depth - 1), None
        step, lane = np.nonzero(added)
        number = added[step, lane].astype(np.int64)
        which = np.repeat(np.arange(len(step)), number)
        ago = np.repeat(np.cumsum(number), number) - np.arange(len(which))  # 1: the row's newest
        step, lane = step[which], lane[which]
        size = int(total.max())
        keep = None if (total == size).all() else np.arange(size)[:, None] < total
        source = np.zeros((size, lanes), np.int64)
        source[end[step, lane] - ago, lane] = (step * lanes + lane) * depth + depth - ago
        return PickedFrames(self.stacking, stacks, source), keep

    def _low(self, batch: Batch, end: Array) -> Array:
        """Return int64[E], the oldest frame that rows show once the batch is stored."""
        oldest = batch.after - self.depth
        if (oldest <= 0).all():
            return self.low
        after = end[-1]
        low = after - self.stacking.frames
        lane = np.flatnonzero((oldest < batch.before) & (batch.after > 0))  # lanes whose oldest row was there before
        row = np.maximum(oldest[lane], 0)
        had = batch.before[lane] > 0
        low[lane] = 0  # of lanes that have no more than the batch
        lane, row = lane[had], row[had]
        low[lane] = self.ends.of(lane, row, batch.before, self.count, checked=False) - self.stacking.frames
        lane = np.flatnonzero((oldest >= batch.before) & (batch.after > batch.before))
        if len(lane):
            step, place, count = batch.places()
            here = count == oldest[place]
            low[place[here]] = end[step[here], place[here]] - self.stacking.frames
        return np.clip(low, self.low, np.maximum(after, self.low))

    def reserve(self, staged: Staged) -> None:
        """Store the encoded bytes. The last step that can fail."""
        assert staged.batch.low is not None
        k, low = self.plane.k, staged.batch.low[1]
        self.plane.widen(int((staged.batch.after // k - low // k).max()) + 2, self.count, self.low)
        self.plane.reserve(staged.inner)

    def cancel(self, staged: Staged) -> None:
        """Undo `reserve`."""
        self.plane.cancel(staged.inner)

    def commit(self, batch: Batch, rows: Array, staged: Staged) -> None:
        """Make a staged batch readable and drop expired rows."""
        assert staged.batch.low is not None
        step, lane, count = batch.places()
        if len(step) > self.depth:  # lanes may have rows that expire at once
            new = count >= batch.after[lane] - self.depth - 64
            step, lane, count = step[new], lane[new], count[new]
        self.ends.write(lane, count, staged.added[step, lane], staged.end[step, lane])
        self.plane.commit(staged.batch, staged.frames, staged.inner)
        self.count, self.low = staged.batch.after, staged.batch.low[1]
        remember(self.last, self.known, batch, staged.stacks)

    def compact(self, count: Array) -> None:
        """Compact the chunks of frames."""
        self.plane.compact(self.count, self.low)

    def next_job(self, count: Array, least: int | None) -> Any:
        """Return frames to recompress."""
        return self.plane.next_job(self.count, least, self.low)

    # ---------------------------------------------------------------- reading

    def fetch(self, lane: Array, count: Array, present: Array, rows: Array, starts: Array) -> Fetch:
        """Say how to fetch rows, as `ColumnData.fetch` describes it."""
        depth = self.stacking.frames
        end = np.full(len(lane), depth, np.int64)
        end[present] = self.ends.of(lane[present], count[present], rows, self.count)
        frames = (end[:, None] + np.arange(-depth, 0)).reshape(-1)
        fetch = self.plane.fetch(lane.repeat(depth), frames, present.repeat(depth), self.count, starts * depth)
        return fetch if self.stacking.outer == 1 else Interleaved(fetch, self.stacking)


@dataclass
class Interleaved:
    """Fetch stacks on the last axis, which are assembled from frames."""

    frames: Fetch
    stacking: Stacking

    may_be_overwritten = False

    def run(self, outs: Sequence[memoryview]) -> None:
        """Fill the outputs of the requests."""
        outer, depth, word = self.stacking.outer, self.stacking.frames, self.stacking.word
        apart = [np.empty(len(out), np.uint8) for out in outs]
        self.frames.run([flat(a) for a in apart])
        for stacks, out in zip(apart, outs, strict=True):
            if not len(out):
                continue
            source = stacks.view(word).reshape(-1, depth, outer)
            target = np.frombuffer(out, word).reshape(-1, outer, depth)
            for i in range(depth):
                target[:, :, i] = source[:, i]


def predecessors(batch: Batch) -> tuple[Array, Array, Array]:
    """Return for every kept row its place on axis 0, its lane, and the place of the row before it in the lane; -1 if that is
    in an earlier batch.
    """
    step, lane, _ = batch.places()
    order = np.argsort(lane, kind="stable")
    step, lane = step[order], lane[order]
    before = np.full(len(step), -1)
    same = np.flatnonzero(lane[1:] == lane[:-1]) + 1
    before[same] = step[same - 1]
    return step, lane, before


def remember(last: Array, known: Array, batch: Batch, rows: Array) -> None:
    """Store the last row of each lane of a batch in `last`, and mark it as known."""
    if batch.keep is None:
        last[:] = rows[-1]
        known[:] = True
        return
    lane = np.flatnonzero(batch.keep.any(axis=0))
    step = len(batch.keep) - 1 - np.argmax(batch.keep[::-1], axis=0)[lane]
    last[lane] = rows[step, lane]
    known[lane] = True


_BLOCK = 64  # rows
_BLOCKS_AT_ONCE = 1024  # blocks
_UP_TO = np.tri(_BLOCK, dtype=np.uint8)  # row r is 1 up to column r


class RowEnds:
    """The newest `depth` rows of each lane and a few more: the frames each added, and their sum."""

    def __init__(self, lanes: int, depth: int) -> None:
        self.blocks = depth // _BLOCK + 2
        self.added = np.zeros((self.blocks, lanes, _BLOCK), np.uint8)
        self.base = np.zeros((self.blocks, lanes), np.int64)  # frames before a block

    def size(self, count: Array) -> int:
        """Return the bytes written to when the lanes have `count` rows."""
        return self.used(count) * (self.added.nbytes + self.base.nbytes) // self.blocks

    def saved(self, first: Array, count: Array, depth: int) -> Array:
        """Return uint8[blocks, E, 64], a copy of the frames added by rows `first` to `count` of each lane; the first of them
        added `depth`.
        """
        used = self.used(count)
        out = self.added[:used].copy()
        end = first + self.blocks * _BLOCK
        # The places of rows that were overwritten.
        lane, row = ranges(count, end if used == self.blocks else np.minimum(end, used * _BLOCK))
        out[row // _BLOCK % self.blocks, lane, row % _BLOCK] = 0
        lane = np.flatnonzero(count > first)
        out[first[lane] // _BLOCK % self.blocks, lane, first[lane] % _BLOCK] = depth
        return out

    def used(self, count: Array) -> int:
        """Return the blocks written to when the lanes have `count` rows."""
        return min(int(count.max(initial=0)) // _BLOCK + 1, self.blocks)

    def restore(self, saved: Array, first: Array, count: Array, low: Array, depth: int) -> Array:
        """Enter what `saved` returned for rows `first` to `count` of each lane; return int64[E], the frames up to the last of
        them.

        Args:
          low: int64[E], the first frame that the oldest row shows.
          depth: Frames that it shows.
        """
        end = low.copy()
        for start in range(int(first.min()) // _BLOCK, -(-int(count.max()) // _BLOCK), _BLOCKS_AT_ONCE):
            bounds = start * _BLOCK, (start + _BLOCKS_AT_ONCE) * _BLOCK
            lane, row = ranges(np.clip(first, *bounds), np.clip(count, *bounds))
            if not len(row):
                continue
            block, at = np.divmod(row, _BLOCK)
            added = saved[block % self.blocks, lane, at]
            added[row == first[lane]] = depth
            begin = np.flatnonzero(np.diff(lane, prepend=-1))
            total = np.cumsum(added, dtype=np.int64)
            size = np.diff(begin, append=len(lane))
            total += np.repeat(end[lane[begin]] - (total[begin] - added[begin]), size)
            # What the oldest row's block held before it is not known, nor needed.
            oldest = row == first[lane]
            self.base[block[oldest] % self.blocks, lane[oldest]] = low[lane[oldest]]
            self.write(lane, row, added, total)
            end[lane[begin]] = total[begin + size - 1]
        return end

    def write(self, lane: Array, count: Array, added: Array, end: Array) -> None:
        """Enter rows, each lane's in order: frames added, and their number up to the row. Cannot fail."""
        block, at = np.divmod(count, _BLOCK)
        block %= self.blocks
        self.added[block, lane, at] = added
        first = at == 0
        self.base[block[first], lane[first]] = (end - added)[first]

    def of(self, lane: Array, count: Array, rows: Array, frames: Array, checked: bool = True) -> Array:
        """Return int64[M], the number of frames up to each row.

        Args:
          rows: int64[E], rows of each lane now.
          frames: int64[E], their frames.
        Raises:
          StoreCorrupted: frames added do not sum up to what the next block begins with, unless not `checked`.
        """
        block, at = np.divmod(count, _BLOCK)
        place = block % self.blocks
        base, added = self.base[place, lane], self.added[place, lane]

        def frames_up_to(row: Array) -> Array:  # a cumulative sum is slower
            return base + np.einsum("ij,ij->i", added, _UP_TO[row], dtype=np.uint16)

        if checked:
            left = rows[lane] - block * _BLOCK  # rows of the block, and of those after it
            then = np.where(left > _BLOCK, self.base[(block + 1) % self.blocks, lane], frames[lane])
            total = frames_up_to(np.minimum(left, _BLOCK) - 1)
            if (total != then).any():
                raise corrupted(f"rows end at frame {int(total[total != then][0])}", f"{int(then[total != then][0])}")
        return frames_up_to(at)
