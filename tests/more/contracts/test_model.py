"""Sequences of methods against the model in other combinations: see `tests/contracts/test_model.py`."""

from tests.contracts.test_model import (  # noqa: F401
    test_convert_keeps_rows_and_finds_their_anchors,
    test_every_method_does_what_the_model_does,
)
from tests.support.model_cases import cases

CASES = [
    ("row", "ranks, all", "device", 3, "donated"),
    ("stack, steps", "buffer", "compressed", None, "donated"),
    ("next step, stack", "batch", "host", 3, "donated"),
    ("mask, both", "batch", "device", 3, "jit"),
    ("stack, steps", "batch", "deduplicated", 3, "donated"),
    ("episode", "versions, all", "host", 3, "jit"),
    ("sequence, 1", "uniform", "device", None, "jit"),
    ("sequence, dilation", "uniform", "deduplicated", 3, "donated"),
    ("cross, dilation", "none", "device", 3, "jit"),
    ("mask, stride", "episodes", "device", 3, "eager"),
    ("mask, left", "batch", "device", 3, "donated"),
    ("final, repeat", "buffer", "host", 3, "jit"),
    ("final, stack", "batch", "memmap", 3, "donated"),
    ("stack, steps", "buffer", "files", None, "donated"),
    ("stack, steps", "buffer, host", "compressed", 3, "donated"),
    ("row", "mixed, held", "device", 3, "donated"),
]
CONVERSIONS = [
    ("stack, steps", "batch", "next step, stack", "uniform", "device", None),
    ("next step", "uniform", "row", "buffer", "compressed", 3),
    ("final", "uniform", "next step", "uniform", "device", None),
]


case, conversion = cases(CASES), cases(CONVERSIONS)
