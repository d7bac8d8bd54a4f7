"""Join several leaves into one, and split one into several: `Concatenate`, `Split`, `Stack`, `Unstack`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.arguments import is_int
from fbuf._core.component import component
from fbuf._core.pytree import PyTree
from fbuf._interfaces.transform import Context, Transform
from fbuf.transforms._fields import added, as_dict, checked_keys, checked_name, convert, lead_of, leaf_of


def _check_axis(call: str, axis: Any) -> int:
    if not is_int(axis):
        raise TypeError(f"{call}: axis is {axis!r}; expected an int. Write axis=-1.")
    return int(axis)


def _axis(call: str, name: str, leaf: jax.Array, axis: int, context: Context, more: int = 0) -> int:
    """Return `axis` of a row's leaf, which later has `more` axes, as an axis of the batch's leaf."""
    lead = lead_of(name, leaf, context)
    axes = leaf.ndim - lead + more
    if not -axes <= axis < axes:
        fix = f"Use one of {', '.join(map(str, range(axes)))}." if axes else "Use Stack(...)."
        what = f"{leaf.dtype}{_shape(name, leaf, context)}"
        raise ValueError(f"{call}: leaf '{name}' is {what}, without axis {axis}. {fix}")
    return lead + axis % axes


def _shape(name: str, leaf: jax.Array, context: Context) -> str:
    """Return the shape for messages: "[2, 3] a row"."""
    lead = lead_of(name, leaf, context)
    return f"{list(leaf.shape[lead:])} a {'row' if lead == context.lead else 'window'}"


def _pieces(call: str, keys: str | tuple[str, ...], leaves: dict[str, jax.Array], context: Context) -> list[jax.Array]:
    """Return the leaves, of one dtype, and all with rows or all without."""
    parts = [leaf_of(call, key, leaves) for key in keys]
    for key, part in zip(keys, parts, strict=True):
        if part.dtype != parts[0].dtype:
            raise TypeError(f"{call}: leaf '{key}' is {part.dtype}, but '{keys[0]}' is {parts[0].dtype}. Cast first.")
        if lead_of(key, part, context) != lead_of(keys[0], parts[0], context):
            raise ValueError(
                f"{call}: leaf '{key}' is {_shape(key, part, context)}, but '{keys[0]}' is "
                f"{_shape(keys[0], parts[0], context)}. Repeat values of a window with Map and jnp.broadcast_to before."
            )
    return parts


def _exchange(
    call: str, keys: str | tuple[str, ...], leaves: dict[str, jax.Array], new: dict[str, jax.Array]
) -> dict[str, Any]:
    """Return nested dicts without the leaves `keys`, and with the new ones."""
    return added(call, {n: x for n, x in leaves.items() if n not in keys}, new)


def _convert_join(call: str, self: Any) -> None:
    """Check the fields of a transform from several leaves to one."""
    convert(
        self, keys=checked_keys(call, self.keys), into=checked_name(call, self.into), axis=_check_axis(call, self.axis)
    )


def _convert_split(call: str, self: Any) -> None:
    """Check the fields of a transform from one leaf to several."""
    if isinstance(self.into, str):
        raise TypeError(f"{call}: into is {self.into!r}; expected names of leaves. Write into=('a', 'b').")
    convert(
        self, key=checked_name(call, self.key), into=checked_keys(call, self.into), axis=_check_axis(call, self.axis)
    )


@component
class Concatenate(Transform):
    """Concatenate leaves along an axis.

    Attributes:
      keys: Names of leaves of one dtype, and of one shape except along the axis.
      into: Name of the leaf that replaces them.
      axis: Axis of one row's leaf, or of one window's for values per window: -1 the last, 0 the first.
      sizes: Length of each leaf along the axis; only the inverse needs them.

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

    row_by_row = True

    def __post_init__(self) -> None:
        _convert_join("Concatenate", self)
        if self.sizes is not None:
            convert(self, sizes=_check_sizes("Concatenate", self.sizes, len(self.keys)))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Concatenate", data)
        parts = _pieces("Concatenate", self.keys, leaves, context)
        axis = _axis("Concatenate", self.keys[0], parts[0], self.axis, context)
        for i, (key, part) in enumerate(zip(self.keys, parts, strict=True)):
            shape, first = _shape(key, part, context), list(parts[0].shape[lead_of(key, part, context) :])
            others = [n for a, n in enumerate(part.shape) if a != axis]
            if part.ndim != parts[0].ndim or others != [n for a, n in enumerate(parts[0].shape) if a != axis]:
                raise ValueError(
                    f"Concatenate: leaf '{key}' is {shape}, but '{self.keys[0]}' is {first}; expected equal shapes except "
                    f"along axis {self.axis}. Reshape with Map before."
                )
            if self.sizes is not None and part.shape[axis] != self.sizes[i]:
                raise ValueError(
                    f"Concatenate: leaf '{key}' is {shape}; expected {self.sizes[i]} along axis {self.axis}, as sizes."
                )
        return _exchange("Concatenate", self.keys, leaves, {self.into: jnp.concatenate(parts, axis=axis)})

    def inverse(self) -> Split:
        """Return the inverse `Split`.

        Raises:
          ValueError: `sizes` is None.
        """
        if self.sizes is None:
            raise ValueError("Concatenate.inverse: sizes is None. Write Concatenate(..., sizes=(3, 4)).")
        return Split(self.into, tuple(self.keys), self.sizes, self.axis)


