"""Apply a function of one row, or of one window, as a transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fbuf._core.arguments import check_bool
from fbuf._core.component import component
from fbuf._core.pytree import PyTree, named_leaves
from fbuf._interfaces.transform import Context, Transform


@component
class Map(Transform):
    """Apply a function to each row of a batch; with a view of windows to each window, leaves `[T, ...]`.

    Attributes:
      fn: `fn(row)` returns any pytree of arrays. JAX traces it, so use `jax.numpy`. Compared by identity: define it once.
      inverse_fn: Its inverse, if any.
      keyed: Call `fn(row, key)` with a key for each row. For batches only.

    Masked rows become zeros afterwards. Missing rows of a window (`window["mask"]`) are zeros in the input; the function
    decides their output.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> squash = fbuf.transforms.Map(lambda row: {**row, "reward": jnp.tanh(row["reward"])})
      >>> buffer = fbuf.Buffer(10, on_read=squash)
      >>> state = buffer.extend(buffer.init({"reward": 0.0}), {"reward": jnp.full(4, 100.0)})
      >>> buffer.peek(state, jax.random.key(0), 2).data["reward"].tolist()
      [1.0, 1.0]
    """

    fn: Callable[..., PyTree]
    inverse_fn: Callable[..., PyTree] | None = None
    keyed: bool = False

    def __post_init__(self) -> None:
        for field in ("fn", "inverse_fn"):
            fn = getattr(self, field)
            if not callable(fn) and not (field == "inverse_fn" and fn is None):
                raise TypeError(f"Map: {field} is {fn!r}; expected a function of a row. Write Map(lambda row: ...).")
        check_bool("Map", "keyed", self.keyed)

    def apply(self, data: PyTree, context: Context) -> PyTree:
        fn: Callable[..., Any] = self.fn
        for _ in range(context.mapped):
            fn = jax.vmap(fn)
        keys: tuple[Any, ...] = ()
        if self.keyed:
            assert context.key is not None
            keys = (jax.random.split(context.key, jax.tree.leaves(data)[0].shape[: context.mapped]),)
        try:
            return fn(data, *keys)
        except Exception as error:
            shapes = {n: list(leaf.shape[context.mapped :]) for n, leaf in named_leaves(data).items()}
            what = "window" if context.mapped < context.lead else "row"
            error.add_note(f"Map.fn, {self.fn!r}, gets one {what} without the batch axis, leaves of shape {shapes}.")
            raise

    def inverse(self) -> Transform:
        """Return `inverse_fn` as a transform.

        Raises:
          ValueError: it is None.
        """
        if self.inverse_fn is None:
            raise ValueError(f"Map.inverse: inverse_fn of {self!r} is None. Write Map(fn, inverse).")
        return Map(self.inverse_fn, self.fn)
