"""`Map`: a function of one row, or of one window, as a transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fbuf._core.component import component
from fbuf._core.pytree import PyTree
from fbuf._interfaces.transform import Context, Transform


@component
class Map:
    """Applies a function to each row, or each element of a batch: with a view of windows to each window, leaves `[T, ...]`.

    Attributes:
      fn: `fn(row)` gives any pytree of arrays; traced by JAX, so write it with `jax.numpy`. Compared by identity: define it
        once.
      inverse_fn: What undoes it, if anything does.
      keyed: `fn(row, key)`: random numbers of its own for each element. For batches only.

    Elements that are masked are zeros after it, whatever it makes of zeros. In a window rows may be missing too
    (`window["mask"]`): zeros go in, and what comes out is the function's business.

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
        if not isinstance(self.keyed, bool):
            raise TypeError(f"Map: keyed is {self.keyed!r}; expected a bool. Write keyed=True.")

    def apply(self, data: PyTree, context: Context) -> PyTree:
        fn: Callable[..., Any] = self.fn
        if not self.keyed:
            for _ in range(context.mapped):
                fn = jax.vmap(fn)
            return fn(data)
        assert context.key is not None
        shape = jax.tree.leaves(data)[0].shape[: context.mapped]
        keys = jax.random.split(context.key, shape)
        for _ in range(context.mapped):
            fn = jax.vmap(fn)
        return fn(data, keys)

    def inverse(self) -> Transform:
        """`inverse_fn` as a transform.

        Raises:
          ValueError: there is none.
        """
        if self.inverse_fn is None:
            raise ValueError(
                f"Map.inverse: inverse_fn of {self!r} is None; expected a function. Write Map(fn, inverse)."
            )
        return Map(self.inverse_fn, self.fn)
