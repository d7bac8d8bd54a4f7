"""What drivers of JAX libraries share: states that are carried, donated, from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def _each_its_own(state: Any) -> Any:
    """The state, where an array stands in it twice with a copy: an array can be donated once."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)


class Carried:
    """A state, and thunks that replace it."""

    def __init__(self, state: Any):
        self.state = jax.block_until_ready(_each_its_own(state))
        self.key = jax.random.key(0)

    def write(self, function: Callable[[Any, Any], Any], rows: Any) -> Callable[[], Any]:
        """`function(state, rows) -> state`, jitted."""
        run, rows = jax.jit(function, donate_argnums=0), jax.device_put(rows)

        def thunk() -> None:
            self.state = jax.block_until_ready(run(self.state, rows))

        return thunk

    def draw(self, function: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[], Any]:
        """`function(state, key) -> (state, batch)`, jitted, with the splitting of the key."""

        def split(state: Any, key: jax.Array) -> Any:
            key, now = jax.random.split(key)
            return *function(state, now), key

        run = jax.jit(split, donate_argnums=0)

        def thunk() -> Any:
            self.state, batch, self.key = run(self.state, self.key)
            return jax.block_until_ready((batch, self.state))[0]

        return thunk
