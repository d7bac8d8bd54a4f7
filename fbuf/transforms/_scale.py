"""`Cast` and `Scale`: what numbers of leaves are made of, and how large they are.

Frames stay uint8 in the buffer and become float in the program that uses them: a quarter of the memory and of the traffic, and
XLA fuses the product with whatever reads the batch.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, named_leaves
from fbuf._interfaces.transform import Context
from fbuf.transforms._fields import blanked, checked_keys, chosen, dtype_name, replaced


def _sources(call: str, keys: str | tuple[str, ...], source: str | None, data: PyTree) -> dict[str, jax.Array]:
    leaves = named_leaves(data)
    picked = {name: leaves[name] for name in chosen(call, keys, leaves)}
    for name, leaf in picked.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{call}: leaf '{name}' is {leaf.dtype}; expected numbers. Name other leaves.")
        if source is not None and leaf.dtype != _canonical(source):
            raise TypeError(
                f"{call}: leaf '{name}' is {leaf.dtype}; expected {source}, as source says. Write source='{leaf.dtype}'."
            )
    return picked


def _canonical(dtype: str) -> Any:
    return jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))


@component
class Cast:
    """Gives leaves another dtype.

    Attributes:
      keys: Names of leaves, or of what holds some.
      dtype: The new one.
      source: The old one; only its inverse needs it.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> fbuf.transforms.apply(fbuf.transforms.Cast("obs", "float16"), {"obs": jnp.ones(4)})["obs"].dtype.name
      'float16'
    """

    keys: str | tuple[str, ...]
    dtype: Any
    source: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", checked_keys("Cast", self.keys))
        object.__setattr__(self, "dtype", dtype_name("Cast", "dtype", self.dtype))
        if self.source is not None:
            object.__setattr__(self, "source", dtype_name("Cast", "source", self.source))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        picked = _sources("Cast", self.keys, self.source, data)
        return replaced(data, {name: leaf.astype(_canonical(self.dtype)) for name, leaf in picked.items()})

    def inverse(self) -> Cast:
        """Back to `source`: lossless where `dtype` holds all its values.

        Raises:
          ValueError: `source` was not given.
        """
        if self.source is None:
            raise ValueError(
                "Cast.inverse: source is None; expected the dtype it casts from. Write Cast(..., source='uint8')."
            )
        return Cast(self.keys, self.source, self.dtype)


@component
class Scale:
    """`x * factor + offset`, in another dtype: by default frames in uint8 become float32 from 0 to 1.

    At read it costs no pass over memory of its own where the step goes on to compute with it: XLA fuses it.

    Attributes:
      keys: Names of leaves, or of what holds some.
      factor, offset: Finite numbers; factor not 0.
      dtype: Of the result. An integer one: rounded, and cut at the ends of its range.
      source: Dtype of the leaf before; only its inverse needs it.

    Computed in float32, or in the wider of the two dtypes.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> frames = {"obs": jnp.array([[0, 255]], jnp.uint8)}
      >>> fbuf.transforms.apply(fbuf.transforms.Scale("obs"), frames)["obs"].tolist()
      [[0.0, 1.0]]
      >>> fbuf.transforms.apply(fbuf.transforms.Scale("obs", 2 / 255, -1), frames)["obs"].tolist()
      [[-1.0, 1.0]]
    """

    keys: str | tuple[str, ...]
    factor: float = 1 / 255
    offset: float = 0.0
    dtype: Any = "float32"
    source: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", checked_keys("Scale", self.keys))
        for field in ("factor", "offset"):
            value = getattr(self, field)
            number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or (field == "factor" and value == 0):
                what = "a finite number" + (" that is not 0" if field == "factor" else "")
                raise ValueError(f"Scale: {field} is {value!r}; expected {what}. Write Scale('obs', 1 / 255).")
            object.__setattr__(self, field, float(value))
        object.__setattr__(self, "dtype", dtype_name("Scale", "dtype", self.dtype))
        if self.source is not None:
            object.__setattr__(self, "source", dtype_name("Scale", "source", self.source))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        picked = _sources("Scale", self.keys, self.source, data)
        return replaced(data, {name: self._scaled(name, leaf, context) for name, leaf in picked.items()})

    def _scaled(self, name: str, leaf: jax.Array, context: Context) -> jax.Array:
        dtype = _canonical(self.dtype)
        kinds = [d for d in (leaf.dtype, dtype) if jnp.issubdtype(d, jnp.floating) and jnp.dtype(d).itemsize == 8]
        within: Any = kinds[0] if kinds else jnp.float32
        out = leaf.astype(within) * jnp.asarray(self.factor, within)
        if self.offset:
            out = blanked(name, out + jnp.asarray(self.offset, within), context)
        if jnp.issubdtype(dtype, jnp.integer):
            low, high = _ends(dtype, within)
            out = jnp.clip(jnp.round(out), jnp.asarray(low, within), jnp.asarray(high, within))
        return out.astype(dtype)

    def inverse(self) -> Scale:
        """`(y - offset) / factor` in `source`; lossless where `dtype` tells all its values apart (uint8 in float32 or float16).

        Raises:
          ValueError: `source` was not given.
        """
        if self.source is None:
            raise ValueError(
                "Scale.inverse: source is None; expected the dtype of the leaf before. Write Scale(..., source='uint8')."
            )
        return Scale(self.keys, 1 / self.factor, -self.offset / self.factor, self.source, self.dtype)


def _ends(dtype: Any, within: Any) -> tuple[float, float]:
    """The least and the largest of an integer dtype that a floating one has."""
    info = np.iinfo(dtype)
    low, high = (np.dtype(within).type(x) for x in (info.min, info.max))
    if int(high) > info.max:
        high = np.nextafter(high, np.dtype(within).type(0))
    return low, high
