"""Choose and make the data of a column: by what the column asks for, where its rows are, and what they turned out to be.

Of a store in files, find which of the rows that its directory counts are intact, and resume with those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.codecs import Zstd
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.columns.chunked_file import ChunkedFileColumn
from fbuf._host.columns.frame_stream import stackings
from fbuf._host.columns.raw import RawColumn
from fbuf._host.columns.raw_file import RawFileColumn
from fbuf._host.columns.spec import Column
from fbuf._host.columns.stacked import StackedColumn
from fbuf._host.io.directory import CHUNKS, NOTHING, RING, Folder
from fbuf._host.memory.lazy_array import Sources
from fbuf._host.store.row_updates import RowUpdates, UpdateLog
from fbuf._host.types import Array, ColumnData, InvalidRows, StoreCorrupted, flat, raise_if_corrupted, ranges


def kind_bytes(parts: Sequence[ColumnData]) -> bytes:
    """Return the kinds of columns as a directory stores them, a byte each."""
    return b"".join(
        CHUNKS if isinstance(p, ChunkedFileColumn) else RING if isinstance(p, RawFileColumn) else NOTHING for p in parts
    )


@dataclass(frozen=True)
class ColumnFactory:
    """Make the columns of a store: `lanes` lanes of `depth` rows each, in files if there is a folder."""

    columns: tuple[Column, ...]
    lanes: int
    depth: int
    cache: int
    folder: Folder | None

    def part(self, index: int) -> ColumnData:
        """Return an empty column; with a folder, one over the rows that are there."""
        column = self.columns[index]
        settings = self._settings(column)
        if column.nbytes == 0:
            return RawColumn(*settings)
        if self.folder is not None:
            return self._chunks(index) if self.folder.kinds[index : index + 1] == CHUNKS else self.ring(index)
        if column.codec is None:
            return RawColumn(*settings)
        if column.stacks and isinstance(column.codec, Zstd) and stackings(column.shape, column.dtype.itemsize):
            return StackedColumn(column.codec, *settings, self.cache)
        chunks = ChunkedColumn(column.codec, *settings, self.cache)
        chunks.probed |= column.settled
        return chunks

    def ring(self, index: int, batch: int = 0) -> RawColumn | RawFileColumn:
        """Return a raw column; in files with room for a batch of this size, in a new file unless that is 0."""
        column = self.columns[index]
        settings = self._settings(column)
        if self.folder is None or column.nbytes == 0:
            return RawColumn(*settings)
        fresh = self.folder.fresh or batch > 0
        return RawFileColumn(self.folder, f"column{index}", *settings, fresh, batch)

    def _settings(self, column: Column) -> tuple[tuple[int, ...], np.dtype[Any], int, int]:
        return column.shape, column.dtype, self.lanes, self.depth

    def _chunks(self, index: int) -> ChunkedFileColumn:
        assert self.folder is not None
        column = self.columns[index]
        assert column.codec is not None
        return ChunkedFileColumn(self.folder, f"column{index}", column.codec, *self._settings(column), self.cache)

    def as_ring(self, index: int, part: ColumnData, count: Array, batch: int) -> RawColumn | RawFileColumn:
        """Return the rows of an incompressible column as a raw one, with room for a batch of this size."""
        column, ring = self.columns[index], self.ring(index, batch)
        lane, row = ranges(np.maximum(count - self.depth, 0), count)
        values: Array = np.empty((len(lane), *column.shape), column.dtype)
        present, start = np.ones(len(lane), bool), np.zeros(1, np.int64)
        raise_if_corrupted(part.fetch(lane, row, present, count, start).run([flat(values)]), present)
        ring.put(lane, row, values)
        # Otherwise the head could count rows that are not on the disk.
        if self.folder is not None and self.folder.is_flushed:
            self.folder.wait_for([f"column{index}.rows", f"column{index}.sums"])
        return ring

    def saved(self, index: int, part: ColumnData, arrays: Sources) -> ColumnData:
        """Return the column that saved arrays belong to: `part`, or one of the kind its rows turned out to be."""
        column = self.columns[index]
        if "rows" in arrays:  # also of a column with a codec, if its rows did not compress
            return part if isinstance(part, RawColumn | RawFileColumn) else self.ring(index)
        if "stacking" in arrays and isinstance(column.codec, Zstd):  # also if they are no longer looked for
            if self.folder is not None:
                raise ValueError(
                    f"Store.from_arrays: column '{column.name}' was saved as frames of stacks, which are kept in memory "
                    f"only; expected rows. Save from Compressed(stacks=False), or load without a path."
                )
            return StackedColumn(column.codec, *self._settings(column), self.cache)
        return part


def reopen(
    folder: Folder, parts: Sequence[ColumnData], updates: RowUpdates, log: UpdateLog, depth: int, length: int
) -> tuple[Array, Array, str]:
    """Resume columns and row updates from the files of a folder.

    Returns:
      int64[E], rows counted; int64[E], how many of the newest are there (at most `length`); and a warning, "" if all are.
    Raises:
      StoreCorrupted: Files are damaged beyond what the folder allows to drop.
    """
    total, files = folder.count, [part for part in parts if isinstance(part, RawFileColumn | ChunkedFileColumn)]
    # What follows erases rows of open chunks that are in the segments, which a killed process may not have flushed.
    folder.wait_for(folder.files(""))
    low, lost = np.maximum(total - depth, folder.first), 0
    count, sizes = total.copy(), np.minimum(total - low, length)
    if folder.verify:
        chunks = [part.k for part in files if isinstance(part, ChunkedFileColumn)]
        invalid = [_lasting_damage(part, low, total) for part in files]
        count, sizes = longest_valid_run(low, total, length, invalid, chunks, folder.flushed)
        if total.any() and not sizes.any():
            raise StoreCorrupted(f"Buffer.resume: no row at {folder.path} is intact. Load the last checkpoint.")
        first, before = count - sizes, np.maximum(total - length, low)
        lost = int((total - count + np.maximum(first - before, 0)).clip(max=total - before).sum())
        folder.flushed = np.minimum(folder.flushed, count)
        folder.first = np.where((count < total) | (first > before), first, folder.first)
        low = np.maximum(count - depth, folder.first)
    for i, part in enumerate(parts):
        if isinstance(part, RawFileColumn):
            part.resume(low, count, checked=folder.verify)
        elif isinstance(part, ChunkedFileColumn | RawColumn):
            part.resume(count)
        if not isinstance(part, ChunkedFileColumn):
            folder.retire_chunks(f"column{i}")
    lost_updates = log.load(updates, low, count, len(parts))
    if lost or lost_updates:
        folder.save(kind_bytes(parts), count, updates.made)
    folder.tidy()
    if not lost and not lost_updates:
        return count, sizes, ""
    return (
        count,
        sizes,
        f"Buffer.resume: {lost} rows and {lost_updates} row updates at {folder.path} are damaged or missing and were dropped; "
        f"each lane resumes with its longest valid run, of flushed rows if there are any. The last checkpoint may have them: "
        f"fbuf.load(path).",
    )


def _lasting_damage(part: RawFileColumn | ChunkedFileColumn, low: Array, count: Array) -> InvalidRows:
    """Return lanes and counts of the rows that are invalid and still are when they are read again."""
    lane, row = part.damaged(low, count)
    if len(row):
        again = set(zip(*(numbers.tolist() for numbers in part.damaged(low, count)), strict=True))
        lasting = np.array([place in again for place in zip(lane.tolist(), row.tolist(), strict=True)], bool)
        lane, row = lane[lasting], row[lasting]
    return lane, row


def longest_valid_run(
    low: Array, count: Array, length: int, invalid: Sequence[InvalidRows], chunks: Sequence[int], flushed: Array
) -> tuple[Array, Array]:
    """Find the run of each lane with the most valid rows that were flushed and that states name, the newest of several.

    Without such rows it is the longest run of all.

    Args:
      low: int64[E], the first row of each lane that is counted.
      count: int64[E], the row after the last.
      length: Rows of a lane that states name.
      invalid: By column.
      chunks: Rows a chunk, of the encoded columns: such a lane ends between two chunks, or where it ended.
      flushed: int64[E], the row after the last that was flushed. Later rows may be missing after a power failure, and most
        rows of a longer run may have expired.
    Returns:
      int64[E], rows each lane counts from now on, and int64[E], how many of its newest are held (at most `length`).
    """
    lengths = np.minimum(count - low, length)
    count = count.copy()
    lanes = np.concatenate([np.zeros(0, np.int64), *(lane for lane, _ in invalid)])
    rows = np.concatenate([np.zeros(0, np.int64), *(row for _, row in invalid)])
    for lane in np.unique(lanes).tolist():
        end = int(count[lane])
        edges = np.concatenate([[int(low[lane]) - 1], np.unique(rows[lanes == lane]), [end]])
        firsts, stops = edges[:-1] + 1, _between_chunks(edges[1:], end, chunks)
        named = min(end - length, int(flushed[lane])), int(flushed[lane])
        sizes = np.clip(stops, *named) - np.clip(firsts, *named)
        if (sizes <= 0).all():
            sizes = stops - firsts
        best = len(sizes) - 1 - int(np.argmax(sizes[::-1]))
        first, stop = int(firsts[best]), int(stops[best])
        number = min(stop - first, length)
        # A lane whose oldest row is at position 0 would look like one that never lost a row.
        if 0 < number < stop and number < length and (stop - number) % length == 0:
            number -= 1
        count[lane], lengths[lane] = (stop, number) if number > 0 else (0, 0)
    return count, lengths


def _between_chunks(stops: Array, end: int, chunks: Sequence[int]) -> Array:
    """Return the last places up to each of int64[M] `stops` where a lane of `end` rows can end."""
    while True:
        cut = stops
        for k in chunks:
            cut = np.where(cut < end // k * k, cut // k * k, cut)
        if (cut == stops).all():
            return stops
        stops = cut
