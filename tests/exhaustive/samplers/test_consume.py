"""`samplers.Consume` in place, and many states at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume
from fbuf.views import Row, Sequence, Transition
from tests.more.samplers.test_consume import test_no_row_is_drawn_too_often  # noqa: F401
from tests.support.epoch import FIELDS, empty, rows_of
from tests.support.inplace import assert_draw_write_draw
from tests.support.tables import one_of

case = one_of(
    (Consume(), Row(), None, True),
    (Consume(), Transition(n_step=2, stack=3, autoreset="same_step"), None, False),
    (Consume(), Sequence(3, boundary="mask", autoreset="same_step"), 3, True),
)


@pytest.mark.optimized
def test_steps_are_in_place():
    buffer = fbuf.Buffer(
        400_000, lanes=2, sampler=Consume(4), view=Transition(n_step=3, stack=4, autoreset="same_step")
    )
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})


def test_many_at_once_are_as_each_alone():
    buffer = fbuf.Buffer(12, sampler=Consume(2), view=Transition(autoreset="same_step"))
    states = [buffer.extend(empty(buffer), rows_of(np.random.default_rng(i), 9)) for i in range(3)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *states)
    keys = jax.random.split(jax.random.key(0), 3)
    sample = jax.jit(jax.vmap(lambda s, k: buffer.sample(s, k, 5)))
    for _ in range(3):
        together, batches = sample(together, keys)
        for i in range(3):
            states[i], one = buffer.sample(states[i], keys[i], 5)
            assert all(jax.tree.leaves(jax.tree.map(lambda a, b, i=i: np.array_equal(a[i], b), batches, one)))
