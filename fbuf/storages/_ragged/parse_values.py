"""Check and convert one value of a ragged row to numpy, against the example's schema, before anything is stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge.lazy_rows import length_name
from fbuf._core import arguments
from fbuf._core.pytree import leaf_spec
from fbuf._core.x64 import narrow
from fbuf._host.ragged.column import RaggedLeaf
from fbuf._host.ragged.values import MISSING, dtype_of

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
        value = arguments._scalar(call, name, value, want.dtype)
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


def value_of(call: str, leaf: RaggedLeaf, given: Any, row: int | None) -> Any:
    """Return one ragged leaf of one row, checked and as numpy.

    Raises:
      TypeError, ValueError: it does not match the example; with leaf, row, what was found and expected.
    """
    where = f"leaf '{leaf.name}'" if row is None else f"leaf '{leaf.name}' of row {row}"
    value: Any = as_numpy(call, where, given)
    if leaf.kind == "any":
        return value
    if leaf.kind in KINDS:
        fits: bool = isinstance(value, KINDS[leaf.kind])
        if not fits:
            want = "str" if leaf.kind == "text" else "bytes"
            fix = "Leave it out of the row" if value is None else f"Convert it with {want}(x)"
            raise TypeError(
                f"{call}: {where} is {type(value).__name__}; expected {want}, as the example. {fix}, or make the example "
                f"None, to allow anything."
            )
        return str.__str__(value) if leaf.kind == "text" else bytes(value)
    dtype = dtype_of(leaf.dtype)
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(
            f"{call}: {where} is {type(value).__name__}; expected an array of {dtype}, as the example. Convert it with "
            f"np.asarray(x, '{dtype}'), or make the example None, to allow anything."
        )
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
        raise TypeError(
            f"{call}: leaf '{length_name(name)}' is {lengths.dtype}{list(lengths.shape)}; expected integers, one for each axis "
            f"of a row of '{name}'. Leave it out if nothing is padded."
        )
    each = lengths.reshape(len(items), -1).tolist()
    for i, (item, cut) in enumerate(zip(items, each, strict=True)):
        if any(n > m or (n < 0 and cut[0] != -1) for n, m in zip(cut, np.shape(item), strict=True)):
            raise ValueError(
                f"{call}: leaf '{name}' of row {i} has shape {list(np.shape(item))} but lengths {cut}; expected at most its "
                f"shape, or -1 for a row that lacks the leaf."
            )
    return [MISSING if cut[0] == -1 else x[tuple(slice(n) for n in cut)] for x, cut in zip(items, each, strict=True)]
