"""flashbax's functions on our storages, without flashbax; tier `more` compares them with it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
import fbuf.integrations.flashbax as fbx


class Step(NamedTuple):
    obs: jax.Array
    t: jax.Array


@pytest.mark.more
def test_compressed_rows_come_as_pairs_in_their_own_type():
    with jax.numpy_dtype_promotion("strict"):
        buffer = fbx.make_flat_buffer(8, 2, 64, add_batch_size=2, storage=fbuf.storages.Compressed(keys=("obs",)))
        state = buffer.init(Step(jnp.zeros((4, 4), jnp.uint8), jnp.int32(0)))
        for t in range(7):  # past the end
            assert bool(buffer.can_sample(state)) == (t >= 2)
            step = jnp.array([t, 10 + t], jnp.int32)
            row = Step(jnp.broadcast_to(step[:, None, None], (2, 4, 4)).astype(jnp.uint8), step)
            state = jax.jit(buffer.add, donate_argnums=0)(state, row)
        first, second = jax.jit(buffer.sample)(state, jax.random.key(0)).experience
    assert np.unique(first.t).tolist() == [3, 4, 5, 13, 14, 15]
    assert (second.t == first.t + 1).all() and (first.obs[:, 0, 0] == first.t).all()
    assert state.experience.t.tolist() == [[4, 5, 6, 3], [14, 15, 16, 13]]


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="a lane has 4 rows; expected at least 5"):
        fbx.make_flat_buffer(8, 9, 2, add_batch_size=2)
    with pytest.raises(ValueError, match="max_size is None and max_length_time_axis None; expected one"):
        fbx.make_trajectory_buffer(1, 2, 3, 1, 3)
