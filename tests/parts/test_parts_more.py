"""Further parts of one's own, alone, in place and vmapped; see `tests/parts/test_parts.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.parts.test_parts import test_parts_work_in_jit_and_scan  # noqa: F401
from tests.support.inplace import assert_order
from tests.support.parts import BATCH, BUFFERS, EXAMPLE, make, rows_of
from tests.support.tables import one_of

pytestmark = pytest.mark.more

name = one_of("writer", "codec", "transforms")
large = one_of("storage, sampler, view")


@pytest.mark.in_place
def test_is_in_place(large):
    settings = {"episode_end": ("terminated", "truncated")} | BUFFERS[large]
    assert_order(fbuf.Buffer(20_000, **settings), "es", EXAMPLE)


def test_a_storage_updates_rows_and_maps():
    buffer = make(BUFFERS["storage"])
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(30, None))
    state, batch = buffer.sample(state, jax.random.key(0), BATCH)
    state = buffer.update_rows(state, batch.index, {"action": jnp.full((BATCH,), 77, jnp.int32)})
    assert set(np.asarray(buffer.get(state, batch.index).data["action"])) == {77}
    keys = jax.random.split(jax.random.key(0), 3)
    states = jax.vmap(lambda _: buffer.init(EXAMPLE))(keys)
    states = jax.vmap(lambda s: buffer.extend(s, rows_of(9, None)))(states)
    assert jax.vmap(lambda s, k: buffer.peek(s, k, 4).data["action"])(states, keys).shape == (3, 4)
