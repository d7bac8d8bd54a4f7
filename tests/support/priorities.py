"""Buffers with priorities, what torchrl makes of these, and what is refused."""

import functools
import itertools

import jax
import numpy as np

import fbuf
from fbuf._algorithms.draw_without_replacement import draw as race
from fbuf.samplers import Prioritized, Ranked  # noqa: F401

KEY = jax.random.key(0)


@functools.cache
def _filled(sampler, priority, capacity):
    buffer = fbuf.Buffer(capacity, sampler=sampler)
    rows = np.arange(len(priority), dtype=np.int32)
    return buffer, buffer.extend(buffer.init(np.int32(0)), rows, priority=np.array(priority, np.float32))


def filled(sampler, priority, capacity=None):
    return _filled(sampler, tuple(np.asarray(priority).tolist()), capacity or len(priority))


def leaves(buffer, state):
    return np.asarray(state.sampler.tree)[: buffer.capacity]


def index_of(buffer, state, slots):
    return buffer.get(state, np.array(slots, np.int32)).index


@functools.partial(jax.jit, static_argnums=(2, 3))
def races(tree, keys, batch_size, capacity, wanted=None):
    return jax.vmap(lambda key: race(tree, key, batch_size, capacity, wanted))(keys)


def sets_of(leaf, number):
    """Chance of each set of `number` leaves drawn one after another without putting back."""
    chances = {}
    for order in itertools.permutations(range(len(leaf)), number):
        left, chance = leaf.sum(), 1.0
        for i in order:
            chance *= leaf[i] / left
            left -= leaf[i]
        chances[tuple(sorted(order))] = chances.get(tuple(sorted(order)), 0.0) + chance
    return chances


REFUSED = """
Prioritized(uniform=1.5) => ValueError Prioritized: uniform is 1.5; expected a Python number from 0 to 1
Prioritized(uniform=True) => ValueError Prioritized: uniform is True
Prioritized(uniform=float("nan")) => ValueError Prioritized: uniform is nan
Prioritized(alpha=None) => ValueError Prioritized: alpha is None
Prioritized(largest="now") => ValueError Prioritized: largest is 'now'; expected "seen" or "held"
Prioritized(uniform=0.1, replace=False) => ValueError Prioritized: uniform is 0.1; expected None with replace=False
Ranked(alpha=-1) => ValueError Ranked: alpha is -1; expected a finite Python number >= 0
Ranked(uniform=-0.1) => ValueError Ranked: uniform is -0.1; expected a Python number from 0 to 1
Ranked(normalize="all") => ValueError Ranked: normalize is 'all'
Ranked(largest=1) => ValueError Ranked: largest is 1
SHARED.set(shared, uniform=1.1) => ValueError Buffer.set: | expected a number from 0 to 1
SHARED.set(shared, uniform=2) => ValueError Buffer.set: | expected a number from 0 to 1
SHARED.set(shared, uniform=np.float32(3)) => ValueError Buffer.set: | expected a number from 0 to 1
SHARED.sample(shared, KEY, 2, uniform=7) => ValueError Buffer.sample: uniform is 7; expected a number from 0 to 1
SHARED.sample(shared, KEY, 2, alpha=0.0) => ValueError has no number 'alpha' (it has: beta, uniform)
SHARED.set(shared, alpha=float("nan")) => ValueError alpha is nan; expected a finite number >= 0
SHARED.set(shared, beta=-1.0) => ValueError beta is -1.0; expected a finite number >= 0
SHARED.set(shared, eps=float("inf")) => ValueError eps is inf; expected a finite number >= 0
SHARED.set(shared, eps=np.ones(3, np.float32)) => ValueError eps has shape [3]; expected one number
PLAIN.set(plain, uniform=0.5) => ValueError has no number 'uniform'
"""
PLAIN, SHARED = (fbuf.Buffer(4, sampler=Prioritized(uniform=share)) for share in (None, 0.1))
