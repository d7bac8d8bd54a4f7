"""Sequences of methods against the model in other combinations: see `tests/contracts/test_model.py`."""

from tests.contracts.test_model import (  # noqa: F401
    test_convert_keeps_rows_and_finds_their_anchors,
    test_every_method_does_what_the_model_does,
)
from tests.support.model_cases import cases

CASES = [
    ("stack, steps", "held", "device", 3, "donated"),
    ("cross", "batch", "device", None, "donated"),
    ("row", "ages, lots", "device", 3, "jit"),
    ("stack, steps", "versions, all", "device", 3, "donated"),
    ("next step, stack", "versions", "compressed", None, "donated"),
    ("sequence, stride", "ages", "device", 3, "eager"),
    ("mask, both", "versions", "device", None, "donated"),
    ("row", "episodes", "device", 3, "donated"),
    ("sequence", "batch", "compressed", 3, "donated"),
    ("sequence, stride", "buffer", "host", None, "eager"),
    ("mask", "episodes", "device", None, "donated"),
    ("mask, stride", "uniform", "compressed", 3, "jit"),
    ("episode", "episodes", "deduplicated", 3, "jit"),
    ("episode, next step", "batch", "device", 3, "donated"),
    ("stack, steps", "episodes", "device", 3, "donated"),
    ("row", "uniform", "device", None, "eager"),
    ("row", "none", "compressed", None, "jit"),
    ("row", "uniform", "host", 3, "donated"),
    ("one step", "batch", "host", None, "eager"),
    ("one frame", "buffer", "device", 3, "eager"),
    ("three steps", "uniform", "compressed", 3, "jit"),
    ("three steps", "none", "device", None, "donated"),
    ("stack", "batch", "device", 3, "jit"),
    ("stack, steps", "uniform", "device", 3, "donated"),
    ("final", "none", "compressed", 3, "eager"),
    ("final, stack", "batch", "compressed", None, "donated"),
    ("next step", "uniform", "compressed", 3, "eager"),
    ("next step, stack", "uniform", "device", None, "jit"),
    ("other ends", "buffer", "device", 3, "donated"),
    ("row", "uniform", "deduplicated", None, "eager"),
    ("final, repeat", "buffer", "deduplicated", 3, "jit"),
    ("next step, stack", "none", "deduplicated", None, "donated"),
    ("mask, stride", "uniform", "memmap", None, "eager"),
    ("episode", "versions, all", "files", 3, "jit"),
    ("row", "batch, host", "device", 3, "eager"),
    ("sequence, stride", "batch, host", "deduplicated", None, "jit"),
    ("stack, steps", "mixed, held", "compressed", None, "jit"),
    ("mask, both", "mixed, held", "device", 3, "donated"),
    ("row", "held", "device", None, "donated"),
    ("next step, stack", "held", "host", 3, "donated"),
    ("sequence, stride", "held", "host", None, "jit"),
    ("episode, next step", "held", "deduplicated", 3, "donated"),
    ("row", "ranks", "memmap", None, "donated"),
    ("final, stack", "ranks", "device", 3, "jit"),
    ("mask, stride", "ranks, all", "compressed", 3, "donated"),
]
CONVERSIONS = [
    ("final", "buffer", "stack, steps", "uniform", "deduplicated", 3),
    ("row", "uniform", "sequence, stride", "episodes", "device", 3),
    ("sequence", "uniform", "episode, next step", "uniform", "device", None),
    ("episode", "uniform", "mask, both", "batch", "device", 3),
    ("mask", "batch", "cross", "uniform", "compressed", None),
    ("episode", "uniform", "stack, steps", "versions", "device", 3),
    ("row", "batch", "row", "versions, all", "host", None),
    ("row", "batch", "stack, steps", "held", "device", 3),
    ("stack, steps", "held", "row", "ranks", "device", None),
]


case, conversion = cases(CASES), cases(CONVERSIONS)
