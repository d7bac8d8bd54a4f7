"""Loops and branches of `jax.lax` that also work inside `jax.shard_map(check_vma=True)`.

There the type of an array names the mesh axes over which it varies. A loop must keep the types of its carry, and branches must
return equal types, but constants vary over no axis. These functions cast carries and results to the axes of the arguments of
the operation that is being traced (`varying_as`). Elsewhere they are those of `jax.lax`.

`sum_of_shards` sums statistics of rows over the shards of a sharded buffer.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

C = TypeVar("C")
_AXES: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("axes", default=frozenset())

_SUM: contextvars.ContextVar[str | None] = contextvars.ContextVar("sum", default=None)


def axes_of(*trees: Any) -> frozenset[str]:
    """Return the mesh axes over which any leaf varies."""
    found: set[str] = set()
    for leaf in jax.tree.leaves(trees):
        kind: Any = jax.typeof(leaf)
        found |= kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
    return frozenset(found)


@contextlib.contextmanager
def varying_as(*trees: Any) -> Iterator[None]:
    """Cast carries and results of the loops and branches that are traced inside to the axes of the leaves of `trees`."""
    axes = axes_of(trees) if jax.sharding.get_abstract_mesh().manual_axes else frozenset[str]()
    before = _AXES.set(axes)
    try:
        yield
    finally:
        _AXES.reset(before)


@contextlib.contextmanager
def summing_over(axis: str) -> Iterator[None]:
    """Let `sum_of_shards` sum over a mesh axis."""
    before = _SUM.set(axis)
    try:
        yield
    finally:
        _SUM.reset(before)


def sum_of_shards(tree: C) -> C:
    """Return the sums of arrays over all shards of a sharded buffer; outside of one the arrays."""
    axis = _SUM.get()
    summed: C = tree if axis is None else lax.psum(tree, axis)
    return summed


def vary(tree: C, axes: frozenset[str]) -> C:
    """Return the arrays typed as varying over `axes` too."""

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(leaf)))
        if not missing:
            return leaf
        if hasattr(lax, "pcast"):
            return lax.pcast(jnp.asarray(leaf), missing, to="varying")
        return lax.pvary(jnp.asarray(leaf), missing)  # type: ignore[attr-defined]  # before jax 0.9

    result: C = jax.tree.map(cast, tree) if axes else tree
    return result


def _casting(fn: Callable[..., Any]) -> Callable[..., Any]:
    axes = _AXES.get()
    return (lambda *args: vary(fn(*args), axes)) if axes else fn


def while_loop(condition: Callable[[C], jax.Array], body: Callable[[C], C], start: C) -> C:
    """`jax.lax.while_loop`."""
    result: C = lax.while_loop(condition, _casting(body), vary(start, _AXES.get()))
    return result


def fori_loop(first: Any, end: Any, body: Callable[[jax.Array, C], C], start: C) -> C:
    """`jax.lax.fori_loop`."""
    result: C = lax.fori_loop(first, end, _casting(body), vary(start, _AXES.get()))
    return result


def scan(body: Callable[[C, Any], tuple[C, Any]], start: C, items: Any) -> tuple[C, Any]:
    """`jax.lax.scan`."""
    result: tuple[C, Any] = lax.scan(_casting(body), vary(start, _AXES.get()), items)
    return result


def cond(predicate: jax.Array, if_true: Callable[..., Any], if_false: Callable[..., Any], *operands: Any) -> Any:
    """`jax.lax.cond`."""
    return lax.cond(predicate, _casting(if_true), _casting(if_false), *operands)


def platform_dependent(*args: Any, cpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """`jax.lax.platform_dependent` for a CPU and anything else."""
    return lax.platform_dependent(*args, cpu=_casting(cpu), default=_casting(default))
