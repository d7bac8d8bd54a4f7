"""Any sequence of methods does what a plain-Python buffer does: see `tests/support/model_trial.py`."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.model_cases import CUTS, EXAMPLES, PROGRAMS, WRITES, cases, listed, make
from tests.support.model_trial import Trial

CASES = listed("""
final, stack/uniform/device/3/eager; sequence, stride/episodes/device/3/donated
""")
CONVERSIONS = [("row", "uniform", "episode, next step", "uniform", "device", None)]
MORE_CONVERSIONS = [("row", "uniform", "next step, stack", "batch", "device", 3)]
MORE = listed("""
row/batch/device/3/jit; episode, cut/uniform/device/-/donated; sequence/uniform/device/-/donated;
mask, both/uniform/device/-/donated;
next step, stack/batch/host/3/donated; stack, steps/buffer, host/compressed/3/donated; other ends/uniform/device/-/donated;
row/versions/device/3/donated; one step/uniform/device/3/jit; next step/none/device/-/donated
""")
EXHAUSTIVE = listed("""
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
EXHAUSTIVE_CONVERSIONS = listed("""
next step/uniform/row/buffer/compressed/3; stack, steps/batch/next step, stack/uniform/device/-;
final/uniform/next step/uniform/device/-; final/buffer/stack, steps/uniform/deduplicated/3;
row/uniform/sequence, stride/episodes/device/3; sequence/uniform/episode, next step/uniform/device/-;
episode/uniform/mask, both/batch/device/3; mask/batch/cross/uniform/compressed/-;
episode/uniform/stack, steps/versions/device/3; row/batch/row/versions, all/host/-;
row/batch/stack, steps/held/device/3; stack, steps/held/row/ranks/device/-; mask/batch/ids/uniform/compressed/-;
ids, next step/uniform/stack, steps/versions/device/3
""")
MORE_CUT = listed("""
final, stack/batch/device/3/donated; next step, stack/uniform/memmap/3/jit; episode, next step/batch/device/-/jit;
mask, both/episodes/deduplicated/3/donated; ids/uniform/device/3/donated; ids, reset/batch/compressed/3/eager
""")
EXHAUSTIVE_CUT = listed("""
mask, stride/episodes/device/3/eager; episode/versions, all/host/3/jit; mask, both/versions/device/-/donated;
final, repeat/buffer/deduplicated/3/jit; row/episodes/device/3/donated; row/batch/compressed/3/donated;
cross, dilation/none/device/3/jit; mask, left/held/device/3/donated; sequence, stride/ages/device/3/eager;
episode, cut/ranks/deduplicated/-/donated; ids, flags/batch/device/3/donated; ids, next step/uniform/device/3/jit;
ids, stop/episodes/device/3/donated; ids, mask/batch/compressed/-/jit; ids, cross/uniform/device/3/donated;
ids, episode/versions, all/device/3/donated
""")
case, conversion = cases(CASES, MORE, EXHAUSTIVE), cases(CONVERSIONS, MORE_CONVERSIONS, EXHAUSTIVE_CONVERSIONS)
cut_case = cases(more=MORE_CUT, exhaustive=EXHAUSTIVE_CUT)


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


@settings(max_examples=EXAMPLES)
@given(program=CUTS)
def test_nothing_crosses_a_cut(cut_case, program):
    view, sampler, storage, lanes, form = cut_case
    trial = Trial(make(view, sampler, storage, lanes), form)
    trial.run(program, given=(len(view) + len(form)) % 2 == 0)
