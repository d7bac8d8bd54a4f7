"""Select leaves of rows by name, and check them, for views."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.pytree import PyTree, Spec, listed, name_of

ONE_ROW = "The example is one row of one lane: jax.tree.map(lambda x: x[0], example)."
MADE = ("mask", "is_first", "learning_mask")
"""Leaves that window views add."""


def check_ends(view: str, names: tuple[str, ...], spec: Spec) -> None:
    """Raise unless every leaf that ends an episode exists and is boolean."""
    for name in names:
        if list(spec) == [""]:
            raise TypeError(f"{view}: episode_end names '{name}', but rows are one unnamed array. Add dicts.")
        if name not in spec:
            raise ValueError(f"{view}: no leaf named '{name}'; rows have {listed(spec)}. Write episode_end=(...).")
        check_flag(view, name, spec)


def check_flag(view: str, name: str, spec: Spec) -> None:
    """Raise unless the leaf is one boolean a row."""
    leaf = spec[name]
    check_single(view, name, spec, "bool[]")
    if leaf.dtype != jnp.bool_ or leaf.shape:
        fix = ONE_ROW if leaf.shape else "Cast with x.astype(bool)."
        raise TypeError(f"{view}: leaf '{name}' is {leaf.dtype}{list(leaf.shape)}; expected bool[] a row. {fix}")


def check_single(view: str, name: str, spec: Spec, expected: str) -> None:
    """Raise if a leaf of one value a row has an axis of length 1, which would broadcast against the others."""
    leaf = spec[name]
    if leaf.shape == (1,):
        lane = len(spec) > 1 and all(other.shape[:1] == (1,) for other in spec.values())
        fix = ONE_ROW if lane else "Drop its last axis before `init` and `extend`: x[..., 0]."
        raise ValueError(f"{view}: leaf '{name}' is {leaf.dtype}[1]; expected {expected} a row. {fix}")


def check_id(view: str, name: str | None, spec: Spec) -> None:
    """Raise unless the leaf with the episode ids, if any, is one integer a row."""
    if name is None:
        return
    if name not in spec:
        raise ValueError(f"{view}: no leaf named '{name}'; rows have {listed(spec)}. Write {view}(episode=...).")
    check_single(view, name, spec, "one integer")
    leaf = spec[name]
    if not jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.shape:
        fix = ONE_ROW if leaf.shape else "Cast with x.astype(jnp.int32)."
        raise TypeError(f"{view}: leaf '{name}' is {leaf.dtype}{list(leaf.shape)}; expected one integer a row. {fix}")


def checked_ends(view: str, names: Any) -> tuple[str, ...]:
    """Return the names of the leaves that end an episode."""
    if not isinstance(names, (tuple, list)):
        fix = f" Write episode_end=({names!r},)." if isinstance(names, str) else ""
        raise TypeError(f"{view}: episode_end is {names!r}; expected a tuple of names.{fix}")
    return tuple(name_of(name) for name in names)


def with_masks(rows: PyTree, masks: Several[jax.Array]) -> dict[str, Any]:
    """Return a dict of the rows, flat if they are a dict and under `row` otherwise, and the masks `MADE`."""
    return (rows if isinstance(rows, dict) else {"row": rows}) | dict(zip(MADE, masks, strict=True))


def check_free(view: str, made: tuple[str, ...], names: Iterable[str], nest: bool = True) -> None:
    """Raise if the rows have a leaf that the view makes; `nest`: the view reads no leaf by its name."""
    for name in names:
        if name.split("/")[0] in made:
            fix = "Rename it, or nest the rows: {'step': row}." if nest else "Rename it."
            raise ValueError(f"{view}: rows have a leaf '{name}', but the view adds {', '.join(made)}. {fix}")
