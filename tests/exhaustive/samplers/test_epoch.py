"""Every kind of epoch over every view; every order of verbs in place."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import fbuf
from fbuf.samplers import Epoch
from fbuf.views import Transition
from tests.support.epoch import LARGE, Trial, arrive, buffer_of, check_inplace, check_places, empty, filled, sample
from tests.support.tables import checks
from tests.support.trees import same


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("view", ["row", "steps"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_more_programs(shuffle, drop_last, view, lanes):
    for seed in range(6, 12):
        Trial(buffer_of(Epoch(shuffle, drop_last), view, lanes), seed).run(80, (1, 5, 40))


def test_rows_of_another_sampler():
    """`convert` tells the sampler of rows that arrived before it."""
    view = Transition(n_step=3, autoreset="same_step")
    uniform = fbuf.Buffer(capacity=12, view=view)
    trial = Trial(dataclasses.replace(uniform, sampler=Epoch()), 0)
    trial.buffer, trial.state = uniform, empty(uniform)
    for _ in range(3):
        trial.extend(7)
    trial.buffer = dataclasses.replace(uniform, sampler=Epoch())
    trial.state = uniform.convert(trial.buffer, trial.state)
    trial.model = trial.model.convert(trial.buffer)
    trial.sample(4)
    trial.extend(1)
    trial.sample(40)


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

    def step(state, key):
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


test_checks = checks((check_places, [(2000, 20_000)]))


test_optimized_checks = pytest.mark.optimized(
    checks((check_inplace, [("row", "es"), ("row", "ses"), ("steps", "ses")]))
)
