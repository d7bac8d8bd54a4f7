"""Contracts with the remaining storages, samplers, flags and keys, and sequences of methods against the model."""

# ruff: noqa: F401, F811

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.views import Row, Transition
from tests.contracts.test_contracts import test_nothing_crosses_a_cut  # noqa: F401
from tests.contracts.test_errors import test_an_empty_sample_is_masked_and_counted
from tests.contracts.test_faults import check_key_reuse, check_many_keys
from tests.contracts.test_functional_more import test_grad_around_sample, test_no_method_calls_back_to_the_host  # noqa: F401
from tests.contracts.test_model import (  # noqa: F401
    test_convert_keeps_rows_and_finds_their_anchors,
    test_every_method_does_what_the_model_does,
)
from tests.contracts.test_shard_map import check_types
from tests.support import combinations, functional
from tests.support.flags import BUFFERS, EXAMPLE, FLAGS, check, check_all_flags, every_method, flags, given, plain
from tests.support.model_cases import cases, listed
from tests.support.tables import checks, one_of, pairwise
from tests.support.trees import close
from tests.support.uniformity import check_parts, check_zero_priorities

pytestmark = pytest.mark.exhaustive


def refused(storage, sampler, view):
    return (sampler, view) in combinations.REFUSED


EVERY = pairwise(list(combinations.STORAGES)[1:], combinations.SAMPLERS, combinations.VIEWS, refused=refused)
WRITTEN = itertools.product(combinations.UNORDERED, ["Row"], combinations.UNORDERED_WRITERS)
test_storages_give_the_same_batches_in_every_combination = checks(
    (combinations.check_storages_agree, [([storage], *parts) for storage, *parts in EVERY]),
    (combinations.check_storages_agree, [(combinations.UNORDERED_STORAGES, *parts) for parts in WRITTEN]),
)
sampler = one_of(Uniform(over="episodes"), Epoch(), Consume(2), Prioritized(), Prioritized(on="host"), Staleness(4))


INFINITE = {(name, "debug_infs") for name in ("rich", "topk", "everything")}  # the least and the largest of no rows
FLAGGED = [  # `check_all_flags` sets the others together
    (name, flag)
    for i, name in enumerate(BUFFERS)
    for j, flag in enumerate(FLAGS)
    if flag in ("debug_infs", "transfer_guard") or (i + j) % 5 == 0
]


@pytest.mark.parametrize(("name", "flag"), [case for case in FLAGGED if case not in INFINITE])
def test_every_method_under_each_flag(name, flag):
    buffer = BUFFERS[name]
    state, x = buffer.init(EXAMPLE), given(buffer)
    with flags(flag):
        got = every_method(buffer, state, x)
    check(name, plain(got))


HERE = [s for s in combinations.SAMPLERS if "host" not in s]
VMAPPED = [(s, "Sequence('mask')", "Ring") for s in HERE]
VMAPPED += [("Prioritized", "Row", w) for w in combinations.UNORDERED_WRITERS]


@pytest.mark.parametrize(("sampler", "view", "writer"), VMAPPED)
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
KEYED = [Uniform(), Ranked(), Consume(2), Staleness(4), Epoch(), Prioritized(), Prioritized(on="host")]
OTHERS = [functional.BUFFERS[name] for name in ("uniform-row", "deduplicated")]
test_checks = checks(
    (check_key_reuse, itertools.product(KEYED, [0, 1])),
    (check_many_keys, [Prioritized(), Prioritized(replace=False), Ranked()]),
    (check_all_flags, sorted(BUFFERS.keys() - {"rich", "host"})),
    (check_types, TYPED),
    (check_parts, [(5, slice(0, 1), slice(2, 5)), (40, slice(0, 9))]),
    (check_zero_priorities, [True]),  # of transitions
    *((check, OTHERS) for check in (functional.check_pure, functional.check_laps)),
)


wrap = one_of(lambda loss: loss)


def test_grad_through_rows_that_were_stored():
    buffer = fbuf.Buffer(capacity=8)

    def total(x):
        state = buffer.extend(buffer.init({"x": x[0]}), {"x": x})
        return jnp.sum(buffer.sample(state, functional.KEY, 16)[1].data["x"])

    slope = jax.jit(jax.grad(total))(jnp.arange(4, dtype=jnp.float32))
    assert float(jnp.sum(slope)) == 16.0 and float(jnp.min(slope)) >= 0.0
    many = jax.vmap(jax.grad(total))(jnp.ones((2, 4), jnp.float32))
    np.testing.assert_array_equal(many, jnp.stack([slope, slope]))


