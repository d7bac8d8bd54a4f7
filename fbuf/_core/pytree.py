"""Rows as named leaves, their shapes and dtypes; and leaves of 64 bits while `jax_enable_x64` is off.

Every leaf of a pytree has a path such as `"obs"` or `"next/obs"`. Parts of a buffer refer to leaves by these names
(`keys=("obs",)`, `observation="obs"`), and messages quote them. A path may also be a tuple: `("next", "obs")`.

Without x64, leaves on the device have 32 bits: values that fit are narrowed, others are errors. Leaves of a host storage may
have 64: the store holds them exactly, and inside JAX they are pairs of uint32, `[..., 2]` in the order of their bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

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


def check_nesting(names: Collection[str]) -> None:
    """Raise if the name of a leaf begins that of another, because parts refer to subtrees by their names.

    Raises:
      ValueError: `{"camera": 0, "camera/depth": 1}`.
    """
    for name in names:
        for end in (i for i, letter in enumerate(name) if letter == "/"):
            if name[:end] in names:
                raise ValueError(
                    f"fbuf: the name of leaf '{name[:end]}' begins that of leaf '{name}', as if it were a subtree. Rename one "
                    f"of them."
                )


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


def subtree(structure: Any, spec: Spec, name: str, leaves: dict[str, jax.Array]) -> PyTree:
    """Return `leaves` in their structure below `name` in a row."""
    if name in leaves:
        return leaves[name]
    rows = structure.unflatten([leaves.get(n) for n in spec])
    for part in name.split("/"):
        rows = _children(rows)[part]
    return rows


def beside(structure: Any, spec: Spec, leaves: dict[str, jax.Array]) -> dict[str, Any]:
    """Return some leaves of rows under their top names, in their structure if all leaves below the name are given."""
    rows = _children(structure.unflatten([leaves.get(n) for n in spec]))
    lacking = nested({n: None for n in spec if n not in leaves})
    return {top: part if top in lacking else rows[top] for top, part in nested(leaves).items()}


def _children(node: PyTree) -> dict[str, PyTree]:
    """Return the children of a pytree node by name."""
    pairs = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): child for path, child in pairs}


def flat_keys(structure: Any) -> list[Any] | None:
    """Return the keys of a plain dict of leaves, in the order of the leaves; None for any other structure."""
    node, children = structure.node_data(), structure.children()
    flat = structure.num_leaves == len(children) and all(map(jax.tree_util.treedef_is_leaf, children))
    return list(node[1]) if node is not None and node[0] is dict and flat else None


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
    """Return shape and canonical dtype of an array or a number, without device memory; errors begin with `where`.

    The order of bytes is the machine's, of which alone JAX takes arrays.
    """
    if type(leaf).__module__.split(".")[0] == "torch":
        raise TypeError(f"{where} is a torch tensor; expected arrays. Convert with fbuf.torch.from_torch(x).")
    if hasattr(leaf, "to_tensordict"):  # of tensordict, or a tensorclass of the user's
        raise TypeError(f"{where} is a {type(leaf).__name__}; expected dicts. Use fbuf.torch.from_torch(x.to_dict()).")
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        if not isinstance(leaf.shape, Iterable):
            raise TypeError(
                f"{where} is {leaf!r}; expected an array or a number, such as np.float32(0) or space.sample()."
            )
        if isinstance(leaf, np.ndarray) and hasattr(leaf, "filled"):
            raise TypeError(f"{where} is a masked array; expected an array. Use its filled().")
        shape, dtype = tuple(leaf.shape), leaf.dtype
    else:
        if dataclasses.is_dataclass(leaf):
            raise TypeError(
                f"{where} is a {type(leaf).__name__}, not a pytree; expected arrays in dicts. Decorate the class with "
                f"@jax.tree_util.register_dataclass, or write dataclasses.asdict(x)."
            )
        try:
            array = np.asarray(leaf)
        except ValueError:
            raise ValueError(f"{where} has lists of several lengths; expected one length, as of an array.") from None
        shape, dtype = array.shape, array.dtype
        if dtype == np.float64 and isinstance(leaf, float):
            dtype = jnp.result_type(float)
        elif dtype == np.int64 and isinstance(leaf, int):
            dtype = jnp.result_type(int)
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = np.dtype(dtype)
        dtype = jax.dtypes.canonicalize_dtype(dtype if dtype.isnative else dtype.newbyteorder("="))
    return jax.ShapeDtypeStruct(shape, dtype)


def spec_of(example: PyTree, exact: Sequence[str] = ()) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the spec of a row of arrays, scalars or `jax.ShapeDtypeStruct`s.

    Args:
      exact: Leaves and subtrees that keep the 64 bits of NumPy's dtypes.
    Raises:
      ValueError: a value does not fit the dtype of its leaf; or the name of a leaf begins that of another.
    """
    spec: dict[str, jax.ShapeDtypeStruct] = {}
    leaves = named_leaves(example)
    check_nesting(leaves)
    for name, leaf in leaves.items():
        where = f"fbuf: leaf '{name}'" if name else "fbuf: the row"
        if isinstance(leaf, (np.ndarray, np.generic)) and not leaf.dtype.isnative:
            leaf = leaf.astype(leaf.dtype.newbyteorder("="))
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


