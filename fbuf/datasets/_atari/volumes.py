"""One part of a dump as pieces of the data set: one, or more where rows take much room, so that memory has a bound.

A piece is held in memory, encoded, until it is committed, and compressed again there. A million frames of most games are
some 50 to 100 MB; of a game that is all sparks and scrolling they are several hundred. So a piece that has grown to
`MOST_BYTES` is committed and another begun. The last of a dump, committed when all its files are known to be whole, names
the others: until then these are nothing, and are removed by whoever comes next.
"""

from __future__ import annotations

import contextlib
from typing import Any

from fbuf._formats import dataset

MOST_BYTES = 128 << 20
RUNS = 10_000  # a run has fewer pieces
MOST = 50  # volumes of a part; the last takes all that is left
BEFORE = RUNS * MOST  # added to a number: rows of the cycle before


class Volumes:
    """Rows on their way into pieces `number`, `number + RUNS`, ...

    Args:
      mark: Kept with each piece, and with no other's.
    """

    def __init__(self, path: str, number: int, schema: dataset.Schema, mark: dict[str, Any]) -> None:
        self._path, self._number, self._schema, self._mark = path, number, schema, mark
        self._writer: dataset.SegmentWriter | None = None
        self.pieces: list[list[int]] = []  # number and rows of each

    def __enter__(self) -> Volumes:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Leaves nothing if there was an exception."""
        if self._writer is not None:
            self._writer.close()
        if kind is not None:
            for number, _rows in self.pieces:
                with contextlib.suppress(OSError):
                    dataset.discard(self._path, number)

    @property
    def rows(self) -> int:
        """So far."""
        return sum(rows for _, rows in self.pieces)

    def append(self, rows: dict[str, Any]) -> None:
        """Adds rows, as `SegmentWriter.append`."""
        if self._writer is not None and self._writer.nbytes >= MOST_BYTES and len(self.pieces) < MOST:
            self.commit()
        if self._writer is None:
            number = self._number + RUNS * len(self.pieces)
            self._writer = dataset.SegmentWriter(self._path, number, self._schema)
            self.pieces.append([number, 0])
        self._writer.append(rows)
        self.pieces[-1][1] = self._writer.rows

    def commit(self, meta: dict[str, Any] | None = None) -> None:
        """Commits what has been appended since the last time, if there is something."""
        if self._writer is not None:
            self._writer.commit({**self._mark, **(meta or {})})
            self._writer = None


def all_numbers(number: int) -> list[int]:
    """Of all pieces that a dump can have become."""
    return [start + RUNS * i for start in (number, number + BEFORE) for i in range(MOST)]
