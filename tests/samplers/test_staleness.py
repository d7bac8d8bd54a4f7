"""`samplers.Staleness`: how often each row is drawn, by its age or by the version of the policy that made it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Consume, Staleness
from fbuf.views import Row
from tests.support import refusals, same_step
from tests.support.epoch import FIELDS
from tests.support.inplace import assert_draw_write_draw
from tests.support.tables import checks
from tests.support.uniformity import chi_square_z

DRAWS = 2**17
INVERSE = [1, 1 / 2, 1 / 3, 1 / 4]
DECAYS = [
    (Staleness(3, version="version"), INVERSE),
    (Staleness(3, version="version", decay="exponential", half_life=2), 2 ** -(np.arange(4) / 2)),
]


WRONG = """
Staleness(-1) => ValueError maximum is -1; expected 0 to 65535. Or use unit=.
Staleness(100_000) => ValueError Or use unit=
Staleness(2.0) => ValueError maximum is 2.0; expected 0 to 65535. Or use unit=.
Staleness(2, version=3) => TypeError version is 3; expected the name of a leaf
Staleness(2, decay="linear") => ValueError decay is 'linear'; expected "inverse"
Staleness(2, decay="exponential") => ValueError half_life is None; expected a number > 0.
Staleness(2, half_life=3) => ValueError half_life is for decay='exponential'
Staleness(2, unit=0) => ValueError unit is 0; expected an int >= 1
Staleness(2, unit=2, version="v") => ValueError and 1 with a version
Staleness(2, runs=9) => ValueError with a version
Staleness(9, runs=9, version="v") => ValueError runs is 9; expected None, or 10 to 65536 with a version.
buffer.init({"x": 0.0}) => ValueError reads leaf 'version'; expected one of x
buffer.init({"version": 0.0}) => TypeError reads leaf 'version', which is | expected an integer
buffer.init({"version": jnp.zeros(2, jnp.int32)}) => TypeError reads leaf 'version', which is | expected an integer
buffer.init({"version": True}) => TypeError reads leaf 'version', which is | expected an integer
buffer.init({"version": np.uint32(0)}) => TypeError reads leaf 'version', which is | expected an integer
buffer.set(state, version=1.5) => TypeError version is 1.5; expected an integer. Write int(x)
buffer.set(state, version="3") => TypeError version is '3'; expected a finite number
buffer.set(state, version=2**31) => ValueError less than 2
buffer.set(state, alpha=1.0) => ValueError has no number 'alpha'
buffer.update_rows(state, buffer.rows(state, last=2).index, {"version": jnp.ones(2, jnp.int32)}) => ValueError
    'version' is read by Staleness( | and cannot change
ages.set(ages.init(0.0), version=3) => ValueError has no number 'version'
"""


def check_chances(buffer, rows, weights):
    """Write rows `[call, N, ...]`; draw each slot as often as its weight says, and tell its chance; the state."""
    example = jax.tree.map(lambda x: x.reshape(-1)[0], rows)

    @jax.jit
    def run(rows):
        state, _ = lax.scan(lambda s, x: (buffer.extend(s, x), None), buffer.init(example), rows)
        batch = buffer.peek(state, jax.random.key(0), DRAWS)
        return state, (batch.mask, batch.weight, batch.probability, batch.index.slot)

    state, (mask, weight, probability, slot) = run(rows)
    assert np.all(mask) and np.all(weight == 1)
    chances = np.asarray(weights, np.float64) / np.sum(weights)
    np.testing.assert_allclose(probability, chances[np.asarray(slot)], rtol=1e-5)
    assert abs(chi_square_z(np.bincount(slot, minlength=buffer.capacity), chances)) < 4
    return state


def check_versions(sampler, weights):
    """Two lanes that are not level: what counts is the newest version of all."""
    version = np.stack([np.repeat(np.arange(5), 6), np.repeat(np.arange(5), 6) - 1], axis=1).astype(np.int32)
    held = np.zeros(40, int)
    held[[t % 20 * 2 + e for t in range(10, 30) for e in range(2)]] = version[10:].reshape(-1)
    expected = np.array([([*weights, 0, 0])[4 - v] for v in held])
    buffer = fbuf.Buffer(40, lanes=2, sampler=sampler)
    check_chances(buffer, {"version": version.reshape(10, 3, 2)}, expected)


def test_chances_by_age():
    buffer = fbuf.Buffer(15, sampler=Staleness(3, unit=3))
    age = (23 - np.arange(15)) % 15
    expected = np.array([*np.repeat(INVERSE, 3), *[0] * 15])[age]
    state = check_chances(buffer, np.arange(24, dtype=np.int32).reshape(24, 1), expected)
    assert int(buffer.stats(state)["anchors_fresh"]) == (expected > 0).sum()


def test_a_learner_ahead_of_its_actors():
    buffer = fbuf.Buffer(10, sampler=Staleness(2, version="version"))
    state = buffer.extend(buffer.init({"version": jnp.int32(0)}), {"version": jnp.arange(5)})
    step = jax.jit(lambda state, version: buffer.sample(buffer.set(state, version=version), jax.random.key(0), 64))
    for version, fresh in ((4, {2, 3, 4}), (5, {3, 4}), (6, {4}), (7, set()), (3, {1, 2, 3, 4})):
        state, batch = step(state, jnp.int32(version))
        assert set(batch.data["version"][batch.mask].tolist()) == fresh
        assert bool(batch.mask.all()) == bool(batch.mask.any()) == bool(fresh) == bool(buffer.can_sample(state))
        assert bool((batch.weight == batch.mask).all())
        assert int(buffer.stats(state)["version"]) == version
    assert step._cache_size() == 1
    state = buffer.extend(state, {"version": jnp.array([9])})
    assert int(buffer.stats(state)["version"]) == 9
    assert int(buffer.stats(buffer.clear(state))["version"]) == 9


def test_weights_of_old_rows_do_not_vanish():
    buffer = fbuf.Buffer(4, sampler=Staleness(999, version="version", decay="exponential", half_life=1))
    state = buffer.extend(buffer.init({"version": jnp.int32(0)}), {"version": jnp.arange(4)})
    batch = buffer.peek(buffer.set(state, version=900), jax.random.key(0), 64)
    np.testing.assert_allclose(batch.probability, 2.0 ** batch.data["version"] / 15, rtol=1e-5)


def test_rows_that_are_no_anchors_age_the_others():
    """The current version is that of the newest policy heard of, whether or not its rows can be drawn already."""
    buffer = fbuf.Buffer(8, sampler=Staleness(2, version="version"), view=same_step.Sequence(4, episode_end=("end",)))
    state = buffer.init({"version": 0, "end": False})
    for version, current in (([0, 0, 0, 0], 0), ([2], 2), ([9], 9), ([20], 9), ([3, 30, *[3] * 20], 30)):
        rows = {"version": np.resize(np.int32(version), 22), "end": np.zeros(22, bool)}
        there = np.arange(22) < len(version)  # of one shape: it compiles once
        state = buffer.extend(state, rows, mask=there & (rows["version"] != 20))
        assert int(buffer.stats(state)["version"]) == current


@pytest.mark.more
def test_counts_do_not_overflow():
    """Lots are counted modulo 2^32."""
    buffer = fbuf.Buffer(10, sampler=Staleness(2))
    state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(8))
    sampler = state.sampler
    stamp = jnp.asarray(np.asarray(sampler.stamp - sampler.stamp[-1:]) + np.int32(2**31 - 2))
    state = dataclasses.replace(state, sampler=dataclasses.replace(sampler, stamp=stamp))
    for i in range(8, 16):
        state = buffer.add(state, jnp.int32(i))
        assert set(buffer.peek(state, jax.random.key(i), 64).data.tolist()) == {i, i - 1, i - 2}
    assert int(state.sampler.stamp[-1, 0]) < 0


@pytest.mark.more
@pytest.mark.in_place
def test_steps_are_in_place():
    view = same_step.Transition(n_step=3, stack=4)
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=Staleness(8, version="action"), view=view)
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()}, jit=False)


def test_wrong_settings_leaves_and_numbers():
    buffer, ages = (fbuf.Buffer(10, sampler=Staleness(2, version=name)) for name in ("version", None))
    state = buffer.extend(buffer.init({"version": 0}), {"version": jnp.zeros(3, jnp.int32)})
    refusals.check_all(WRONG, globals() | {"buffer": buffer, "ages": ages, "state": state})


@pytest.mark.more
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


@pytest.mark.more
def test_versions_far_apart():
    buffer = fbuf.Buffer(10, sampler=Staleness(5, version="version"))
    state = buffer.extend(buffer.init({"version": 0}), {"version": jnp.array([-(2**31), -7, 3])})
    assert set(buffer.peek(state, jax.random.key(0), 64).data["version"].tolist()) == {3}
    assert not bool(buffer.can_sample(buffer.set(state, version=2**31 - 1)))


@pytest.mark.more
def test_runs_of_tiny_weight_leave_the_other_draws_alone():
    """Sums of float32 in another order may differ by a hair: what may not be drawn is not drawn all the same."""
    sampler = Staleness(400, version="version", decay="exponential", half_life=3, runs=500)
    buffer = fbuf.Buffer(5000, lanes=5, sampler=sampler)
    state = buffer.init({"version": jnp.int32(0)})
    version = np.sort(np.random.default_rng(0).integers(0, 450, (1000, 5)).astype(np.int32), axis=0)
    state = buffer.set(buffer.extend(state, {"version": version}), version=470)
    batch = buffer.peek(state, jax.random.key(0), 2**18)
    assert bool(batch.mask.all()) and int(batch.data["version"].min()) >= 70
    assert (np.asarray(batch.probability) > 0).all()


VERSIONS = [(Staleness(2, version="version", decay="none"), [1, 1, 1, 0])]
VERSIONS += [(Staleness(0, version="version"), [1, 0, 0, 0])]


test_chances_by_version = checks((check_versions, DECAYS[:1]), more=[(check_versions, [*DECAYS[1:], *VERSIONS])])


PARTS = [(Consume(4), same_step.Transition(n_step=3, stack=4)), (Staleness(8, unit=100), Row())]
PARTS += [(Staleness(8, version="action"), same_step.Sequence(16, boundary="mask"))]


@pytest.mark.exhaustive
@pytest.mark.in_place
@pytest.mark.parametrize(("sampler", "view"), PARTS)
def test_steps_of_views_are_in_place(sampler, view):
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=sampler, view=view)
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})
