"""Contracts with the remaining storages, samplers, flags and keys."""

# ruff: noqa: F401, F811

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.views import Row, Transition
from tests.contracts.test_errors import test_an_empty_sample_is_masked_and_counted
from tests.contracts.test_faults import check_key_reuse, check_many_keys
from tests.contracts.test_shard_map import check_types
from tests.support import combinations
from tests.support.flags import BUFFERS, EXAMPLE, FLAGS, check, check_all_flags, every_method, flags, given, plain
from tests.support.tables import checks, one_of, pairwise
from tests.support.trees import close
from tests.support.uniformity import check_parts, check_retired, check_zero_priorities, chi_square_z, slots_drawn


def refused(storage, sampler, view):
    return (sampler, view) in combinations.REFUSED


@pytest.mark.parametrize(
    ("storage", "sampler", "view"),
    pairwise(list(combinations.STORAGES)[1:], combinations.SAMPLERS, combinations.VIEWS, refused=refused),
)
def test_storages_give_the_same_batches_in_every_combination(storage, sampler, view):
    combinations.check_storages_agree([storage], sampler, view)


@pytest.mark.parametrize("sampler", combinations.UNORDERED)
@pytest.mark.parametrize("writer", combinations.UNORDERED_WRITERS)
def test_storages_give_writers_the_same_batches_with_every_sampler(writer, sampler):
    combinations.check_storages_agree(combinations.UNORDERED_STORAGES, sampler, "Row", writer)


@pytest.mark.parametrize("view", combinations.VIEWS)
def test_where_priorities_live_does_not_matter(view):
    found = [list(combinations.batches("Device", name, view)) for name in ("Prioritized", "Prioritized(on='host')")]
    jax.tree.map(np.testing.assert_array_equal, *found)


sampler = one_of(Uniform(over="episodes"), Epoch(), Consume(2), Prioritized(), Prioritized(on="host"), Staleness(4))


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", BUFFERS)
def test_every_method_under_each_flag(name, flag):
    if flag == "debug_infs" and name in ("rich", "topk", "everything"):
        pytest.skip("the least and the largest of no rows are infinite")
    buffer = BUFFERS[name]
    state, x = buffer.init(EXAMPLE), given(buffer)
    with flags(flag):
        got = every_method(buffer, state, x)
    check(name, plain(got))


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(alpha=1.0, eps=0.0, stratified=False)])
def test_a_million_draws_of_many_rows(sampler):
    capacity, chances = 50_021, np.ones(50_021)
    buffer = fbuf.Buffer(capacity=capacity, sampler=sampler)
    given = {}
    if sampler.prioritized:
        given["priority"] = np.random.default_rng(0).uniform(0.5, 2.0, capacity).astype(np.float32)
        chances = given["priority"].astype(np.float64)
    state = buffer.extend(buffer.init(np.float32(0)), np.zeros(capacity, np.float32), **given)
    for seed in range(3):
        assert abs(chi_square_z(slots_drawn(buffer, state, seed, 2**20), chances / chances.sum())) < 4


HERE = [s for s in combinations.SAMPLERS if "host" not in s]


@pytest.mark.parametrize(
    ("sampler", "view", "writer"),
    [
        *((s, "Sequence('mask')", "Ring") for s in HERE),
        *(("Prioritized", "Row", w) for w in combinations.UNORDERED_WRITERS),
    ],
)
def test_vmapped_states_give_what_each_gives_alone(sampler, view, writer):
    buffer, rng = combinations.make("Device", sampler, view, writer), np.random.default_rng(0)

    def step(state, given):
        rows, mask, key = given
        state, batch = buffer.sample(buffer.extend(state, rows, mask=mask), key, combinations.BATCH)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.arange(1.0, combinations.BATCH + 1))
        return state, batch

    def run(given):
        return jax.lax.scan(step, buffer.init(combinations.EXAMPLE), given)

    rows = jax.tree.map(lambda x: x.reshape(3, 8, 5, *x.shape[1:]), combinations.rows_of(rng, 120))
    mask = rng.random(rows["action"].shape) < np.array([0.2, 0.6, 1.0])[:, None, None, None]
    given = rows, mask, jax.random.split(jax.random.key(0), (3, 8))
    many, alone = jax.jit(jax.vmap(run))(given), jax.jit(run)
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], (many, given))
        close(one[0], alone(one[1]), rtol=1e-6)


TYPED = pairwise(("Device", "Deduplicated"), HERE, combinations.VIEWS, refused=refused)
RETIRED = [Uniform(), Prioritized(stratified=False), Consume(), Epoch(), Staleness(500)]
test_checks = checks(
    (
        check_key_reuse,
        itertools.product(
            [Uniform(), Ranked(), Consume(2), Staleness(4), Epoch(), Prioritized(), Prioritized(on="host")], [0, 1]
        ),
    ),
    (check_many_keys, [Prioritized(), Prioritized(replace=False), Ranked()]),
    (check_all_flags, sorted(BUFFERS.keys() - {"rich", "host"})),
    (check_retired, itertools.product(RETIRED, [Row(), Transition(n_step=3, stack=4, autoreset="same_step")])),
    (check_types, TYPED),
    (check_parts, [(5, slice(0, 1), slice(2, 5)), (40, slice(0, 9))]),
    (check_zero_priorities, [True]),  # of transitions
)
