"""Sequences of methods against the model in other combinations: see `tests/contracts/test_model.py`."""

from tests.contracts.test_model import (  # noqa: F401
    test_convert_keeps_rows_and_finds_their_anchors,
    test_every_method_does_what_the_model_does,
)
from tests.support.model_cases import cases

CASES = [
    ("row", "ranks, all", "device", 3, "donated"),
    ("next step, stack", "batch", "host", 3, "donated"),
    ("sequence, dilation", "uniform", "deduplicated", 3, "donated"),
    ("mask, stride", "episodes", "device", 3, "eager"),
    ("final, stack", "batch", "memmap", 3, "donated"),
    ("stack, steps", "buffer, host", "compressed", 3, "donated"),
]
CONVERSIONS = [
    ("next step", "uniform", "row", "buffer", "compressed", 3),
]


case, conversion = cases(CASES), cases(CONVERSIONS)
