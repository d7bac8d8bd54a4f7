"""Buffers whose priorities are on the host or on the device, their methods with made-up arguments, and what they hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.samplers import Prioritized, _host_priorities
from tests.support.trees import same

EXPIRED = "the priorities of this BufferState have expired.*Carry on the state"
CAPACITY, LANES, BATCH = 60, 3, 16
EXAMPLE = {"x": jax.ShapeDtypeStruct((), jnp.int32), "done": jax.ShapeDtypeStruct((), jnp.bool_)}
KEY = np.array([0, 7], np.uint32)


def make(on, options=None, **parts):
    return fbuf.Buffer(CAPACITY, sampler=Prioritized(on=on, **options or {}), **{"lanes": LANES, **parts})


def verb(buffer, what, state, seed):
    """One verb with made-up arguments; `(state, what it gave)`."""
    key = jax.random.key(seed)
    if what in ("extend", "more"):
        count = 4 if what == "extend" else 23  # more than a lane holds
        bits = jax.random.bits(key, (count, LANES), jnp.uint32)
        rows = {"x": bits.astype(jnp.int32), "done": bits % 5 == 0}
        priority = (bits % 1000).astype(jnp.float32) if what == "more" else None
        return buffer.extend(state, rows, mask=bits % 7 > 0, priority=priority), None
    if what == "set":
        return buffer.set(state, alpha=jnp.asarray(seed % 8, jnp.float32) / 4), None
    if what == "clear":
        return buffer.clear(state), None
    state, batch = buffer.sample(state, key, BATCH, beta=jnp.float32(0.7))
    errors = jnp.exp(jax.random.normal(key, (BATCH,), jnp.float32) * jnp.float32(6)).at[3].set(jnp.nan)
    return buffer.update_priority(state, batch.index, jnp.where(seed % 4 > 0, errors, jnp.float32(0))), batch


VERBS = ("extend", "more", "learn", "set", "clear")
run = functools.cache(lambda buffer: jax.jit(functools.partial(verb, buffer), static_argnums=0))


def leaves_of(state):
    """Of a buffer without lanes that are cut: float32[C]."""
    tree = state.sampler.tree
    return _host_priorities.leaves(tree) if isinstance(tree, _host_priorities.HostTree) else np.asarray(tree)[:CAPACITY]


def compare(device, host):
    same(leaves_of(device), leaves_of(host))
    same(device.sampler.max_priority, host.sampler.max_priority)
    same(device.counters, host.counters)
