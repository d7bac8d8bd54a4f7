import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify

import fbuf
from tests.buffer.test_checked import EXAMPLE, KEY, check_jitted, filled


def test_a_jitted_step_raises_through_checkify():
    check_jitted("stale indices", "Compressed")


def test_under_cond_and_vmap():
    buffer = fbuf.checked(fbuf.prioritized(8))

    def maybe(state, wanted):
        return lax.cond(wanted, lambda s: buffer.sample(s, KEY, 4)[0], lambda s: s, state)

    jitted = jax.jit(checkify.checkify(maybe))
    empty = buffer.init(EXAMPLE)
    assert jitted(empty, False)[0].get() is None
    assert "Buffer.sample: there is nothing to draw" in str(jitted(empty, True)[0].get())

    keys = jax.random.split(KEY, 3)
    peeks = jax.jit(checkify.checkify(lambda s, k: jax.vmap(lambda k: buffer.peek(s, k, 4).index.slot)(k)))
    assert peeks(filled(buffer), keys)[0].get() is None and "nothing to draw" in str(peeks(empty, keys)[0].get())

    many = jax.tree.map(lambda *x: jnp.stack(x), filled(buffer), empty, filled(buffer))
    each = jax.jit(jax.vmap(checkify.checkify(lambda s, k: buffer.sample(s, k, 4)[1].mask)))
    error, mask = each(many, keys)
    assert mask.any(axis=1).tolist() == [True, False, True]
    assert str(error.get()).count("there is nothing to draw") == 1 and "mapped index 1" in str(error.get())
