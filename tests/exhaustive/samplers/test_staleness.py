"""`samplers.Staleness` in place."""

import jax
import jax.numpy as jnp
import pytest

import fbuf
from fbuf.samplers import Staleness
from fbuf.views import Row, Sequence
from tests.support.epoch import FIELDS
from tests.support.inplace import assert_draw_write_draw


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("sampler", "view"),
    [
        (Staleness(8, unit=100), Row()),
        (Staleness(8, version="action"), Sequence(16, boundary="mask", autoreset="same_step")),
    ],
)
def test_steps_are_in_place(sampler, view):
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=sampler, view=view)
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})


def test_runs_that_are_forgotten():
    """Two actors in one lane: each change begins a run."""
    version = jnp.tile(jnp.array([7, 8]), 40)
    rows = {"i": jnp.arange(80), "version": version}
    for runs, left in ((None, 64), (2, 2), (10, 10)):
        buffer = fbuf.Buffer(100, sampler=Staleness(1, version="version", runs=runs))
        state = buffer.extend(buffer.init({"i": jnp.int32(0), "version": jnp.int32(0)}), rows)
        batch = buffer.peek(state, jax.random.key(0), 4096)
        assert sorted(set(batch.data["i"].tolist())) == list(range(80 - left, 80))
        assert int(buffer.stats(state)["anchors_fresh"]) == left
