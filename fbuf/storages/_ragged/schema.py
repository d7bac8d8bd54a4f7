"""The schema of an example row of `Ragged`: which leaves are arrays of the state, and which are ragged, of which kind.

Rows are nested dicts with string keys. Everything else is a value, including lists and tuples, and is converted to numpy and
checked against the example before anything is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge.lazy_rows import length_name
from fbuf._core import arguments
from fbuf._core.pytree import PyTree, leaf_spec, narrow, nested
from fbuf._core.sample import TICKET
from fbuf._host.ragged.column import RaggedLeaf
from fbuf._host.ragged.values import MISSING, dtype_code, dtype_of

PLAIN = frozenset((np.ndarray, str, bytes, float, int, bool, list, tuple, type(None)))
"""Types that need no further checks against dicts, tracers and tensors."""
KINDS: dict[str, tuple[type, ...]] = {"text": (str,), "bytes": (bytes, bytearray, memoryview)}


def is_array(value: Any) -> bool:
    """Return whether it has shape and dtype: numpy, JAX, torch, `jax.ShapeDtypeStruct`."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_torch(value: Any) -> bool:
    """Return whether it is a torch tensor, without importing torch."""
    return type(value).__module__.split(".")[0] == "torch"


def as_numpy(call: str, what: str, value: Any) -> Any:
    """Return arrays of JAX and torch as numpy, a nested tensor as the list of its rows, other values unchanged."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{call}: {what} is a masked array; expected one without a mask. Use x.filled(0).")
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{call}: {what} is traced; inside jit give columns, a dict of arrays. Write {{'obs': x}}.")
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise TypeError(f"{call}: {what} is a typed PRNG key; expected an array. Store jax.random.key_data(key).")
        return np.asarray(value)
    if is_torch(value) and getattr(value, "is_nested", False):
        return [as_numpy(call, what, row) for row in value.detach().unbind()]
    if is_torch(value) and is_array(value):
        tensor = value.detach().cpu()
        if tensor.numel() and not tensor.untyped_storage().nbytes():  # reading it would crash the process
            raise ValueError(f"{call}: {what} is a tensor whose storage was freed; expected its values.")
        try:
            return tensor.numpy()
        except TypeError:
            raise TypeError(f"{call}: {what} is {value.dtype}, which numpy lacks. Use fbuf.torch.from_torch.") from None
    return value


def numbers(values: list[Any], want: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any] | None:
    """Return Python numbers of the wanted kind as an array; None: they must be checked one by one."""
    kinds = set(map(type, values))
    fitting: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {float, int}}
    fits = fitting.get(np.dtype(want.dtype).kind, set())
    if want.shape != () or not kinds or not kinds <= fits:
        return None
    try:
        with np.errstate(over="raise"):
            return np.array(values, want.dtype)
    except (FloatingPointError, OverflowError):
        return None


def dense_value(call: str, name: str, value: Any, want: jax.ShapeDtypeStruct, row: int | None) -> Any:
    """Return one dense leaf of one row, checked."""
    where = "" if row is None else f" of row {row}"
    value = as_numpy(call, f"leaf '{name}'{where}", value)
    if isinstance(value, (bool, int, float)) and want.shape == ():
        value = arguments.scalar(call, name, value, want.dtype)
    elif not is_array(value):
        raise TypeError(
            f"{call}: leaf '{name}'{where} is {type(value).__name__}; expected {want.dtype}{list(want.shape)}, as the "
            f"example. For objects use storages.Ragged(keys=('{name}',))."
        )
    got = leaf_spec(value)
    if got.dtype != want.dtype:
        raise arguments.wrong_dtype(f"{call}: leaf '{name}'{where}", got.dtype, want.dtype)
    if got.shape != want.shape:
        raise ValueError(
            f"{call}: leaf '{name}'{where} has shape {list(got.shape)}; expected {list(want.shape)}. If its shape differs "
            f"between rows, use storages.Ragged(keys=('{name}',))."
        )
    return narrow(f"{call}: leaf '{name}'{where}", "", value, want.dtype)


def value_of(call: str, leaf: RaggedLeaf, item: Any, row: int | None) -> Any:
    """Return one ragged leaf of one row, checked and as numpy.

    Raises:
      TypeError, ValueError: it does not match the example; with leaf, row, what was found and expected.
    """
    where = f"leaf '{leaf.name}'" if row is None else f"leaf '{leaf.name}' of row {row}"
    value: Any = as_numpy(call, where, item)
    if leaf.kind == "any":
        return value
    if leaf.kind in KINDS:
        fits: bool = isinstance(value, KINDS[leaf.kind])
        if not fits:
            want = "str" if leaf.kind == "text" else "bytes"
            fix = "Leave it out of the row" if value is None else f"Convert it with {want}(x)"
            raise TypeError(f"{call}: {where} is {type(value).__name__}; expected {want}, as the example. {fix}.")
        return str.__str__(value) if leaf.kind == "text" else bytes(value)
    dtype = dtype_of(leaf.dtype)
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"{call}: {where} is {type(value).__name__}; expected an array of {dtype}, as the example.")
    if leaf.maximum is not None and value.dtype != dtype and leaf_spec(value).dtype == dtype:
        value = narrow(f"{call}: {where}", "", value, dtype)
    if value.dtype != dtype:
        raise arguments.wrong_dtype(f"{call}: {where}", value.dtype, dtype)
    if leaf.maximum is not None and (
        value.ndim != len(leaf.maximum) or any(a > b for a, b in zip(value.shape, leaf.maximum, strict=True))
    ):
        raise ValueError(
            f"{call}: {where} has shape {list(value.shape)}; expected at most {list(leaf.maximum)}. Cut it, or use "
            f"storages.Ragged(maximum={{'{leaf.name}': {tuple(value.shape)}}})."
        )
    return np.asarray(value)


def shortened(call: str, name: str, items: list[Any], lengths: Any) -> list[Any]:
    """Return padded values cut to their lengths; -1: the row lacks the leaf."""
    if lengths.dtype.kind not in "iu" or lengths.shape[-1:] != (np.ndim(items[0]) if items else lengths.shape[-1],):
        got = f"{lengths.dtype}{list(lengths.shape)}"
        raise TypeError(f"{call}: leaf '{length_name(name)}' is {got}; expected integers, one per axis.")
    each = lengths.reshape(len(items), -1).tolist()
    for i, (item, cut) in enumerate(zip(items, each, strict=True)):
        if any(n > m or (n < 0 and cut[0] != -1) for n, m in zip(cut, np.shape(item), strict=True)):
            raise ValueError(f"{call}: leaf '{name}' of row {i} has shape {list(np.shape(item))} but lengths {cut}.")
    return [MISSING if cut[0] == -1 else x[tuple(slice(n) for n in cut)] for x, cut in zip(items, each, strict=True)]


def flatten(call: str, row: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return values by path, from nested dicts; a dict at one of `names` is a value.

    Raises:
      TypeError: the row is not a dict, or has invalid keys.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"{call}: a row is {type(row).__name__}; expected a dict. Name the leaf: {{'x': row}}.")
    found: dict[str, Any] = {}

    def walk(at: Mapping[Any, Any], path: str) -> None:
        for key, value in at.items():
            if not isinstance(key, str) or not key or "/" in key:
                raise TypeError(f"{call}: a row has the key {key!r}; expected a name without '/'. Rename it.")
            name = f"{path}{key}"
            kind = type(value)
            if (kind is dict or (kind not in PLAIN and isinstance(value, Mapping))) and name not in names:
                walk(value, f"{name}/")
            else:
                found[name] = value

    walk(row, "")
    return found


def describe(
    call: str, example: PyTree, keys: tuple[str, ...] | None, maximum: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], tuple[RaggedLeaf, ...]]:
    """Return the arrays of a row in the state, as nested dicts, and the ragged leaves of an example.

    Raises:
      TypeError: it is not a dict, or a leaf with a maximum is not an array of numbers.
      ValueError: it has no leaves; keys or maximum name nothing; a maximum has another rank; a name is reserved.
    """
    row = {n: as_numpy(call, f"leaf '{n}'", x) for n, x in flatten(call, example).items()}
    if not row:
        raise ValueError(f"{call}: the example has no leaves; expected one row, as in {{'text': text}}.")
    for what, names in (("keys", keys or ()), ("maximum", tuple(maximum))):
        for key in names:
            if key not in row and not (what == "keys" and any(n.startswith(f"{key}/") for n in row)):
                raise ValueError(f"{call}: {what} names '{key}', but rows have {', '.join(row)}. Use one of those.")
    stored: dict[str, Any] = {}
    leaves = []
    for name, value in row.items():
        if not (name in maximum or _is_ragged(name, value, keys)):
            stored[name] = value
            continue
        leaf = RaggedLeaf(name, *_kind_of(value), maximum.get(name))
        if leaf.maximum is not None:
            _check_maximum(call, leaf, value)
            dtype = leaf_spec(jax.ShapeDtypeStruct((), dtype_of(leaf.dtype))).dtype
            leaf = RaggedLeaf(name, "array", str(dtype_code(dtype)), leaf.maximum)
            stored[name] = jax.ShapeDtypeStruct(maximum[name], dtype)
            stored[length_name(name)] = jax.ShapeDtypeStruct((len(maximum[name]),), jnp.int32)
        leaves.append(leaf)
    for name in (TICKET, *(length_name(n) for n in maximum)):
        if name in row:
            raise ValueError(f"{call}: rows have a leaf '{name}', a name reserved by storages.Ragged. Rename the leaf.")
    stored[TICKET] = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return nested(stored), tuple(sorted(leaves, key=lambda leaf: leaf.name))


def _is_ragged(name: str, value: Any, keys: tuple[str, ...] | None) -> bool:
    number = isinstance(value, (bool, int, float)) or (
        is_array(value) and _kind_of(value)[0] == "array" and np.dtype(value.dtype).kind not in "mM"
    )
    if not number:
        return True
    if keys is None:
        return bool(np.ndim(value) if not is_array(value) else len(value.shape))
    return any(name == key or name.startswith(f"{key}/") for key in keys)


def _kind_of(value: Any) -> tuple[str, str]:
    """Return the kind of an example's leaf, and the dtype of its arrays."""
    for kind, types in KINDS.items():
        if isinstance(value, types):
            return kind, ""
    if is_array(value):
        dtype = np.dtype(value.dtype)
        code = dtype_code(dtype)
        if code is not None and (dtype.kind not in "USV" or dtype.isbuiltin == 2):
            return "array", code
    return "any", ""


def _check_maximum(call: str, leaf: RaggedLeaf, value: Any) -> None:
    assert leaf.maximum is not None
    if leaf.kind != "array" or dtype_of(leaf.dtype).kind in "mM":
        raise TypeError(
            f"{call}: leaf '{leaf.name}' is {type(value).__name__}, and maximum names it. Leave it out of maximum."
        )
    if len(value.shape) != len(leaf.maximum) or any(a > b for a, b in zip(value.shape, leaf.maximum, strict=True)):
        raise ValueError(
            f"{call}: leaf '{leaf.name}' has shape {list(value.shape)}; expected at most {list(leaf.maximum)}, its maximum. "
            f"Use maximum={{'{leaf.name}': {tuple(value.shape)}}} or more."
        )
