"""Select, check, replace and rebuild leaves by name, for transforms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.arguments import is_int
from fbuf._core.pytree import PyTree, is_under, name_of, named_leaves, nested, under
from fbuf._core.slots import zero_unless
from fbuf._interfaces.transform import Context


def convert(self: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(self, name, value)


def checked_keys(call: str, keys: Any) -> tuple[str, ...]:
    """Return names of leaves or subtrees: `"obs"`, `("obs", "next_obs")`, `(("next", "obs"),)`."""
    chosen = (keys,) if isinstance(keys, str) else tuple(keys) if isinstance(keys, (tuple, list)) else ()
    if not chosen or not all(isinstance(key, (str, tuple)) for key in chosen):
        raise TypeError(f"{call}: keys is {keys!r}; expected names of leaves. Write {call}(('obs', 'next_obs'), ...).")
    names = tuple(checked_name(call, key) for key in chosen)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{call}: keys names '{twice}' twice; expected each leaf once. Leave one of them out.")
    return names


def checked_name(call: str, name: Any) -> str:
    """Return one name: `"next/obs"`, or `("next", "obs")`."""
    if not isinstance(name, (str, tuple)) or not all(isinstance(part, str) for part in name):
        raise TypeError(f"{call}: name is {name!r}; expected text. Write 'obs', or 'next/obs'.")
    return name_of(name)


def chosen(call: str, keys: str | tuple[str, ...], names: Iterable[str]) -> list[str]:
    """Return the leaves that `keys` name.

    Raises:
      ValueError: a name is missing.
    """
    known = list(names)
    for key in keys:
        if not under(key, known):
            raise ValueError(f"{call}: leaf '{key}' is missing; expected one of {', '.join(known)}.")
    return [n for n in known if is_under(n, keys)]


def leaf_of(call: str, name: str, leaves: Mapping[str, jax.Array]) -> jax.Array:
    """Return a leaf. Raises ValueError if it is missing, or a subtree."""
    if name not in leaves:
        chosen(call, (name,), leaves)
        raise ValueError(f"{call}: '{name}' is a subtree; expected a leaf. Name its leaves one by one.")
    return leaves[name]


def replaced(data: PyTree, new: Mapping[str, jax.Array]) -> PyTree:
    """Return the pytree with some leaves replaced by name."""
    structure: Any = jax.tree.structure(data)
    return structure.unflatten([new.get(name, leaf) for name, leaf in named_leaves(data).items()])


def as_dict(call: str, data: PyTree) -> dict[str, jax.Array]:
    """Return the leaves of nested dicts by name.

    Raises:
      TypeError: the data is not nested dicts.
    """
    leaves = named_leaves(data)
    wanted: Any = jax.tree.structure(nested(leaves) if "" not in leaves else None)
    if wanted != jax.tree.structure(data):
        raise TypeError(f"{call}: rows are {jax.tree.structure(data)}; expected dicts. Use transforms.Map.")
    return leaves


def rebuilt(call: str, leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return nested dicts of leaves by name.

    Raises:
      ValueError: there are no leaves, or a leaf has the name of a subtree.
    """
    if not leaves:
        raise ValueError(f"{call}: no leaf is left. Keep at least one.")
    for name in leaves:
        inner = [n for n in leaves if n.startswith(name + "/")]
        if inner:
            raise ValueError(f"{call}: '{name}' is a leaf and contains the leaf '{inner[0]}'. Use another name.")
    return nested(leaves)


def added(call: str, leaves: dict[str, jax.Array], new: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return nested dicts of `leaves` and new ones with unused names."""
    for name in new:
        if name in leaves:
            raise ValueError(f"{call}: leaf '{name}' already exists. Use another name.")
    return rebuilt(call, {**leaves, **new})


def lead_of(name: str, leaf: jax.Array, context: Context) -> int:
    """Return the axes before those of the item: those of rows, or 1 for one value per window."""
    whole = name in context.collapsed or leaf.shape[: context.lead] != context.mask.shape
    return 1 if whole else context.lead


def blanked(name: str, leaf: jax.Array, context: Context) -> jax.Array:
    """Set missing rows to zero; a leaf with one value per window if all its rows are missing."""
    kept, lead = context.mask, lead_of(name, leaf, context)
    return zero_unless(jnp.any(kept, axis=tuple(range(lead, kept.ndim))), leaf)


def dtype_name(call: str, field: str, dtype: Any) -> str:
    """Return the name of a dtype."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not (jnp.issubdtype(found, jnp.number) or found == jnp.bool_):
        raise TypeError(f"{call}: {field} is {dtype!r}; expected a dtype of numbers. Write {field}='float32'.")
    return str(found.name)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite real number, and no bool."""
    return (is_int(value) or isinstance(value, (float, np.floating))) and math.isfinite(value)
