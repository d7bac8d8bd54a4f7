"""Further cases of flags: see `tests/contracts/test_flags.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.flags import BATCH, BUFFERS, EXAMPLE, check, check_all_flags, every_method, flags, given, plain
from tests.support.tables import checks


def test_eager_methods_move_nothing_to_or_from_the_device():
    name = "prioritized"
    buffer = BUFFERS[name]
    state, x = buffer.init(EXAMPLE), given(buffer)
    with flags("transfer_guard"):
        got = every_method(buffer, state, x)
    check(name, plain(got))


def test_nothing_leaks_from_scan_vmap_and_grad():
    buffer = BUFFERS["rich"]
    x = given(buffer)

    def run(weight, key):
        def step(state, key):
            state, batch = buffer.sample(buffer.extend(state, x["rows"]), key, BATCH)
            return buffer.update_priority(state, batch.index, batch.data["reward"] * weight), batch.data["reward"]

        return jnp.sum(weight * lax.scan(step, buffer.init(EXAMPLE), jax.random.split(key, 3))[1])

    with jax.checking_leaks():
        slopes = jax.jit(jax.vmap(jax.grad(run), in_axes=(0, None)))(jnp.ones((2,), jnp.float32), jax.random.key(0))
    assert np.all(np.isfinite(slopes))


test_checks = checks((check_all_flags, ["rich", "host"]))
