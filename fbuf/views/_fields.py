"""Select leaves of rows by name, and check them, for views."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.pytree import PyTree, Spec, name_of
from fbuf._indexing.anchors import END, RESET

MADE = ("mask", "is_first", "learning_mask")
"""Leaves that window views add."""


def check_ends(view: str, names: tuple[str, ...], spec: Spec) -> None:
    """Raise unless every leaf that ends an episode exists and is boolean."""
    for name in names:
        if name not in spec:
            raise ValueError(f"{view}: episode_end names '{name}'; expected leaves of {', '.join(spec)}.")
        check_flag(view, name, spec)


def check_flag(view: str, name: str, spec: Spec) -> None:
    """Raise unless the leaf is one boolean a row."""
    if spec[name].dtype != jnp.bool_ or spec[name].shape != ():
        found = f"{spec[name].dtype}{list(spec[name].shape)}"
        raise TypeError(f"{view}: leaf '{name}' is {found}; expected bool[] a row. Cast with x.astype(bool).")


def check_autoreset(view: str, autoreset: str | None, ends: tuple[str, ...]) -> None:
    """Raise if the value is invalid, or missing where rows end episodes."""
    if autoreset is None and ends:
        raise ValueError(
            f"{view}: autoreset is missing; rows end episodes ({', '.join(ends)}), and the view must know what row follows. "
            f'Write autoreset="next_step" for gymnasium.vector environments (their default mode), or '
            f'autoreset="same_step" for SAME_STEP mode, manual resets and JAX environments.'
        )
    if autoreset not in (None, "same_step", "next_step"):
        raise ValueError(f'{view}: autoreset is {autoreset!r}; expected "same_step" or "next_step".')


def checked_ends(view: str, names: Any) -> tuple[str, ...]:
    """Return the names of the leaves that end an episode."""
    if not isinstance(names, (tuple, list)):
        fix = f" Write episode_end=({names!r},)." if isinstance(names, str) else ""
        raise TypeError(f"{view}: episode_end is {names!r}; expected a tuple of names.{fix}")
    return tuple(name_of(name) for name in names)


def last_bit(autoreset: str | None) -> int:
    """Return the flag of the last row of an episode."""
    return RESET if autoreset == "next_step" else END


def whole_rows(structure: Any, spec: Spec, arrays: Several[jax.Array], masks: Several[jax.Array]) -> dict[str, Any]:
    """Return every leaf of the rows in their structure below the top names, and the masks `MADE`."""
    leaves, tops = dict(zip(spec, arrays, strict=True)), dict.fromkeys(name.split("/")[0] for name in spec)
    return {top: subtree(structure, spec, top, leaves) for top in tops} | dict(zip(MADE, masks, strict=True))


def check_window_rows(view: str, ends: tuple[str, ...], spec: Spec) -> None:
    """Raise unless windows can be made of the rows."""
    check_ends(view, ends, spec)
    if list(spec) == [""]:
        raise TypeError(f"{view}: rows are one unnamed array; expected a dict of leaves. Write {{'obs': x}}.")
    check_free(view, MADE, spec)


def check_free(view: str, made: tuple[str, ...], names: Iterable[str]) -> None:
    """Raise if the rows have a leaf that the view makes."""
    for name in names:
        if name.split("/")[0] in made:
            raise ValueError(f"{view}: rows have a leaf '{name}', which the view makes ({', '.join(made)}). Rename it.")


def subtree(structure: Any, spec: Spec, name: str, leaves: dict[str, jax.Array]) -> PyTree:
    """Return `leaves` in their structure below `name` in a row."""
    if name in leaves:
        return leaves[name]
    rows = structure.unflatten([leaves.get(n) for n in spec])
    for part in name.split("/"):
        rows = rows[part] if isinstance(rows, dict) else rows[int(part)] if part.isdigit() else getattr(rows, part)
    return rows
