"""`fbuf._algorithms.sum_tree` against numpy: what it holds, what it draws, on both of its paths."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fbuf._algorithms import random
from fbuf._algorithms import sum_tree as st
from fbuf._core.control_flow import order_after_reads
from fbuf.testing import assert_inplace
from tests.support import sum_tree
from tests.support.refusals import raises
from tests.support.tables import checks


@pytest.fixture(params=sum_tree.PATHS)
def path(request, monkeypatch):
    """Run a test on the path of CPUs and on the path of everything else."""
    return sum_tree.use_path(monkeypatch, str(request.param))


on_both_paths = pytest.mark.usefixtures("path")
test_set_is_what_a_plain_array_does = on_both_paths(
    checks((sum_tree.check_set, [65, 1000]), more=[(sum_tree.check_set, [9])])
)
test_trees_on_both_paths = on_both_paths(
    checks((sum_tree.check_together, [300]), (sum_tree.check_zero_leaves, [9, 1000]))
)
test_leaves_and_draws = checks(
    (sum_tree.check_rebuild, [(1, "sum"), (9, "max"), (1000, "min")]),
    (sum_tree.check_every_row, [2**15]),
    (sum_tree.check_one_leaf, [1, 9, 65]),
    (sum_tree.check_strata, [7, 500, 513]),
    (sum_tree.check_frequencies, [65]),
    # Few do with a spare draw, many without; large trees are read ahead (tier `more`).
    (sum_tree.check_paths, [(9, 1), (65, 300)]),
    (sum_tree.check_keep_last, [(0, None), (17, None), (17, 334), (1000, 2**31)]),
)


def test_nothing_to_write():
    leaves, update = np.arange(9, dtype=np.float32), sum_tree.setter(9)
    same = update(sum_tree.expected_tree(leaves), np.zeros(0, np.int32), np.zeros(0, np.float32))
    np.testing.assert_array_equal(same, sum_tree.expected_tree(leaves))


def test_queries_end_in_a_zero_bit():
    uniform = np.random.default_rng(0).random(1000, np.float32)
    assert not (np.asarray(st._scale(jnp.asarray(uniform), jnp.float32(0.7))).view(np.int32) & 1).any()


def test_messages():
    raises(ValueError, r"sum_tree: capacity is 0; expected 1 to 2\*\*30", st.init, 0)
    raises(ValueError, r"sum_tree.init: fill is 2.0; .*Use rebuild", st.init, 8, 2.0)


def test_extreme_uniforms(path):
    leaves = np.zeros(5000, np.float32)
    leaves[[3, 77, 1000, 4000]] = [1e-8, 1, 3, 1e-8]
    top, bottom = np.meshgrid([0, 0.5, 1 - 2**-24, 1], [0, 0.5, 1 - 2**-24, 1])
    draw = jax.jit(functools.partial(st._descend_by_loop, batch=16, capacity=5000))
    index, leaf = draw(sum_tree.expected_tree(leaves), *(x.ravel().astype(np.float32) for x in (top, bottom)))
    assert np.all(leaves[np.asarray(index)] > 0)
    np.testing.assert_array_equal(leaf, leaves[np.asarray(index)])


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
def test_accelerators_run_no_loop(platform):
    """One index after the other is what a processor does; elsewhere it would be thousands of tiny kernels."""

    @jax.jit
    def step(tree, key):
        index, leaf = st.draw(tree, key, 64, 10_000, stratified=True)
        return st.set(tree, index, leaf, 10_000)

    tree = jax.ShapeDtypeStruct((st.nodes(10_000),), jnp.float32)
    lowered = step.trace(tree, jax.random.key(0)).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in lowered) == (platform == "cpu")
    assert "stablehlo.gather" in lowered


def test_words_are_threefry_on_counters_that_jax_does_not_use():
    threefry = pytest.importorskip("jax.extend.random")
    key = jax.random.key(7)
    counters = np.concatenate([np.full(5, random.QUERY, np.uint32), np.arange(5, dtype=np.uint32)])
    expected = threefry.threefry_2x32(jax.random.key_data(key), counters)
    np.testing.assert_array_equal(jnp.concatenate(random.pairs(key, 5)), expected)
    assert random.QUERY > 0  # JAX's own counters begin with 0 below 2^32 elements


def test_a_uniform_has_24_bits():
    words = np.array([0, 255, 256, 2**31, 2**32 - 1], np.uint32)
    expected = np.array([0, 0, 2**-24, 0.5, 1 - 2**-24], np.float32)
    np.testing.assert_array_equal(np.asarray(random.unit(jnp.asarray(words))), expected)


def test_strata_are_those_of_the_batch_whatever_is_drawn_beside_it():
    top, _ = st.uniforms(jax.random.key(0), 8, 9, stratified=True)
    np.testing.assert_array_equal(np.floor(np.asarray(top[:8]) * 8), np.arange(8))


@pytest.mark.more
@pytest.mark.gpu
def test_accelerator_draws_and_writes_as_the_cpu():
    capacity = 1_000_003
    leaves = np.random.default_rng(2).lognormal(0, 3, capacity).astype(np.float32)
    results = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            tree = jnp.asarray(sum_tree.expected_tree(leaves))
            index, leaf = sum_tree.drawer(capacity, 4096, True)(tree, jax.random.key(0))
            tree = sum_tree.setter(capacity)(tree, index, leaf + 1)
            results.append((np.asarray(index), np.asarray(tree)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.more
@pytest.mark.in_place
@pytest.mark.parametrize("path", ["cpu", "tpu"], indirect=True)  # GPUs recompute levels whole: see tests/accelerators
def test_writes_and_draws_copy_no_tree(path):
    capacity, batch = 10**6, 256
    tree, index = jax.ShapeDtypeStruct((st.nodes(capacity),), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)

    def step(state, key):
        tree, token = state
        token, (index, leaf) = order_after_reads(token, st.draw(tree, key, batch, capacity, stratified=True))
        return (st.set(tree, index + token, leaf + np.float32(1), capacity), token), index

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 10))
    assert_inplace(lambda t, i, leaf: st.set(t, i, leaf, capacity), tree, index, jax.ShapeDtypeStruct((batch,), "f4"))
    assert_inplace(lambda s, keys: lax.scan(step, s, keys), (tree, jax.ShapeDtypeStruct((), "i4")), keys, bound=2**17)


test_more_trees_on_both_paths = pytest.mark.usefixtures("path")(
    checks(
        more=[
            (sum_tree.check_set, [(65_536, "sum"), (9, "max"), (1000, "min")]),
            (sum_tree.check_together, [1]),
            (sum_tree.check_one_leaf, [2, 65_536]),
            (sum_tree.check_strata, [10_000]),
            (sum_tree.check_frequencies, [1000]),
        ]
    )
)


CAPACITIES = [1, 2, 7, 8, 9, 64, 65, 1000, 65_536, 1_000_003]
LARGEST = CAPACITIES[-1]
SET = [*((c, "sum") for c in CAPACITIES), *itertools.product((1, 9, 1000), ("min", "max"))]
test_every_tree_on_both_paths = pytest.mark.usefixtures("path")(
    checks(
        exhaustive=[
            (sum_tree.check_set, SET),
            (sum_tree.check_zero_leaves, [1, 8, 65, LARGEST]),
            (sum_tree.check_strata, [64, LARGEST]),
            (sum_tree.check_one_leaf, [7]),
        ]
    )
)


test_more_trees = checks(
    more=[
        (sum_tree.check_paths, [(1, 300), (1000, st._MANY), (300_000, 300), (300_000, st._MANY)]),
        (sum_tree.check_keep_last, itertools.product([1, 2, 17], [None, 334, 2**32 // 17 - 5, 2**31])),
    ],
    exhaustive=[
        (sum_tree.check_rebuild, itertools.product(CAPACITIES, ["sum", "min", "max"])),
        (sum_tree.check_every_row, [2**18, 2**24]),
        (sum_tree.check_paths, [(1, 1), (9, 16_384), (65, 1), *((LARGEST, batch) for batch in (1, 300, 16_384))]),
    ],
)
