"""More of `samplers.Staleness`: other decays, numbers at the ends of their ranges, runs, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Staleness
from tests.samplers.test_staleness import INVERSE, check_chances, check_versions


@pytest.mark.parametrize(
    ("sampler", "weights"),
    [(Staleness(2, version="version", decay="none"), [1, 1, 1, 0]), (Staleness(0, version="version"), [1, 0, 0, 0])],
)
def test_chances_by_version(sampler, weights):
    check_versions(sampler, weights)


def test_chances_by_age():
    expected = np.array([*INVERSE, *[0] * 15])[(23 - np.arange(15)) % 15]
    check_chances(fbuf.Buffer(15, sampler=Staleness(3)), np.arange(24, dtype=np.int32).reshape(8, 3), expected)


def test_weights_too_small_for_a_float():
    """A learner hundreds of half-lives ahead still draws what is not beyond the maximum."""
    sampler = Staleness(20, version="version", decay="exponential", half_life=0.05)
    buffer = fbuf.Buffer(10, sampler=sampler)
    state = buffer.extend(buffer.init({"version": 0}), {"version": jnp.array([0, 0, 1, 1])})
    for version, drawn in ((1, {1}), (20, {1}), (21, {1}), (22, set())):
        now = buffer.set(state, version=version)
        batch = buffer.peek(now, jax.random.key(0), 64)
        assert set(batch.data["version"][batch.mask].tolist()) == drawn
        assert bool(buffer.can_sample(now)) == bool(drawn)


def test_versions_far_apart():
    buffer = fbuf.Buffer(10, sampler=Staleness(5, version="version"))
    state = buffer.extend(buffer.init({"version": 0}), {"version": jnp.array([-(2**31), -7, 3])})
    assert set(buffer.peek(state, jax.random.key(0), 64).data["version"].tolist()) == {3}
    assert not bool(buffer.can_sample(buffer.set(state, version=2**31 - 1)))


def test_a_run_of_hardly_any_weight_harms_nobody():
    """Sums of float32 in another order may differ by a hair: what may not be drawn is not drawn all the same."""
    sampler = Staleness(400, version="version", decay="exponential", half_life=3, runs=500)
    buffer = fbuf.Buffer(5000, lanes=5, sampler=sampler)
    state = buffer.init({"version": jnp.int32(0)})
    version = np.sort(np.random.default_rng(0).integers(0, 450, (1000, 5)).astype(np.int32), axis=0)
    state = buffer.set(buffer.extend(state, {"version": version}), version=470)
    batch = buffer.peek(state, jax.random.key(0), 2**18)
    assert bool(batch.mask.all()) and int(batch.data["version"].min()) >= 70
    assert (np.asarray(batch.probability) > 0).all()


def test_a_lot_that_is_not_full_yet_is_the_newest():
    buffer = fbuf.Buffer(100, sampler=Staleness(1, unit=4))
    state, add = buffer.init(jnp.int32(0)), jax.jit(buffer.add)
    peek = jax.jit(lambda s, key: buffer.peek(s, key, 256).data)
    for i in range(30):
        state = add(state, np.int32(i))
        fresh = set(peek(state, jax.random.key(i)).tolist())
        assert fresh == {k for k in range(i + 1) if i // 4 - k // 4 <= 1}
