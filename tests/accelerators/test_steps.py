"""Steps compile for TPUs and an H100 that are only described, in place, and take and launch no more than the page says.

Nothing runs on a device: the compilers tell the bytes of a program, and its text what it launches. Install them first
(`install.py`); `--share K/N` compiles a part of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from benchmarks.accelerators import load
from tests.accelerators.steps import ON_HOST, STEPS, TESTED, Step, faults

pytestmark = pytest.mark.optimized
CASES = [
    pytest.param(
        step,
        id=f"{step.number} {step.kind}, {step.name}",
        marks=() if step in TESTED else pytest.mark.exhaustive,
    )
    for step in STEPS
]


@pytest.fixture(autouse=True)
def _no_cache() -> Iterator[None]:
    """Compile without the persistent cache, which knows no devices that are only described."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.parametrize("step", CASES)
def test_a_step_needs_no_more_than_the_page_says(step: Step) -> None:
    made, most = step.compile(), load()[step].ours
    assert not faults(step, made)
    assert made.temporary <= 1.05 * most.temporary
    if step.kind == "h100":
        assert made.launches <= most.launches
        assert made.waits <= most.waits
    else:  # a later libtpu schedules otherwise
        assert made.launches <= 1.05 * most.launches


@pytest.mark.parametrize("case", ON_HOST, ids=lambda case: case[2])
def test_callbacks_need_a_gpu(case: tuple[int, str, str]) -> None:
    """Such steps are traced, but the client of a GPU that is only described lowers no callbacks."""
    with pytest.raises(RuntimeError, match="Unknown backend: 'gpu' requested, but no platforms"):
        Step("h100", 1, *case).compile()
