"""Select, drop and rename leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fbuf._core.component import component
from fbuf._core.pytree import PyTree
from fbuf._interfaces.transform import Context, Transform
from fbuf.transforms._fields import as_dict, checked_keys, checked_name, chosen, convert, rebuilt


@component
class Select(Transform):
    """Keep some leaves, and drop the others.

    Leaves that a view adds (`mask`, `is_first`, `discount`, ...) stay only if they are named. It has no inverse.

    Attributes:
      keys: Names of leaves or subtrees: `("obs", "next/obs")`.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> sorted(fbuf.transforms.apply(fbuf.transforms.Select("a"), {"a": jnp.zeros(4), "b": jnp.ones(4)}))
      ['a']
    """

    keys: str | tuple[str, ...]

    row_by_row = True

    def __post_init__(self) -> None:
        convert(self, keys=checked_keys("Select", self.keys))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Select", data)
        return rebuilt("Select", {n: leaves[n] for n in chosen("Select", self.keys, leaves)})


@component
class Drop(Transform):
    """Drop some leaves. It has no inverse.

    Attributes:
      keys: Names of leaves or subtrees.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> sorted(fbuf.transforms.apply(fbuf.transforms.Drop("a"), {"a": jnp.zeros(4), "b": jnp.ones(4)}))
      ['b']
    """

    keys: str | tuple[str, ...]

    row_by_row = True

    def __post_init__(self) -> None:
        convert(self, keys=checked_keys("Drop", self.keys))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Drop", data)
        dropped = chosen("Drop", self.keys, leaves)
        return rebuilt("Drop", {n: leaf for n, leaf in leaves.items() if n not in dropped})


@component
class Rename(Transform):
    """Rename leaves or subtrees.

    Attributes:
      names: New names by old: `{"observation": "obs", "done": "terminated"}`.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> rename = fbuf.transforms.Rename({"observation": "obs"})
      >>> list(fbuf.transforms.apply(rename, {"observation": jnp.zeros(4)}))
      ['obs']
      >>> rename.inverse()
      Rename(names=(('obs', 'observation'),))
    """

    names: tuple[tuple[str, str], ...] | Mapping[str, str]

    row_by_row = True

    def __post_init__(self) -> None:
        names: Any = self.names
        pairs = tuple(names.items()) if isinstance(names, Mapping) else names
        fine = isinstance(pairs, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
        if not fine or not pairs:
            raise TypeError(f"Rename: names is {names!r}; expected a dict. Write Rename({{'observation': 'obs'}}).")
        named = tuple((checked_name("Rename", old), checked_name("Rename", new)) for old, new in pairs)
        for side, what in ((0, "old"), (1, "new")):
            twice = next((p[side] for p in named if [q[side] for q in named].count(p[side]) > 1), None)
            if twice is not None:
                raise ValueError(f"Rename: '{twice}' occurs twice among the {what} names. Remove one of them.")
        convert(self, names=named)

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Rename", data)
        pairs: Any = self.names
        new_names: dict[str, str] = {}
        for old, new in pairs:
            new_names |= {name: new + name.removeprefix(old) for name in chosen("Rename", (old,), leaves)}
        out = {}
        for name, leaf in leaves.items():
            called = new_names.get(name, name)
            if called in out or (called != name and called in leaves and called not in new_names):
                raise ValueError(f"Rename: leaf '{called}' already exists. Use another name.")
            out[called] = leaf
        return rebuilt("Rename", out)

    def inverse(self) -> Rename:
        """Return the renaming from new names to old."""
        pairs: Any = self.names
        return Rename(tuple((new, old) for old, new in pairs))
