"""Check and convert the rows given to `Ragged`, before anything is stored.

Outside jit rows are a list of dicts, or one dict of columns: arrays `[N, ...]` or lists of N values. Inside jit they are
columns of arrays, padded to the leaf's maximum. Rows that bring tickets are already stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge.lazy_rows import length_name
from fbuf._core import arguments
from fbuf._core.pytree import PyTree, Spec, leaf_spec, narrow
from fbuf._core.sample import TICKET
from fbuf._host.ragged.column import RaggedLeaf
from fbuf._host.ragged.values import MISSING
from fbuf.storages._ragged.schema import as_numpy, dense_value, flatten, numbers, shortened, value_of

Shape = tuple[int, ...]
Lead = tuple[int | None, ...]
LeavesByName = Mapping[str, RaggedLeaf]


class Parsed(NamedTuple):
    """Checked rows."""

    leaves: dict[str, Any]  # arrays [*leading, *item]; TICKET is zeros where `values` are still to be stored
    values: list[list[Any]] | None  # N * E values of each ragged leaf; None: already stored, or stored by a callback


def parse_traced(call: str, tree: PyTree, spec: Spec, leaves: tuple[RaggedLeaf, ...], lead: Lead, axes: str) -> Parsed:
    """Parse rows inside jit: columns of dense leaves, and of leaves with a maximum."""
    padded = {leaf.name: leaf for leaf in leaves if leaf.maximum is not None}
    if not isinstance(tree, Mapping):
        raise TypeError(f"{call}: rows are {type(tree).__name__}; expected a dict of arrays [{axes}, ...] inside jit.")
    flat = flatten(call, tree, [leaf.name for leaf in leaves])
    for leaf in leaves:
        if leaf.name in flat and leaf.maximum is None and TICKET not in flat:
            raise TypeError(
                f"{call}: leaf '{leaf.name}' ({leaf.kind}) has no maximum, so it cannot be stored inside jit. Call it outside "
                f"jit, or declare an array's largest shape: storages.Ragged(maximum={{'{leaf.name}': (...)}})."
            )
    if TICKET not in flat and not padded:
        some = leaves[0].name if leaves else "obs"
        raise TypeError(
            f"{call}: rows have no leaf with a maximum, so they can be added eagerly only. Call it outside jit, or declare "
            f"an array's largest shape: storages.Ragged(maximum={{'{some}': (...)}})."
        )
    lengths = {length_name(name): name for name in padded}
    if TICKET in flat:  # stored already
        flat = {n: x for n, x in flat.items() if n not in padded and n not in lengths}
    dense = {n: s for n, s in spec.items() if n not in padded and n not in lengths and (n != TICKET or TICKET in flat)}
    plain = {n: x for n, x in flat.items() if n not in padded and n not in lengths}
    out = (
        dict(arguments.check_rows(call, plain, dense, jax.tree.structure(dict(dense)), lead, axes))
        if dense or plain
        else {}
    )
    if TICKET in flat:
        return Parsed(out, None)
    head = next((x.shape[: len(lead)] for x in out.values()), None)
    for name in padded:
        if name not in flat and length_name(name) in flat:
            raise ValueError(f"{call}: '{length_name(name)}' is given without '{name}'. Give both, or none.")
    for name in [n for n in padded if n in flat]:
        array, length, head = _pad_leaf(
            call, padded[name], flat[name], flat.get(length_name(name)), spec, head, lead, axes
        )
        out |= {name: array, length_name(name): length}
    if head is None:
        raise ValueError(f"{call}: rows have no leaves; expected {', '.join(n for n in spec if n != TICKET)}.")
    for name in [n for n in padded if n not in flat]:
        out[name] = jnp.zeros((*head, *spec[name].shape), spec[name].dtype)
        out[length_name(name)] = jnp.full((*head, *spec[length_name(name)].shape), -1, jnp.int32)
    return Parsed(out, None)


def _pad_leaf(
    call: str, leaf: RaggedLeaf, value: Any, lengths: Any, spec: Spec, head: Any, lead: Lead, axes: str
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    want, got, cut = spec[leaf.name], leaf_spec(value), len(lead)
    assert leaf.maximum is not None
    if got.dtype != want.dtype:
        raise arguments.wrong_dtype(f"{call}: leaf '{leaf.name}'", got.dtype, want.dtype)
    item, found = got.shape[cut:], got.shape[:cut]
    fits = len(item) == len(want.shape) and all(a <= b for a, b in zip(item, want.shape, strict=True))
    expected = tuple(lead) if head is None else head
    if not fits or len(found) != cut or any(n not in (None, m) for n, m in zip(expected, found, strict=True)):
        inner = "".join(f", <= {n}" for n in want.shape)
        raise ValueError(
            f"{call}: leaf '{leaf.name}' has shape {list(got.shape)}; expected [{axes}{inner}], with the leading axes of the "
            f"other leaves{'' if head is None else f', {list(head)}'}. Cut it, or declare a larger maximum."
        )
    if isinstance(value, np.ndarray):
        value = narrow(f"{call}: leaf '{leaf.name}'", "", value, want.dtype)
    array = jnp.asarray(value)
    array = jnp.pad(array, [(0, 0)] * cut + [(0, b - a) for a, b in zip(item, want.shape, strict=True)])
    if lengths is None:
        length = jnp.broadcast_to(jnp.asarray(item, jnp.int32), (*found, len(item)))
    else:
        length = arguments.check_array(call, f"leaf '{length_name(leaf.name)}'", lengths, (*found, len(item)), "i")
        # A length beyond the array becomes one beyond the maximum, so that the store raises.
        length = length.astype(jnp.int32)
        have, most = (jnp.asarray(np.broadcast_to(np.array(n, np.int32), length.shape)) for n in (item, want.shape))
        length = jnp.where((length > have) & (length <= most), most + jnp.int32(1), length)
    return array, length, found


def parse_eager(call: str, tree: PyTree, spec: Spec, leaves: tuple[RaggedLeaf, ...], lead: Lead, axes: str) -> Parsed:
    """Parse rows outside jit, in any form."""
    ragged = {leaf.name: leaf for leaf in leaves}
    lengths = {length_name(leaf.name) for leaf in leaves if leaf.maximum is not None}
    dense = {n: s for n, s in spec.items() if n not in ragged and n not in lengths and n != TICKET}
    if isinstance(tree, Mapping):
        flat = flatten(call, tree, tuple(ragged))
        if TICKET in flat:
            return parse_traced(call, tree, spec, leaves, lead, axes)
        _check_names(call, "rows", flat, dense, ragged, lengths)
        if not lead:
            for name in [n for n in ragged if n in flat and length_name(n) in flat and length_name(n) in lengths]:
                value = as_numpy(call, f"leaf '{name}'", flat[name])
                (value,) = shortened(call, name, [value], np.asarray(flat[length_name(name)])[None])
                flat = {n: x for n, x in flat.items() if n != name} | ({} if value is MISSING else {name: value})
            return _parse_rows(call, [flat], (), dense, ragged)
        return _parse_columns(call, flat, lead, axes, dense, ragged)
    if not isinstance(tree, (list, tuple)) or not lead:
        form = f"a list of dicts or a dict of columns [{axes}, ...]" if lead else "a dict"
        raise TypeError(
            f"{call}: rows are {type(tree).__name__}; storages.Ragged takes {form}. Write "
            f"{'[{' if lead else '{'}'obs': x, 'text': y{'}]' if lead else '}'}."
        )
    rows: list[Any] = list(tree)
    shape: Shape = (len(rows),)
    if len(lead) == 2:
        for step, several in enumerate(rows):
            if not isinstance(several, (list, tuple)):
                raise TypeError(f"{call}: row {step} is {type(several).__name__}; expected a list of {lead[1]} dicts.")
            _check_count(call, f"row {step}", len(several), lead[1])
        shape = (len(rows), int(lead[1] or 0))
        rows = [row for several in rows for row in several]
    elif lead[0] is not None:
        _check_count(call, "the list", len(rows), lead[0])
    flat_rows = [flatten(call, row, tuple(ragged)) for row in rows]
    for i, row in enumerate(flat_rows):
        _check_names(call, f"row {i}", row, dense, ragged, set())
    return _parse_rows(call, flat_rows, shape, dense, ragged)


def _check_count(call: str, what: str, got: int, want: int | None) -> None:
    if got != want:
        raise ValueError(f"{call}: {what} has {got} rows; expected {want}, one dict per lane.")


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
            f"{call}: {what}: {told} (got: {', '.join(got) or 'nothing'}; expected: {', '.join((*dense, *ragged))}). Only "
            f"ragged leaves ({', '.join(ragged) or 'none here'}) may be missing."
        )


def _parse_rows(
    call: str, rows: Sequence[Mapping[str, Any]], shape: Shape, dense: Spec, ragged: LeavesByName
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


def _parse_columns(
    call: str, flat: Mapping[str, Any], lead: Lead, axes: str, dense: Spec, ragged: LeavesByName
) -> Parsed:
    plain: dict[str, Any] = {n: as_numpy(call, f"leaf '{n}'", x) for n, x in flat.items() if n in dense}
    for name, column in plain.items():
        if isinstance(column, (list, tuple)):
            items, have = _split_column(call, name, column, lead, None, axes)
            cells = [dense_value(call, name, x, dense[name], i) for i, x in enumerate(items)]
            plain[name] = np.array(cells, dense[name].dtype).reshape((*have, *dense[name].shape))
    out: dict[str, Any] = {}
    if dense:
        out |= arguments.check_rows(call, plain, dense, jax.tree.structure(dict(dense)), lead, axes)
    shape = next((x.shape[: len(lead)] for x in out.values()), None)
    found: dict[str, list[Any]] = {}
    for name in [n for n in ragged if n in flat]:
        column = as_numpy(call, f"leaf '{name}'", flat[name])
        items, shape = _split_column(call, name, column, lead, shape, axes)
        lengths = flat.get(length_name(name)) if ragged[name].maximum is not None else None
        if lengths is not None:
            items = shortened(call, name, items, np.asarray(as_numpy(call, f"leaf '{length_name(name)}'", lengths)))
        found[name] = [x if x is MISSING else value_of(call, ragged[name], x, i) for i, x in enumerate(items)]
    if shape is None:
        raise ValueError(f"{call}: rows have no leaves; expected {', '.join((*dense, *ragged))}. Give a list of dicts.")
    number = int(np.prod(shape))
    out[TICKET] = np.zeros((*shape, 2), np.uint32)
    return Parsed(out, [found.get(name, [MISSING] * number) for name in ragged])


def _split_column(
    call: str, name: str, column: Any, lead: Lead, shape: Shape | None, axes: str
) -> tuple[list[Any], tuple[int, ...]]:
    """Return the values of a column, lanes side by side, and its leading axes."""
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
        raise TypeError(f"{call}: leaf '{name}' has {what}; expected an array [{axes}, ...], or {axes} values.")
    if any(n not in (None, m) for n, m in zip(want, have, strict=True)):
        raise ValueError(
            f"{call}: leaf '{name}' has leading axes {list(have)}; expected [{axes}] = "
            f"{[n if n is not None else 'N' for n in want]}. All leaves need the same leading axes."
        )
    return items, have
