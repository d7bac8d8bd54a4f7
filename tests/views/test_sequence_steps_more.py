"""Windows of random settings, other samplers and storages, against their oracle."""

import dataclasses

import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized, Ranked, Uniform
from fbuf.views import Sequence
from tests.support import same_step
from tests.support.inplace import assert_order
from tests.support.trees import same
from tests.support.window_cases import ROW, check, check_chances, random_view
from tests.views.test_sequence_steps import BY_PRIORITY, LOGS

pytestmark = pytest.mark.more

SETTINGS = range(11)  # those of the quick tier and these are 300 logs
MASKED = Sequence(5, burn_in=2, bootstrap=1, stride=2, boundary="mask", at=2, autoreset="next_step", episode="id")
CROSSING = same_step.Sequence(5, burn_in=2, bootstrap=1, stride=2, boundary="cross")


@pytest.mark.parametrize("seed", SETTINGS)
def test_buffers_have_the_windows_of_the_oracle(seed):
    view = random_view(np.random.default_rng(seed))
    for log in range(LOGS):
        check(view, 1000 * seed + log)


@pytest.mark.parametrize("view", [MASKED, CROSSING], ids=["mask", "cross"])
@pytest.mark.parametrize("sampler", [Uniform(), BY_PRIORITY], ids=["uniform", "prioritized"])
def test_draws_are_of_the_windows_of_the_oracle(view, sampler):
    check_chances(view, sampler)


@pytest.mark.parametrize("storage", [fbuf.storages.Compressed(keys=("number",)), fbuf.storages.Host()], ids=repr)
def test_host_storages_have_the_windows_of_the_oracle(storage):
    for log in range(3):
        check(MASKED, log, storage)


@pytest.mark.parametrize("view", [MASKED, same_step.Sequence(5, stride=2, bootstrap=1)], ids=["mask", "stop"])
def test_converted_rows_have_the_windows_of_rows_that_were_added(view):
    rng = np.random.default_rng(0)
    rows = {name: np.repeat(np.asarray(leaf), 60) for name, leaf in ROW.items()}
    rows |= {
        "number": np.arange(60, dtype=np.int32),
        "terminated": rng.random(60) < 0.1,
        "truncated": rng.random(60) < 0.1,
    }
    plain, windows = (fbuf.Buffer(60, view=v) for v in (fbuf.views.Row(), view))
    state = plain.extend(plain.init(ROW), rows)
    added = windows.extend(windows.init(ROW), rows)
    converted = plain.convert(windows, plain.cut(state))
    full = dataclasses.replace(windows, capacity=61)  # its oldest row is known to begin an episode
    state = dataclasses.replace(plain, capacity=61)
    state = state.convert(full, state.extend(state.init(ROW), rows))
    same(full.stats(state)["drawable"], windows.stats(added)["drawable"])
    assert windows.stats(converted)["drawable"] > 0


@pytest.mark.in_place
@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), Ranked()], ids=["uniform", "prioritized", "ranked"])
def test_steps_are_in_place(sampler):
    for view in (same_step.Sequence(6, stride=3, bootstrap=1, episode="id"), MASKED):
        assert_order(fbuf.Buffer(400_000, lanes=2, view=view, sampler=sampler), "es", ROW, steps=0)
