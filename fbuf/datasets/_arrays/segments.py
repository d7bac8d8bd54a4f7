"""Blocks of rows into the pieces of a data set.

A piece is there or not, and a data set without its last file does not open; so an interruption leaves whole pieces. They
are used again only by the same work: every piece carries a mark made from its rows, compared before anything is written.
Pieces are written by threads, not processes: compressing releases Python's lock, and nothing must be pickled. A stream
cannot be resumed, and leaves nothing where it fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._concurrency.parallel import run_parallel
from fbuf._core.progress import Bar, Progress
from fbuf._formats import dataset
from fbuf._formats.dataset.manifest import NAME
from fbuf._formats.dataset.segment_writer import MOST_ROWS
from fbuf.datasets._lock import NAME as LOCK
from fbuf.datasets._lock import held
from fbuf.interop._columns import Block

_PIECE_BYTES = 512 * 2**20  # before compression
_MOST_ROWS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Work:
    """What is to be written, piece by piece.

    Attributes:
      schema: Of the rows.
      rows: Of each piece.
      blocks: The rows of piece `n`, in order, as blocks `{leaf: [m, ...]}`. Called from several threads.
      mark: What tells the rows of piece `n` from those of other work: a short text.
      meta: What `dataset.json` says of the rows, asked for when all are written.
    """

    schema: dataset.Schema
    rows: Sequence[int]
    blocks: Callable[[int], Iterator[Block]]
    mark: Callable[[int], str]
    meta: Callable[[], Mapping[str, Any]]


def rows_a_piece(call: str, piece_rows: int | None, schema: dataset.Schema) -> int:
    """Rows of a piece: as asked for, or at most a million and what fits 512 MiB before compression."""
    if piece_rows is None:
        return max(1, min(_MOST_ROWS, _PIECE_BYTES // max(schema.row_bytes, 1)))
    if (
        isinstance(piece_rows, bool)
        or not isinstance(piece_rows, (int, np.integer))
        or not 1 <= piece_rows <= MOST_ROWS
    ):
        raise ValueError(f"{call}: piece_rows is {piece_rows!r}; expected an int from 1 to {MOST_ROWS}, or None.")
    return int(piece_rows)


def path_of(call: str, name: str, given: Any, other: str = "") -> Path:
    """A path as the user gave it. Raises TypeError: it is none."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        what = repr(given) if given is None or isinstance(given, str) else f"a {type(given).__name__}"
        raise TypeError(f"{call}: {name} is {what}; expected the path of a folder{other and ', '}{other}.")
    return Path(given).expanduser()


def check_workers(call: str, workers: int) -> None:
    """Raises ValueError unless it is an int >= 0."""
    if isinstance(workers, bool) or not isinstance(workers, (int, np.integer)) or workers < 0:
        raise ValueError(f"{call}: workers is {workers!r}; expected an int >= 0, threads beside this one.")


def check_free(call: str, path: Path, *, unfinished: bool) -> None:
    """Raises FileExistsError if something lies at `path`; `unfinished` pieces may.

    A folder that is empty may, too.
    """
    if (path / NAME).exists():
        raise FileExistsError(
            f"{call}: {path} is a data set already. Open it: fbuf.datasets.open({str(path)!r}), or make room: "
            f"fbuf.datasets.delete({str(path)!r})."
        )
    if not path.exists():
        return
    names = set(os.listdir(path)) - {LOCK, NAME + ".new"} if path.is_dir() else {"."}
    if names - {"pieces"}:
        raise FileExistsError(f"{call}: {path} holds something else; expected no such folder. Choose another path.")
    if names and not unfinished:
        raise FileExistsError(
            f"{call}: {path} holds what unfinished work left, and rows that come as a stream cannot be resumed. "
            f"Make room: fbuf.datasets.delete({str(path)!r})."
        )


