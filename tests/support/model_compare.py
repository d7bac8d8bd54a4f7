"""Comparisons of a buffer's state with what the model of `tests/support/model.py` holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import rank_buckets, sum_tree
from fbuf._indexing import anchors
from fbuf.samplers import _host_priorities


def host_tree(tree):
    leaves = _host_priorities.leaves(tree)
    held = _host_priorities.store_of(tree)._tree
    return leaves, held._nodes, held._least


def compare_fields(got, expected):
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        if np.asarray(want).dtype == np.float64:
            np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            assert np.array_equal(got[name], want), (name, got[name], want)


@functools.partial(jax.jit, static_argnums=1)
def rebuilt(leaves, reduce):
    return sum_tree.rebuild(leaves, reduce=reduce)


@functools.partial(jax.jit, static_argnums=1)
def leaves_of(tree, capacity):
    return sum_tree.get(tree, jnp.arange(capacity, dtype=jnp.int32))


def compare_trees(buffer, sampler, leaf, priority):
    """Leaves and priorities are those expected, by slot; parents are what all leaves give, bit for bit."""
    near = {"rtol": 2e-5, "atol": 0}
    lowest = buffer.sampler.normalize == "buffer"
    if buffer.sampler.on_host:
        leaves, sums, lows = host_tree(sampler.tree)
        np.testing.assert_allclose(leaves, leaf, **near)
        assert (sums == np.asarray(rebuilt(leaves, "sum"))).all()
        if lowest:
            low = np.asarray(rebuilt(np.where(leaves > 0, leaves, np.float32(np.inf)), "min"))
            assert (lows == low[low.size - lows.size :]).all()  # the host has no leaves of its own for these
        return
    leaves = np.asarray(leaves_of(sampler.tree, buffer.capacity))
    np.testing.assert_allclose(leaves, leaf, **near)
    assert (np.asarray(sampler.tree) == np.asarray(rebuilt(leaves, "sum"))).all()
    if lowest:
        drawn = np.isfinite(priority) & ((leaves > 0) | (sampler.uniform is not None))
        low = np.where(drawn, leaves, np.float32(np.inf))
        assert (np.asarray(sampler.low) == np.asarray(rebuilt(low, "min"))).all()
    if sampler.top is not None:
        held = np.asarray(leaves_of(sampler.top, buffer.capacity))
        np.testing.assert_allclose(held, priority, **near)
        assert (np.asarray(sampler.top) == np.asarray(rebuilt(held, "max"))).all()


@jax.jit
def ranks_of(bucket):
    number = bucket.shape[0]
    slot, zero = jnp.arange(number, dtype=jnp.int32), jnp.zeros((), jnp.int32)
    return rank_buckets.set(rank_buckets.init(number), slot, bucket, number, zero)


def compare_ranks(buffer, sampler, bucket, priority):
    """Buckets are those expected, by slot; counts are what all of them give."""
    del priority
    again = ranks_of(bucket.astype(np.int32))
    for one, two in zip(jax.tree.leaves(sampler.ranks), jax.tree.leaves(again), strict=True):
        assert np.array_equal(one, two)


def drawable_slots(buffer, state):
    """Slots of anchors by flags and by the sampler's log, which must agree; None where every row is one."""
    if state.anchors is None:
        return None
    flags = np.asarray(state.anchors.flags)
    slots = set(np.flatnonzero(flags & anchors.OPEN).tolist())
    if not buffer.sampler.prioritized:
        lanes, length, _ = buffer.geometry
        queue = getattr(state.sampler, "log", state.sampler)
        log, head, count = np.asarray(queue.slot), np.asarray(queue.head), np.asarray(queue.count)
        logged = [int(log[(head[e] + i) % length * lanes + e]) for e in range(lanes) for i in range(count[e])]
        assert len(logged) == len(set(logged)) and set(logged) == slots
    return slots
