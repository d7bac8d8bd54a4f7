"""NumPy values of 64 bits while `jax_enable_x64` is off.

Leaves on the device have 32 bits: values that fit are narrowed, others are errors. Leaves of a host storage may have 64: the
store holds them exactly, and inside JAX they are pairs of uint32, `[..., 2]` in the order of their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np

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


def refuse(where: str, name: str, value: Any, dtype: Any, given: Any = np.int64) -> NoReturn:
    """Raise ValueError for a value out of range; `given` is its own dtype."""
    fix = "Use one in its range"
    if np.dtype(dtype).itemsize == 4 and name:
        exact = np.dtype(given).name
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
    if not isinstance(values, (np.ndarray, np.generic)) or values.dtype != dtype:
        kind = str(getattr(values, "dtype", type(values).__name__)) + " of JAX" * isinstance(values, jax.Array)
        raise TypeError(
            f"{where} is {kind}; this buffer keeps {dtype} on the host, which JAX cannot hold while jax_enable_x64 is off. "
            f"Pass NumPy arrays outside jit: np.asarray(x, np.{dtype})."
        )
    return np.asarray(values, order="C")[..., None].view(np.uint32)


def exact(call: str, spec: Mapping[str, jax.ShapeDtypeStruct], data: Any) -> Any:
    """Return rows or a batch with NumPy arrays of their 64-bit dtypes instead of pairs.

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
        if name not in dtypes:
            return leaf
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{call}: leaf '{name}' is {dtypes[name]}, which jit cannot hold while jax_enable_x64 is off. Call it outside "
                f"jit (or use fbuf.Replay), or enable x64: jax.config.update('jax_enable_x64', True)."
            )
        return np.array(jax.device_get(leaf), order="C").view(dtypes[name])[..., 0]

    return jax.tree_util.tree_map_with_path(of_leaf, data)