@contextlib.contextmanager
def _making(call: str, path: Path, *, unfinished: bool) -> Iterator[None]:
    """Hold the lock of a data set; if anything fails, remove what cannot be resumed."""
    check_free(call, path, unfinished=unfinished)
    with held(call, path):
        check_free(call, path, unfinished=unfinished)  # another process may have finished it meanwhile
        try:
            yield
        except BaseException:
            if not (unfinished and dataset.committed(path)):
                dataset.remove(path)
            raise


def write(call: str, path: Path, work: Work, *, workers: int, progress: Progress) -> None:
    """Write the data set, or what is missing of it.

    Raises:
      FileExistsError: there is a data set, or pieces of other work.
      BlockingIOError: another process is at it.
    """
    with _making(call, path, unfinished=True), contextlib.closing(Bar(progress, call, sum(work.rows), " rows")) as bar:
        done = _committed(call, path, work)
        bar(sum(work.rows[number] for number in done))

        def one(number: int, step: Callable[[int], None]) -> None:
            _write_piece(path, number, work.schema, work.blocks(number), lambda: work.mark(number), step)

        run_parallel([number for number in range(len(work.rows)) if number not in done], one, bar, workers)
        used = [dataset.Used(number, 0, rows) for number, rows in enumerate(work.rows)]
        dataset.finish(path, pieces=used, meta=dict(work.meta()))


def write_stream(
    call: str,
    path: Path,
    schema: dataset.Schema,
    blocks: Iterable[Block],
    piece_rows: int,
    meta: Mapping[str, Any],
    progress: Progress,
) -> int:
    """Write a data set from blocks that come once, one piece after another; return the number of rows."""
    with _making(call, path, unfinished=False), contextlib.closing(Bar(progress, call, 0, " rows")) as bar:
        used: list[dataset.Used] = []
        for part in _split(blocks, piece_rows):
            rows = _write_piece(path, len(used), schema, part, lambda: "stream", bar)
            used.append(dataset.Used(len(used), 0, rows))
        bar.total = bar.done
        bar(0)
        dataset.finish(path, pieces=used, meta=dict(meta))
    return bar.done


def _write_piece(
    path: Path,
    number: int,
    schema: dataset.Schema,
    blocks: Iterable[Block],
    mark: Callable[[], str],
    step: Callable[[int], None],
) -> int:
    rows = 0
    with dataset.PieceWriter(path, number, schema) as piece:
        for block in blocks:
            piece.append(block)
            rows += length_of(block)
            step(length_of(block))
        piece.commit(meta={"mark": mark()})
    return rows


def _split(blocks: Iterable[Block], rows: int) -> Iterator[Iterator[Block]]:
    """The blocks of one piece after another, cut where a piece is full."""
    blocks = iter(blocks)
    rest: Block | None = None

    def part() -> Iterator[Block]:
        nonlocal rest
        left = rows
        while left and (rest := next(blocks, None) if rest is None else rest) is not None:
            block, length = rest, length_of(rest)
            rest = {name: leaf[left:] for name, leaf in block.items()} if length > left else None
            yield {name: leaf[:left] for name, leaf in block.items()}
            left -= min(length, left)

    while (rest := next(blocks, None) if rest is None else rest) is not None:
        yield part()


def length_of(block: Block) -> int:
    """Rows of a block."""
    return len(next(iter(block.values())))


def _committed(call: str, path: Path, work: Work) -> set[int]:
    """Pieces that are there, checked to be of this work."""
    done: set[int] = set()
    for number, piece in (dataset.committed(path) if path.exists() else {}).items():
        same = number < len(work.rows) and piece.rows == work.rows[number] and piece.schema == work.schema
        if not same or piece.meta.get("mark") != work.mark(number):
            raise FileExistsError(
                f"{call}: {path} holds unfinished work on other rows, or with other settings (piece {number}). Choose "
                f"another path, or make room: fbuf.datasets.delete({str(path)!r})."
            )
        done.add(number)
    return done
