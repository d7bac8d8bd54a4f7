"""Rows that come once, in order: checked as they come, a block behind, as the next row says what follows the last."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._core.progress import Progress
from fbuf.datasets._flat import CALL, Found, Plan, Settings, columns_of, length_of, planned, warn_of_cuts
from fbuf.datasets._names import named
from fbuf.datasets._once import write_stream
from fbuf.datasets._writing import Block, rows_a_piece
from fbuf.interop._columns import block_of
from fbuf.interop._source import Column


def write_once(found: Found, path: Path, settings: Settings, about: Mapping[str, Any], progress: Progress) -> None:
    """Writes a data set from columns that are read from front to back."""
    rows = length_of(found, named(CALL, found, settings.fields))
    plan = planned({name: column for name, (column, _) in found.items()}, settings, rows)

    def parts() -> Iterator[Block]:
        for start in range(0, rows, plan.block):
            last = min(start + plan.block, rows)
            yield {name: block_of(CALL, name, c, start, last, ()) for name, c in plan.columns.items()}

    _write(plan, parts(), path, settings, about, progress)


def write_blocks(
    data: Iterable[Any], path: Path, settings: Settings, about: Mapping[str, Any], progress: Progress
) -> None:
    """Writes a data set from dicts of arrays, in order of time."""
    items = iter(data)
    first = next(items, None)
    while isinstance(first, Mapping) and first and not _size(first):
        first = next(items, None)
    if first is None:
        raise ValueError(f"{CALL}: there are no rows; expected one at least.")
    plan = _plan_of(first, settings)
    plan = dataclasses.replace(plan, columns={name: _bare(column) for name, column in plan.columns.items()})
    items = itertools.chain(iter([first]), items)
    del first
    _write(plan, _parts(items, plan, settings), path, settings, about, progress)


def _bare(column: Column) -> Column:
    """Without the array, which would stay in memory."""
    return dataclasses.replace(column, read=lambda first, last: np.zeros(0))


def _write(
    plan: Plan, parts: Iterable[Block], path: Path, settings: Settings, about: Mapping[str, Any], progress: Progress
) -> None:
    size = rows_a_piece(CALL, settings.piece_rows, plan.schema)
    counts = [0, 0]
    blocks = _finished(plan, parts, counts)
    meta = {**about, "from": "arrays"}
    write_stream(CALL, path, plan.schema, blocks, piece_rows=size, meta=lambda: meta, progress=progress)
    warn_of_cuts(*counts)


def _plan_of(item: Any, settings: Settings) -> Plan:
    if not isinstance(item, Mapping):
        raise TypeError(f"{CALL}: data gives a {type(item).__name__}; expected dicts of arrays.")
    found = columns_of(item)
    rows = length_of(found, named(CALL, found, settings.fields)) if _size(item) else 0
    return planned({name: column for name, (column, _) in found.items()}, settings, rows)


def _size(item: Mapping[str, Any]) -> int:
    return max((rows for _, rows in columns_of(item).values()), default=0)


def _parts(items: Iterator[Any], plan: Plan, settings: Settings) -> Iterator[Block]:
    """Blocks of raw rows, copied, as whoever gives them may fill the same arrays again; each dict is checked."""
    expected = {name: (column.shape, column.dtype) for name, column in plan.columns.items()}
    number = 0
    for item in items:
        rows = _size(item) if isinstance(item, Mapping) else 1
        if rows:
            now = _plan_of(item, settings)
            came = {name: (column.shape, column.dtype) for name, column in now.columns.items()}
            if came != expected:
                odd = next(name for name in (*came, *expected) if came.get(name) != expected.get(name))
                raise ValueError(
                    f"{CALL}: from row {number} on leaf '{odd}' is {_text(came.get(odd))}; expected "
                    f"{_text(expected.get(odd))}, as in the first dict."
                )
            for start in range(0, rows, plan.block):
                last = min(start + plan.block, rows)
                yield {name: np.array(block_of(CALL, name, c, start, last, ())) for name, c in now.columns.items()}
            number += rows
            del now
        del item


def _finished(plan: Plan, parts: Iterable[Block], counts: list[int]) -> Iterator[Block]:
    """Each block once the next is there; counts ends that were found by comparing, and rows."""
    held: Block | None = None
    for part in parts:
        if held is not None:
            yield _one(plan, held, {name: part[name][:1] for name in plan.ends.follows}, counts)
        held = part
    if held is not None:
        yield _one(plan, held, None, counts)


def _one(plan: Plan, block: Block, after: Block | None, counts: list[int]) -> Block:
    finished, cuts = plan.ends.finished(CALL, counts[1], block, after)
    counts[0] += cuts
    counts[1] += len(finished["terminated"])
    return finished


def _text(leaf: tuple[tuple[int, ...], np.dtype[Any]] | None) -> str:
    return "missing" if leaf is None else f"{leaf[1].name}{list(leaf[0])}"
