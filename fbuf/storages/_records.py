"""What users hand to `Ragged`: an example that says what rows hold, and rows, as dicts or as columns.

Rows are nested dicts with string keys; everything else is a value (a list or tuple too: as a leaf it is an object). Several
rows are a list of such dicts, or one dict of columns: arrays `[N, ...]`, or lists of N values where shapes differ. All of it
is checked here, before anything is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf import _errors
from fbuf._host.shelf import Leaf
from fbuf._host.values import MISSING, dtype_code, dtype_of
from fbuf._lazy import TICKET, length_name
from fbuf._tree import PyTree, Spec, leaf_spec, nested

_PLAIN = frozenset((np.ndarray, str, bytes, float, int, bool, list, tuple, type(None)))
"""Types that are told from a dict, a tracer or a tensor at a glance."""
_KINDS: dict[str, tuple[type, ...]] = {"text": (str,), "bytes": (bytes, bytearray, memoryview)}


class Parsed(NamedTuple):
    """Checked rows."""

    leaves: dict[str, Any]  # arrays [*leading, *item]; TICKET is zeros where `values` are still to be stored
    values: list[list[Any]] | None  # of each ragged leaf N * E values; None: nothing is left to store eagerly


# ---------------------------------------------------------------------------------------------- the example


def flatten(call: str, row: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """Values by path, from nested dicts; a dict at one of `names` is a value.

    Raises:
      TypeError: it is no dict, or has keys that are no names.
    """
    if not isinstance(row, Mapping):
        raise TypeError(
            f"{call}: a row is {type(row).__name__}; storages.Ragged takes dicts, as in {{'obs': obs, 'text': text}}. "
            f"Give the leaf a name: {{'x': row}}."
        )
    found: dict[str, Any] = {}

    def walk(at: Mapping[Any, Any], path: str) -> None:
        for key, value in at.items():
            if not isinstance(key, str) or not key or "/" in key:
                raise TypeError(f"{call}: a row has the key {key!r}; expected a name without '/'. Rename it.")
            name = f"{path}{key}"
            kind = type(value)
            if (kind is dict or (kind not in _PLAIN and isinstance(value, Mapping))) and name not in names:
                walk(value, f"{name}/")
            else:
                found[name] = value

    walk(row, "")
    return found


def is_array(value: Any) -> bool:
    """Whether it has shape and dtype: numpy, JAX, torch, `jax.ShapeDtypeStruct`."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_torch(value: Any) -> bool:
    """Whether it is a torch tensor, without importing torch."""
    return type(value).__module__.split(".")[0] == "torch"


def describe(
    call: str, example: PyTree, keys: tuple[str, ...] | None, maximum: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], tuple[Leaf, ...]]:
    """What an example row says: the arrays of a row in the state, nested dicts; and the ragged leaves.

    Raises:
      TypeError: it is no dict, or a leaf with a maximum is no array of numbers.
      ValueError: keys or maximum name nothing; a maximum has another rank; a name is taken.
    """
    row = {n: _numpy(call, f"leaf '{n}'", x) for n, x in flatten(call, example).items()}
    for what, names in (("keys", keys or ()), ("maximum", tuple(maximum))):
        for key in names:
            if key not in row and not (what == "keys" and any(n.startswith(f"{key}/") for n in row)):
                raise ValueError(f"{call}: {what} names '{key}', but rows have {', '.join(row)}. Use one of those.")
    held: dict[str, Any] = {}
    leaves = []
    for name, value in row.items():
        if not (name in maximum or _is_ragged(name, value, keys)):
            held[name] = value
            continue
        leaf = Leaf(name, *_kind_of(value), maximum.get(name))
        if leaf.maximum is not None:
            _check_maximum(call, leaf, value)
            dtype = leaf_spec(jax.ShapeDtypeStruct((), dtype_of(leaf.dtype))).dtype
            leaf = Leaf(name, "array", str(dtype_code(dtype)), leaf.maximum)
            held[name] = jax.ShapeDtypeStruct(maximum[name], dtype)
            held[length_name(name)] = jax.ShapeDtypeStruct((len(maximum[name]),), jnp.int32)
        leaves.append(leaf)
    for name in (TICKET, *(length_name(n) for n in maximum)):
        if name in row:
            raise ValueError(
                f"{call}: rows have a leaf '{name}', a name storages.Ragged makes itself. Rename the leaf."
            )
    held[TICKET] = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return nested(held), tuple(sorted(leaves, key=lambda leaf: leaf.name))


def _is_ragged(name: str, value: Any, keys: tuple[str, ...] | None) -> bool:
    number = isinstance(value, (bool, int, float)) or (is_array(value) and _kind_of(value)[0] == "array")
    if not number:
        return True
    if keys is None:
        return bool(np.ndim(value) if not is_array(value) else len(value.shape))
    return any(name == key or name.startswith(f"{key}/") for key in keys)


