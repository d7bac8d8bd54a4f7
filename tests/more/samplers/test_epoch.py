"""More of `samplers.Epoch`: programs in other forms, many states at once, conversions, strict modes."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf._algorithms import permutation
from fbuf.samplers import Epoch
from tests.support.epoch import LARGE, SMALL, Trial, arrive, buffer_of, check_arriving, empty, filled, is_draw, sample
from tests.support.trees import same


@pytest.mark.parametrize(
    ("sampler", "view", "lanes"), [(Epoch(), "row", None), (Epoch(shuffle=False, drop_last=True), "steps", 3)]
)
def test_more_programs(sampler, view, lanes):
    for seed in range(3, 6):
        Trial(buffer_of(sampler, view, lanes), seed).run(80, (1, 5, 40))


@pytest.mark.parametrize(("sampler", "view", "lanes"), [(Epoch(drop_last=True), "row", None), (Epoch(), "steps", 3)])
def test_programs_with_keyed_orders(monkeypatch, sampler, view, lanes):
    """As if true shuffles ended at 5 anchors: small buffers then cross over again and again."""
    monkeypatch.setattr(permutation, "SHUFFLED", 5)
    for seed in range(3):
        # A length that no other test has: verbs compiled for it know the other line.
        Trial(buffer_of(sampler, view, lanes, length=12), seed).run(80, (5, 13))


def test_vmap_over_states():
    """None, few (shuffled), many (a keyed order), and all overwritten: each as if alone."""
    buffer = LARGE
    counts = (0, 5, 700, 3000)
    alone = [filled(buffer, count) for count in counts]
    for i in (1, 2, 3):
        alone[i] = sample(buffer, alone[i], jax.random.key(i), 4)[0]
    alone[3] = arrive(buffer, alone[3], 0, 2980)
    together = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    some = jnp.arange(2, dtype=jnp.int32)

    def step(state: Any, key: jax.Array) -> Any:
        state, batch = buffer.sample(state, key, 300)
        return buffer.extend(state, some), batch

    many, one = jax.jit(jax.vmap(step)), jax.jit(step)
    for turn in range(4):
        keys = jax.random.split(jax.random.key(turn), len(counts))
        together, batches = many(together, keys)
        for i, key in enumerate(keys):
            alone[i], batch = one(alone[i], key)
            same(jax.tree.map(lambda x, i=i: x[i], batches), batch)
    same(together, jax.tree.map(lambda *x: jnp.stack(x), *alone))


def test_any_kind_of_key_will_do():
    state = filled(SMALL, 9)
    same(sample(SMALL, state, jax.random.key(3), 4), sample(SMALL, state, jax.random.PRNGKey(3), 4))
    other, batch = sample(SMALL, state, jax.random.key(3, impl="rbg"), 4)
    is_draw(batch, 4, 9)
    same(jax.tree.map(jnp.zeros_like, other), jax.tree.map(jnp.zeros_like, state))


def test_clean_under_strict_modes():
    results, keys = [], [jax.random.key(0), jax.random.key(1)]
    empty_state, number = LARGE.init(jnp.int32(0)), np.arange(3000, dtype=np.int32)
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    for modes in ((), (wide(True), jax.numpy_dtype_promotion("strict"), jax.debug_nans(True), jax.checking_leaks())):
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            draw = jax.jit(lambda state, key: LARGE.sample(state, key, 4))  # traced in each mode
            write = jax.jit(lambda state, rows, mask: LARGE.extend(state, rows, mask=mask))
            state, none = draw(empty_state, keys[0])
            state, some = draw(write(state, number, number < 1500), keys[1])
            results.append((LARGE.clear(state), none, some, LARGE.stats(state)))
    same(results[1], results[0])


def test_eager_sample_copies_nothing_that_grows():
    buffer = buffer_of(Epoch(), "steps", lanes=2)
    state = empty(buffer)
    after, _ = buffer.sample(state, jax.random.key(1), 7)
    pairs = zip(jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(after), strict=True)
    moved = {jax.tree_util.keystr(path) for (path, a), b in pairs if a is not b}
    assert all(name.startswith((".sampler.turn", ".counters", ".token")) for name in moved)


def test_an_epoch_in_order_while_rows_arrive():
    check_arriving(shuffle=False)
