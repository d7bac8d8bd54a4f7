"""Rows of `Ragged` outside jit: a list of dicts, or one dict of columns, arrays `[N, ...]` or lists of N values.

All of it is checked here, before anything is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fbuf._bridge.lazy_rows import length_name
from fbuf._core import arguments
from fbuf._core.pytree import PyTree, Spec
from fbuf._core.sample import TICKET
from fbuf._host.ragged.column import RaggedLeaf
from fbuf._host.ragged.values import MISSING
from fbuf.storages._ragged.parse_traced import Parsed, traced
from fbuf.storages._ragged.parse_values import as_numpy, dense_value, numbers, shortened, value_of
from fbuf.storages._ragged.schema import flatten


def eager(
    call: str, given: PyTree, spec: Spec, leaves: tuple[RaggedLeaf, ...], lead: tuple[int | None, ...], axes: str
) -> Parsed:
    """Rows outside jit, in any form."""
    ragged = {leaf.name: leaf for leaf in leaves}
    lengths = {length_name(leaf.name) for leaf in leaves if leaf.maximum is not None}
    dense = {n: s for n, s in spec.items() if n not in ragged and n not in lengths and n != TICKET}
    if isinstance(given, Mapping):
        flat = flatten(call, given, tuple(ragged))
        if TICKET in flat:
            return traced(call, given, spec, leaves, lead, axes)
        _check_names(call, "rows", flat, dense, ragged, lengths)
        if not lead:
            for name in [n for n in ragged if n in flat and length_name(n) in flat and length_name(n) in lengths]:
                value = as_numpy(call, f"leaf '{name}'", flat[name])
                (value,) = shortened(call, name, [value], np.asarray(flat[length_name(name)])[None])
                flat = {n: x for n, x in flat.items() if n != name} | ({} if value is MISSING else {name: value})
            return _of_rows(call, [flat], (), dense, ragged)
        return _of_columns(call, flat, lead, axes, dense, ragged)
    if not isinstance(given, (list, tuple)) or not lead:
        form = f"a list of dicts or a dict of columns [{axes}, ...]" if lead else "a dict"
        raise TypeError(
            f"{call}: rows are {type(given).__name__}; storages.Ragged takes {form}. Write "
            f"{'[{' if lead else '{'}'obs': x, 'text': y{'}]' if lead else '}'}."
        )
    rows: list[Any] = list(given)
    shape: tuple[int, ...] = (len(rows),)
    if len(lead) == 2:
        for step, several in enumerate(rows):
            if not isinstance(several, (list, tuple)):
                raise TypeError(
                    f"{call}: row {step} is {type(several).__name__}; expected a list of {lead[1]} dicts, one a lane. Write "
                    f"[[{{...}}, ...], ...]."
                )
            _check_number(call, f"row {step}", len(several), lead[1])
        shape = (len(rows), int(lead[1] or 0))
        rows = [row for several in rows for row in several]
    elif lead[0] is not None:
        _check_number(call, "the list", len(rows), lead[0])
    flat_rows = [flatten(call, row, tuple(ragged)) for row in rows]
    for i, row in enumerate(flat_rows):
        _check_names(call, f"row {i}", row, dense, ragged, set())
    return _of_rows(call, flat_rows, shape, dense, ragged)


def _check_number(call: str, what: str, got: int, want: int | None) -> None:
    if got != want:
        raise ValueError(f"{call}: {what} has {got} rows; expected {want}, one a lane. Give a dict for each.")


def _check_names(
    call: str, what: str, got: Mapping[str, Any], dense: Mapping[str, Any], ragged: Mapping[str, Any], lengths: set[str]
) -> None:
    if got.keys() == dense.keys() | ragged.keys():
        return
    missing = [n for n in dense if n not in got]
    extra = [n for n in got if n not in dense and n not in ragged and n not in lengths]
    if missing or extra:
        told = " and ".join(
            ([f"leaf '{missing[0]}' is missing"] if missing else [])
            + ([f"leaf '{extra[0]}' is not in this buffer"] if extra else [])
        )
        raise ValueError(
            f"{call}: {what}: {told} (got: {', '.join(got) or 'nothing'}; expected: {', '.join((*dense, *ragged))}). Rows may "
            f"lack ragged leaves ({', '.join(ragged) or 'none here'}), never the others: give all of them."
        )


def _of_rows(
    call: str,
    rows: Sequence[Mapping[str, Any]],
    shape: tuple[int, ...],
    dense: Mapping[str, jax.ShapeDtypeStruct],
    ragged: Mapping[str, RaggedLeaf],
) -> Parsed:
    out: dict[str, Any] = {}
    for name, want in dense.items():
        column = [row[name] for row in rows]
        array = numbers(column, want) if shape else None
        if array is None:
            items = [dense_value(call, name, value, want, i if shape else None) for i, value in enumerate(column)]
            array = np.array(items, want.dtype)
        out[name] = array.reshape((*shape, *want.shape))
    found = [
        [MISSING if n not in row else value_of(call, leaf, row[n], i if shape else None) for i, row in enumerate(rows)]
        for n, leaf in ragged.items()
    ]
    out[TICKET] = np.zeros((*shape, 2), np.uint32)
    return Parsed(out, found)


def _of_columns(
    call: str,
    flat: Mapping[str, Any],
    lead: tuple[int | None, ...],
    axes: str,
    dense: Mapping[str, jax.ShapeDtypeStruct],
    ragged: Mapping[str, RaggedLeaf],
) -> Parsed:
    own: dict[str, Any] = {n: as_numpy(call, f"leaf '{n}'", x) for n, x in flat.items() if n in dense}
    for name, column in own.items():
        if isinstance(column, (list, tuple)):
            items, have = _column(call, name, column, lead, None, axes)
            cells = [dense_value(call, name, x, dense[name], i) for i, x in enumerate(items)]
            own[name] = np.array(cells, dense[name].dtype).reshape((*have, *dense[name].shape))
    out: dict[str, Any] = {}
    if dense:
        out |= arguments.check_rows(call, own, dense, jax.tree.structure(dict(dense)), lead, axes)
    shape = next((x.shape[: len(lead)] for x in out.values()), None)
    found: dict[str, list[Any]] = {}
    for name in [n for n in ragged if n in flat]:
        column = as_numpy(call, f"leaf '{name}'", flat[name])
        items, shape = _column(call, name, column, lead, shape, axes)
        lengths = flat.get(length_name(name)) if ragged[name].maximum is not None else None
        if lengths is not None:
            items = shortened(call, name, items, np.asarray(as_numpy(call, f"leaf '{length_name(name)}'", lengths)))
        found[name] = [x if x is MISSING else value_of(call, ragged[name], x, i) for i, x in enumerate(items)]
    if shape is None:
        raise ValueError(f"{call}: rows have no leaves; expected {', '.join((*dense, *ragged))}. Give a list of dicts.")
    number = int(np.prod(shape))
    out[TICKET] = np.zeros((*shape, 2), np.uint32)
    return Parsed(out, [found.get(name, [MISSING] * number) for name in ragged])


def _column(
    call: str, name: str, column: Any, lead: tuple[int | None, ...], shape: tuple[int, ...] | None, axes: str
) -> tuple[list[Any], tuple[int, ...]]:
    """The values of a column, lanes side by side, and its leading axes."""
    want = tuple(lead) if shape is None else shape
    if isinstance(column, np.ndarray) and column.ndim >= len(lead):
        have = column.shape[: len(lead)]
        items = list(column.reshape(-1, *column.shape[len(lead) :]))
    elif isinstance(column, (list, tuple)):
        items, have = list(column), (len(column),)
        if len(lead) == 2:
            widths = {len(several) if isinstance(several, (list, tuple, np.ndarray)) else -1 for several in items}
            have = (len(items), widths.pop() if len(widths) == 1 else int(lead[1] or 0) if not widths else -1)
            items = [x for several in items for x in several] if have[1] >= 0 else []
    else:
        what = f"shape {list(column.shape)}" if isinstance(column, np.ndarray) else f"type {type(column).__name__}"
        raise TypeError(
            f"{call}: leaf '{name}' has {what}; expected a column: an array [{axes}, ...], or a list of {axes} values where "
            f"shapes differ. For single rows use a list of dicts."
        )
    if any(n not in (None, m) for n, m in zip(want, have, strict=True)):
        raise ValueError(
            f"{call}: leaf '{name}' has leading axes {list(have)}; expected [{axes}] = "
            f"{[n if n is not None else 'N' for n in want]}. All leaves need the same leading axes."
        )
    return items, have
