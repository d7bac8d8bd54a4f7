"""One dispatch a verb, and no copy of what a verb leaves alone.

A jitted call that returns an input it was not given for good copies it: 132 ms for 157 MB. The jitted core of a verb
therefore returns a leafless mark in place of every leaf of the state that it did not touch, and the caller puts the old
array back. Which leaves these are is found while tracing, by identity, so no verb has to say it.

Verbs and the parts they call have scopes in the program (`fbuf.sample/draw`), so that a profile says what takes the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])


def scoped(name: str, fn: F) -> F:
    """`fn`, its operations under `name` in programs and profiles."""
    return jax.named_scope(name)(fn)


@jax.tree_util.register_static
class _Unchanged:
    """Stands for a leaf that the caller still has."""


_UNCHANGED = _Unchanged()


class Operation:
    """A function `(buffer, state, *args, static) -> (state, result)` as one jitted dispatch."""

    def __init__(self, core: Callable[..., tuple[Any, Any]]):
        name = core.__name__.strip("_").removesuffix("_core")
        self.core = scoped(f"fbuf.{name}", core)

        def changes(buffer: Any, static: tuple[Any, ...], state: Any, args: tuple[Any, ...]) -> Any:
            buffer.check_state(state)
            new, result = self.core(buffer, state, *args, *static)
            before, after = jax.tree.leaves(state), jax.tree.leaves(new)
            return [_UNCHANGED if a is b else a for a, b in zip(after, before, strict=True)], result

        changes.__name__ = f"fbuf_{name}"  # as a profile shows an eager call
        self._jitted = jax.jit(changes, static_argnums=(0, 1), inline=True)

    def __call__(self, buffer: Any, state: Any, *args: Any, static: tuple[Any, ...] = ()) -> tuple[Any, Any]:
        changes, result = self._jitted(buffer, static, state, args)
        before = jax.tree.leaves(state)
        structure: Any = jax.tree.structure(state)
        leaves = [b if a is _UNCHANGED else a for a, b in zip(changes, before, strict=True)]
        return structure.unflatten(leaves), result
