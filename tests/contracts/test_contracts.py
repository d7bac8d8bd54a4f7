"""Contracts with more storages, samplers, flags and keys, and sequences of methods against the model."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

from fbuf.samplers import Consume, Epoch, Prioritized, Ranked
from tests.contracts import test_faults as faults
from tests.contracts.test_errors import test_an_empty_sample_is_masked_and_counted  # noqa: F401
from tests.contracts.test_model import (  # noqa: F401
    test_every_method_does_what_the_model_does,
)
from tests.contracts.test_shard_map import check_types, check_values
from tests.support import flags
from tests.support.combinations import SAMPLERS, SOME, VIEWS, check_storages_agree
from tests.support.model_cases import CUTS, EXAMPLES, cases, listed, make
from tests.support.model_trial import Trial
from tests.support.tables import checks, one_of
from tests.support.uniformity import check_prioritized

pytestmark = pytest.mark.more


@pytest.mark.optimized
@pytest.mark.parametrize(("sampler", "view"), SOME)
def test_storages_give_the_same_batches(sampler, view):
    check_storages_agree(["Deduplicated", "Compressed", "Host", "Ragged"], sampler, view)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_memory_during_extend():
    faults.check_no_memory("compressed")


@given(**faults.PRIORITIES)
def test_any_priorities_leave_a_buffer_that_draws(errors, alpha):
    faults.check_priorities(Ranked(), errors, alpha)


def test_eager_methods_move_nothing_to_or_from_the_device():
    name = "prioritized"
    buffer = flags.BUFFERS[name]
    state, x = buffer.init(flags.EXAMPLE), flags.given(buffer)
    with flags.flags("transfer_guard"):
        got = flags.every_method(buffer, state, x)
    flags.check(name, flags.plain(got))


def test_nothing_leaks_from_scan_vmap_and_grad():
    buffer = flags.BUFFERS["rich"]
    x = flags.given(buffer)

    def run(weight, key):
        def step(state, key):
            state, batch = buffer.sample(buffer.extend(state, x["rows"]), key, flags.BATCH)
            return buffer.update_priority(state, batch.index, batch.data["reward"] * weight), batch.data["reward"]

        return jnp.sum(weight * lax.scan(step, buffer.init(flags.EXAMPLE), jax.random.split(key, 3))[1])

    with jax.checking_leaks():
        slopes = jax.jit(jax.vmap(jax.grad(run), in_axes=(0, None)))(jnp.ones((2,), jnp.float32), jax.random.key(0))
    assert np.all(np.isfinite(slopes))


VIEW = itertools.cycle(VIEWS)
TYPES = [
    (("Device", "Deduplicated")[number % 2], sampler, "Episode" if "episodes" in sampler else view)
    for number, (sampler, view) in enumerate(zip((name for name in SAMPLERS if "host" not in name), VIEW, strict=False))
]
test_checks = checks(
    (faults.check_raising, [("try_write", False), ("read", False), ("read", True)]),
    (faults.check_many_keys, [Epoch()]),
    (faults.check_key_reuse, [(Consume(2), 1), (Prioritized(on="host"), 1)]),
    (check_types, TYPES),
    (flags.check_all_flags, ["rich", "host"]),
    (check_types, [("Device", "Prioritized", "Row", "TopK"), ("Device", "Prioritized", "Row", "Reservoir")]),
    (check_values, [("Device", "Epoch", "Transition"), ("Device", "Prioritized(replace=False)", "Transition")]),
    (check_values, [("Deduplicated", "Prioritized", "Transition")]),
    (check_prioritized, [True]),  # stratified
)


CASES = listed("""
next step, stack/batch/host/3/donated; stack, steps/buffer, host/compressed/3/donated; other ends/uniform/device/-/donated;
row/versions/device/3/donated; one step/uniform/device/3/jit
""")
sampler = one_of(Ranked(uniform=0.5, normalize="buffer"))
CUT = listed("""
final, stack/batch/device/3/donated; next step, stack/uniform/memmap/3/jit; episode, next step/batch/device/-/jit;
mask, both/episodes/deduplicated/3/donated; ids/uniform/device/3/donated; ids, reset/batch/compressed/3/eager
""")
case, cut_case = cases(CASES), cases(CUT)


@settings(max_examples=EXAMPLES)
@given(program=CUTS)
def test_nothing_crosses_a_cut(cut_case, program):
    view, sampler, storage, lanes, form = cut_case
    trial = Trial(make(view, sampler, storage, lanes), form)
    trial.run(program, given=(len(view) + len(form)) % 2 == 0)
