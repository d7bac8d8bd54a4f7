"""`Operation`: a method of a buffer as one jitted dispatch that does not copy unchanged leaves.

A jitted call copies every input that it returns, unless that input is donated. An operation therefore returns only the
leaves of the state that it changed, and the caller keeps the other arrays. Unchanged leaves are found by identity, while
tracing.

Operations, and the parts they call, have scopes in the program (`fbuf.sample/draw`), which profiles show.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from itertools import compress
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from fbuf._core import control_flow
from fbuf._core.component import STATES
from fbuf._core.control_flow import any_unbatched

DONATED = (
    "the state was donated. Use the state that the step returned, state = step(state); after an interrupted step, make or load "
    "the state again."
)
CALLBACK_ERRORS = jax.errors.JaxRuntimeError, ValueError  # the second of calls that JAX dispatches in C++
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")


Changes = tuple[dict[str, Any], dict[str, Any]] | dict[int, Any]
"""Of a state or dict, fields all of whose leaves are new, and changes of other fields; of other pytrees, leaves by position."""


def changes_of(before: Any, after: Any) -> Changes:
    """Return the leaves of `after` that are not in `before`, while tracing."""
    if type(after) not in STATES and type(after) is not dict:
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        return {position: new for position, (old, new) in enumerate(pairs) if new is not old}
    whole: dict[str, Any] = {}
    parts: dict[str, Changes] = {}
    before, after = _fields(before), _fields(after)
    for name, field in after.items():
        old, new = jax.tree.leaves(before[name]), jax.tree.leaves(field)
        is_new = [a is not b for a, b in zip(new, old, strict=True)]
        if is_new and all(is_new):
            whole[name] = field
        elif any(is_new):
            parts[name] = changes_of(before[name], field)
    return whole, parts


def _fields(state: Any) -> dict[str, Any]:
    return state if isinstance(state, dict) else vars(state)


def replaced(tree: S, changes: dict[int, Any]) -> S:
    """Return a pytree with other leaves at these positions."""
    leaves, structure = jax.tree.flatten(tree)
    for position, leaf in changes.items():
        leaves[position] = leaf
    return jax.tree.unflatten(structure, leaves)


def with_changes(before: S, changes: Changes) -> S:
    """Return `before` with the leaves of `changes_of`."""
    if isinstance(changes, dict):
        if isinstance(before, OnHost):
            return before.with_leaves(changes)
        return replaced(before, changes)
    whole, parts = changes
    if parts:
        fields = _fields(before)
        whole = whole | {name: with_changes(fields[name], part) for name, part in parts.items()}
    if isinstance(before, dict):
        merged_dict: Any = before | whole
        return merged_dict
    return with_fields(before, whole) if whole else before


def with_fields(node: S, fields: dict[str, Any]) -> S:
    """Return a state with some fields replaced, as `dataclasses.replace`, which takes five times as long."""
    new = object.__new__(type(node))
    object.__setattr__(new, "__dict__", vars(node) | fields)
    return new


class OnHost:
    """A pytree node that names rows or priorities of a store, which its `owner` keeps open."""

    __slots__ = ()

    owner: Any  # `fbuf._bridge.lifetime.Owner`; None for shapes only

    def with_leaves(self, leaves: dict[int, Any]) -> Any:
        """Return the node with other leaves at these positions, also if a write of the store failed."""
        return replaced(self, leaves)


def raise_cause(state: Any, error: Exception) -> None:
    """Raise what a callback of a store in a state raised, if JAX made `error` of it, and it is for the caller to handle."""
    if str(error).rstrip().endswith("KeyboardInterrupt:"):
        raise KeyboardInterrupt from None
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, OnHost)):
        if isinstance(node, OnHost) and node.owner is not None:
            node.owner.raise_cause(error)


class Operation(Generic[P, R]):
    """A function `(buffer, state, *args, *static) -> (state, result)` as one jitted dispatch.

    Attributes:
      core: The function, for other functions of this kind.
      inline: The same with a scope in profiles, and of the state that a call takes.

    Args:
      of_call: Makes `core` a function of that state.
    """

    def __init__(self, core: Callable[P, R], of_call: Callable[[Any], Any] = lambda core: core, *, scope: bool = True):
        self.core = core
        self.inline: Callable[..., tuple[Any, Any]] = of_call(core)
        if scope:
            self.inline = jax.named_scope(f"fbuf.{core.__name__}")(self.inline)

    @functools.cached_property
    def _jitted(self) -> Any:  # made by the first call: `import fbuf` makes some thirty operations
        def changes(buffer: Any, static: tuple[Any, ...], state: Any, args: tuple[Any, ...]) -> Any:
            buffer._check_state(state)
            manual = jax.sharding.get_abstract_mesh().manual_axes
            with control_flow.varying_as(state, args) if manual else contextlib.nullcontext():
                new, result = self.inline(buffer, state, *args, *static)
            return changes_of(state, new), result

        changes.__name__ = f"fbuf_{self.core.__name__}"  # the name of an eager call in profiles
        return jax.jit(changes, static_argnums=(0, 1), inline=True)

    def __call__(self, buffer: Any, state: Any, *args: Any, static: tuple[Any, ...] = ()) -> tuple[Any, Any]:
        try:
            changes, result = self._jitted(buffer, static, state, args)
        except CALLBACK_ERRORS as error:
            raise_cause(state, error)
            raise
        except RuntimeError as error:
            arrays = [x for x in jax.tree.leaves(state) if not isinstance(x, jax.core.Tracer)]
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
                raise RuntimeError(f"{type(buffer).__name__}: {DONATED}") from error
            raise
        return with_changes(state, changes), result


def update_if(wanted: jax.Array, update: Callable[[jax.Array, S, T], tuple[S, T]], state: S, batch: T) -> tuple[S, T]:
    """Return `update(wanted, state, batch)` if `wanted` bool[], else both as they are.

    The loop, of at most one pass, carries only the leaves of `state` that `update` changes, so XLA copies no others. Under
    `vmap` it runs for every member if any wants it; `update` must not change the others.
    """
    before = jax.tree.leaves(state)
    structure: Any = jax.tree.structure(state)
    changed: list[bool] = []

    def trace(state: S, batch: T) -> None:
        after = jax.tree.leaves(update(wanted, state, batch)[0])
        changed.extend(new is not old for new, old in zip(after, jax.tree.leaves(state), strict=True))

    def merged(leaves: list[jax.Array]) -> S:
        rest = iter(leaves)
        return structure.unflatten([next(rest) if c else leaf for c, leaf in zip(changed, before, strict=True)])

    def once(carry: tuple[jax.Array, list[jax.Array], T]) -> tuple[jax.Array, list[jax.Array], T]:
        after, batch = update(carry[0], merged(carry[1]), carry[2])
        return jnp.zeros_like(carry[0]), list(compress(jax.tree.leaves(after), changed)), batch

    jax.eval_shape(trace, state, batch)
    start = (wanted, list(compress(before, changed)), batch)
    _, leaves, batch = control_flow.while_loop(lambda carry: any_unbatched(carry[0]), once, start)
    return merged(leaves), batch
