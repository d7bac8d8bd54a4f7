"""Convert the dtype and the range of leaves: `Cast` and `Scale`.

Frames stay uint8 in the buffer and become float in the program that reads them: a quarter of the memory and traffic, and
XLA fuses the product with its consumer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, named_leaves
from fbuf._interfaces.transform import Context, Transform
from fbuf.transforms._fields import blanked, checked_keys, chosen, convert, dtype_name, is_number, replaced


def _sources(call: str, keys: str | tuple[str, ...], source: str | None, data: PyTree) -> dict[str, jax.Array]:
    leaves = named_leaves(data)
    picked = {name: leaves[name] for name in chosen(call, keys, leaves)}
    for name, leaf in picked.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{call}: leaf '{name}' is {leaf.dtype}; expected numbers. Name other leaves.")
        if source is not None and leaf.dtype != _canonical(source):
            raise TypeError(f"{call}: leaf '{name}' is {leaf.dtype}; expected {source}. Write source='{leaf.dtype}'.")
    return picked


def _convert_dtypes(call: str, self: Any) -> None:
    """Check the keys and dtypes of a transform."""
    source = None if self.source is None else dtype_name(call, "source", self.source)
    convert(self, keys=checked_keys(call, self.keys), dtype=dtype_name(call, "dtype", self.dtype), source=source)


def _canonical(dtype: str) -> Any:
    return jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))


@component
class Cast(Transform):
    """Convert leaves to another dtype.

    Attributes:
      keys: Names of leaves or subtrees.
      dtype: The new dtype.
      source: The old dtype; only the inverse needs it.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> fbuf.transforms.apply(fbuf.transforms.Cast("obs", "float16"), {"obs": jnp.ones(4)})["obs"].dtype.name
      'float16'
    """

    keys: str | tuple[str, ...]
    dtype: Any
    source: Any = None

    row_by_row = True

    def __post_init__(self) -> None:
        _convert_dtypes("Cast", self)

    def apply(self, data: PyTree, context: Context) -> PyTree:
        picked = _sources("Cast", self.keys, self.source, data)
        return replaced(data, {name: leaf.astype(_canonical(self.dtype)) for name, leaf in picked.items()})

    def inverse(self) -> Cast:
        """Return the cast back to `source`; lossless if `dtype` holds all its values.

        Raises:
          ValueError: `source` is None.
        """
        if self.source is None:
            raise ValueError("Cast.inverse: source is None; expected a dtype. Write Cast(..., source='uint8').")
        return Cast(self.keys, self.source, self.dtype)


@component
class Scale(Transform):
    """Compute `x * factor + offset` in another dtype: by default uint8 frames become float32 from 0 to 1.

    In `on_read` XLA fuses it with the step that follows.

    Attributes:
      keys: Names of leaves or subtrees.
      factor, offset: Finite numbers; factor not 0.
      dtype: Of the result. Integers are rounded, and clipped to their range.
      source: Dtype of the input; only the inverse needs it.

    It computes in float32, or in the wider of the two dtypes.

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
        for field in ("factor", "offset"):
            value = getattr(self, field)
            if not is_number(value) or (field == "factor" and value == 0):
                what = "a finite number" + (" that is not 0" if field == "factor" else "")
                raise ValueError(f"Scale: {field} is {value!r}; expected {what}. Write Scale('obs', 1 / 255).")
        convert(self, factor=float(self.factor), offset=float(self.offset))
        _convert_dtypes("Scale", self)

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
        """Return `(y - offset) / factor` in `source`; lossless if `dtype` separates its values (uint8 in float32 or float16).

        Raises:
          ValueError: `source` is None.
        """
        if self.source is None:
            raise ValueError("Scale.inverse: source is None; expected a dtype. Write Scale(..., source='uint8').")
        return Scale(self.keys, 1 / self.factor, -self.offset / self.factor, self.source, self.dtype)


def _ends(dtype: Any, within: Any) -> tuple[float, float]:
    """Return the least and the largest value of an integer dtype that a floating dtype represents."""
    info = np.iinfo(dtype)
    low, high = (np.dtype(within).type(x) for x in (info.min, info.max))
    if int(high) > info.max:
        high = np.nextafter(high, np.dtype(within).type(0))
    return low, high
