"""`Concatenate`, `Split`, `Stack`, `Unstack`: several leaves as one, and one as several."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.component import component
from fbuf._core.pytree import PyTree
from fbuf._interfaces.transform import Context
from fbuf.transforms._fields import added, as_dict, checked_keys, checked_name, chosen, lead_of


def _check_axis(call: str, axis: Any) -> int:
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(f"{call}: axis is {axis!r}; expected an int, among the axes of one row. Write axis=-1.")
    return int(axis)


def _axis(call: str, name: str, leaf: jax.Array, axis: int, context: Context, more: int = 0) -> int:
    """`axis` of a row's leaf, of which there are `more` later, as one of a batch's."""
    lead = lead_of(name, leaf, context)
    own = leaf.ndim - lead + more
    if not -own <= axis < own:
        fix = (
            "Use Stack(...), which makes one."
            if own == 0 and not more
            else f"Use one of {', '.join(map(str, range(own)))}."
        )
        what = f"{leaf.dtype}{_shape(name, leaf, context)}"
        raise ValueError(f"{call}: leaf '{name}' is {what}, and has no axis {axis}. {fix}")
    return lead + axis % own


def _shape(name: str, leaf: jax.Array, context: Context) -> str:
    """For messages: "[2, 3] a row"."""
    lead = lead_of(name, leaf, context)
    return f"{list(leaf.shape[lead:])} a {'row' if lead == context.lead else 'window'}"


def _pieces(call: str, keys: str | tuple[str, ...], leaves: dict[str, jax.Array], context: Context) -> list[jax.Array]:
    """The leaves themselves, of one dtype, and all of them of rows or all of windows."""
    for key in keys:
        if key not in leaves:
            chosen(call, (key,), leaves)
            raise ValueError(f"{call}: '{key}' holds several leaves; expected the name of one. Name them one by one.")
    parts = [leaves[key] for key in keys]
    for key, part in zip(keys, parts, strict=True):
        if part.dtype != parts[0].dtype:
            raise TypeError(
                f"{call}: leaf '{key}' is {part.dtype}, but '{keys[0]}' is {parts[0].dtype}; expected one dtype. Cast one of "
                f"them before: Cast({key!r}, '{parts[0].dtype}')."
            )
        if lead_of(key, part, context) != lead_of(keys[0], parts[0], context):
            raise ValueError(
                f"{call}: leaf '{key}' is {_shape(key, part, context)}, but '{keys[0]}' is "
                f"{_shape(keys[0], parts[0], context)}; expected all of them a row, or all a window. Repeat what is there once "
                f"a window before, with Map and jnp.broadcast_to."
            )
    return parts


def _joined(
    call: str, keys: str | tuple[str, ...], leaves: dict[str, jax.Array], into: str, leaf: jax.Array
) -> dict[str, Any]:
    return added(call, {n: x for n, x in leaves.items() if n not in keys}, {into: leaf})


def _several(call: str, into: Any) -> tuple[str, ...]:
    if isinstance(into, str):
        raise TypeError(f"{call}: into is {into!r}; expected names of leaves. Write into=('a', 'b').")
    return checked_keys(call, into)


@component
class Concatenate:
    """Joins leaves along an axis they have.

    Attributes:
      keys: Names of leaves, of one dtype, and but for the axis of one shape.
      into: Name of the leaf that takes their place.
      axis: Among the axes of one row's leaf, or of one window's where there is one value a window: -1 the last, 0 the first.
      sizes: How long each is along the axis; only its inverse needs them.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> join = fbuf.transforms.Concatenate(("position", "velocity"), into="obs", sizes=(3, 2))
      >>> joined = fbuf.transforms.apply(join, {"position": jnp.zeros((8, 3)), "velocity": jnp.ones((8, 2))})
      >>> joined["obs"].shape, sorted(fbuf.transforms.apply(join.inverse(), joined))
      ((8, 5), ['position', 'velocity'])
    """

    keys: str | tuple[str, ...]
    into: str
    axis: int = -1
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", checked_keys("Concatenate", self.keys))
        object.__setattr__(self, "into", checked_name("Concatenate", self.into))
        object.__setattr__(self, "axis", _check_axis("Concatenate", self.axis))
        if self.sizes is not None:
            object.__setattr__(self, "sizes", _check_sizes("Concatenate", self.sizes, len(self.keys)))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Concatenate", data)
        parts = _pieces("Concatenate", self.keys, leaves, context)
        axis = _axis("Concatenate", self.keys[0], parts[0], self.axis, context)
        for i, (key, part) in enumerate(zip(self.keys, parts, strict=True)):
            shape, first = _shape(key, part, context), list(parts[0].shape[lead_of(key, part, context) :])
            others = [n for a, n in enumerate(part.shape) if a != axis]
            if part.ndim != parts[0].ndim or others != [n for a, n in enumerate(parts[0].shape) if a != axis]:
                raise ValueError(
                    f"Concatenate: leaf '{key}' is {shape}, but '{self.keys[0]}' is {first}; expected the same but for "
                    f"axis {self.axis}. Reshape one of them before, with Map."
                )
            if self.sizes is not None and part.shape[axis] != self.sizes[i]:
                raise ValueError(
                    f"Concatenate: leaf '{key}' is {shape}; expected {self.sizes[i]} along axis {self.axis}, as sizes "
                    f"says. Write sizes={tuple(p.shape[axis] for p in parts)}."
                )
        return _joined("Concatenate", self.keys, leaves, self.into, jnp.concatenate(parts, axis=axis))

    def inverse(self) -> Split:
        """The `Split` that undoes it.

        Raises:
          ValueError: `sizes` were not given.
        """
        if self.sizes is None:
            raise ValueError(
                "Concatenate.inverse: sizes is None; expected how long each leaf is along the axis. Write "
                "Concatenate(..., sizes=(3, 4))."
            )
        return Split(self.into, tuple(self.keys), self.sizes, self.axis)


@component
class Split:
    """Cuts a leaf along an axis; the inverse of `Concatenate`.

    Attributes:
      key: Name of the leaf.
      into: Names of those that take its place.
      sizes: How long each is along the axis.
      axis: Among the axes of one row's leaf.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> split = fbuf.transforms.Split("obs", ("position", "velocity"), (3, 2))
      >>> fbuf.transforms.apply(split, {"obs": jnp.zeros((8, 5))})["velocity"].shape
      (8, 2)
    """

    key: str
    into: tuple[str, ...]
    sizes: tuple[int, ...]
    axis: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", checked_name("Split", self.key))
        object.__setattr__(self, "into", _several("Split", self.into))
        object.__setattr__(self, "sizes", _check_sizes("Split", self.sizes, len(self.into)))
        object.__setattr__(self, "axis", _check_axis("Split", self.axis))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Split", data)
        (leaf,) = _pieces("Split", (self.key,), leaves, context)
        axis = _axis("Split", self.key, leaf, self.axis, context)
        if leaf.shape[axis] != sum(self.sizes):
            raise ValueError(
                f"Split: leaf '{self.key}' is {_shape(self.key, leaf, context)}, but sizes={self.sizes} come to "
                f"{sum(self.sizes)}; expected {leaf.shape[axis]}. Change sizes."
            )
        parts = jnp.split(leaf, np.cumsum(self.sizes)[:-1].tolist(), axis=axis)
        rest = {n: x for n, x in leaves.items() if n != self.key}
        return added("Split", rest, dict(zip(self.into, parts, strict=True)))

    def inverse(self) -> Concatenate:
        """The `Concatenate` that undoes it."""
        return Concatenate(self.into, self.key, self.axis, self.sizes)


@component
class Stack:
    """Joins leaves of one shape and dtype along a new axis.

    Attributes:
      keys: Names of leaves.
      into: Name of the leaf that takes their place.
      axis: Of the new axis, among those of one row's leaf then: 0 the first, -1 the last.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> stack = fbuf.transforms.Stack(("left", "right"), into="eyes")
      >>> eyes = fbuf.transforms.apply(stack, {"left": jnp.zeros((8, 5)), "right": jnp.ones((8, 5))})
      >>> eyes["eyes"].shape, stack.inverse()
      ((8, 2, 5), Unstack(key='eyes', into=('left', 'right')))
    """

    keys: str | tuple[str, ...]
    into: str
    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", checked_keys("Stack", self.keys))
        object.__setattr__(self, "into", checked_name("Stack", self.into))
        object.__setattr__(self, "axis", _check_axis("Stack", self.axis))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Stack", data)
        parts = _pieces("Stack", self.keys, leaves, context)
        for key, part in zip(self.keys, parts, strict=True):
            if part.shape != parts[0].shape:
                raise ValueError(
                    f"Stack: leaf '{key}' is {_shape(key, part, context)}, but '{self.keys[0]}' is "
                    f"{list(parts[0].shape[lead_of(key, part, context) :])}; expected one shape. Join them along an "
                    f"axis they have: Concatenate."
                )
        axis = _axis("Stack", self.keys[0], parts[0], self.axis, context, more=1)
        return _joined("Stack", self.keys, leaves, self.into, jnp.stack(parts, axis=axis))

    def inverse(self) -> Unstack:
        """The `Unstack` that undoes it."""
        return Unstack(self.into, tuple(self.keys), self.axis)


@component
class Unstack:
    """Takes a leaf apart along an axis; the inverse of `Stack`.

    Attributes:
      key: Name of the leaf.
      into: Names of those that take its place, as many as it is long along the axis.
      axis: Among the axes of one row's leaf; the parts lack it.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> unstack = fbuf.transforms.Unstack("eyes", ("left", "right"))
      >>> fbuf.transforms.apply(unstack, {"eyes": jnp.zeros((8, 2, 5))})["left"].shape
      (8, 5)
    """

    key: str
    into: tuple[str, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", checked_name("Unstack", self.key))
        object.__setattr__(self, "into", _several("Unstack", self.into))
        object.__setattr__(self, "axis", _check_axis("Unstack", self.axis))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Unstack", data)
        (leaf,) = _pieces("Unstack", (self.key,), leaves, context)
        axis = _axis("Unstack", self.key, leaf, self.axis, context)
        if leaf.shape[axis] != len(self.into):
            raise ValueError(
                f"Unstack: leaf '{self.key}' is {_shape(self.key, leaf, context)}, so axis {self.axis} makes "
                f"{leaf.shape[axis]} leaves; expected {len(self.into)}, the names in into. Name each of them."
            )
        parts = [jax.lax.index_in_dim(leaf, i, axis, keepdims=False) for i in range(len(self.into))]
        rest = {n: x for n, x in leaves.items() if n != self.key}
        return added("Unstack", rest, dict(zip(self.into, parts, strict=True)))

    def inverse(self) -> Stack:
        """The `Stack` that undoes it."""
        return Stack(self.into, self.key, self.axis)


def _check_sizes(call: str, sizes: Any, number: int) -> tuple[int, ...]:
    fine = isinstance(sizes, (tuple, list)) and len(sizes) == number
    if not fine or not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= 1 for n in sizes):
        raise ValueError(
            f"{call}: sizes is {sizes!r}; expected {number} ints >= 1, one a leaf. Write sizes={(3,) * number}."
        )
    return tuple(int(n) for n in sizes)
