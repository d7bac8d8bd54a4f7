"""`apply`: a transform outside a buffer: to prepare an observation for the policy, or to undo what was done to rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.pytree import PyTree, named_leaves
from fbuf._interfaces.transform import Context, Transform


def apply(
    transform: Transform,
    data: PyTree,
    *,
    lead: int = 1,
    time: int | None = None,
    mask: Any = None,
    key: jax.Array | None = None,
    memory: Any = None,
) -> PyTree:
    """What `transform` makes of a batch, eager or jitted.

    Args:
      transform: Any, a chain too: `buffer.on_write.inverse()`.
      data: Leaves `[B, ...]`; with `lead=2` `[B, T, ...]`.
      lead: Leading axes that count rows, 0 for a single row.
      time: Which of these goes along time, for those that look along it.
      mask: bool[*lead], rows that are there; None: all.
      key: PRNG key, for those that are `keyed`.
      memory: For those that remember something: `state.transforms.read`, or `.write`, for the whole chain of a buffer.
    Raises:
      ValueError: a key is needed and not given; or leaves are not as the transform wants them.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> scale = fbuf.transforms.Scale("obs", source="uint8")
      >>> small = fbuf.transforms.apply(scale, {"obs": jnp.array([[0, 51, 255]], jnp.uint8)})
      >>> fbuf.transforms.apply(scale.inverse(), small)["obs"].tolist()
      [[0, 51, 255]]
    """
    leaves = named_leaves(data)
    shapes = [jnp.shape(leaf)[:lead] for leaf in leaves.values()]
    if not shapes or len(shapes[0]) < lead or any(shape != shapes[0] for shape in shapes):
        found = ", ".join(f"'{n}' {list(jnp.shape(x))}" for n, x in leaves.items())
        raise ValueError(
            f"transforms.apply: leaves are {found or 'none'}; expected leading axes that are the same in all, {lead} of "
            f"them. Write lead=... for as many as there are before those of a row: 0 for one row."
        )
    if getattr(transform, "keyed", False) and key is None:
        raise ValueError(f"transforms.apply: {transform!r} needs a key. Write apply(..., key=jax.random.key(0)).")
    if lead == 0:  # as a batch of one
        data = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], data)
        shapes = [(1,)]
    there = jnp.ones(shapes[0], bool) if mask is None else jnp.asarray(mask).reshape(shapes[0])
    context = Context(max(lead, 1), time, False, there, key, memory)
    out = transform.apply(jax.tree.map(jnp.asarray, data), context)
    return jax.tree.map(lambda leaf: leaf[0], out) if lead == 0 else out