DTYPES = frozenset(map(np.dtype, ("int64", "uint64", "float64")))


def needs_x64(dtype: Any) -> bool:
    """Return whether JAX would narrow a dtype: it has 64 bits, and `jax_enable_x64` is off."""
    return dtype in DTYPES and bool(jax.dtypes.canonicalize_dtype(dtype) != dtype)


def has_64_bits(tree: Any) -> bool:
    """Return whether a pytree has NumPy leaves that JAX would narrow silently."""
    return any(isinstance(leaf, (np.ndarray, np.generic)) and needs_x64(leaf.dtype) for leaf in jax.tree.leaves(tree))


def narrow(where: str, name: str, values: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Return NumPy values as an array of `dtype`.

    Raises:
      ValueError: an integer is out of range, or a finite number becomes infinite. `where` begins the message.
    """
    values = np.asarray(values)
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        made = values.astype(dtype)
    lost = made != values if values.dtype.kind in "iu" else np.isinf(made) & np.isfinite(values)
    if lost.any():
        refuse(where, name, values[lost][0], dtype, values.dtype)
    return made


def fits(values: Any, dtype: Any) -> bool:
    """Return whether NumPy values of another dtype fit; infinite values count as too large."""
    if values.dtype.kind in "iu":
        return bool(np.all(values.astype(dtype) == values))
    with np.errstate(over="ignore"):
        return not np.isinf(values.astype(dtype)).any()


def refuse(where: str, name: str, value: Any, dtype: Any, source_dtype: Any = np.int64) -> NoReturn:
    """Raise ValueError for a value out of range; `source_dtype` is its own dtype."""
    fix = "Use one in its range"
    if np.dtype(dtype).itemsize == 4 and name:
        exact = np.dtype(source_dtype).name
        fix += f", or keep {exact} on the host: storages.Host(keys=('{name}',)), with np.{exact}(0) in the example"
    raise ValueError(f"{where} is {value}, which {dtype} cannot hold. {fix}.")


def in_jax(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf of a host storage inside JAX."""
    return jax.ShapeDtypeStruct((*leaf.shape, 2), np.uint32) if needs_x64(leaf.dtype) else leaf


def to_pairs(where: str, values: Any, dtype: Any) -> Any:
    """Return NumPy values of a 64-bit dtype as uint32[..., 2]; pairs stay as they are.

    Raises:
      TypeError: another dtype, or another kind of array.
    """
    if isinstance(values, jax.Array) and values.dtype == np.uint32 and values.shape[-1:] == (2,):
        return values
    if not isinstance(values, (np.ndarray, np.generic)) or not np.can_cast(values.dtype, dtype, "equiv"):
        kind = str(getattr(values, "dtype", type(values).__name__)) + " of JAX" * isinstance(values, jax.Array)
        raise TypeError(
            f"{where} is {kind}; this buffer keeps {dtype} on the host, which JAX cannot hold while jax_enable_x64 is off. "
            f"Pass NumPy arrays outside jit: np.asarray(x, np.{dtype})."
        )
    return np.asarray(values, dtype, order="C")[..., None].view(np.uint32)


def exact(call: str, spec: Mapping[str, jax.ShapeDtypeStruct], data: Any) -> Any:
    """Return rows or a batch with NumPy arrays of their 64-bit dtypes instead of pairs; what a view rounded stays.

    Raises:
      TypeError: the data are traced.
    """
    dtypes = {name: leaf.dtype for name, leaf in spec.items() if needs_x64(leaf.dtype)}
    if not dtypes:
        return data

    def of_leaf(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name not in spec:  # views may put rows that are not dicts under `row`
            name = name.removeprefix("row").removeprefix("/")
        if name not in dtypes or leaf.dtype != np.uint32:
            return leaf
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{call}: leaf '{name}' is {dtypes[name]}, which jit cannot hold while jax_enable_x64 is off. Call it outside "
                f"jit (or use fbuf.Replay), or enable x64: jax.config.update('jax_enable_x64', True)."
            )
        return np.array(jax.device_get(leaf), order="C").view(dtypes[name])[..., 0]

    return jax.tree_util.tree_map_with_path(of_leaf, data)


def register_node(kind: type, children: tuple[str, ...], flatten: Callable[[Any], tuple[Any, Any]]) -> None:
    """Make a class a pytree node.

    Args:
      kind: Is made of its children, then of its static values.
      children: Their names, in key paths.
      flatten: Return the children and the static values of a node.
    """
    keys = tuple(map(jax.tree_util.GetAttrKey, children))

    def flatten_with_keys(node: Any) -> tuple[Any, Any]:
        leaves, static = flatten(node)
        return tuple(zip(keys, leaves, strict=True)), static

    jax.tree_util.register_pytree_with_keys(
        kind, flatten_with_keys, lambda static, leaves: kind(*leaves, *static), flatten
    )
