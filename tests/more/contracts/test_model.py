"""Sequences of methods against the model in other combinations: see `tests/contracts/test_model.py`."""

from hypothesis import given, settings

from tests.contracts.test_model import (  # noqa: F401
    test_every_method_does_what_the_model_does,
)
from tests.support.model_cases import CUTS, EXAMPLES, cases, listed, make
from tests.support.model_trial import Trial

CASES = [
    ("next step, stack", "batch", "host", 3, "donated"),
    ("stack, steps", "buffer, host", "compressed", 3, "donated"),
]
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
