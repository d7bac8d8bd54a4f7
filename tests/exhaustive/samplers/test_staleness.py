"""`samplers.Staleness` in place."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import fbuf
from fbuf.samplers import Staleness
from fbuf.views import Row, Sequence
from tests.support.epoch import FIELDS
from tests.support.inplace import assert_draw_write_draw


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("sampler", "view"),
    [(Staleness(8, unit=100), Row()), (Staleness(8, version="action"), Sequence(16, boundary="mask"))],
)
def test_steps_are_in_place(sampler: Any, view: Any) -> None:
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=sampler, view=view)
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})
