"""Mixtures: every sampler, storage and target in every mode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Consume, Prioritized
from tests.support.mixture import (
    MODES,
    SAMPLERS,
    check_empty,
    check_in_place,
    check_sampler,
    check_weights,
    filled,
    numbers,
    three,
    two,
)
from tests.support.uniformity import chi_square_z


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_hold_rows_of_each_buffer(sampler: str, mode: str) -> None:
    check_sampler(sampler, mode)


@pytest.mark.parametrize(("mode", "target"), [("exact", "source"), ("random", "source"), ("all", "union")])
def test_weights_are_those_of_the_mixture(mode: str, target: str) -> None:
    check_weights(mode, target, 1.0)


@pytest.mark.optimized
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sampler", ["Uniform", "Epoch", "Consume", "Prioritized", "Prioritized(replace=False)", "Ranked"]
)
def test_steps_are_in_place(sampler: str, mode: str) -> None:
    check_in_place(sampler, mode)


@pytest.mark.parametrize("quota", ["exact", "random"])
def test_rows_of_an_empty_buffer_are_masked(quota: str) -> None:
    mixture = three(quota=quota, if_empty="mask")
    state = filled(mixture, a=0)
    _, probability, source, _ = map(np.asarray, numbers(mixture)(state, jax.random.split(jax.random.key(0), 300)))
    counts = np.bincount(source, minlength=4)
    if quota == "random":
        assert chi_square_z(counts[[1, 2, 3]], np.array([0.25, 0.5, 0.25])) < 4 and counts[0] == 0
    else:
        assert counts.tolist() == [0, 4 * 300, 8 * 300, 4 * 300]
    assert not bool(mixture.can_sample(state))
    np.testing.assert_allclose(probability[source == 2], 0.5 / 40, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_eager_jitted_and_scanned_give_the_same(mode: str) -> None:
    samplers = (Prioritized(), Consume(2))
    one, other = (fbuf.Buffer(c, sampler=s) for c, s in zip((20, 40), samplers, strict=True))
    mixture = two(one, other, **MODES[mode])

    def step(state: Any, i: Any) -> Any:
        rows = {"obs": jnp.zeros((2, 8, 8), jnp.uint8) + i.astype(jnp.uint8), "id": jnp.full((2,), i, jnp.int32)}
        state = mixture.extend(state, "a", rows)
        state, batch = mixture.sample(state, jax.random.fold_in(jax.random.key(3), i), 8)
        state = mixture.update_priority(state, batch.index, batch.data["id"] + 1.0)
        return state, batch

    start = filled(mixture, a=0)
    eager, out = start, []
    for i in range(4):
        eager, batch = step(eager, jnp.int32(i))
        out.append(batch)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *out)
    scanned, batches = jax.jit(lambda state: lax.scan(step, state, jnp.arange(4)))(start)
    for a, b in zip(jax.tree.leaves((eager, stacked)), jax.tree.leaves((scanned, batches)), strict=True):
        assert a.dtype == b.dtype and bool(jnp.all(a == b))


@pytest.mark.parametrize("annealed", [False, True])
def test_other_buffers_give_the_rows_of_an_empty_one(annealed: bool) -> None:
    check_empty(annealed=annealed)
