"""A host column as blocks: rows are cut up, each distinct block lies once in a table, and a row is the ids of its blocks.

The ids are a column of their own: as the changes from row to row, by chunks (`changes`), or with `chunk=1` as they are, in a
ring, each row with a checksum. Reading is the ids, then one gather of blocks straight into the output. A block is verified
against its fingerprint once a call, however many rows show it.

Blocks of rows that have expired are given up when the batch that drops them is committed, and their places are used again by
later batches. A reader under way may then see another block: its fingerprint betrays it, or the row's expiry does, and
`Store.read` asks both after the last byte is read.

Rejected: ids compressed with zstd, for any of six layouts (see `changes`); locking out readers while places are reused, or
waiting for them (both let a slow reader hold up a writer); 16-bit ids (they end at 65,536 blocks, which rich games pass).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.arrays import Array, StoreCorrupted, flat
from fbuf._host.batch import Batch, ranges
from fbuf._host.blocktable import Table, damaged_places, odd, wide
from fbuf._host.changes import Changes, changed_rows
from fbuf._host.chunks import Chunks
from fbuf._host.codec import Zstd
from fbuf._host.coder import WORTHWHILE
from fbuf._host.part import Census, Fetch
from fbuf._host.ring import Ring

_BLOCK_BYTES = 128  # at least, of whole lines
_LINE_BYTES = 512  # longer lines are cut
_COLOURS = 4  # `[H, W, 4]` and fewer are pixels of several values, not frames
_PROBE_ROWS, _PROBE_BYTES = 256, 1 << 24
"""Rows, or bytes of large ones, seen before `WORTHWHILE` is asked: what comes again needs time to."""


@dataclass(frozen=True)
class Blocks:
    """Rows as ids of distinct blocks: faster reads than `Zstd`, slower writes, more bytes where frames are rich.

    Take it where reads are what a step waits for and memory is not short: on six Atari games reads take less than half the
    time, writes of many rows a tenth to twice more, and frames 3 to 6 times the bytes, still 6 to 30 times fewer than raw
    (`python -m benchmarks --only compression`). Frames that move as a whole, or are noisy, have few blocks alike: leave
    them to `Zstd`.

    Attributes:
      block: `(h, w)` pixels of a block; None: whole lines, 128 bytes or more. Blocks narrower than a line take fewer bytes,
        but their lines are copied one by one, and they are read more slowly than `Zstd`.
      chunk: k, 1 to 64. Of so many rows the first is kept as ids and the others as changes: with 8 a third fewer bytes than
        with 1, writes half as long again, and reads in two thirds of the time of `Zstd`.
    Raises:
      ValueError: a field out of range.

    Cost: a row takes 4 bytes a block, with `chunk=8` a third of that; a distinct block its bytes and some 35. A write costs
      some 200 us whatever its size (`Zstd`: 30 us), so rows should come many at a time.

    Example:
      >>> Blocks()
      Blocks(block=None, chunk=1)
    """

    block: tuple[int, int] | None = None
    chunk: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.chunk, bool) or not isinstance(self.chunk, int) or not 1 <= self.chunk <= 64:
            raise ValueError(
                f"Blocks: chunk is {self.chunk!r}; expected an integer from 1 to 64. The default is Blocks(chunk=1)."
            )
        block = self.block
        sizes = block if isinstance(block, tuple) else ()
        whole = [s for s in sizes if isinstance(s, int) and not isinstance(s, bool) and s >= 1]
        if block is not None and not (len(sizes) == len(whole) == 2):
            raise ValueError(
                f"Blocks: block is {block!r}; expected two integers of 1 or more, lines and pixels, or None. "
                f"Write Blocks(block=(12, 12))."
            )

    def encode(self, rows: Array) -> bytes:
        """Rows on their own, without a table (changed rows are kept so): one zstd frame."""
        return Zstd(dictionary=0).encode(rows)

    def decode(self, data: bytes | memoryview, out: Array) -> None:
        """Fills `out`. Raises StoreCorrupted unless `data` is one frame of exactly its size."""
        Zstd(dictionary=0).decode(data, out)


@dataclass(frozen=True)
class Cut:
    """How the bytes of a row are cut: frames of lines, blocks of `h` lines by `w` bytes; the rest is filled with zeros."""

    frames: int
    height: int  # lines of a frame
    line: int  # bytes
    h: int
    w: int

    @property
    def down(self) -> int:
        """Blocks from top to bottom of a frame."""
        return -(-self.height // self.h)

    @property
    def across(self) -> int:
        """Blocks from left to right."""
        return -(-self.line // self.w)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.frames * self.down * self.across

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return self.h * self.w

    @property
    def _padded(self) -> bool:
        return self.down * self.h != self.height or self.across * self.w != self.line

    @property
    def _plain(self) -> bool:
        """Whether blocks lie in a row as in its cut: nothing to move."""
        return not self._padded and self.across == 1

    def split(self, rows: Array) -> Array:
        """uint8[R, blocks, size] of rows uint8[R, bytes]; a view where it can be."""
        if self._plain:
            return rows.reshape(-1, self.blocks, self.size)
        frames = rows.reshape(-1, self.height, self.line)
        if self._padded:
            whole = np.zeros((len(frames), self.down * self.h, self.across * self.w), np.uint8)
            whole[:, : self.height, : self.line] = frames
            frames = whole
        pieces = frames.view(f"V{self.w}").reshape(-1, self.down, self.h, self.across)
        return np.ascontiguousarray(pieces.swapaxes(2, 3)).view(np.uint8).reshape(-1, self.blocks, self.size)

    def join(self, words: Array, places: Array, out: Array) -> None:
        """Fills rows uint8[R, bytes] with the blocks int64[R, blocks] of a table uint8[M, size]."""
        if self._plain:
            # mode="raise", the default, would gather into a temporary first.
            np.take(words, places.reshape(-1), axis=0, out=out.reshape(-1, self.size), mode="clip")
            return
        for start in range(0, len(places), 64):  # what a processor's cache holds
            some = places[start : start + 64]
            tiles = np.take(words, some.reshape(-1), axis=0, mode="clip").view(f"V{self.w}")
            tiles = tiles.reshape(-1, self.down, self.across, self.h).swapaxes(2, 3)
            frames = out[start : start + 64].reshape(-1, self.height, self.line)
            if self._padded:
                lines = np.ascontiguousarray(tiles).view(np.uint8).reshape(len(frames), self.down * self.h, -1)
                frames[:] = lines[:, : self.height, : self.line]
            else:
                frames.view(f"V{self.w}").reshape(tiles.shape)[:] = tiles


def cut_of(shape: tuple[int, ...], size: int, block: tuple[int, int] | None) -> Cut:
    """The cut of rows of `shape` with elements of `size` bytes."""
    pixel = shape[-1] * size if len(shape) >= 3 and shape[-1] <= _COLOURS else size
    lines = shape[:-1] if len(shape) >= 3 and shape[-1] <= _COLOURS else shape
    height = lines[-2] if len(lines) >= 2 else 1
    line = (lines[-1] if lines else 1) * pixel
    frames = int(np.prod(lines[:-2], dtype=np.int64))
    if block is not None:
        return Cut(frames, height, line, min(block[0], height), min(block[1] * pixel, line))
    w = -(-line // -(-line // _LINE_BYTES))
    least = min(-(-_BLOCK_BYTES // w), height)
    exact = [h for h in range(least, 2 * least) if height % h == 0]
    return Cut(frames, height, line, exact[0] if exact else least, w)


@dataclass
class Staged:
    """A batch whose blocks are in the table, not yet visible."""

    ids: Array  # uint32[N, E, ...], zeros where a row is not kept
    gone: Array  # int64[D, blocks], places of the rows that it drops
    inner: Any  # of the column of ids
    incompressible: bool = False


class Blocked:
    """The newest `depth` rows of each lane as ids, and the table of their blocks."""

    def __init__(self, codec: Blocks, shape: tuple[int, ...], dtype: np.dtype[Any], lanes: int, depth: int) -> None:
        self.cut = cut_of(shape, dtype.itemsize, codec.block)
        self.k = codec.chunk
        self.depth = depth
        self.row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.table = Table(self.cut.size)
        self.number = self.cut.blocks
        self.ids: Ring | Chunks
        word = np.dtype(np.uint32)
        if self.k == 1:
            self.ids = Ring((self.number + 1,), word, lanes, depth)  # the last is a checksum
        else:
            self._changes = Changes(self.k, self.number)
            self.ids = Chunks(self._changes, (self.number,), word, lanes, depth)
        self.probed = False

    # ---------------------------------------------------------------- size

    def size(self, count: Array) -> int:
        """Ids, and the table with its empty places and index."""
        return self.ids.size(count) + self.table.nbytes

    def census(self, count: Array) -> Census:
        """Chunks of ids (rows where they are as they are); bytes of ids and of live blocks."""
        chunks, payload, dictionaries = self.ids.census(count)
        if isinstance(self.ids, Ring):
            chunks = int(np.minimum(count, self.depth).sum())
            payload = chunks * self.ids.row
        return Census(chunks, payload + self._live_bytes(), dictionaries)

    def _live_bytes(self) -> int:
        return self.table.live * self.table.nbytes // self.table.places

    # ---------------------------------------------------------------- writing

    def stage(self, batch: Batch, rows: Array) -> Staged:
        """Enters the blocks of a batch into the table. Readers see no change, whatever happens here."""
        gone = self._expiring(batch)
        ids = self._refer(batch, rows)
        staged = Staged(ids, gone, None)
        try:
            staged.inner = self.ids.stage(batch, ids)
            if not self.probed:
                staged.incompressible = not self._worthwhile(batch, staged)
        except BaseException:
            self._give_up(ids)
            raise
        if staged.incompressible:
            self._give_up(ids)
        return staged

    def _oldest(self, count: Array) -> Array:
        """Of each lane, the oldest row whose ids are still kept: a chunk goes as a whole."""
        return np.maximum(count - self.depth, 0) // self.k * self.k

    def _refer(self, batch: Batch, rows: Array) -> Array:
        """uint32[N, E, ...], ids of the rows that are to stay, with references to their blocks."""
        width = self.number + (self.k == 1)
        ids = np.zeros((*rows.shape[:2], width), np.uint32)
        step, lane, count = batch.places()
        stays = count >= self._oldest(batch.after)[lane] if batch.at is None else np.ones(len(count), bool)
        order = np.flatnonzero(stays)
        order = order[np.argsort(lane[order], kind="stable")]  # rows of a lane one after another: they repeat
        step, lane, count = step[order], lane[order], count[order]
        whole = rows.shape[1] == 1 and len(step) == len(rows)
        kept = np.ascontiguousarray(rows if whole else rows[step, lane])
        blocks = self.cut.split(kept.reshape(-1).view(np.uint8).reshape(len(step), self.row))
        changed = np.ones((len(step), self.number), bool)
        if len(step):
            flat_rows = wide(blocks.reshape(-1, self.cut.size)).reshape(len(step), -1)
            differs = np.flatnonzero(flat_rows[1:] != flat_rows[:-1]) // (flat_rows.shape[1] // self.number)
            changed[1:] = False
            changed[1:].reshape(-1)[differs] = True
        # Every block of every row by the number of the changed block it repeats.
        since = np.maximum.accumulate(np.where(changed, np.arange(len(step))[:, None], 0), axis=0)
        item = (np.cumsum(changed) - 1).reshape(changed.shape)[since, np.arange(self.number)]
        fresh = blocks.reshape(-1, self.cut.size)[np.flatnonzero(changed)]
        places = self.table.refer(fresh, np.bincount(item.reshape(-1), minlength=len(fresh)))
        ids[step, lane, : self.number] = own = places[item]
        if self.k == 1:
            try:
                ids[step, lane, self.number] = _row_checksum(own, lane, count)
            except BaseException:
                self._give_up(ids)
                raise
        return ids

    def _give_up(self, ids: Array) -> None:
        """Takes the references of rows back."""
        self.table.release(ids[..., : self.number])

    def _expiring(self, batch: Batch) -> Array:
        """int64[D, blocks], places of the rows that a batch drops, 0 where unknown. Only writers drop rows: they are there."""
        low = self._oldest(batch.before)
        lane, count = ranges(low, np.minimum(self._oldest(batch.after), batch.before))
        if batch.gone is not None:
            lane, count = np.zeros(len(batch.gone), np.int64), batch.gone
        if not len(lane):
            return np.zeros((0, self.number), np.int64)
        try:
            return self._rows(lane, count, batch.before)[0]
        except StoreCorrupted:
            # What a damaged chunk referred to is not known: its blocks stay in the table, where others may need them.
            places = np.zeros((len(lane), self.number), np.int64)
            for i in range(len(lane)):
                with contextlib.suppress(StoreCorrupted):
                    places[i] = self._rows(lane[i : i + 1], count[i : i + 1], batch.before)[0]
            return places

    def _rows(self, lane: Array, count: Array, rows: Array) -> tuple[Array, Array]:
        """Places of the blocks of rows, 0 where their ids are damaged, and whether they are."""
        return self.fetch(lane, count, np.ones(len(lane), bool), rows, np.zeros(1, np.int64)).places()

    def _worthwhile(self, batch: Batch, staged: Staged) -> bool:
        """Whether the column compresses; True as long as it is too early to tell."""
        rows = int(np.minimum(batch.after, self.depth).sum())
        if rows < _PROBE_ROWS and rows * self.row < _PROBE_BYTES:
            return True
        self.probed = True
        if isinstance(self.ids, Ring):
            encoded = rows * self.ids.row
        else:
            encoded = self.ids.arena.live + sum(map(len, staged.inner.blobs))
        self.probed = rows * self.row >= WORTHWHILE * (encoded + self._live_bytes())
        return self.probed

    def reserve(self, staged: Staged) -> None:
        """Stores the ids. The last step that can fail."""
        self.ids.reserve(staged.inner)

    def cancel(self, staged: Staged) -> None:
        """Undoes `stage` and `reserve`."""
        self.ids.cancel(staged.inner)
        self._give_up(staged.ids)

    def commit(self, batch: Batch, rows: Array, staged: Staged) -> None:
        """Makes a staged batch readable and gives up the blocks of what has expired."""
        self.ids.commit(batch, staged.ids, staged.inner)
        self._give_up(staged.gone)

    def due(self, count: Array) -> bool:
        """Ids are not compressed again."""
        return False

    def lot(self, count: Array, least: int | None) -> None:
        """Ids are not compressed again."""
        return None

    def compact(self, count: Array) -> None:
        """The ids' business: a table only grows."""
        self.ids.compact(count)

    # ---------------------------------------------------------------- reading

    def fetch(self, lane: Array, count: Array, there: Array, rows: Array, starts: Array) -> BlockFetch:
        """How to fetch rows, as `Part.fetch` describes it."""
        ids: Fetch
        if isinstance(self.ids, Ring):
            ids = self.ids.fetch(lane, count, there, rows, np.zeros(1, np.int64))
        else:
            ids = changed_rows(self.ids, self._changes, lane, count, there, rows)
        return BlockFetch(self.cut, ids, self.k == 1, self.table.held, lane, count, there, starts)


