"""Any sequence of methods does what a plain-Python buffer does: see `tests/support/model_trial.py`."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.model_cases import EXAMPLES, PROGRAMS, WRITES, cases, listed, make
from tests.support.model_trial import Trial

CASES = listed("""
row/batch/device/3/jit; final, stack/uniform/device/3/eager; next step/none/device/-/donated;
sequence, stride/episodes/device/3/donated; episode, cut/uniform/device/-/donated;
mask, both/uniform/device/-/donated; sequence/uniform/device/-/donated
""")
CONVERSIONS = [
    ("row", "uniform", "next step, stack", "batch", "device", 3),
    ("row", "uniform", "episode, next step", "uniform", "device", None),
]
case, conversion = cases(CASES), cases(CONVERSIONS)


@settings(max_examples=EXAMPLES)
@given(program=PROGRAMS)
def test_every_method_does_what_the_model_does(case, program):
    view, sampler, storage, lanes, form = case
    trial = Trial(make(view, sampler, storage, lanes), form)
    trial.run(program, given=(len(view) + len(form)) % 2 == 0)


@settings(max_examples=EXAMPLES)
@given(
    before=st.lists(st.tuples(st.sampled_from(WRITES), st.integers(0, 2**16)), min_size=1, max_size=5),
    after=st.lists(st.tuples(st.sampled_from(WRITES), st.integers(0, 2**16)), max_size=4),
)
def test_convert_keeps_rows_and_finds_their_anchors(conversion, before, after):
    view, sampler, other_view, other_sampler, storage, lanes = conversion
    capacity = 9 * (lanes or 1)
    first, second = (
        dataclasses.replace(make(v, s, storage, lanes), capacity=capacity, episode_end=())
        for v, s in ((view, sampler), (other_view, other_sampler))
    )
    trial, converted = Trial(first), Trial(second)
    trial.run(before, given=False)
    converted.state = first.convert(second, trial.state)
    converted.model, converted.id = trial.model.convert(second), trial.id
    converted.compare_all(np.random.default_rng(0))
    converted.sample(np.random.default_rng(0))
    converted.run(after, given=True)
