"""Sequences of methods against the model in other combinations: see `tests/contracts/test_model.py`."""

from tests.contracts.test_model import (  # noqa: F401
    test_every_method_does_what_the_model_does,
)
from tests.support.model_cases import cases

CASES = [
    ("next step, stack", "batch", "host", 3, "donated"),
    ("stack, steps", "buffer, host", "compressed", 3, "donated"),
]


case = cases(CASES)
