"""Errors name the call, the leaf, the value, what was expected and the code that fixes it."""

import jax
import numpy as np
import pytest

import fbuf
from fbuf._buffer.state import COUNTERS
from fbuf.samplers import Prioritized, Uniform
from fbuf.views import Transition
from tests.support import errors, refusals
from tests.support.errors import BATCH, BUFFER, CAPACITY, EXAMPLE, KEY, PRIORITIZED, ROW, index, rows, zeros
from tests.support.refusals import raises
from tests.support.tables import one_of


@pytest.mark.parametrize("case", refusals.cases(errors.ROWS) + refusals.cases(errors.ARGUMENTS))
def test_invalid_rows_and_arguments_are_refused(case):
    refusals.check(case, errors.SCOPE, **errors.states())


def test_an_eager_call_names_the_class_of_its_index():
    with pytest.raises(TypeError, match="Buffer.update_priority: index is ndarray; expected the Index"):
        PRIORITIZED.update_priority(PRIORITIZED.init(EXAMPLE), zeros(BATCH), zeros(BATCH))


def test_every_method_refuses_other_states():
    no = Uniform()
    for verb, arguments in {
        "extend": (no, rows(1)),
        "add": (no, rows()),
        "sample": (no, KEY, 1),
        "peek": (no, KEY, 1),
        "update_priority": (no, index(1), zeros(1)),
        "update_rows": (no, index(1), {"reward": zeros(1)}),
        "get": (no, index(1)),
        "last": (no, 1),
        "convert": (BUFFER, no),
        **dict.fromkeys(("clear", "set", "rows", "stats", "can_sample"), (no,)),
    }.items():
        expected = rf"Buffer\.{verb}: first argument is Uniform, expected BufferState\. The order"
        with pytest.raises(TypeError, match=expected):
            getattr(PRIORITIZED, verb)(*arguments)


def test_a_donated_state_is_named():
    state = BUFFER.init(EXAMPLE)
    jax.jit(BUFFER.extend, donate_argnums=0)(state, rows(2))
    for verb in (
        lambda state: BUFFER.sample(state, KEY, BATCH),
        lambda state: BUFFER.extend(state, rows(2)),
        BUFFER.size,
        BUFFER.rows,
        BUFFER.clear,
    ):
        raises(RuntimeError, r"^Buffer\.\w+: the state was donated.*state = step\(state\)", verb, state)


@pytest.mark.parametrize("case", refusals.cases(errors.CONFIGURATIONS) + refusals.cases(errors.EXAMPLES))
def test_invalid_configurations_and_examples_are_refused(case):
    refusals.check(case, errors.SCOPE)


sampler = one_of(Uniform(), Prioritized(replace=False, normalize="buffer"))


def test_an_empty_sample_is_masked_and_counted(sampler):
    buffer = fbuf.Buffer(capacity=CAPACITY, sampler=sampler, view=Transition(n_step=2, stack=2, autoreset="same_step"))
    state, batch = buffer.sample(buffer.init(ROW), KEY, BATCH)
    assert not bool(buffer.can_sample(state))
    for leaf in jax.tree.leaves((batch.data, batch.probability, batch.weight, batch.mask, batch.index.ticket)):
        assert not np.any(leaf)
    assert np.all(np.asarray(batch.index.slot) == CAPACITY)
    if sampler.prioritized:  # the indices of masked rows are skipped and not counted as refused
        state = buffer.update_priority(state, batch.index, np.ones(BATCH, np.float32))
    stats = jax.device_get(buffer.stats(state))
    assert {name: int(stats[name]) for name in COUNTERS if stats[name]} == {"empty_samples": 1}
