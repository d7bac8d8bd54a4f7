"""Every method and part has a scope in the compiled program, for profiles."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.support.trees import row_with

ROW = row_with(np.zeros(4, np.uint8))
SCOPES = """
fbuf.extend/write fbuf.extend/anchors fbuf.extend/follow fbuf.sample/draw fbuf.sample/window fbuf.sample/read
fbuf.sample/assemble fbuf.update_priority/update fbuf.update_rows/write fbuf.stats
""".split()
INLINED = re.compile(r"/jit\(fbuf_\w+\)/")


def lowered(**settings):
    view = fbuf.views.Transition(n_step=2, stack=2, autoreset="same_step")
    buffer = fbuf.Buffer(64, lanes=2, sampler=fbuf.samplers.Prioritized(), view=view, **settings)

    def step(state, rows, key):
        state = buffer.extend(state, rows)
        state, batch = buffer.sample(state, key, 8)
        state = buffer.update_priority(state, batch.index, jnp.ones(8))
        state = buffer.update_rows(state, batch.index, {"reward": jnp.ones(8)})
        return state, batch, buffer.stats(state)

    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, 2, *x.shape), x.dtype), ROW)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    step = jax.jit(step, donate_argnums=0)
    return INLINED.sub("/", step.lower(jax.eval_shape(buffer.init, ROW), rows, key).as_text(debug_info=True))


def test_operations_are_named_by_method_and_part():
    text = lowered()
    assert not [scope for scope in SCOPES if f"jit(step)/{scope}" not in text]


@pytest.mark.more
def test_a_prefetched_draw_is_named_by_its_parts():
    text = lowered(prefetch=1, batch_size=8)
    assert not [part for part in ("draw", "read", "assemble") if f"fbuf.sample/{part}" not in text]
