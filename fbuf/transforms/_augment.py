"""Shift and crop images at random, in each batch again.

One shift applies to all frames of a stack or window, because their relative motion carries the signal. Images keep their dtype;
apply `Scale` afterwards.

Source: Kostrikov, Yarats and Fergus 2020 (DrQ: shifts by up to 4 pixels, edges repeated); Laskin et al. 2020 (RAD: crops).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._core.arguments import is_int
from fbuf._core.component import component
from fbuf._core.pytree import PyTree, named_leaves
from fbuf._interfaces.transform import Context, Transform
from fbuf.transforms._fields import checked_keys, chosen, convert, lead_of, replaced


@component
class Augment(Transform):
    """Shift images by a few random pixels, crop them at random, or both. For batches only: it needs a key.

    Attributes:
      keys: Names of leaves or subtrees with images: `("obs", "next_obs")`.
      shift: Most pixels in each direction, uniform; edges are repeated.
      crop: Height and width of a random crop; None: no crop.
      axes: Axes of height and width: (-2, -1) for `[..., H, W]` (stacks of frames), (-3, -2) for `[..., H, W, channels]`.
      together: Shift all leaves of a row equally, so that `obs` and `next_obs` correspond; False: each independently, as in
        DrQ. Leaves that shift together have images of one size.

    It has no inverse.

    Cost: a copy of the images, in their dtype.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> shift = fbuf.transforms.Augment(("obs", "next_obs"), shift=4, together=True)
      >>> frames = jnp.arange(2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
      >>> moved = fbuf.transforms.apply(shift, {"obs": frames, "next_obs": frames}, key=jax.random.key(0))
      >>> moved["obs"].shape, bool((moved["obs"] == moved["next_obs"]).all()), bool((moved["obs"] == frames).all())
      ((2, 3, 8, 8), True, False)
    """

    keys: str | tuple[str, ...]
    shift: int = 4
    crop: tuple[int, int] | None = None
    axes: tuple[int, int] = (-2, -1)
    together: bool = False

    keyed = True

    def __post_init__(self) -> None:
        if not is_int(self.shift) or self.shift < 0:
            raise ValueError(f"Augment: shift is {self.shift!r}; expected an int >= 0, in pixels. Write shift=4.")
        if self.crop is None and not self.shift:
            raise ValueError("Augment: shift is 0 and crop is None. Write shift=4, or crop=(76, 76).")
        crop = None if self.crop is None else _pair("crop", self.crop, least=1, write="(76, 76)")
        axes = _pair("axes", self.axes, least=None, write="(-3, -2)")
        if max(axes) >= 0 or axes[0] == axes[1]:
            raise ValueError(f"Augment: axes is {self.axes!r}; expected two negative ints, as (-3, -2) for HWC.")
        convert(self, keys=checked_keys("Augment", self.keys), shift=int(self.shift), crop=crop, axes=axes)

    def apply(self, data: PyTree, context: Context) -> PyTree:
        leaves = named_leaves(data)
        names = chosen("Augment", self.keys, leaves)
        sizes = {name: self._size(name, leaves[name], context) for name in names}
        if self.together and len(set(sizes.values())) > 1:
            other = next(n for n in names if sizes[n] != sizes[names[0]])
            raise ValueError(f"Augment: sizes are {sizes[names[0]]} and {sizes[other]}. Write together=False.")
        assert context.key is not None
        new = {}
        for i, name in enumerate(names):
            key = context.key if self.together else jax.random.fold_in(context.key, i)
            new[name] = self._moved(leaves[name], sizes[name], key)  # zeros stay zeros
        return replaced(data, new)

    def _size(self, name: str, leaf: jax.Array, context: Context) -> tuple[int, int]:
        shape = leaf.shape[lead_of(name, leaf, context) :]
        if len(shape) < -min(self.axes):
            raise ValueError(f"Augment: leaf '{name}' is {leaf.dtype}{list(shape)} a row, without axes {self.axes}.")
        height, width = (leaf.shape[axis] for axis in self.axes)
        if self.crop is not None:
            most = (height + 2 * self.shift, width + 2 * self.shift)
            if self.crop[0] > most[0] or self.crop[1] > most[1]:
                raise ValueError(f"Augment: crop is {self.crop}, but images of '{name}' are {most[0]} by {most[1]}.")
        return height, width

    def _moved(self, leaf: jax.Array, size: tuple[int, int], key: jax.Array) -> jax.Array:
        y_axis, x_axis = self.axes
        padding = [(self.shift, self.shift) if a - leaf.ndim in self.axes else (0, 0) for a in range(leaf.ndim)]
        padded = jnp.pad(leaf, padding, mode="edge") if self.shift else leaf
        cut = size if self.crop is None else self.crop
        number = leaf.shape[0]
        spare = (size[0] + 2 * self.shift - cut[0], size[1] + 2 * self.shift - cut[1])
        down, right = (
            jax.random.randint(k, (number,), 0, n + 1, jnp.int32)
            for k, n in zip(jax.random.split(key), spare, strict=True)
        )

        def one(image: jax.Array, down: jax.Array, right: jax.Array) -> jax.Array:
            start = [jnp.zeros((), jnp.int32)] * image.ndim
            shape = list(image.shape)
            start[y_axis], start[x_axis] = down, right
            shape[y_axis], shape[x_axis] = cut
            return lax.dynamic_slice(image, start, shape)

        return jax.vmap(one)(padded, down, right)


def _pair(field: str, value: Any, least: int | None, write: str) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(map(is_int, value)):
        raise TypeError(f"Augment: {field} is {value!r}; expected two ints, height and width. Write {field}={write}.")
    if least is not None and min(value) < least:
        raise ValueError(f"Augment: {field} is {value!r}; expected ints >= {least}. Write {field}={write}.")
    return int(value[0]), int(value[1])
