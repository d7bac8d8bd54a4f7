"""Leaves by name, for transforms that change some of them: what they go by, what they leave alone, and the messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.pytree import PyTree, name_of, named_leaves, nested, zero_unless
from fbuf._interfaces.transform import Context


def checked_keys(call: str, keys: Any) -> tuple[str, ...]:
    """Names of leaves, or of what holds some: `"obs"`, `("obs", "next_obs")`, `(("next", "obs"),)`."""
    given = (keys,) if isinstance(keys, str) else tuple(keys) if isinstance(keys, (tuple, list)) else ()
    if not given or not all(isinstance(key, (str, tuple)) for key in given):
        raise TypeError(f"{call}: keys is {keys!r}; expected names of leaves. Write {call}(('obs', 'next_obs'), ...).")
    names = tuple(checked_name(call, key) for key in given)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{call}: keys names '{twice}' twice; expected each leaf once. Leave one of them out.")
    return names


def checked_name(call: str, name: Any) -> str:
    """One name: `"next/obs"`, or `("next", "obs")`."""
    if not isinstance(name, (str, tuple)) or not all(isinstance(part, str) for part in name):
        raise TypeError(f"{call}: {name!r} is no name of a leaf; expected text. Write 'obs', or 'next/obs'.")
    return name_of(name)


def below(name: str, names: Iterable[str]) -> list[str]:
    """Of `names` the leaf `name`, or those below it."""
    return [n for n in names if n == name or n.startswith(name + "/")]


def chosen(call: str, keys: str | tuple[str, ...], names: Iterable[str]) -> list[str]:
    """The leaves that `keys` name.

    Raises:
      ValueError: there is none of a name.
    """
    there = list(names)
    for key in keys:
        if not below(key, there):
            raise ValueError(
                f"{call}: leaf '{key}' is not there (there are: {', '.join(there)}). Name one of these; what a view makes of "
                f"rows has names of its own."
            )
    return [n for n in there if any(n in below(key, there) for key in keys)]


def replaced(data: PyTree, new: Mapping[str, jax.Array]) -> PyTree:
    """The same pytree with some leaves replaced, by name."""
    structure: Any = jax.tree.structure(data)
    return structure.unflatten([new.get(name, leaf) for name, leaf in named_leaves(data).items()])


def as_dict(call: str, data: PyTree) -> dict[str, jax.Array]:
    """Leaves by name, of nested dicts.

    Raises:
      TypeError: it is something else, of which nobody knows how to leave a leaf out.
    """
    leaves = named_leaves(data)
    wanted: Any = jax.tree.structure(nested(leaves) if "" not in leaves else None)
    if wanted != jax.tree.structure(data):
        raise TypeError(
            f"{call}: rows are {jax.tree.structure(data)}; expected (nested) dicts of arrays, as leaves come and go by name. "
            f"Make them such first: transforms.Map(lambda row: {{'obs': row.obs, ...}})."
        )
    return leaves


def rebuilt(call: str, leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Nested dicts of leaves by name.

    Raises:
      ValueError: there are none, or a leaf has the name of what holds others.
    """
    if not leaves:
        raise ValueError(f"{call}: no leaf is left; expected some. Keep at least one.")
    for name in leaves:
        inner = [n for n in leaves if n.startswith(name + "/")]
        if inner:
            raise ValueError(
                f"{call}: '{name}' would be a leaf, and hold the leaf '{inner[0]}' too; expected one of both. Use another name."
            )
    return nested(leaves)


def added(call: str, leaves: dict[str, jax.Array], new: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Nested dicts of `leaves` and new ones, whose names are free."""
    for name in new:
        if name in leaves:
            raise ValueError(f"{call}: there is a leaf '{name}' already; expected a free name. Use another one.")
    return rebuilt(call, {**leaves, **new})


def lead_of(name: str, leaf: jax.Array, context: Context) -> int:
    """How many axes a leaf has before its item's: those that count rows, or 1 if it has one value a window."""
    whole = name in context.collapsed or leaf.shape[: context.lead] != context.mask.shape
    return 1 if whole else context.lead


def blanked(name: str, leaf: jax.Array, context: Context) -> jax.Array:
    """Zeros where rows are not there; of a leaf that has one value a window, where none of its rows is."""
    there, lead = context.mask, lead_of(name, leaf, context)
    return zero_unless(jnp.any(there, axis=tuple(range(lead, there.ndim))), leaf)


def dtype_name(call: str, field: str, dtype: Any) -> str:
    """The name of a dtype, as JAX has it."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not (jnp.issubdtype(found, jnp.number) or found == jnp.bool_):
        raise TypeError(f"{call}: {field} is {dtype!r}; expected a dtype of numbers. Write {field}='float32'.")
    return str(found.name)