def _kind_of(value: Any) -> tuple[str, str]:
    """The kind of leaf that an example stands for, and the dtype of its arrays."""
    for kind, types in _KINDS.items():
        if isinstance(value, types):
            return kind, ""
    if is_array(value):
        dtype = np.dtype(str(value.dtype).removeprefix("torch.")) if is_torch(value) else value.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            code = dtype_code(np.dtype(dtype))
            if code is not None and np.dtype(dtype).kind not in "USV" or np.dtype(dtype).isbuiltin == 2:
                return "array", str(code)
        return "any", ""
    for kind, types in _KINDS.items():
        if isinstance(value, types):
            return kind, ""
    return "any", ""


def _check_maximum(call: str, leaf: Leaf, value: Any) -> None:
    assert leaf.maximum is not None
    if leaf.kind != "array" or dtype_of(leaf.dtype).kind in "mM":
        raise TypeError(
            f"{call}: leaf '{leaf.name}' is {type(value).__name__}, but has a maximum; expected an array of numbers, which "
            f"can be padded. Leave it out of maximum."
        )
    if len(value.shape) != len(leaf.maximum) or any(a > b for a, b in zip(value.shape, leaf.maximum, strict=True)):
        raise ValueError(
            f"{call}: leaf '{leaf.name}' has shape {list(value.shape)}; expected at most {list(leaf.maximum)}, its maximum. "
            f"Use maximum={{'{leaf.name}': {tuple(value.shape)}}} or more."
        )


# ------------------------------------------------------------------------------------------------- the rows


def traced(
    call: str, given: PyTree, spec: Spec, leaves: tuple[Leaf, ...], lead: tuple[int | None, ...], axes: str
) -> Parsed:
    """Rows inside jit: columns of dense leaves, and of those with a maximum."""
    padded = {leaf.name: leaf for leaf in leaves if leaf.maximum is not None}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{call}: rows are {type(given).__name__}; inside jit expected a dict of arrays [{axes}, ...]. Call it outside "
            f"jit, or stack the rows: {{'reward': jnp.stack(rewards)}}."
        )
    flat = flatten(call, given, [leaf.name for leaf in leaves])
    for leaf in leaves:
        if leaf.name in flat and leaf.maximum is None and TICKET not in flat:
            raise TypeError(
                f"{call}: leaf '{leaf.name}' ({leaf.kind}) has no maximum, so it cannot be stored inside jit, where everything "
                f"is an array of a known shape. Call {call.split('.')[-1]} outside jit, leave the leaf out, or (arrays) "
                f"declare its largest shape: storages.Ragged(maximum={{'{leaf.name}': (...)}})."
            )
    if TICKET not in flat and not padded:
        some = leaves[0].name if leaves else "obs"
        raise TypeError(
            f"{call}: rows of this buffer have no leaf with a maximum, so they can be added eagerly only. Call it outside jit, "
            f"or declare the largest shape of an array leaf: storages.Ragged(maximum={{'{some}': (...)}})."
        )
    lengths = {length_name(name): name for name in padded}
    if TICKET in flat:  # stored already
        flat = {n: x for n, x in flat.items() if n not in padded and n not in lengths}
    dense = {n: s for n, s in spec.items() if n not in padded and n not in lengths and (n != TICKET or TICKET in flat)}
    own = {n: x for n, x in flat.items() if n not in padded and n not in lengths}
    out = (
        dict(_errors.check_rows(call, own, dense, jax.tree.structure(dict(dense)), lead, axes)) if dense or own else {}
    )
    if TICKET in flat:
        return Parsed(out, None)
    head = next((x.shape[: len(lead)] for x in out.values()), None)
    for name in padded:
        if name not in flat and length_name(name) in flat:
            raise ValueError(f"{call}: '{length_name(name)}' is given without '{name}'. Give both, or none.")
    for name in [n for n in padded if n in flat]:
        array, length, head = _pad(call, padded[name], flat[name], flat.get(length_name(name)), spec, head, lead, axes)
        out |= {name: array, length_name(name): length}
    if head is None:
        raise ValueError(f"{call}: rows have no leaves; expected {', '.join(n for n in spec if n != TICKET)}.")
    for name in [n for n in padded if n not in flat]:
        out[name] = jnp.zeros((*head, *spec[name].shape), spec[name].dtype)
        out[length_name(name)] = jnp.full((*head, *spec[length_name(name)].shape), -1, jnp.int32)
    return Parsed(out, None)


