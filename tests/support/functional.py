"""Buffers, their methods, and checks that these are pure functions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.samplers import Prioritized, Uniform
from fbuf.storages import Deduplicated
from fbuf.views import Transition
from tests.support import flags
from tests.support.flags import EXAMPLE
from tests.support.trees import numpy_leaf, same

LANES, CAPACITY, BATCH = 2, 24, 6
STACKS = {"sampler": Prioritized(), "view": Transition(n_step=2, stack=2, autoreset="same_step"), "lanes": LANES}
BUFFERS = {
    "uniform-row": fbuf.Buffer(CAPACITY, lanes=LANES),
    "prioritized-transition": fbuf.Buffer(CAPACITY, **STACKS),
    "deduplicated": fbuf.Buffer(CAPACITY, storage=Deduplicated(keys=("obs",), blocks=64), **STACKS),
}
RICH = BUFFERS["prioritized-transition"]
KEY = jax.random.key(7)


def rows(steps, seed=0):
    return flags.rows(RICH, steps, seed)


@functools.cache
def filled(buffer=RICH):
    """A state on its third round, so that every part of it is in use. Shared: nobody may donate it."""
    state = buffer.init(EXAMPLE)
    for seed in range(4):
        state = buffer.extend(state, rows(7, seed))
    return state


def step(buffer, state, key, new):
    state = buffer.extend(state, new)
    state, batch = buffer.sample(state, key, BATCH)
    if buffer.sampler.prioritized:
        state = buffer.update_priority(state, batch.index, batch.data["reward"])
    state = buffer.update_rows(state, batch.index, {"reward": batch.weight})
    return state, batch


def methods(buffer):
    index = fbuf.Index(jnp.arange(4, dtype=jnp.int32), jnp.full((4,), 3, jnp.uint32))
    error = jnp.arange(4, dtype=jnp.float32)
    one, given = jax.tree.map(lambda x: x[0], rows(1)), rows(3, 9)
    calls = {
        "add": lambda s: buffer.add(s, one),
        "extend": lambda s: buffer.extend(s, given),
        "extend masked": lambda s: buffer.extend(s, given, mask=given["terminated"]),
        "sample": lambda s: buffer.sample(s, KEY, BATCH),
        "peek": lambda s: buffer.peek(s, KEY, BATCH),
        "update_rows": lambda s: buffer.update_rows(s, index, {"reward": error}),
        "clear": buffer.clear,
        "get": lambda s: buffer.get(s, index),
        "rows": buffer.rows,
        "newest rows": lambda s: buffer.rows(s, last=3),
        "can_sample": buffer.can_sample,
        "stats": buffer.stats,
        "convert": lambda s: buffer.convert(dataclasses.replace(buffer, sampler=Uniform()), s),
    }
    if buffer.sampler.prioritized:
        calls["update_priority"] = lambda s: buffer.update_priority(s, index, error)
        calls["set"] = lambda s: buffer.set(s, alpha=0.9)
        calls["extend priority"] = lambda s: buffer.extend(s, given, priority=given["reward"])
    return calls


def check_pure(buffer, after=lambda method: None):
    """No method changes its arguments; two calls give the same. `after` each method is called with its name."""
    state = filled(buffer)
    before = jax.tree.map(numpy_leaf, state)
    for method, call in methods(buffer).items():
        first = call(state)
        same(state, before)
        same(call(state), first)
        after(method)


def build():
    return fbuf.Buffer(CAPACITY, **STACKS)


def laps(buffer, lap):
    state = buffer.init(EXAMPLE)
    return state.replace(ring=dataclasses.replace(state.ring, lap=jnp.full((LANES,), lap, jnp.uint32)))


def check_laps(buffer):
    run = jax.jit(functools.partial(step, buffer))
    old, young = laps(buffer, 2**32 - 2), buffer.init(EXAMPLE)
    passed = []
    for seed in range(8):
        given = rows(5, seed)
        old, batch = run(old, jax.random.key(seed), given)
        young, expected = run(young, jax.random.key(seed), given)
        same(batch.data, expected.data)
        same((batch.index.slot, batch.mask), (expected.index.slot, expected.mask))
        since = np.asarray(expected.index.generation, np.int64) - 1  # laps since the beginning; 0 is never a lap
        same(batch.index.generation, np.where(batch.mask, (since + 2**32 - 3) % (2**32 - 1) + 1, 0).astype(np.uint32))
        passed.append(int(old.ring.lap[0]))
        assert int(buffer.size(old)) == int(buffer.size(young))
    assert max(passed) > 2**31 > min(passed), "the laps never came round"
    same(*({name: value for name, value in buffer.stats(s).items() if name != "writes"} for s in (old, young)))
