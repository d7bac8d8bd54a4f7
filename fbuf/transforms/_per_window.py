"""Which leaves of a batch of windows have one value a window, also of those that are as long as it.

What a function makes of a window may have its rows, `[T, item]`, or be one value, `[F]`; where F is T, shapes do not tell
them apart, and a later stage would take its numbers for rows, and those of missing rows for missing. So stages are traced once
more with windows of one row more: what grows by it has rows. A function that only takes windows of T rows cannot be asked;
then shapes decide.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fbuf._core.pytree import PyTree, named_leaves
from fbuf._interfaces.transform import Context, Transform


def longer(data: PyTree, context: Context) -> PyTree:
    """A batch with windows of one row more, as shapes."""

    def one(name: str, leaf: jax.Array) -> jax.ShapeDtypeStruct:
        shape = tuple(leaf.shape)
        if name not in context.collapsed and shape[:2] == context.mask.shape:
            shape = (shape[0], shape[1] + 1, *shape[2:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    structure = jax.tree.structure(data)
    return jax.tree.unflatten(structure, [one(name, leaf) for name, leaf in named_leaves(data).items()])


def after(transform: Transform, data: PyTree, context: Context) -> PyTree | None:
    """What a stage makes of `longer` windows, as shapes; None: it does not take them."""
    batch, length = context.mask.shape

    def run(data: PyTree, key: jax.Array | None, memory: PyTree) -> PyTree:
        mask = jnp.ones((batch, length + 1), bool)
        made = transform.apply(data, context._replace(mask=mask, key=key, memory=memory))
        return jax.tree.map(jnp.asarray, made)

    try:
        return jax.eval_shape(run, data, context.key, context.memory)
    except Exception:  # of a user's function, whatever it is
        return None


def names(data: PyTree, more: PyTree | None, context: Context) -> frozenset[str]:
    """Leaves that have no rows: by their shapes, or as `more`, made of longer windows, shows."""
    if more is None:
        return frozenset()
    shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(more).items()}
    found = ((name, jnp.shape(leaf)) for name, leaf in named_leaves(data).items())
    return frozenset(n for n, shape in found if shape[:2] != context.mask.shape or shapes.get(n) == shape)
