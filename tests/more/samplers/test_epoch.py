"""More of `samplers.Epoch`: programs in other forms, many states at once, conversions, strict modes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import permutation
from fbuf.samplers import Epoch
from tests.support.epoch import LARGE, SMALL, Trial, buffer_of, check_arriving, empty, filled, is_draw, sample
from tests.support.trees import same, x64


def test_more_programs():
    for seed in range(3, 6):
        Trial(buffer_of(Epoch(shuffle=False, drop_last=True), "steps", 3), seed).run(80, (1, 5, 40))


def test_programs_with_keyed_orders(monkeypatch):
    """As if true shuffles ended at 5 anchors: small buffers then cross over again and again."""
    monkeypatch.setattr(permutation, "SHUFFLED", 5)
    for seed in range(3):
        # A length that no other test has: verbs compiled for it know the other line.
        Trial(buffer_of(Epoch(drop_last=True), "row", None, length=12), seed).run(80, (5, 13))


def test_any_kind_of_key_will_do():
    state = filled(SMALL, 9)
    same(sample(SMALL, state, jax.random.key(3), 4), sample(SMALL, state, jax.random.PRNGKey(3), 4))
    other, batch = sample(SMALL, state, jax.random.key(3, impl="rbg"), 4)
    is_draw(batch, 4, 9)
    same(jax.tree.map(jnp.zeros_like, other), jax.tree.map(jnp.zeros_like, state))


def test_clean_under_strict_modes():
    results, keys = [], [jax.random.key(0), jax.random.key(1)]
    empty_state, number = LARGE.init(jnp.int32(0)), np.arange(3000, dtype=np.int32)
    for modes in ((), (x64(), jax.numpy_dtype_promotion("strict"), jax.debug_nans(True), jax.checking_leaks())):
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
    assert all(name.startswith((".sampler.turn", ".header")) for name in moved)


def test_an_epoch_in_order_while_rows_arrive():
    check_arriving(shuffle=False)
