"""Write blocks of rows as the segments of a data set.

A segment is written atomically, and a data set without its manifest does not open, so an interruption leaves whole
segments. Only the same work reuses them: each has a mark made from its rows. Threads write them, since compression releases
Python's lock. A stream cannot be resumed, and a failure leaves nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fbuf._concurrency.parallel import Advance, run_parallel
from fbuf._core.arguments import is_int
from fbuf._core.progress import Bar, Progress
from fbuf._formats import dataset
from fbuf._formats.dataset.manifest import NAME
from fbuf._formats.dataset.segment_writer import MAX_ROWS
from fbuf._rows.columns import Block
from fbuf.datasets._lock import NAME as LOCK
from fbuf.datasets._lock import exclusive

_SEGMENT_BYTES = 512 * 2**20  # before compression
_MOST_ROWS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Work:
    """What to write, segment by segment.

    Attributes:
      schema: Of the rows.
      rows: Of each segment.
      blocks: Yield the rows of segment `n`, in order, as blocks `{leaf: [m, ...]}`. Called from several threads.
      mark: Return a short text that identifies the rows of segment `n`.
      meta: Return the metadata, after all rows are written.
    """

    schema: dataset.Schema
    rows: Sequence[int]
    blocks: Callable[[int], Iterator[Block]]
    mark: Callable[[int], str]
    meta: Callable[[], Mapping[str, Any]]


def rows_per_segment(call: str, segment_rows: int | None, schema: dataset.Schema) -> int:
    """Return the rows of a segment: as asked for, or at most a million and 512 MiB before compression."""
    if segment_rows is None:
        return max(1, min(_MOST_ROWS, _SEGMENT_BYTES // max(schema.row_bytes, 1)))
    if not is_int(segment_rows) or not 1 <= segment_rows <= MAX_ROWS:
        raise ValueError(f"{call}: segment_rows is {segment_rows!r}; expected an int from 1 to {MAX_ROWS}, or None.")
    return int(segment_rows)


def to_path(call: str, name: str, value: Any, other: str = "") -> Path:
    """Return an argument as a path. Raises TypeError: it is not one."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        what = repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
        raise TypeError(f"{call}: {name} is {what}; expected the path of a folder{other and ', '}{other}.")
    return Path(value).expanduser()


def check_free(call: str, path: Path, *, unfinished: bool) -> None:
    """Raise FileExistsError if `path` exists; an empty folder may, and `unfinished` segments on request."""
    delete = f"fbuf.datasets.delete({str(path)!r})"
    if (path / NAME).exists():
        raise FileExistsError(f"{call}: {path} is a data set already. Open it, or call {delete}.")
    if not path.exists():
        return
    names = set(os.listdir(path)) - {LOCK, NAME + ".new"} if path.is_dir() else {"."}
    if names - {"pieces"}:
        raise FileExistsError(f"{call}: {path} already exists and is not a data set. Choose another path.")
    if names and not unfinished:
        raise FileExistsError(f"{call}: {path} has segments of a stream, which cannot be resumed. Call {delete}.")


@contextlib.contextmanager
def _making(call: str, path: Path, *, unfinished: bool) -> Iterator[None]:
    """Hold the lock of a data set; on failure, remove what cannot be resumed."""
    check_free(call, path, unfinished=unfinished)
    with exclusive(call, path):
        check_free(call, path, unfinished=unfinished)  # another process may have finished it meanwhile
        try:
            yield
        except BaseException:
            if not (unfinished and dataset.committed(path)):
                dataset.remove(path)
            raise


def write(call: str, path: Path, work: Work, *, workers: int, progress: Progress) -> None:
    """Write the data set, or its missing segments.

    Raises:
      FileExistsError: there is a data set, or segments of other work.
      BlockingIOError: another process is writing it.
    """
    with _making(call, path, unfinished=True), contextlib.closing(Bar(progress, call, sum(work.rows), " rows")) as bar:
        done = _committed(call, path, work)
        bar(sum(work.rows[number] for number in done))

        def one(number: int, step: Advance) -> None:
            _write_segment(path, number, work.schema, work.blocks(number), lambda: work.mark(number), step)

        run_parallel([number for number in range(len(work.rows)) if number not in done], one, bar, workers)
        used = [dataset.SegmentRows(number, 0, rows) for number, rows in enumerate(work.rows)]
        dataset.finish(path, used, meta=dict(work.meta()))


def write_stream(
    call: str,
    path: Path,
    schema: dataset.Schema,
    blocks: Iterable[Block],
    segment_rows: int,
    meta: Mapping[str, Any],
    progress: Progress,
) -> int:
    """Write a data set from blocks that are read once, segment after segment; return the number of rows."""
    with _making(call, path, unfinished=False), contextlib.closing(Bar(progress, call, 0, " rows")) as bar:
        used: list[dataset.SegmentRows] = []
        for part in _split(blocks, segment_rows):
            rows = _write_segment(path, len(used), schema, part, lambda: "stream", bar)
            used.append(dataset.SegmentRows(len(used), 0, rows))
        bar.total = bar.done
        bar(0)
        dataset.finish(path, used, meta=dict(meta))
    return bar.done


def _write_segment(
    path: Path, number: int, schema: dataset.Schema, blocks: Iterable[Block], mark: Callable[[], str], step: Advance
) -> int:
    rows = 0
    with dataset.SegmentWriter(path, number, schema) as writer:
        for block in blocks:
            writer.append(block)
            rows += length_of(block)
            step(length_of(block))
        writer.commit(meta={"mark": mark()})
    return rows


def split_blocks(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """Yield blocks of at most this many rows."""
    for block in blocks:
        for first in range(0, length_of(block), rows):
            yield {name: leaf[first : first + rows] for name, leaf in block.items()}


def _split(blocks: Iterable[Block], rows: int) -> Iterator[Iterator[Block]]:
    """Yield the blocks of one segment after another, cut at its size."""
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
    """Return the rows of a block."""
    return len(next(iter(block.values())))


def _committed(call: str, path: Path, work: Work) -> set[int]:
    """Return the numbers of the finished segments. Raises FileExistsError if one is of other work."""
    done: set[int] = set()
    for number, segment in (dataset.committed(path) if path.exists() else {}).items():
        same = number < len(work.rows) and segment.rows == work.rows[number] and segment.schema == work.schema
        if not same or segment.meta.get("mark") != work.mark(number):
            raise FileExistsError(
                f"{call}: {path} has segments of other rows or settings (segment {number}). Delete it, or choose another."
            )
        done.add(number)
    return done
