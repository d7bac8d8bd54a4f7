"""Leaves of rows by name, for views that make a batch out of some of them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.pytree import PyTree, Spec, name_of
from fbuf._indexing.anchors import END, RESET

MADE = ("mask", "is_first", "learning_mask")
"""What views of windows add to the leaves of rows."""


def check_ends(view: str, names: tuple[str, ...], spec: Spec) -> None:
    """Raises unless every leaf that ends an episode is there, and boolean."""
    for name in names:
        if name not in spec:
            raise ValueError(
                f"{view}: episode_end names '{name}', but rows have {', '.join(spec)}. Name the leaves that end an episode: "
                f"{view}(..., episode_end=('done',))."
            )
        check_flag(view, name, spec)


def check_flag(view: str, name: str, spec: Spec) -> None:
    """Raises unless the leaf is one boolean a row."""
    if spec[name].dtype != jnp.bool_ or spec[name].shape != ():
        raise TypeError(
            f"{view}: leaf '{name}' is {spec[name].dtype}{list(spec[name].shape)}; expected bool[] a row. "
            f"Cast with x.astype(bool)."
        )


def check_autoreset(view: str, autoreset: str) -> None:
    """Raises unless it is one of the two."""
    if autoreset not in ("same_step", "next_step"):
        raise ValueError(f'{view}: autoreset is {autoreset!r}; expected "same_step" or "next_step".')


def checked_ends(view: str, names: Any) -> tuple[str, ...]:
    """Names of leaves that end an episode."""
    if not isinstance(names, (tuple, list)):
        fix = f" Write episode_end=({names!r},)." if isinstance(names, str) else ""
        raise TypeError(f"{view}: episode_end is {names!r}; expected a tuple of names.{fix}")
    return tuple(name_of(name) for name in names)


def last_bit(autoreset: str) -> int:
    """The flag that says of a row that it is the last of its episode."""
    return RESET if autoreset == "next_step" else END


def whole_rows(structure: Any, spec: Spec, arrays: Several[jax.Array], masks: Several[jax.Array]) -> dict[str, Any]:
    """Every leaf of the rows, in the structure they have there below the topmost names, and the masks `MADE`."""
    leaves, tops = dict(zip(spec, arrays, strict=True)), dict.fromkeys(name.split("/")[0] for name in spec)
    return {top: subtree(structure, spec, top, leaves) for top in tops} | dict(zip(MADE, masks, strict=True))


def check_window_rows(view: str, ends: tuple[str, ...], spec: Spec) -> None:
    """Raises unless windows can be made of such rows."""
    check_ends(view, ends, spec)
    if list(spec) == [""]:
        raise TypeError(f"{view}: rows are one array without a name; expected a dict of leaves. Write {{'obs': x}}.")
    check_free(view, MADE, spec)


def check_free(view: str, made: tuple[str, ...], names: Iterable[str]) -> None:
    """Raises where rows have a leaf of a name that the view gives to what it makes."""
    for name in names:
        if name.split("/")[0] in made:
            raise ValueError(
                f"{view}: rows have a leaf '{name}', a name this view makes itself ({', '.join(made)}). Rename the leaf."
            )


def under(name: str, names: Iterable[str]) -> list[str]:
    """Of `names` the leaf `name`, or the leaves below it."""
    return [n for n in names if n == name or n.startswith(name + "/")]


def subtree(structure: Any, spec: Spec, name: str, leaves: dict[str, jax.Array]) -> PyTree:
    """`leaves` in the structure they have below `name` in a row."""
    if name in leaves:
        return leaves[name]
    rows = structure.unflatten([leaves.get(n) for n in spec])
    for part in name.split("/"):
        rows = rows[part] if isinstance(rows, dict) else rows[int(part)] if part.isdigit() else getattr(rows, part)
    return rows


def place(data: dict[str, Any], path: list[str], leaf: jax.Array) -> None:
    """Puts a leaf into nested dicts."""
    for part in path[:-1]:
        data = data.setdefault(part, {})
    data[path[-1]] = leaf
