"""Choose and make the data of a column: by what the column asks for, where its rows are, and what they turned out to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.codecs.codec import Zstd
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.columns.chunked_file import ChunkedFileColumn
from fbuf._host.columns.frame_stream import stackings
from fbuf._host.columns.raw import RawColumn
from fbuf._host.columns.raw_file import RawFileColumn
from fbuf._host.columns.spec import Column
from fbuf._host.columns.stacked import StackedColumn
from fbuf._host.interfaces import ColumnData, ranges
from fbuf._host.io.directory import CHUNKS, NOTHING, RING, Folder
from fbuf._host.memory.lazy_array import Sources
from fbuf._host.types import Array, flat, raise_if_corrupted


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
        there, start = np.ones(len(lane), bool), np.zeros(1, np.int64)
        raise_if_corrupted(part.fetch(lane, row, there, count, start).run([flat(values)]), there)
        ring.put(lane, row, values)
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
