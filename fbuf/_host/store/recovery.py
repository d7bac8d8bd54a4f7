"""Reopen a store in files: find which of the rows that its directory counts are intact, and resume with those."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fbuf._host.columns.chunked_file import ChunkedFileColumn
from fbuf._host.columns.raw import RawColumn
from fbuf._host.columns.raw_file import RawFileColumn
from fbuf._host.interfaces import ColumnData, InvalidRows
from fbuf._host.io.directory import Folder
from fbuf._host.store.factory import kind_bytes
from fbuf._host.store.row_updates import RowUpdates, UpdateLog
from fbuf._host.types import Array, StoreCorrupted


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
    low, lost = np.maximum(total - depth, folder.first), 0
    count, held = total.copy(), np.minimum(total - low, length)
    if folder.verify:
        chunks = [part.k for part in files if isinstance(part, ChunkedFileColumn)]
        count, held = longest_valid_run(low, total, length, [part.damaged(low, total) for part in files], chunks)
        if total.any() and not held.any():
            raise StoreCorrupted(f"Buffer.resume: no row at {folder.path} is intact. Load the last checkpoint.")
        first, before = count - held, np.maximum(total - length, low)
        lost = int((total - count + np.maximum(first - before, 0)).clip(max=total - before).sum())
        folder.first = np.where((count < total) | (first > before), first, folder.first)
        low = np.maximum(count - depth, folder.first)
    for i, part in enumerate(parts):
        if isinstance(part, RawFileColumn):
            part.resume(low, count, checked=folder.verify)
        elif isinstance(part, ChunkedFileColumn | RawColumn):
            part.resume(count)
        if not isinstance(part, ChunkedFileColumn):
            folder.delete_chunks(f"column{i}")
    lost_updates = log.load(updates, low, count, len(parts))
    if not lost and not lost_updates:
        return count, held, ""
    folder.save(kind_bytes(parts), count, updates.made)
    return (
        count,
        held,
        f"Buffer.resume: {lost} rows and {lost_updates} row updates at {folder.path} are damaged or missing and were dropped; "
        f"each lane resumes with its longest valid run. The last checkpoint may have them: fbuf.load(path).",
    )


def longest_valid_run(
    low: Array, count: Array, length: int, invalid: Sequence[InvalidRows], chunks: Sequence[int]
) -> tuple[Array, Array]:
    """Find the longest run of valid rows of each lane, the newest of several.

    Args:
      low: int64[E], the first row of each lane that is counted.
      count: int64[E], the row after the last.
      length: Rows of a lane that states name.
      invalid: By column.
      chunks: Rows a chunk, of the encoded columns: such a lane ends between two chunks, or where it ended.
    Returns:
      int64[E], rows each lane counts from now on, and int64[E], how many of its newest are held (at most `length`).
    """
    held = np.minimum(count - low, length)
    count = count.copy()
    lanes = np.concatenate([np.zeros(0, np.int64), *(lane for lane, _ in invalid)])
    rows = np.concatenate([np.zeros(0, np.int64), *(row for _, row in invalid)])
    for lane in np.unique(lanes).tolist():
        end = int(count[lane])
        edges = np.concatenate([[int(low[lane]) - 1], np.unique(rows[lanes == lane]), [end]])
        sizes = np.diff(edges) - 1
        best = len(sizes) - 1 - int(np.argmax(sizes[::-1]))
        first, stop = int(edges[best]) + 1, _between_chunks(int(edges[best + 1]), end, chunks)
        number = min(stop - first, length)
        # A lane whose oldest row is at position 0 would look like one that never lost a row.
        if 0 < number < stop and number < length and (stop - number) % length == 0:
            number -= 1
        count[lane], held[lane] = (stop, number) if number > 0 else (0, 0)
    return count, held


def _between_chunks(stop: int, end: int, chunks: Sequence[int]) -> int:
    while True:
        cut = min((stop // k * k for k in chunks if stop < end // k * k), default=stop)
        if cut == stop:
            return stop
        stop = cut
