"""Rows that come once, into the pieces of a data set, one after another; there is nothing to go on with after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fbuf import _pieces
from fbuf._core.progress import Bar, Progress
from fbuf.datasets._lock import held
from fbuf.datasets._writing import Block, check_free, length_of


def write_stream(
    call: str,
    path: Path,
    schema: _pieces.Schema,
    blocks: Iterable[Block],
    *,
    piece_rows: int,
    meta: Callable[[], Mapping[str, Any]],
    progress: Progress,
) -> None:
    """Writes a data set from blocks that come once; if anything goes wrong, nothing is left."""
    check_free(call, path, unfinished=False)
    with held(call, path):
        check_free(call, path, unfinished=False)
        try:
            _write_stream(call, path, schema, _Cut(blocks), piece_rows, meta, progress)
        except BaseException:
            _pieces.remove(path)
            raise


def _write_stream(
    call: str,
    path: Path,
    schema: _pieces.Schema,
    rest: _Cut,
    piece_rows: int,
    meta: Callable[[], Mapping[str, Any]],
    progress: Progress,
) -> None:
    used: list[_pieces.Used] = []
    bar = Bar(progress, call, 0, " rows")
    while rest.more():
        with _pieces.PieceWriter(path, len(used), schema) as piece:
            rows = 0
            for block in rest.take(piece_rows):
                piece.append(block)
                rows += length_of(block)
                bar(length_of(block))
            piece.commit(meta={"mark": "stream"})
        used.append(_pieces.Used(len(used), 0, rows))
    bar.total = bar.done
    bar(0)
    bar.close()
    _pieces.finish(path, pieces=used, meta=dict(meta()))


class _Cut:
    """Blocks, cut where a piece is full."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = iter(blocks)
        self._held: Block | None = None

    def more(self) -> bool:
        while self._held is None or not length_of(self._held):
            self._held = next(self._blocks, None)
            if self._held is None:
                return False
        return True

    def take(self, rows: int) -> Iterator[Block]:
        while rows and self.more():
            assert self._held is not None
            block, length = self._held, length_of(self._held)
            if length > rows:
                self._held = {name: leaf[rows:] for name, leaf in block.items()}
                block, length = {name: leaf[:rows] for name, leaf in block.items()}, rows
            else:
                self._held = None
            rows -= length
            yield block