def _pad(
    call: str, leaf: Leaf, value: Any, lengths: Any, spec: Spec, head: Any, lead: tuple[int | None, ...], axes: str
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    want, got, cut = spec[leaf.name], leaf_spec(value), len(lead)
    assert leaf.maximum is not None
    if got.dtype != want.dtype:
        raise TypeError(
            f"{call}: leaf '{leaf.name}' is {got.dtype}; this buffer was initialised with {want.dtype}. "
            f"Cast with x.astype(jnp.{want.dtype})."
        )
    item, found = got.shape[cut:], got.shape[:cut]
    fits = len(item) == len(want.shape) and all(a <= b for a, b in zip(item, want.shape, strict=True))
    expected = tuple(lead) if head is None else head
    if not fits or len(found) != cut or any(n not in (None, m) for n, m in zip(expected, found, strict=True)):
        inner = "".join(f", <= {n}" for n in want.shape)
        raise ValueError(
            f"{call}: leaf '{leaf.name}' has shape {list(got.shape)}; expected [{axes}{inner}] (its maximum is "
            f"{list(want.shape)}), with the leading axes of the other leaves{'' if head is None else f', {list(head)}'}. Cut "
            f"it, or declare a larger maximum."
        )
    array = jnp.asarray(value)
    array = jnp.pad(array, [(0, 0)] * cut + [(0, b - a) for a, b in zip(item, want.shape, strict=True)])
    if lengths is None:
        length = jnp.broadcast_to(jnp.asarray(item, jnp.int32), (*found, len(item)))
    else:
        length = _errors.check_array(call, f"leaf '{length_name(leaf.name)}'", lengths, (*found, len(item)), "i")
        length = length.astype(jnp.int32)
    return array, length, found


def eager(
    call: str, given: PyTree, spec: Spec, leaves: tuple[Leaf, ...], lead: tuple[int | None, ...], axes: str
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
                value = _numpy(call, f"leaf '{name}'", flat[name])
                (value,) = _shortened(call, name, [value], np.asarray(flat[length_name(name)])[None])
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
    ragged: Mapping[str, Leaf],
) -> Parsed:
    out: dict[str, Any] = {}
    for name, want in dense.items():
        column = [row[name] for row in rows]
        array = _numbers(column, want) if shape else None
        if array is None:
            items = [_item(call, name, value, want, i if shape else None) for i, value in enumerate(column)]
            array = np.array(items, want.dtype)
        out[name] = array.reshape((*shape, *want.shape))
    found = [
        [MISSING if n not in row else value_of(call, leaf, row[n], i if shape else None) for i, row in enumerate(rows)]
        for n, leaf in ragged.items()
    ]
    out[TICKET] = np.zeros((*shape, 2), np.uint32)
    return Parsed(out, found)


def _numbers(values: list[Any], want: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any] | None:
    """Python numbers of the kind wanted at once; None: look at each."""
    kinds = set(map(type, values))
    fitting: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {float, int}}
    fits = fitting.get(np.dtype(want.dtype).kind, set())
    if want.shape != () or not kinds or not kinds <= fits:
        return None
    try:
        return np.array(values, want.dtype)
    except OverflowError:
        return None


def _item(call: str, name: str, value: Any, want: jax.ShapeDtypeStruct, row: int | None) -> Any:
    """One dense leaf of one row."""
    where = "" if row is None else f" of row {row}"
    value = _numpy(call, f"leaf '{name}'{where}", value)
    if isinstance(value, (bool, int, float)) and want.shape == ():
        value = _errors._scalar(call, name, value, want.dtype)
    elif not is_array(value):
        raise TypeError(
            f"{call}: leaf '{name}'{where} is {type(value).__name__}; expected {want.dtype}{list(want.shape)}, as the example "
            f"given to `init`. For objects name it in keys: storages.Ragged(keys=('{name}',))."
        )
    got = leaf_spec(value)
    if got.dtype != want.dtype:
        raise TypeError(
            f"{call}: leaf '{name}'{where} is {got.dtype}; this buffer was initialised with {want.dtype}. "
            f"Cast with x.astype('{want.dtype}')."
        )
    if got.shape != want.shape:
        raise ValueError(
            f"{call}: leaf '{name}'{where} has shape {list(got.shape)}; expected {list(want.shape)}: it is not ragged. "
            f"If its shape differs between rows, name it: storages.Ragged(keys=('{name}',))."
        )
    return np.asarray(value)


