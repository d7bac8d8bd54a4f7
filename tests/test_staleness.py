"""`samplers.Staleness`: how often each row is drawn, by its age or by the version of the policy that made it.

What it does in the company of views, lanes, conversions and other verbs is compared with the model in `tests/test_model.py`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Staleness
from fbuf.views import Row, Sequence, Transition
from tests.inplace import assert_draw_write_draw
from tests.test_uniformity import chi_square_z

DRAWS = 2**17
INVERSE = [1, 1 / 2, 1 / 3, 1 / 4]


def drawn(buffer: fbuf.Buffer, state: Any) -> np.ndarray:
    """Times each slot was drawn, having compared what a draw says of its chance with all of them."""
    batch = buffer.peek(state, jax.random.key(0), DRAWS)
    assert bool(batch.mask.all()) and bool((batch.weight == 1).all())
    counts = np.bincount(np.asarray(batch.index.slot), minlength=buffer.capacity)
    chances = np.zeros(buffer.capacity)
    chances[np.asarray(batch.index.slot)] = np.asarray(batch.probability)
    assert chances.sum() == pytest.approx(1, abs=1e-4)
    assert abs(chi_square_z(counts, chances / chances.sum())) < 4
    return counts


@pytest.mark.parametrize(
    ("sampler", "weights"),
    [
        (Staleness(3, version="version"), INVERSE),
        (Staleness(3, version="version", decay="exponential", half_life=2), 2 ** -(np.arange(4) / 2)),
        (Staleness(2, version="version", decay="none"), [1, 1, 1, 0]),
        (Staleness(0, version="version"), [1, 0, 0, 0]),
    ],
)
def test_chances_by_version(sampler: Staleness, weights: Any) -> None:
    """Two lanes that are not level: what counts is the newest version of all."""
    buffer = fbuf.Buffer(40, lanes=2, sampler=sampler)
    version = np.stack([np.repeat(np.arange(5), 6), np.repeat(np.arange(5), 6) - 1], axis=1).astype(np.int32)
    state = buffer.init({"version": jnp.int32(0)})
    for part in np.split(version, 10):
        state = buffer.extend(state, {"version": part})
    counts = drawn(buffer, state)
    held = np.zeros(40, int)
    held[[t % 20 * 2 + e for t in range(10, 30) for e in range(2)]] = version[10:].reshape(-1)
    expected = np.array([([*weights, 0, 0])[4 - v] for v in held])
    assert abs(chi_square_z(counts, expected / expected.sum())) < 4


@pytest.mark.parametrize(("unit", "weights"), [(1, INVERSE), (3, np.repeat(INVERSE, 3))])
def test_chances_by_age(unit: int, weights: Any) -> None:
    buffer = fbuf.Buffer(15, sampler=Staleness(3, unit=unit))
    state = buffer.init(jnp.int32(0))
    for lot in np.split(np.arange(24, dtype=np.int32), 8):
        state = buffer.extend(state, lot)
    age = (23 - np.arange(15)) % 15
    expected = np.array([*weights, *[0] * 15])[age]
    assert abs(chi_square_z(drawn(buffer, state), expected / expected.sum())) < 4
    assert int(buffer.stats(state)["anchors_fresh"]) == (expected > 0).sum()


def test_a_lot_that_is_not_full_yet_is_the_newest() -> None:
    buffer = fbuf.Buffer(100, sampler=Staleness(1, unit=4))
    state = buffer.init(jnp.int32(0))
    for i in range(30):
        state = buffer.add(state, jnp.int32(i))
        fresh = set(buffer.peek(state, jax.random.key(i), 256).data.tolist())
        assert fresh == {k for k in range(i + 1) if i // 4 - k // 4 <= 1}


def test_a_learner_ahead_of_its_actors() -> None:
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


def test_weights_too_small_for_a_float() -> None:
    """A learner hundreds of half-lives ahead still draws what is not beyond the maximum."""
    sampler = Staleness(20, version="version", decay="exponential", half_life=0.05)
    buffer = fbuf.Buffer(10, sampler=sampler)
    state = buffer.extend(buffer.init({"version": 0}), {"version": jnp.array([0, 0, 1, 1])})
    for version, drawn in ((1, {1}), (20, {1}), (21, {1}), (22, set())):
        now = buffer.set(state, version=version)
        batch = buffer.peek(now, jax.random.key(0), 64)
        assert set(batch.data["version"][batch.mask].tolist()) == drawn
        assert bool(buffer.can_sample(now)) == bool(drawn)


def test_versions_far_apart() -> None:
    buffer = fbuf.Buffer(10, sampler=Staleness(5, version="version"))
    state = buffer.extend(buffer.init({"version": 0}), {"version": jnp.array([-(2**31), -7, 3])})
    assert set(buffer.peek(state, jax.random.key(0), 64).data["version"].tolist()) == {3}
    assert not bool(buffer.can_sample(buffer.set(state, version=2**31 - 1)))


def test_rows_that_are_no_anchors_age_the_others() -> None:
    """The current version is that of the newest policy heard of, whether or not its rows can be drawn already."""
    buffer = fbuf.Buffer(8, sampler=Staleness(2, version="version"), view=Sequence(4, episode_end=("end",)))
    state = buffer.init({"version": 0, "end": False})
    for version, current in (([0, 0, 0, 0], 0), ([2], 2), ([9], 9), ([20], 9), ([3, 30, *[3] * 20], 30)):
        rows = {"version": jnp.array(version), "end": jnp.zeros(len(version), bool)}
        state = buffer.extend(state, rows, mask=jnp.array(version) != 20)
        assert int(buffer.stats(state)["version"]) == current


def test_runs_that_are_forgotten() -> None:
    """Two actors in one lane: each change begins a run."""
    version = jnp.tile(jnp.array([7, 8]), 40)
    rows = {"i": jnp.arange(80), "version": version}
    for runs, left in ((None, 64), (2, 2), (10, 10)):
        buffer = fbuf.Buffer(100, sampler=Staleness(1, version="version", runs=runs))
        state = buffer.extend(buffer.init({"i": jnp.int32(0), "version": jnp.int32(0)}), rows)
        batch = buffer.peek(state, jax.random.key(0), 4096)
        assert sorted(set(batch.data["i"].tolist())) == list(range(80 - left, 80))
        assert int(buffer.stats(state)["anchors_fresh"]) == left


def test_counts_do_not_overflow() -> None:
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


def test_a_run_of_hardly_any_weight_harms_nobody() -> None:
    """Sums of float32 in another order may differ by a hair: what may not be drawn is not drawn all the same."""
    sampler = Staleness(400, version="version", decay="exponential", half_life=3, runs=500)
    buffer = fbuf.Buffer(5000, lanes=5, sampler=sampler)
    state = buffer.init({"version": jnp.int32(0)})
    version = np.sort(np.random.default_rng(0).integers(0, 450, (1000, 5)).astype(np.int32), axis=0)
    state = buffer.set(buffer.extend(state, {"version": version}), version=470)
    batch = buffer.peek(state, jax.random.key(0), 2**18)
    assert bool(batch.mask.all()) and int(batch.data["version"].min()) >= 70
    assert (np.asarray(batch.probability) > 0).all()


@pytest.mark.parametrize(
    ("sampler", "view"),
    [
        (Staleness(8, version="action"), Transition(n_step=3, stack=4)),
        pytest.param(Staleness(8, unit=100), Row(), marks=pytest.mark.slow),
        pytest.param(Staleness(8, version="action"), Sequence(16, boundary="mask"), marks=pytest.mark.slow),
    ],
)
def test_steps_are_in_place(sampler: Any, view: Any) -> None:
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=sampler, view=view)
    example = {
        "action": jax.ShapeDtypeStruct((), np.int32),
        "obs": jax.ShapeDtypeStruct((2,), np.uint8),
        "reward": jax.ShapeDtypeStruct((), np.float32),
        "terminated": jax.ShapeDtypeStruct((), np.bool_),
        "truncated": jax.ShapeDtypeStruct((), np.bool_),
    }
    assert_draw_write_draw(buffer, example)


@pytest.mark.parametrize("view", [Row(), Transition(action=None, reward="version", terminated="end", truncated=None)])
def test_rows_given_up_for_want_of_room(view: Any) -> None:
    storage = fbuf.storages.Deduplicated(keys=("obs",), block=(8, 8), blocks=128)
    buffer = fbuf.Buffer(100, sampler=Staleness(20, version="version"), storage=storage, view=view)
    example = {
        "obs": jax.ShapeDtypeStruct((16, 16), np.uint8),
        "version": jax.ShapeDtypeStruct((), np.int32),
        "end": jax.ShapeDtypeStruct((), np.bool_),
    }
    state, rng = buffer.init(example), np.random.default_rng(0)
    extend = jax.jit(buffer.extend)
    for i in range(30):
        obs = rng.integers(0, 256, (4, 16, 16), np.uint8)
        state = extend(state, {"obs": obs, "version": np.full(4, i, np.int32), "end": np.zeros(4, bool)})
    stats = buffer.stats(state)
    assert int(stats["retired_rows"]) > 0 and int(stats["anchors_fresh"]) == int(stats["drawable"]) < 100
    state, batch = buffer.sample(state, jax.random.key(0), 4096)
    assert bool(batch.mask.all()) and int(buffer.stats(state)["draws_refused"]) == 0
    assert len(set(batch.index.slot.tolist())) == int(stats["drawable"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"maximum": -1}, "maximum is -1; expected an int from 0 to 65535."),
        ({"maximum": 100_000}, "for greater ages use lots: unit=..."),
        ({"maximum": 2.0}, "maximum is 2.0; expected an int"),
        ({"maximum": 2, "version": 3}, "version is 3; expected the name of a leaf"),
        ({"maximum": 2, "decay": "linear"}, "decay is 'linear'; expected \"inverse\""),
        ({"maximum": 2, "decay": "exponential"}, "Write Staleness(2, decay='exponential', half_life=8)."),
        ({"maximum": 2, "half_life": 3}, "half_life is for decay='exponential'"),
        ({"maximum": 2, "unit": 0}, "unit is 0; expected an int >= 1."),
        ({"maximum": 2, "unit": 2, "version": "v"}, "with a version leave it out"),
        ({"maximum": 2, "runs": 9}, "for versions only"),
        ({"maximum": 9, "runs": 9, "version": "v"}, "from maximum + 1 = 10"),
    ],
)
def test_wrong_settings(given: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        Staleness(**given)


def test_wrong_leaves_and_numbers() -> None:
    buffer = fbuf.Buffer(10, sampler=Staleness(2, version="version"))
    with pytest.raises(ValueError, match="goes by leaf 'version', but rows have x"):
        buffer.init({"x": 0.0})
    for wrong in (0.0, jnp.zeros(2, jnp.int32), True, np.uint32(0)):
        with pytest.raises(TypeError, match="goes by leaf 'version', which is .* expected an integer"):
            buffer.init({"x": 0.0, "version": wrong})
    state = buffer.init({"x": 0.0, "version": 0})
    with pytest.raises(TypeError, match=r"version is 1.5; expected an integer\. Write int\(x\)"):
        buffer.set(state, version=1.5)
    with pytest.raises(TypeError, match="version is '3'; expected a number"):
        buffer.set(state, version="3")
    with pytest.raises(ValueError, match="less than 2"):
        buffer.set(state, version=2**31)
    with pytest.raises(ValueError, match="has no number 'alpha'"):
        buffer.set(state, alpha=1.0)
    state = buffer.extend(state, {"x": jnp.zeros(3), "version": jnp.zeros(3, jnp.int32)})
    index = buffer.last(state, 2).index
    with pytest.raises(ValueError, match=r"'version' is what Staleness\(.*\) goes by, and cannot change"):
        buffer.update_rows(state, index, {"version": jnp.ones(2, jnp.int32)})
    with pytest.raises(ValueError, match="has no number 'version'"):
        ages = fbuf.Buffer(10, sampler=Staleness(2))
        ages.set(ages.init(0.0), version=3)
