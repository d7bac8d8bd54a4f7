"""What the tests of samplers and views share: a step that draws, writes and draws again must copy nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import fbuf
from fbuf.testing import assert_inplace


def assert_draw_write_draw(buffer: fbuf.Buffer, example: Any, state: Any = None, *, jit: bool = True) -> None:
    """In a scan, and in one jit; of a buffer of two lanes, large enough that a copied leaf shows."""

    def step(state: Any, given: Any) -> Any:
        state, batch = buffer.sample(state, given[1], 8)
        state = buffer.extend(state, given[0])
        state, other = buffer.sample(state, given[1], 8)
        return state, (batch, other)

    def shaped(*axes: int) -> Any:
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, 3, 2, *x.shape), x.dtype), example)
        return rows, jax.ShapeDtypeStruct((*axes, 2), jnp.uint32)

    state = jax.eval_shape(buffer.init, example) if state is None else state
    if jit:
        assert_inplace(step, state, shaped())
    assert_inplace(lambda state, given: lax.scan(step, state, given), state, shaped(4))