def _numpy(call: str, what: str, value: Any) -> Any:
    """Arrays of JAX and torch as numpy; the rest as it is."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{call}: {what} is a masked array; expected one without a mask. Use x.filled(0).")
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{call}: {what} is traced; inside jit give columns, a dict of arrays. Write {{'obs': x}}.")
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise TypeError(f"{call}: {what} is a typed PRNG key; expected an array. Store jax.random.key_data(key).")
        return np.asarray(value)
    if is_torch(value) and is_array(value):
        tensor = value.detach().cpu()
        try:
            return tensor.numpy()
        except TypeError:
            raise TypeError(
                f"{call}: {what} is a {value.dtype} tensor, which numpy cannot take over. Convert with "
                f"fbuf.torch.from_torch(x)."
            ) from None
    return value


def value_of(call: str, leaf: Leaf, given: Any, row: int | None) -> Any:
    """One ragged leaf of one row, checked and as numpy.

    Raises:
      TypeError, ValueError: it is not what the example was; with leaf, row, what came, what was expected.
    """
    where = f"leaf '{leaf.name}'" if row is None else f"leaf '{leaf.name}' of row {row}"
    value: Any = _numpy(call, where, given)
    if leaf.kind == "any":
        return value
    if leaf.kind in _KINDS:
        fits: bool = isinstance(value, _KINDS[leaf.kind])
        if not fits:
            want = "str" if leaf.kind == "text" else "bytes"
            raise TypeError(
                f"{call}: {where} is {type(value).__name__}; expected {want}, as the example given to `init`. Convert it with "
                f"{want}(x), or give None as the example of a leaf that may hold anything."
            )
        return str.__str__(value) if leaf.kind == "text" else bytes(value)
    dtype = dtype_of(leaf.dtype)
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(
            f"{call}: {where} is {type(value).__name__}; expected an array of {dtype}, as the example given to `init`. Convert "
            f"it with np.asarray(x, '{dtype}'), or give None as the example of a leaf that may hold anything."
        )
    if leaf.maximum is not None and value.dtype != dtype and leaf_spec(value).dtype == dtype:
        value = np.asarray(value, dtype)  # float64 is float32 where JAX narrows it
    if value.dtype != dtype:
        raise TypeError(
            f"{call}: {where} is {value.dtype}; this buffer was initialised with {dtype}. Cast with x.astype('{dtype}')."
        )
    if leaf.maximum is not None and (
        value.ndim != len(leaf.maximum) or any(a > b for a, b in zip(value.shape, leaf.maximum, strict=True))
    ):
        raise ValueError(
            f"{call}: {where} has shape {list(value.shape)}; expected at most {list(leaf.maximum)}, its maximum. Nothing was "
            f"stored. Cut it, or use storages.Ragged(maximum={{'{leaf.name}': {tuple(value.shape)}}})."
        )
    return np.asarray(value)


def _of_columns(
    call: str,
    flat: Mapping[str, Any],
    lead: tuple[int | None, ...],
    axes: str,
    dense: Mapping[str, jax.ShapeDtypeStruct],
    ragged: Mapping[str, Leaf],
) -> Parsed:
    own: dict[str, Any] = {n: _numpy(call, f"leaf '{n}'", x) for n, x in flat.items() if n in dense}
    for name, column in own.items():
        if isinstance(column, (list, tuple)):
            items, have = _column(call, name, column, lead, None, axes)
            cells = [_item(call, name, x, dense[name], i) for i, x in enumerate(items)]
            own[name] = np.array(cells, dense[name].dtype).reshape((*have, *dense[name].shape))
    out: dict[str, Any] = {}
    if dense:
        out |= _errors.check_rows(call, own, dense, jax.tree.structure(dict(dense)), lead, axes)
    shape = next((x.shape[: len(lead)] for x in out.values()), None)
    found: dict[str, list[Any]] = {}
    for name in [n for n in ragged if n in flat]:
        column = _numpy(call, f"leaf '{name}'", flat[name])
        items, shape = _column(call, name, column, lead, shape, axes)
        lengths = flat.get(length_name(name)) if ragged[name].maximum is not None else None
        if lengths is not None:
            items = _shortened(call, name, items, np.asarray(_numpy(call, f"leaf '{length_name(name)}'", lengths)))
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


def _shortened(call: str, name: str, items: list[Any], lengths: Any) -> list[Any]:
    """Padded values cut to their lengths; -1: the row lacks the leaf."""
    if lengths.dtype.kind not in "iu" or lengths.shape[-1:] != (np.ndim(items[0]) if items else lengths.shape[-1],):
        raise TypeError(
            f"{call}: leaf '{length_name(name)}' is {lengths.dtype}{list(lengths.shape)}; expected integers, one for each axis "
            f"of a row of '{name}'. Leave it out where nothing is padded."
        )
    each = lengths.reshape(len(items), -1).tolist()
    for i, (item, cut) in enumerate(zip(items, each, strict=True)):
        if any(n > m or (n < 0 and cut[0] != -1) for n, m in zip(cut, np.shape(item), strict=True)):
            raise ValueError(
                f"{call}: leaf '{name}' of row {i} has shape {list(np.shape(item))} but lengths {cut}; expected lengths within "
                f"it, or -1 for a row that lacks the leaf."
            )
    return [MISSING if cut[0] == -1 else x[tuple(slice(n) for n in cut)] for x, cut in zip(items, each, strict=True)]
