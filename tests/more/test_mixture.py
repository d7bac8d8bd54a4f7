"""Mixtures: every sampler and mode once, windows, data sets, loops, and steps in place."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Consume, Prioritized, Uniform
from fbuf.views import Sequence, Transition
from tests import pieces
from tests.support.mixture import (
    EXAMPLE,
    MODES,
    batches,
    check_flags,
    check_in_place,
    check_sampler,
    check_weights,
    density,
    filled,
    numbers,
    same,
    three,
    two,
    weighted,
)
from tests.test_uniformity import chi_square_z

CASES = [
    ("Prioritized(replace=False)", "exact"),
    ("Uniform", "all"),
    ("Consume", "random"),
    ("Consume(3)", "exact"),
    ("Prioritized", "annealed"),
    ("Prioritized(on='host')", "random"),
    ("Ranked", "all"),
    ("Staleness", "exact"),
]


@pytest.mark.parametrize(("sampler", "mode"), CASES)
def test_batches_hold_rows_of_each_buffer(sampler: str, mode: str) -> None:
    check_sampler(sampler, mode)


@pytest.mark.parametrize("mode", ["exact", "annealed", "all"])
def test_weights_are_those_of_the_mixture(mode: str) -> None:
    check_weights(mode, "union" if mode == "all" else "source", 1.0)


def test_compressed_rows_give_the_batches_of_device() -> None:
    assert same(batches("Device", "annealed"), batches("Compressed", "annealed"))


@jax.tree_util.register_static
class InOrder(Uniform):
    """A sampler of a user's own: anchors in order of their slots, each share of the buffer once."""

    def draw(self, sampler: Any, key: Any, batch_size: int, population: Any, options: Any, token: Any) -> Any:
        sampler, draw = super().draw(sampler, key, batch_size, population, options, token)
        return sampler, dataclasses.replace(draw, slot=jnp.sort(draw.slot))


def test_a_sampler_may_draw_in_any_order() -> None:
    mixture = fbuf.Mixture({name: fbuf.Buffer(50, sampler=InOrder()) for name in "ab"}, annealed=True)
    ids, *_ = map(np.asarray, numbers(mixture)(filled(mixture), jax.random.split(jax.random.key(0), 600)))
    counts = np.array([np.sum(ids == 1000 * s + i) for s in (1, 2) for i in range(50)])
    assert chi_square_z(counts, np.full(100, 1 / 100)) < 4


@pytest.mark.parametrize("quota", ["exact", "random"])
def test_rows_of_an_empty_buffer_are_masked(quota: str) -> None:
    mixture = three(quota=quota, if_empty="mask")
    state = filled(mixture, a=0)
    _, probability, source = map(np.asarray, numbers(mixture)(state, jax.random.split(jax.random.key(0), 300)))
    counts = np.bincount(source, minlength=4)
    if quota == "random":
        assert chi_square_z(counts[[1, 2, 3]], np.array([0.25, 0.5, 0.25])) < 4 and counts[0] == 0
    else:
        assert counts.tolist() == [0, 4 * 300, 8 * 300, 4 * 300]
    assert not bool(mixture.can_sample(state))
    np.testing.assert_allclose(probability[source == 2], 0.5 / 40, rtol=1e-6)


def test_a_fraction_of_zero_is_never_drawn_from() -> None:
    for settings in ({}, {"annealed": True}, {"quota": "random"}):
        mixture = two(fractions={"a": 1.0, "b": 0.0}, **settings)
        state = filled(mixture, a=0)
        state, batch = mixture.sample(state, jax.random.key(0), 8)
        assert not bool(jnp.any(batch.mask)) and not bool(mixture.can_sample(state))
        assert not int(mixture.stats(state)["moved_rows"])


def test_windows_take_their_errors() -> None:
    view = Sequence(3, episode_end=("done",))
    buffers = {n: fbuf.Buffer(30, view=view, sampler=Prioritized(alpha=1.0, eps=0.0)) for n in "ab"}
    mixture = fbuf.Mixture(buffers)
    example = {"id": np.int32(0), "done": np.bool_(False)}
    state = mixture.init({"a": example, "b": example})
    for name in "ab":
        state = mixture.extend(state, name, {"id": np.arange(30, dtype=np.int32), "done": np.zeros(30, bool)})
    state, batch = mixture.sample(state, jax.random.key(0), 6)
    after = mixture.update_priority(state, batch.index, jnp.ones((6, 3)) * 5, eta=0.5)
    for i, name in enumerate("ab"):
        slots = np.unique(np.asarray(batch.index.slot)[np.asarray(batch.source) == i])
        np.testing.assert_allclose(after[name].sampler.tree[:30][slots], 5, rtol=1e-6)


