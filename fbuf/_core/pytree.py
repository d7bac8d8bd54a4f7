"""Rows as named leaves: every leaf of a pytree has a path such as `"obs"` or `"next/obs"`.

Parts of a buffer refer to leaves by these names (`keys=("obs",)`, `observation="obs"`), and messages quote them. A path may
also be a tuple: `("next", "obs")`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.x64 import narrow, needs_x64

PyTree = Any
Spec = Mapping[str, jax.ShapeDtypeStruct]
"""Shape and dtype of one row of each leaf, by name."""
Leaves = Mapping[str, jax.Array]
"""Arrays by name."""


def name_of(path: str | tuple[str, ...]) -> str:
    """Return the name of a path: `"next/obs"` for `("next", "obs")` and for `"next/obs"`."""
    if not isinstance(path, (str, tuple)):
        raise TypeError(f"fbuf: the name of a leaf is {path!r}; expected a string, such as 'obs' or 'next/obs'.")
    return path if isinstance(path, str) else "/".join(path)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of `tree` by name, in flattening order. A bare array has the name `""`.

    Raises:
      TypeError: the keys of a dict are of several types.
      ValueError: two leaves have the same name: `{"a/b": 1, "a": {"b": 2}}`.
    """
    try:
        pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    except (TypeError, ValueError) as error:  # JAX sorts the keys of dicts
        raise TypeError("fbuf: a dict has keys of several types; expected strings, {'a': x, '0': y}.") from error
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
    if len(leaves) < len(pairs):
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs]
        twice = next(name for name in leaves if names.count(name) > 1)
        raise ValueError(f"fbuf: two leaves have the name '{twice}'; expected another for each. Rename one of them.")
    return leaves


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts of leaves by name: the inverse of `named_leaves` for nested dicts."""
    out: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        at = out
        for part in path:
            at = at.setdefault(part, {})
        at[last] = leaf
    return out


def listed(names: Iterable[str]) -> str:
    """Return the names of a row's leaves for a message."""
    return ", ".join(names) or "one unnamed array"


def under(name: str, names: Iterable[str]) -> list[str]:
    """Return the leaf `name`, or the leaves below it."""
    return [n for n in names if is_under(n, (name,))]


def is_under(name: str, keys: Iterable[str]) -> bool:
    """Return whether a leaf is one of `keys`, or below one."""
    return any(name == key or name.startswith(key + "/") for key in keys)


def outside(keys: Collection[str], names: Iterable[str]) -> list[str]:
    """Return the leaves that are neither one of `keys` nor below one."""
    return [n for n in names if not is_under(n, keys)]


def leaf_spec(leaf: Any, where: str = "fbuf: a leaf") -> jax.ShapeDtypeStruct:
    """Return shape and canonical dtype of an array or a number, without device memory; errors begin with `where`."""
    if type(leaf).__module__.split(".")[0] == "torch":
        raise TypeError(f"{where} is a torch tensor; expected arrays. Convert with fbuf.torch.from_torch(x).")
    if hasattr(leaf, "to_tensordict"):  # of tensordict, or a tensorclass of the user's
        raise TypeError(f"{where} is a {type(leaf).__name__}; expected dicts. Use fbuf.torch.from_torch(x.to_dict()).")
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        shape, dtype = tuple(leaf.shape), leaf.dtype
    else:
        array = np.asarray(leaf)
        shape, dtype = array.shape, array.dtype
        if dtype == np.float64 and isinstance(leaf, float):
            dtype = jnp.result_type(float)
        elif dtype == np.int64 and isinstance(leaf, int):
            dtype = jnp.result_type(int)
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(shape, dtype)


def spec_of(example: PyTree, exact: Sequence[str] = ()) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the spec of a row of arrays, scalars or `jax.ShapeDtypeStruct`s.

    Args:
      exact: Leaves and subtrees that keep the 64 bits of NumPy's dtypes.
    Raises:
      ValueError: a value does not fit the dtype of its leaf.
    """
    spec = {}
    for name, leaf in named_leaves(example).items():
        where = f"fbuf: leaf '{name}'"
        spec[name] = leaf_spec(leaf, where)
        if needs_x64(getattr(leaf, "dtype", None)) and is_under(name, exact):
            spec[name] = jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
        elif isinstance(leaf, (int, float, np.ndarray, np.generic)):
            narrow(where, name, leaf, spec[name].dtype)
    return spec


def item_bytes(spec: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of one row of a leaf."""
    return int(np.prod(spec.shape, dtype=np.int64)) * int(spec.dtype.itemsize)


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of all leaves of a pytree of arrays or `jax.ShapeDtypeStruct`s."""
    return sum(item_bytes(leaf_spec(leaf)) for leaf in jax.tree.leaves(tree))


def expand(mask: jax.Array, ndim: int) -> jax.Array:
    """Append axes to `mask` until it has `ndim`."""
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))


def zero_unless(mask: jax.Array, leaf: jax.Array) -> jax.Array:
    """Return `leaf` where `mask` (over its leading axes) is True, and zeros elsewhere."""
    return jnp.where(expand(mask, leaf.ndim), leaf, jnp.zeros((), leaf.dtype))