name = one_of("prioritized-transition", "uniform-row")


CASES = listed("""
mask, stride/episodes/device/3/eager; row/ranks, all/device/3/donated; final, stack/batch/memmap/3/donated;
sequence, dilation/uniform/deduplicated/3/donated; stack, steps/buffer/compressed/-/donated;
mask, both/batch/device/3/jit; stack, steps/batch/deduplicated/3/donated; episode/versions, all/host/3/jit;
sequence, 1/uniform/device/-/jit; cross, dilation/none/device/3/jit; mask, left/batch/device/3/donated;
final, repeat/buffer/host/3/jit; stack, steps/buffer/files/-/donated; row/mixed, held/device/3/donated;
stack, steps/held/device/3/donated; cross/batch/device/-/donated; row/ages, lots/device/3/jit;
stack, steps/versions, all/device/3/donated; next step, stack/versions/compressed/-/donated;
sequence, stride/ages/device/3/eager; mask, both/versions/device/-/donated; row/episodes/device/3/donated;
sequence/batch/compressed/3/donated; sequence, stride/buffer/host/-/eager; mask/episodes/device/-/donated;
mask, stride/uniform/compressed/3/jit; episode/episodes/deduplicated/3/jit;
episode, next step/batch/device/3/donated; stack, steps/episodes/device/3/donated; row/uniform/device/-/eager;
row/none/compressed/-/jit; row/uniform/host/3/donated; one step/batch/host/-/eager; one frame/buffer/device/3/eager;
three steps/uniform/compressed/3/jit; three steps/none/device/-/donated; stack/batch/device/3/jit;
stack, steps/uniform/device/3/donated; final/none/compressed/3/eager; final, stack/batch/compressed/-/donated;
next step/uniform/compressed/3/eager; next step, stack/uniform/device/-/jit; other ends/buffer/device/3/donated;
row/uniform/deduplicated/-/eager; final, repeat/buffer/deduplicated/3/jit;
next step, stack/none/deduplicated/-/donated; mask, stride/uniform/memmap/-/eager;
episode/versions, all/files/3/jit; row/batch, host/device/3/eager; sequence, stride/batch, host/deduplicated/-/jit;
stack, steps/mixed, held/compressed/-/jit; mask, both/mixed, held/device/3/donated; row/held/device/-/donated;
next step, stack/held/host/3/donated; sequence, stride/held/host/-/jit;
episode, next step/held/deduplicated/3/donated; row/ranks/memmap/-/donated; final, stack/ranks/device/3/jit;
mask, stride/ranks, all/compressed/3/donated
""")
CONVERSIONS = listed("""
next step/uniform/row/buffer/compressed/3; stack, steps/batch/next step, stack/uniform/device/-;
final/uniform/next step/uniform/device/-; final/buffer/stack, steps/uniform/deduplicated/3;
row/uniform/sequence, stride/episodes/device/3; sequence/uniform/episode, next step/uniform/device/-;
episode/uniform/mask, both/batch/device/3; mask/batch/cross/uniform/compressed/-;
episode/uniform/stack, steps/versions/device/3; row/batch/row/versions, all/host/-;
row/batch/stack, steps/held/device/3; stack, steps/held/row/ranks/device/-; mask/batch/ids/uniform/compressed/-;
ids, next step/uniform/stack, steps/versions/device/3
""")
CUT = listed("""
mask, stride/episodes/device/3/eager; episode/versions, all/host/3/jit; mask, both/versions/device/-/donated;
final, repeat/buffer/deduplicated/3/jit; row/episodes/device/3/donated; row/batch/compressed/3/donated;
cross, dilation/none/device/3/jit; mask, left/held/device/3/donated; sequence, stride/ages/device/3/eager;
episode, cut/ranks/deduplicated/-/donated; ids, flags/batch/device/3/donated; ids, next step/uniform/device/3/jit;
ids, stop/episodes/device/3/donated; ids, mask/batch/compressed/-/jit; ids, cross/uniform/device/3/donated;
ids, episode/versions, all/device/3/donated
""")
case, conversion, cut_case = cases(CASES), cases(CONVERSIONS), cases(CUT)
