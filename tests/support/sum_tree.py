"""`fbuf._algorithms.sum_tree` in numpy, and checks of the code of each platform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms import sum_tree as st
from fbuf._algorithms.sum_tree import _keep_last_by_comparison, keep_last
from tests.support.uniformity import chi_square_z

REDUCE = {"sum": (np.add, 0.0), "min": (np.minimum, np.inf), "max": (np.maximum, -np.inf)}


PATHS = ("cpu", "gpu", "tpu")


def use_path(monkeypatch, path):
    """Let the CPU run the code of another platform."""
    if path == "cpu":
        return path
    read = st._sibling_windows if path == "gpu" else st._sibling_elements

    def set_as(trees, index, leaves, *, capacity, reduce, first):  # of any indices, so not `distinct`
        if path == "gpu":
            first = st._first_dense(capacity, max(index.shape[0], st._SWEPT))
        return st._set_by_level(trees, index, leaves, capacity=capacity, reduce=reduce, first=first, read=read)

    monkeypatch.setattr(st, "_set_by_loop", set_as)
    monkeypatch.setattr(
        st, "_descend_by_loop", functools.partial(st._descend_by_level, read=read, in_halves=path == "gpu")
    )
    return path


def setter(capacity, reduce="sum"):
    # A new lambda for every test: jit caches by function, and the paths differ behind its back.
    return jax.jit(lambda t, i, v: st.set(t, i, v, capacity, reduce=reduce), donate_argnums=0)


def drawer(capacity, batch, stratified=False):
    return jax.jit(lambda t, k: st.draw(t, k, batch, capacity, stratified=stratified))


def expected_tree(leaves, reduce="sum"):
    """The whole array, level by level, adding in the documented order."""
    f, identity = REDUCE[reduce]
    level, parts = leaves.astype(np.float32), []
    while True:
        level = np.pad(level, (0, -len(level) % 8), constant_values=np.float32(identity))
        parts.append(level)
        if len(parts) > 1 and len(parts[-2]) == 8:
            return np.concatenate(parts)
        c = level.reshape(-1, 8).T
        level = f(f(f(c[0], c[1]), f(c[2], c[3])), f(f(c[4], c[5]), f(c[6], c[7])))


def count(tree, capacity, batch, batches, seed):
    @jax.jit
    def run(tree, key):
        def step(counts, key):
            index, _ = st.draw(tree, key, batch, capacity, stratified=False)
            return counts.at[index].add(np.int32(1)), None

        return lax.scan(step, jnp.zeros((capacity,), jnp.int32), jax.random.split(key, batches))[0]

    return np.asarray(run(tree, jax.random.key(seed)))


def check_set(capacity, reduce="sum"):
    """Duplicates (last wins), dropped indices, several batch sizes: equal to a plain array bit for bit."""
    random = np.random.default_rng(capacity)
    leaves = np.full(capacity, REDUCE[reduce][1], np.float32)
    tree = jnp.asarray(expected_tree(leaves, reduce))
    update = setter(capacity, reduce)
    for batch in (1, 64, 64, 700):
        hot = random.integers(0, capacity, max(1, batch // 4))
        index = random.choice(hot, batch).astype(np.int32)  # heavy duplicates
        wild = random.random(batch) < 0.2
        index[wild] = random.choice([-1, -(2**31), capacity, 2**31 - 1], wild.sum())
        value = random.lognormal(0, 4, batch).astype(np.float32)
        value[random.random(batch) < 0.2] = 0.0
        for i, v in zip(index, value, strict=True):
            if 0 <= i < capacity:
                leaves[i] = v
        tree = update(tree, index, value)
        np.testing.assert_array_equal(np.asarray(tree), expected_tree(leaves, reduce))
    np.testing.assert_array_equal(st.get(tree, np.arange(capacity, dtype=np.int32)), leaves)
    assert st.root(tree) == expected_tree(leaves, reduce)[-8]


def check_rebuild(capacity, reduce):
    leaves = np.random.default_rng(0).lognormal(0, 4, capacity).astype(np.float32)
    tree = jax.jit(functools.partial(st.rebuild, reduce=reduce))(leaves)
    assert tree.shape == (st.nodes(capacity),)
    np.testing.assert_array_equal(np.asarray(tree), expected_tree(leaves, reduce))


def check_together(batch, capacity=1000):
    kinds = ("sum", "min", "max")
    random = np.random.default_rng(batch)
    held = {kind: np.full(capacity, REDUCE[kind][1], np.float32) for kind in kinds}
    trees = [expected_tree(held[kind], kind) for kind in kinds]
    write = jax.jit(lambda t, i, v: st.set_all(t, i, v, capacity, reduce=kinds))
    for _ in range(3):
        index = random.integers(-2, capacity + 2, batch).astype(np.int32)
        values = [random.lognormal(0, 4, batch).astype(np.float32) for _ in kinds]
        trees = write(trees, index, values)
        for kind, tree, value in zip(kinds, trees, values, strict=True):
            for i, v in zip(index, value, strict=True):
                if 0 <= i < capacity:
                    held[kind][i] = v
            np.testing.assert_array_equal(tree, expected_tree(held[kind], kind))


def check_zero_leaves(capacity):
    random = np.random.default_rng(1)
    leaves = random.lognormal(0, 6, capacity).astype(np.float32)  # 1e-11 to 1e11
    leaves[random.random(capacity) < 0.7] = 0
    leaves[random.integers(capacity)] = 1
    draw = drawer(capacity, 4096, stratified=capacity % 2 == 0)
    for seed in range(5):
        index, leaf = draw(expected_tree(leaves), jax.random.key(seed))
        assert index.dtype == jnp.int32 and leaf.dtype == jnp.float32
        assert np.all((np.asarray(index) >= 0) & (np.asarray(index) < capacity))
        np.testing.assert_array_equal(np.asarray(leaf), leaves[np.asarray(index)])
        assert np.all(np.asarray(leaf) > 0)
    # of a half-filled tree nothing is drawn past the rows there are, and the last of them is
    held = -(-capacity // 2)
    index, leaf = draw(expected_tree((np.arange(capacity) < held).astype(np.float32)), jax.random.key(0))
    assert np.all(np.asarray(index) < held) and np.all(np.asarray(leaf) == 1)
    assert capacity > 5000 or np.max(np.asarray(index)) >= held - 1 - held / 200


def check_every_row(capacity):
    """For each of 2^24 rows alike there are uniforms of 24 bits that draw it: its block's, and its own in the block."""
    block, part = 8 ** st.middle(capacity), min(2**18, capacity)
    tree = expected_tree(np.ones(capacity, np.float32))
    draw = jax.jit(functools.partial(st._descend_by_loop, batch=part, capacity=capacity))
    for first in range(0, capacity, part):
        row = np.arange(first, first + part)
        top, bottom = (row // block + 0.5) * (block / capacity), (row % block + 0.5) / block
        for uniform in (top, bottom):
            assert np.all(uniform * 2**24 == np.floor(uniform * 2**24))
        index, leaf = draw(tree, top.astype(np.float32), bottom.astype(np.float32))
        np.testing.assert_array_equal(index, row)
        assert np.all(np.asarray(leaf) == 1)


def check_one_leaf(capacity):
    draw = drawer(capacity, 64, True)
    index, leaf = draw(expected_tree(np.zeros(capacity)), jax.random.key(0))
    assert not np.any(index) and not np.any(leaf)
    for only in {0, capacity // 2, capacity - 1}:
        for value in (1e-30, 1.0, 1e30):
            tree = expected_tree(np.where(np.arange(capacity) == only, value, 0))
            index, leaf = draw(tree, jax.random.key(1))
            assert np.all(np.asarray(index) == only) and np.all(np.asarray(leaf) > 0)


def check_paths(capacity, batch, monkeypatch):
    leaves = np.random.default_rng(2).lognormal(0, 3, capacity).astype(np.float32)
    tree, drawn = expected_tree(leaves), []
    for path in PATHS:
        use_path(monkeypatch, path)
        draw = drawer(capacity, batch, stratified=capacity > 9)
        drawn.append([jax.device_get(draw(tree, jax.random.key(s))) for s in range(4)])
    for one, *others in zip(*drawn, strict=True):
        np.testing.assert_array_equal(one[1], leaves[one[0]])
        for other in others:
            np.testing.assert_array_equal(one, other)


def check_strata(capacity):
    """Draw each block (where all are small: each leaf) as often as its share says, but for its two edges."""
    leaves = np.random.default_rng(3).random(capacity).astype(np.float32) + 0.1
    index, _ = drawer(capacity, 1024, True)(expected_tree(leaves), jax.random.key(0))
    block = 8 ** st.middle(capacity) if capacity > 512 else 1
    mass = np.add.reduceat(leaves.astype(np.float64), np.arange(0, capacity, block))
    counts = np.bincount(np.asarray(index) // block, minlength=len(mass))
    assert np.all(np.abs(counts - 1024 * mass / mass.sum()) < 2 + 1e-3)
    assert capacity > 512 or np.all(np.diff(np.asarray(index)) >= 0)


def z_of(counts, leaves):
    return chi_square_z(counts, leaves.astype(np.float64) / leaves.sum(dtype=np.float64))


def check_frequencies(capacity):
    leaves = np.random.default_rng(4).random(capacity).astype(np.float32) + 0.1
    leaves[::7] = 0
    counts = count(expected_tree(leaves), capacity, 4096, 250, seed=0)
    assert z_of(counts, leaves) < 3.09  # p > 0.001
    # The test can fail: the same counts do not fit leaves 3% off.
    assert z_of(counts, leaves * np.linspace(0.97, 1.03, capacity)) > 4.75  # p < 1e-6


def check_keep_last(batch, below):
    high = max(1, batch // 3)
    if below is None:
        index = np.random.default_rng(batch).integers(-3, high, batch).astype(np.int32)
    else:  # the largest there may be among them
        index = (below - 1 - np.random.default_rng(batch).integers(0, high, batch)).astype(np.int32)
    last = {int(i): position for position, i in enumerate(index)}
    kept = np.asarray(jax.jit(keep_last, static_argnums=1)(index, below))
    assert kept.dtype == bool and kept.shape == (batch,)
    np.testing.assert_array_equal(np.flatnonzero(kept), sorted(last.values()))
    np.testing.assert_array_equal(_keep_last_by_comparison(index), kept)  # what accelerators do
