"""Loops, branches and a search that also work inside `jax.shard_map(check_vma=True)`.

There the type of an array names the mesh axes over which it varies. A loop must keep the types of its carry, and branches must
return equal types, but constants vary over no axis. These functions cast carries and results to the axes of the arguments of
the operation that is being traced (`varying_as`). Elsewhere they are those of JAX.

`order_after_reads` finishes reads before later writes, without ordered effects and without copies. XLA often copies an array
that a step reads and then writes in place, but not values that went through a conditional: so it is the identity as a
conditional whose other branch never runs. Its token is the old one plus a zero that XLA cannot fold; every write adds the
token to its indices. GPUs need a barrier: XLA turns the conditional into selects there, and reads again in later kernels.
Under `vmap` the predicate is reduced over the batch, because a batched conditional becomes a `select`.
`sum_of_shards` sums statistics of rows over the shards of a sharded buffer.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

C = TypeVar("C")
T = TypeVar("T")
_AXES: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("axes", default=frozenset())

_COMPARED = 64
_SELECTED = 2**16  # elements

_SUM: contextvars.ContextVar[str | None] = contextvars.ContextVar("sum", default=None)


def axes_of(*trees: Any) -> frozenset[str]:
    """Return the mesh axes over which any leaf varies."""
    found: set[str] = set()
    for leaf in jax.tree.leaves(trees):
        kind: Any = jax.typeof(leaf)
        found |= kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
    return frozenset(found)


@contextlib.contextmanager
def while_tracing(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Give a variable another value for what is traced inside."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def varying_as(*trees: Any) -> contextlib.AbstractContextManager[None]:
    """Cast carries and results of the loops and branches traced inside to the axes of the leaves of `trees`, in `shard_map`."""
    return while_tracing(_AXES, axes_of(trees))


def summing_over(axis: str) -> contextlib.AbstractContextManager[None]:
    """Let `sum_of_shards` sum over a mesh axis."""
    return while_tracing(_SUM, axis)


def sum_of_shards(tree: C) -> C:
    """Return the sums of arrays over all shards of a sharded buffer; outside of one the arrays."""
    axis = _SUM.get()
    return tree if axis is None else lax.psum(tree, axis)


def vary(tree: C, axes: frozenset[str]) -> C:
    """Return the arrays typed as varying over `axes` too."""

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(leaf)))
        if not missing:
            return leaf
        if hasattr(lax, "pcast"):
            return lax.pcast(jnp.asarray(leaf), missing, to="varying")
        return lax.pvary(jnp.asarray(leaf), missing)  # type: ignore[attr-defined]  # before jax 0.9

    return jax.tree.map(cast, tree) if axes else tree


def vary_like(tree: C, *others: Any) -> C:
    """Return the arrays typed as varying over the axes of the leaves of `others` too."""
    return vary(tree, axes_of(others)) if jax.sharding.get_abstract_mesh().manual_axes else tree


def _casting(fn: Callable[..., Any]) -> Callable[..., Any]:
    axes = _AXES.get()
    return (lambda *args: vary(fn(*args), axes)) if axes else fn


def while_loop(condition: Callable[[C], jax.Array], body: Callable[[C], C], start: C) -> C:
    """`jax.lax.while_loop`."""
    return lax.while_loop(condition, _casting(body), vary(start, _AXES.get()))


def fori_loop(first: Any, end: Any, body: Callable[[jax.Array, C], C], start: C, unroll: bool = False) -> C:
    """`jax.lax.fori_loop`."""
    return lax.fori_loop(first, end, _casting(body), vary(start, _AXES.get()), unroll=unroll)


def number_up_to(ends: jax.Array, values: jax.Array) -> jax.Array:
    """Return int32[...], how many of the sorted `ends` [N] are at most each of `values` [...].

    It is `jnp.searchsorted(side="right")`, which JAX 0.10 cannot trace inside `jax.shard_map` over some axes of a mesh only.
    Up to `_COMPARED` ends, such as those of lanes, are all compared, in one kernel; a search is a loop of several.

    Cost: O(log N) a value.
    Example:
      >>> number_up_to(jnp.array([1, 3, 3, 7]), jnp.array([0, 3, 9])).tolist()
      [0, 3, 4]
    """
    number = ends.shape[0]
    if number <= _COMPARED:
        each = ends.reshape((number,) + (1,) * values.ndim) <= values[None]
        return jnp.sum(each, axis=0, dtype=jnp.int32)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // jnp.int32(2)
        up = (ends.at[jnp.minimum(middle, jnp.int32(number - 1))].get(mode="promise_in_bounds") <= values) & (
            low < high
        )
        return jnp.where(up, middle + jnp.int32(1), low), jnp.where(up, high, middle)

    start = jnp.zeros(values.shape, jnp.int32), jnp.full(values.shape, number, jnp.int32)
    return fori_loop(0, number.bit_length(), halve, start)[0]


def scan(body: Callable[[C, Any], tuple[C, Any]], start: C, items: Any) -> tuple[C, Any]:
    """`jax.lax.scan`."""
    return lax.scan(_casting(body), vary(start, _AXES.get()), items)


def cond(predicate: jax.Array, if_true: Callable[..., Any], if_false: Callable[..., Any], *operands: Any) -> Any:
    """`jax.lax.cond`."""
    return lax.cond(predicate, _casting(if_true), _casting(if_false), *operands)


def platform_dependent(
    *args: Any, cpu: Callable[..., T] | None = None, gpu: Callable[..., T] | None = None, default: Callable[..., T]
) -> T:
    """`jax.lax.platform_dependent` for a CPU, a GPU of any vendor, and anything else; branches may have loops and constants."""
    branches = {"cpu": cpu, "cuda": gpu, "rocm": gpu}
    casting = {name: _casting(branch) for name, branch in branches.items() if branch is not None}
    return lax.platform_dependent(*args, **casting, default=_casting(default))


@jax.custom_batching.custom_vmap
def _is_never(token: jax.Array) -> jax.Array:
    """Return False, bool[], which XLA cannot fold; unbatched under any number of `vmap`s."""
    return token < jnp.int32(-1)


@_is_never.def_vmap
def _is_never_of_all(axis_size: int, in_batched: Sequence[bool], token: jax.Array) -> tuple[jax.Array, bool]:
    return _is_never(jnp.min(token)), False


def order_after_reads(token: jax.Array, reads: T) -> tuple[jax.Array, T]:
    """Return `(token, reads)`, equal in value; operations that use the new token run after `reads`.

    Args:
      token: int32[], 0 in every state; signed, because `uint32 < -1` is true in JAX.
      reads: Arrays read from the state, as a pytree. Use the returned ones.
    Cost: none; the arrays are not copied.
    """

    def keep(values: T) -> tuple[T, jax.Array]:
        return values, jnp.zeros((), jnp.int32)

    def never(values: T) -> tuple[T, jax.Array]:
        return jax.tree.map(jnp.zeros_like, values), jnp.ones((), jnp.int32)

    def by_branch(token: jax.Array, reads: T) -> tuple[jax.Array, T]:
        reads, zero = cond(_is_never(token), never, keep, reads)
        return token + zero, reads

    def by_barrier(token: jax.Array, reads: T) -> tuple[jax.Array, T]:
        never = _is_never(token)  # XLA fuses the reads of small arrays with these selects
        kept = jax.tree.map(lambda x: x if x.size > _SELECTED else jnp.where(never, jnp.zeros_like(x), x), reads)
        zero, kept = lax.optimization_barrier((jnp.zeros((), jnp.int32), kept))
        return token + zero, kept

    return platform_dependent(token, reads, gpu=by_barrier, default=by_branch)


def computed_once(values: T) -> T:
    """Return `values`. A GPU computes them once; without a barrier XLA computes them again there for each use."""
    return platform_dependent(values, gpu=lax.optimization_barrier, default=lambda same: same)


@jax.custom_batching.custom_vmap
def any_unbatched(flags: jax.Array) -> jax.Array:
    """Return bool[], whether any of `flags` holds in any member of a `vmap`: never batched.

    As the condition of a loop or a branch, it keeps `vmap` from selecting between old and new arrays, which would copy
    them. Members that are done run the body too, which must not change them.
    """
    return jnp.any(flags)


@any_unbatched.def_vmap
def _any_of_all(axis_size: int, in_batched: Sequence[bool], flags: jax.Array) -> tuple[jax.Array, bool]:
    return any_unbatched(flags), False


def if_any(flags: jax.Array, compute: Callable[[], T], otherwise: T) -> T:
    """Return `compute()` if any of `flags` holds, else `otherwise`.

    GPUs always compute it, because the host would wait for the branch: without a flag it must return `otherwise`, too.
    """

    def by_branch() -> T:
        return cond(any_unbatched(flags), compute, lambda: otherwise)

    return platform_dependent(gpu=compute, default=by_branch)


def replaced_if(flag: jax.Array, compute: Callable[..., Any], *values: Any, select: bool) -> Any:
    """Return `compute(*values)` if `flag` bool[] holds, else `values`.

    With `select` GPUs always compute it and select, because the host would wait for the branch.
    """

    def by_branch(*values: Any) -> Any:
        return cond(flag, compute, lambda *same: same, *values)

    def by_select(*values: Any) -> Any:
        return jax.tree.map(functools.partial(jnp.where, flag), compute(*values), values)

    return platform_dependent(*values, gpu=by_select if select else by_branch, default=by_branch)
