"""Mixtures: every sampler, storage and target in every mode, saved and loaded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Memmap
from tests.support import mixture as support
from tests.support.mixture import EXAMPLE, filled, played, same, two
from tests.support.tables import checks
from tests.support.uniformity import chi_square_z

pytestmark = pytest.mark.exhaustive


def half_of(samplers):
    return [(s, m) for i, s in enumerate(samplers) for j, m in enumerate(support.MODES) if (i + j) % 2 == 0]


IN_PLACE = half_of(["Uniform", "Epoch", "Consume", "Prioritized", "Prioritized(replace=False)", "Ranked"])
test_checks = checks((support.check_sampler, half_of(support.SAMPLERS)), (support.check_empty, [False, True]))
test_steps_are_in_place = pytest.mark.in_place(checks((support.check_in_place, IN_PLACE)))


@pytest.mark.parametrize(
    ("mode", "target"), [("exact", "source"), ("annealed", "source"), ("random", "source"), ("all", "union")]
)
def test_weights_are_those_of_the_mixture(mode, target):
    """`beta` of the call replaces that of the mixture."""
    mixture, state = support.weighted(support.MODES[mode], target=target, normalize=None, beta=0.7)
    given = {"beta": jnp.float32(1)} | support.traced(mode)
    batch = jax.device_get(mixture.peek(state, jax.random.key(1), support.size_of(mixture), **given))
    wanted = support.density(mixture, state, {"a": 0.25, "b": 0.75})
    chance = np.array([wanted[n] for n in batch.data["id"].tolist()])
    np.testing.assert_allclose(batch.probability, chance, rtol=1e-5)
    number, share = np.where(batch.index.source == 0, 20, 40), np.where(batch.index.source == 0, 0.25, 0.75)
    relative = 60 * chance if target == "union" else number * chance / share
    np.testing.assert_allclose(batch.weight, 1 / relative, rtol=1e-5)


@pytest.mark.parametrize("quota", ["exact", "random"])
def test_rows_of_an_empty_buffer_are_masked(quota):
    mixture = support.three(quota=quota, if_empty="mask")
    state = support.filled(mixture, a=0)
    _, probability, source, _ = map(
        np.asarray, support.numbers(mixture)(state, jax.random.split(jax.random.key(0), 300))
    )
    counts = np.bincount(source, minlength=4)
    if quota == "random":
        assert chi_square_z(counts[[1, 2, 3]], np.array([0.25, 0.5, 0.25])) < 4 and counts[0] == 0
    else:
        assert counts.tolist() == [0, 4 * 300, 8 * 300, 4 * 300]
    assert not bool(mixture.can_sample(state))
    np.testing.assert_allclose(probability[source == 2], 0.5 / 40, rtol=1e-6)


def test_buffers_are_loaded_into_other_capacities_and_storages(tmp_path):
    mixture = two(fbuf.Buffer(20, sampler=Prioritized()), fbuf.Buffer(40))
    state, _ = played(mixture, filled(mixture), 0, 1)
    fbuf.save(tmp_path / "c", mixture, state)
    small, fewer = fbuf.load(tmp_path / "c", resize={"a": 5})
    assert small["a"].capacity == 5 and small["b"].capacity == 40
    assert small["a"].last(fewer["a"], 5).data["id"].tolist() == list(range(1015, 1020))
    files = two(mixture["a"], fbuf.Buffer(40, storage=Memmap(str(tmp_path / "rows"), keys=("obs",))))
    loaded, again = fbuf.load(tmp_path / "c", files)
    assert loaded == files and same(played(mixture, state, 1, 2)[1], played(loaded, again, 1, 2)[1])
    other = dataclasses.replace(mixture, fractions={"a": 0.25, "b": 0.75}, target="source")
    loaded, again = fbuf.load(tmp_path / "c", other, example={"a": EXAMPLE, "b": EXAMPLE})
    assert loaded == other and same(again, state)
