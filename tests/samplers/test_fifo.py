"""`Consume(order="fifo")`: windows in order of arrival, none lost, and new rows refused where there is no room."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Consume
from fbuf.views import Sequence
from tests.support.fifo import Trial, buffer_of
from tests.support.refusals import raises


@pytest.mark.parametrize("settings", [(7, 3, 1), (12, 2, 2, 3, 3)], ids=["rows", "trajectories"])
def test_programs(settings):
    buffer = buffer_of(*settings)
    for seed in range(2):
        Trial(buffer, seed).run(60)


def test_an_actor_loop_in_jit_asks_first():
    """The program of flashbax's trajectory queue: act while there is room, learn where there is a trajectory."""
    view = Sequence(2, stride=2, episode_end=())
    buffer = fbuf.Buffer(12, lanes=3, view=view, sampler=Consume(order="fifo"))

    @jax.jit
    def run(state):
        def step(carry, _):
            state, t = carry
            rows = {"t": t + jnp.arange(6, dtype=jnp.int32).reshape(2, 3)}
            can = buffer.can_add(state, 2)
            state = lax.cond(can, lambda s: buffer.extend(s, rows), lambda s: s, state)
            state, batch = buffer.sample(state, jax.random.key(0), 2)
            return (state, t + 6 * can.astype(jnp.int32)), (batch.data["t"], batch.mask)

        return lax.scan(step, (state, jnp.int32(0)), None, 20)

    (state, _), (t, mask) = run(buffer.init({"t": jnp.int32(0)}))
    got = np.asarray(t)[np.asarray(mask)].tolist()
    assert (
        got == [[6 * i + lane, 6 * i + lane + 3] for i in range(20) for lane in range(3)][: len(got)] and len(got) == 40
    )
    assert int(buffer.stats(state)["refused_rows"]) == 0


def test_what_it_refuses():
    raises(ValueError, 'Consume: order is \'lifo\'; expected "random" or "fifo"', Consume, order="lifo")
    with pytest.raises(ValueError, match="needs rows to be replaced oldest first"):
        fbuf.Buffer(8, sampler=Consume(order="fifo"), writer=fbuf.writers.Reservoir())
    checked = fbuf.checked(fbuf.Buffer(2, sampler=Consume(order="fifo")))
    with pytest.raises(ValueError, match="1 rows found no room and were not stored.*can_add"):
        checked.extend(checked.init(np.int32(0)), np.arange(3, dtype=np.int32))
    assert bool(fbuf.uniform(2).can_add(fbuf.uniform(2).init(np.int32(0)), 5))