def test_data_sets_mix_like_others(tmp_path: Path) -> None:
    """Two data sets, and one beside a buffer that grows."""
    rows = pieces.make(tmp_path)
    buffer, held = fbuf.datasets.open(tmp_path, view=Transition())
    sets = fbuf.Mixture({"one": buffer, "two": buffer}, fractions={"one": 0.3, "two": 0.7})
    both = sets.init({"one": held, "two": held})
    both, batch = sets.sample(both, jax.random.key(0), 10)
    assert batch.source.tolist() == [0] * 3 + [1] * 7 and bool(jnp.all(batch.mask))
    actions = np.asarray(rows["action"])[np.asarray(batch.index.slot)]
    assert (np.asarray(batch.data["action"]) == actions).all()

    online = fbuf.Buffer(50, view=Transition(), sampler=Prioritized())
    mixture = fbuf.Mixture({"online": online, "offline": buffer})
    state = mixture.init({"online": {name: array[0] for name, array in rows.items()}, "offline": held})
    state, batch = mixture.sample(state, jax.random.key(0), 8)
    assert batch.source.tolist() == [1] * 8 and int(mixture.stats(state)["moved_rows"]) == 4
    state = mixture.extend(state, "online", {name: array[:20] for name, array in rows.items()})
    state, batch = mixture.sample(state, jax.random.key(1), 8)
    assert batch.source.tolist() == [0] * 4 + [1] * 4
    state = mixture.update_priority(state, batch.index, jnp.ones(8))
    after = mixture.update_rows(state, batch.index, {"action": batch.data["action"]})
    assert int(mixture.stats(after)["refused_read_only"]) == 4
    with pytest.raises(TypeError):
        mixture.extend(state, "offline", {name: array[:1] for name, array in rows.items()})
    with pytest.raises(TypeError):
        mixture.clear(state)
    assert int(mixture["online"].size(mixture.clear(state, "online")["online"])) == 0


@pytest.mark.parametrize("mode", ["exact", "annealed"])
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


def test_a_checked_step_raises() -> None:
    mixture = two()
    state = filled(mixture, b=0)
    step = fbuf.checked(lambda state, key: mixture.sample(state, key, 4))
    state, batch = step(state, jax.random.key(0))
    wrong = dataclasses.replace(batch.index, source=batch.index.source + 7)
    with pytest.raises(ValueError, match="4 out of range"):
        fbuf.checked(mixture.update_rows)(state, wrong, {"id": jnp.zeros(4, jnp.int32)})
    with pytest.raises(ValueError, match="there is nothing to draw now"):
        step(mixture.clear(state), jax.random.key(0))


@pytest.mark.optimized
@pytest.mark.parametrize(("sampler", "mode"), [("Consume", "exact"), ("Prioritized", "annealed")])
def test_steps_are_in_place(sampler: str, mode: str) -> None:
    check_in_place(sampler, mode)


def test_batches_under_strict_flags() -> None:
    check_flags("annealed")


@pytest.mark.parametrize("mode", ["random", "all"])
def test_rows_are_drawn_by_their_probabilities(mode: str) -> None:
    mixture, state = weighted(MODES[mode])
    ids, probability, _ = map(np.asarray, numbers(mixture)(state, jax.random.split(jax.random.key(7), 3000)))
    wanted = density(mixture, state, {"a": 0.25, "b": 0.75})
    np.testing.assert_allclose(probability, [wanted[n] for n in ids.tolist()], rtol=1e-5)
    counts = np.array([np.sum(ids == n) for n in sorted(wanted)])
    assert chi_square_z(counts, np.array([wanted[n] for n in sorted(wanted)])) < 4


def test_random_quotas_leave_out_an_empty_buffer() -> None:
    mixture = three(quota="random")
    state = filled(mixture, a=0)
    _, probability, source = map(np.asarray, numbers(mixture)(state, jax.random.split(jax.random.key(0), 300)))
    counts = np.bincount(source, minlength=4)
    assert counts[3] == 0 and chi_square_z(counts[[1, 2]], np.array([1 / 3, 2 / 3])) < 4
    assert bool(mixture.can_sample(state))
    np.testing.assert_allclose(probability[source == 2], 2 / 3 / 40, rtol=1e-6)


def test_priorities_go_where_rows_came_from() -> None:
    sampler = Prioritized(alpha=1.0, eps=0.0)
    mixture = fbuf.Mixture(
        {"a": fbuf.Buffer(20, sampler=sampler), "u": fbuf.uniform(20), "b": fbuf.Buffer(20, sampler=sampler)}
    )
    state = filled(mixture)
    state, batch = mixture.sample(state, jax.random.key(0), 12)
    error = jnp.where(jnp.arange(12) == 0, jnp.nan, jnp.arange(12) + 2.0)
    new = mixture.update_priority(state, batch.index, error)
    for i, name in enumerate(mixture.names):
        if name == "u":
            continue
        leaves = np.ones(20)
        for row in range(12):
            if int(batch.source[row]) == i and row:
                leaves[int(batch.index.slot[row])] = row + 2
        np.testing.assert_allclose(new[name].sampler.tree[:20], leaves, rtol=1e-6)
        assert int(mixture.stats(new)[f"{name}/refused_nonfinite"]) == (name == "a")
    assert jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.all(x == y)), state["u"], new["u"]))


def test_plans_and_summaries_are_those_of_the_buffers() -> None:
    mixture = two()
    state = filled(mixture)
    plans = mixture.plan({"a": EXAMPLE, "b": EXAMPLE})
    assert plans["b"].device == mixture["b"].plan(EXAMPLE).device
    mixture.flush(state)
    assert {name: summary.size for name, summary in mixture.summary(state).items()} == {"a": 20, "b": 40}