@component
class Split(Transform):
    """Split a leaf along an axis; the inverse of `Concatenate`.

    Attributes:
      key: Name of the leaf.
      into: Names of the leaves that replace it.
      sizes: Length of each along the axis.
      axis: Axis of one row's leaf.

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

    row_by_row = True

    def __post_init__(self) -> None:
        _convert_split("Split", self)
        convert(self, sizes=_check_sizes("Split", self.sizes, len(self.into)))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Split", data)
        (leaf,) = _pieces("Split", (self.key,), leaves, context)
        axis = _axis("Split", self.key, leaf, self.axis, context)
        if leaf.shape[axis] != sum(self.sizes):
            raise ValueError(
                f"Split: leaf '{self.key}' is {_shape(self.key, leaf, context)}; expected the sum of {self.sizes}."
            )
        parts = jnp.split(leaf, np.cumsum(self.sizes)[:-1].tolist(), axis=axis)
        return _exchange("Split", (self.key,), leaves, dict(zip(self.into, parts, strict=True)))

    def inverse(self) -> Concatenate:
        """Return the inverse `Concatenate`."""
        return Concatenate(self.into, self.key, self.axis, self.sizes)


@component
class Stack(Transform):
    """Stack leaves of one shape and dtype along a new axis.

    Attributes:
      keys: Names of leaves.
      into: Name of the leaf that replaces them.
      axis: Position of the new axis in one row's leaf: 0 the first, -1 the last.

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

    row_by_row = True

    def __post_init__(self) -> None:
        _convert_join("Stack", self)

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Stack", data)
        parts = _pieces("Stack", self.keys, leaves, context)
        for key, part in zip(self.keys, parts, strict=True):
            if part.shape != parts[0].shape:
                raise ValueError(
                    f"Stack: leaf '{key}' is {_shape(key, part, context)}, but '{self.keys[0]}' is "
                    f"{list(parts[0].shape[lead_of(key, part, context) :])}; expected one shape. Use Concatenate."
                )
        axis = _axis("Stack", self.keys[0], parts[0], self.axis, context, more=1)
        return _exchange("Stack", self.keys, leaves, {self.into: jnp.stack(parts, axis=axis)})

    def inverse(self) -> Unstack:
        """Return the inverse `Unstack`."""
        return Unstack(self.into, tuple(self.keys), self.axis)


@component
class Unstack(Transform):
    """Split a leaf into its elements along an axis; the inverse of `Stack`.

    Attributes:
      key: Name of the leaf.
      into: Names of the leaves that replace it, one for each element along the axis.
      axis: Axis of one row's leaf, which is removed.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> unstack = fbuf.transforms.Unstack("eyes", ("left", "right"))
      >>> fbuf.transforms.apply(unstack, {"eyes": jnp.zeros((8, 2, 5))})["left"].shape
      (8, 5)
    """

    key: str
    into: tuple[str, ...]
    axis: int = 0

    row_by_row = True

    def __post_init__(self) -> None:
        _convert_split("Unstack", self)

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = as_dict("Unstack", data)
        (leaf,) = _pieces("Unstack", (self.key,), leaves, context)
        axis = _axis("Unstack", self.key, leaf, self.axis, context)
        if leaf.shape[axis] != len(self.into):
            raise ValueError(
                f"Unstack: leaf '{self.key}' is {_shape(self.key, leaf, context)}; expected {len(self.into)} on the axis."
            )
        parts = [jax.lax.index_in_dim(leaf, i, axis, keepdims=False) for i in range(len(self.into))]
        return _exchange("Unstack", (self.key,), leaves, dict(zip(self.into, parts, strict=True)))

    def inverse(self) -> Stack:
        """Return the inverse `Stack`."""
        return Stack(self.into, self.key, self.axis)


def _check_sizes(call: str, sizes: Any, number: int) -> tuple[int, ...]:
    fine = isinstance(sizes, (tuple, list)) and len(sizes) == number
    if not fine or not all(is_int(n) and n >= 1 for n in sizes):
        raise ValueError(f"{call}: sizes is {sizes!r}; expected {number} ints >= 1. Write sizes={(3,) * number}.")
    return tuple(int(n) for n in sizes)
