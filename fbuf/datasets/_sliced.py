"""Rows that can be read in any order: checked from end to end, then written in pieces."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._core.progress import Progress
from fbuf._files._data import bytes_of
from fbuf.datasets._flat import CALL, Found, Settings, check_rows, length_of, planned, warn_of_cuts
from fbuf.datasets._names import named
from fbuf.datasets._writing import Block, Work, rows_a_piece, write
from fbuf.interop._columns import block_of


def write_columns(
    found: Found,
    path: Path,
    settings: Settings,
    about: Mapping[str, Any],
    workers: int,
    progress: Progress,
) -> None:
    """Writes the data set; `about` is kept with it."""
    taken = named(CALL, found, settings.fields)
    rows = length_of(found, taken)
    plan = planned({name: column for name, (column, _) in found.items()}, settings, rows)
    check_rows(plan, rows)
    size = rows_a_piece(CALL, settings.piece_rows, plan.schema)
    starts = range(0, rows, size)
    cuts = [0] * len(starts)
    begin = zlib.crc32(repr((rows, plan.ends)).encode())
    written: dict[int, str] = {}

    def raw(number: int) -> Iterator[tuple[int, Block, Block | None]]:
        """Blocks of a piece: number of the first row, rows, and the observations of the row after them."""
        first, stop = starts[number], min(starts[number] + size, rows)
        for start in range(first, stop, plan.block):
            last = min(start + plan.block, stop)
            block = {name: block_of(CALL, name, c, start, last, ()) for name, c in plan.columns.items()}
            after = None
            if last < rows:
                after = {name: plan.columns[name].read(last, last + 1) for name in plan.ends.follows}
            yield start, block, after

    def blocks(number: int) -> Iterator[Block]:
        cuts[number], checksum = 0, begin
        for start, block, after in raw(number):
            checksum = _checksum(block, after, checksum)
            finished, found = plan.ends.finished(CALL, start, block, after)
            cuts[number] += found
            yield finished
        written[number] = f"arrays {checksum:08x}"

    def mark(number: int) -> str:
        if number in written:
            return written[number]
        checksum = begin
        for _, block, after in raw(number):
            checksum = _checksum(block, after, checksum)
        return f"arrays {checksum:08x}"

    sizes = [min(start + size, rows) - start for start in starts]
    work = Work(plan.schema, sizes, blocks, mark, lambda: {**about, "from": "arrays"})
    write(CALL, path, work, workers=workers, progress=progress)
    warn_of_cuts(sum(cuts), rows)


def _checksum(block: Block, after: Block | None, checksum: int) -> int:
    """Of all that a block is made from: rows that differ anywhere are other work."""
    for leaf in (*block.values(), *(after or {}).values()):
        checksum = zlib.crc32(bytes_of(np.ascontiguousarray(leaf)), checksum)
    return checksum
