"""`narrow`: NumPy values in the 32-bit dtypes that JAX holds; values that do not fit are errors."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import numpy as np

WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64")))


def is_wide(dtype: Any) -> bool:
    """Return whether a dtype has 64 bits, and JAX now narrows it (`jax_enable_x64` is off)."""
    return dtype in WIDE and not jax.config.read("jax_enable_x64")


def has_wide(tree: Any) -> bool:
    """Return whether a pytree has NumPy leaves that JAX would narrow silently."""
    return any(isinstance(leaf, (np.ndarray, np.generic)) and is_wide(leaf.dtype) for leaf in jax.tree.leaves(tree))


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
    """Return whether NumPy values of another dtype fit; infinite values may count as too large."""
    if values.dtype.kind in "iu":
        return bool(np.all(values.astype(dtype) == values))
    with np.errstate(over="ignore"):
        return not np.isinf(values.astype(dtype)).any()


def refuse(where: str, name: str, value: Any, dtype: Any, given: Any = np.int64) -> NoReturn:
    """Raise ValueError for a value out of range; `given` is its own dtype."""
    fix = "Use one in its range"
    if np.dtype(dtype).itemsize == 4 and name:
        wide = np.dtype(given).name
        fix += f", or keep {wide} on the host: storages.Host(keys=('{name}',)), with np.{wide}(0) in the example"
    raise ValueError(f"{where} is {value}, which {dtype} cannot hold. {fix}.")
