"""Steps compile for a TPU v5e, for eight v5p and for an H100, and work in place there.

Nothing runs on a device: the compilers tell the bytes of a program, and its text what it launches. Install them first
(`install.py`); `--share K/N` compiles a part of the cases.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import fbuf
from fbuf import samplers, storages, views
from tests.accelerators.compiled import compile_step, leaf

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

pytestmark = pytest.mark.optimized

REST = {
    "action": leaf((), jnp.int32),
    "reward": leaf((), jnp.float32),
    "terminated": leaf((), jnp.bool_),
    "truncated": leaf((), jnp.bool_),
}
ROWS = {
    "frames": REST | {"obs": leaf((84, 84), jnp.uint8)},
    "vectors": REST | {"obs": leaf((17,), jnp.float32), "action": leaf((6,), jnp.float32)},
}
STACKS = views.Transition(n_step=3, stack=4, autoreset="same_step")
PARTS = {
    "uniform": {},
    "prioritized, stacks": {"sampler": samplers.Prioritized(), "view": STACKS},
    "windows": {"view": views.Sequence(16, autoreset="same_step")},
    "epoch": {"sampler": samplers.Epoch()},
    "consume": {"sampler": samplers.Consume()},
    "ranked": {"sampler": samplers.Ranked()},
    "staleness": {"sampler": samplers.Staleness(8)},
}
CAPACITIES = (125_000, 1_000_000)
TEMPORARY = 3 * 2**20
"""Bytes that every program may take. A TPU's copies small results into tiles, of 2 MB in all for a batch of 256."""
PADDED_BATCH = {("vectors", "windows"): 2 * 2**20}
"""More bytes on a TPU, where rows of 17 floats in a batch `[256, 16, 17]` take 128; they do not grow with the capacity."""
LAUNCHES = {
    ("frames", "uniform"): 13,
    ("vectors", "uniform"): 14,
    ("frames", "prioritized, stacks"): 71,
    ("vectors", "prioritized, stacks"): 70,
    ("vectors", "windows"): 28,
    ("vectors", "epoch"): 46,
    ("vectors", "consume"): 32,
    ("vectors", "ranked"): 52,
    ("vectors", "staleness"): 63,
}
"""Most kernels of a step on an H100."""
WAITS = {"prioritized, stacks": 2, "epoch": 4, "consume": 2}
"""Most conditionals and loops of unknown length of such a step; nested ones count too."""


@pytest.fixture(autouse=True)
def _no_cache() -> Iterator[None]:
    """Compile without the persistent cache, which knows no devices that are only described."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def check(kind: str, capacity: int, row: str, parts: str, number: int = 1, *, draw_first: bool = False) -> None:
    layout = None if kind == "h100" else "tiles"
    buffer = fbuf.Buffer(capacity, lanes=8, storage=storages.Device(layout), **PARTS[parts])
    made = compile_step(kind, buffer, ROWS[row], number, draw_first=draw_first)
    assert made.aliased >= made.state
    assert made.stored <= made.state * (1.05 if row == "frames" else 1.1) + 2**20
    more = 0 if kind == "h100" else PADDED_BATCH.get((row, parts), 0)
    assert made.temporary <= 3 * made.passed + TEMPORARY + more, f"{made.temporary:,} bytes"
    if kind == "h100" and number == 1 and not draw_first:
        assert made.launches <= LAUNCHES[row, parts], made.launches
        assert made.waits <= WAITS.get(parts, 0), made.waits


CASES = [
    *itertools.product(("v5e",), CAPACITIES, ROWS, ("uniform", "windows")),
    ("v5e", 1_000_000, "frames", "prioritized, stacks"),  # 7.2 of 16 GB: the compiler refuses what does not fit
    *(("h100", 1_000_000, *case) for case in LAUNCHES),
]


@pytest.mark.parametrize(("kind", "capacity", "row", "parts"), CASES)
def test_a_step_is_in_place(kind: str, capacity: int, row: str, parts: str) -> None:
    check(kind, capacity, row, parts)


@pytest.mark.parametrize("parts", [parts for row, parts in LAUNCHES if row == "vectors"])
def test_a_step_that_draws_first_is_in_place(parts: str) -> None:
    check("h100", 1_000_000, "vectors", parts, draw_first=True)


def test_a_sharded_step_is_in_place() -> None:
    check("v5p", 1_000_000, "vectors", "uniform", 8)


def test_rows_on_the_host_compile_for_a_tpu() -> None:
    buffer = fbuf.Buffer(125_000, lanes=8, storage=storages.Compressed(("obs",)), sampler=samplers.Prioritized())
    made = compile_step("v5e", buffer, ROWS["frames"])
    assert made.aliased >= made.state and made.temporary <= 3 * made.passed + TEMPORARY