@dataclass
class BlockFetch:
    """Rows to put together."""

    cut: Cut
    ids: Fetch
    checked: bool  # whether ids come with a checksum
    held: tuple[Array, Array]
    lane: Array
    count: Array
    there: Array
    starts: Array

    volatile = True  # the places of rows that expire are used again

    def places(self) -> tuple[Array, Array]:
        """int64[M, blocks], and bool[M], rows whose ids are not what was stored (their places are 0)."""
        number = self.cut.blocks
        ids = np.zeros((len(self.there), number + self.checked), np.uint32)
        self.ids.run([flat(ids)])
        places = ids[:, :number].astype(np.int64)
        damaged = np.zeros(len(ids), bool)
        if self.checked:
            damaged = ids[:, number] != _row_checksum(places, self.lane, self.count)
        if places.size and int(places.max()) >= len(self.held[0]):
            damaged |= (places >= len(self.held[0])).any(axis=1)
        damaged &= self.there
        if damaged.any() or not self.there.all():
            places[damaged | ~self.there] = 0
        return places, damaged

    def run(self, outs: Sequence[memoryview]) -> Array:
        """Fills the requests' outputs; the rows that are damaged, or were overwritten meanwhile."""
        places, damaged = self.places()
        wrong = damaged_places(self.held, places)
        if len(wrong):
            damaged |= np.isin(places, wrong).any(axis=1)
        for some, out in zip(np.split(places, self.starts[1:]), outs, strict=True):
            if some.size:
                self.cut.join(self.held[0], some, np.frombuffer(out, np.uint8).reshape(len(some), -1))
        return damaged


def _row_checksum(places: Array, lane: Array, count: Array) -> Array:
    """uint32[R] of a row's ids and of which row it is: a row that lies elsewhere is noticed."""
    factors = odd(places.shape[1] + 2)
    words = places.astype(np.uint64)
    total = np.einsum("ij,j->i", words, factors[2:]) + count.astype(np.uint64) * factors[0]
    return ((total + lane.astype(np.uint64) * factors[1]) >> np.uint64(32)).astype(np.uint32)
