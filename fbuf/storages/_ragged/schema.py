"""The schema of an example row of `Ragged`: which leaves are arrays of the state, and which are ragged, of which kind.

Rows are nested dicts with string keys. Everything else is a value, including lists and tuples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge.lazy_rows import length_name
from fbuf._core.pytree import PyTree, leaf_spec, nested
from fbuf._core.sample import TICKET
from fbuf._host.ragged.column import RaggedLeaf
from fbuf._host.ragged.values import dtype_code, dtype_of
from fbuf.storages._ragged.parse_values import KINDS, PLAIN, as_numpy, is_array


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
    held: dict[str, Any] = {}
    leaves = []
    for name, value in row.items():
        if not (name in maximum or _is_ragged(name, value, keys)):
            held[name] = value
            continue
        leaf = RaggedLeaf(name, *_kind_of(value), maximum.get(name))
        if leaf.maximum is not None:
            _check_maximum(call, leaf, value)
            dtype = leaf_spec(jax.ShapeDtypeStruct((), dtype_of(leaf.dtype))).dtype
            leaf = RaggedLeaf(name, "array", str(dtype_code(dtype)), leaf.maximum)
            held[name] = jax.ShapeDtypeStruct(maximum[name], dtype)
            held[length_name(name)] = jax.ShapeDtypeStruct((len(maximum[name]),), jnp.int32)
        leaves.append(leaf)
    for name in (TICKET, *(length_name(n) for n in maximum)):
        if name in row:
            raise ValueError(f"{call}: rows have a leaf '{name}', a name reserved by storages.Ragged. Rename the leaf.")
    held[TICKET] = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return nested(held), tuple(sorted(leaves, key=lambda leaf: leaf.name))


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
