"""`fbuf._sumtree` against numpy: what it holds, what it draws, on both of its paths."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fbuf import _descent, _words
from fbuf import _sumtree as st
from fbuf._duplicates import keep_last
from fbuf._pin import pin

CAPACITIES = [1, 2, 7, 8, 9, 64, 65, 1000, 65_536, 1_000_003]
REDUCE = {"sum": (np.add, 0.0), "min": (np.minimum, np.inf), "max": (np.maximum, -np.inf)}


@pytest.fixture(params=["loop", "level"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on the path of CPUs and on the path of everything else."""
    if request.param == "level":
        monkeypatch.setattr(st, "_set_by_loop", st._set_by_level)
        monkeypatch.setattr(_descent, "_descend_by_loop", _descent._descend_by_level)
    return str(request.param)


def setter(capacity: int, reduce: Any = "sum") -> Callable[..., jax.Array]:
    # A new lambda for every test: jit caches by function, and the paths differ behind its back.
    return jax.jit(lambda t, i, v: st.set(t, i, v, capacity, reduce=reduce), donate_argnums=0)


def drawer(capacity: int, batch: int, stratified: bool = False) -> Callable[..., Any]:
    return jax.jit(lambda t, k: _descent.draw(t, k, batch, capacity, stratified=stratified))


def expected_tree(leaves: np.ndarray, reduce: str = "sum") -> np.ndarray:
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


def tail(statistic: float, degrees: int) -> float:
    """P(chi-square > statistic), by Wilson and Hilferty's cube root (exact enough from 5 degrees)."""
    spread = 2 / (9 * degrees)
    return math.erfc(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread)) / 2


def chi_square(counts: np.ndarray, leaves: np.ndarray) -> float:
    expected = counts.sum() * (leaves.astype(np.float64) / leaves.astype(np.float64).sum())
    positive = expected > 0
    assert not counts[~positive].any()
    statistic = ((counts[positive] - expected[positive]) ** 2 / expected[positive]).sum()
    return tail(float(statistic), int(positive.sum()) - 1)


def count(tree: jax.Array, capacity: int, batch: int, batches: int, seed: int) -> np.ndarray:
    @jax.jit
    def run(tree: jax.Array, key: jax.Array) -> jax.Array:
        def step(counts: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            index, _ = _descent.draw(tree, key, batch, capacity, stratified=False)
            return counts.at[index].add(np.int32(1)), None

        keys = jax.random.split(key, batches)
        return lax.scan(step, jnp.zeros((capacity,), jnp.int32), keys)[0]

    return np.asarray(run(tree, jax.random.key(seed)))


# ------------------------------------------------------------------------------- what it holds


@pytest.mark.parametrize(
    ("capacity", "reduce"),
    [*((c, "sum") for c in CAPACITIES), *((c, r) for c in (1, 9, 1000) for r in ("min", "max"))],
)
def test_set_is_what_a_plain_array_does(path: str, capacity: int, reduce: str) -> None:
    """Duplicates (last wins), dropped indices, several batch sizes: equal bit for bit."""
    random = np.random.default_rng(capacity)
    leaves = np.full(capacity, REDUCE[reduce][1], np.float32)
    tree = st.init(capacity, REDUCE[reduce][1])
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
    everywhere = jnp.arange(capacity, dtype=jnp.int32)
    np.testing.assert_array_equal(st.get(tree, everywhere), leaves)
    assert st.root(tree) == expected_tree(leaves, reduce)[-8]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("reduce", list(REDUCE))
def test_rebuild_is_set_of_all(capacity: int, reduce: Any) -> None:
    leaves = np.random.default_rng(0).lognormal(0, 4, capacity).astype(np.float32)
    tree = st.rebuild(jnp.asarray(leaves), reduce=reduce)
    assert tree.shape == (st.nodes(capacity),)
    np.testing.assert_array_equal(np.asarray(tree), expected_tree(leaves, reduce))


def test_nothing_to_write() -> None:
    tree = st.rebuild(jnp.arange(9, dtype=jnp.float32))
    empty = st.set(tree, jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.float32), 9)
    np.testing.assert_array_equal(empty, tree)
    outside = jnp.array([-1, 9, 10, 71], jnp.int32)
    dropped = st.set(tree, outside, jnp.full((4,), 5, jnp.float32), 9)
    np.testing.assert_array_equal(dropped, tree)


def test_memory_is_an_eighth_more_than_the_leaves() -> None:
    for capacity in (8**4 + 1, 10**6, 8**7 + 1):
        assert st.nodes(capacity) < 1.15 * capacity + 80


def test_no_drift_when_priorities_shrink(path: str) -> None:
    """1e6 everywhere, then 1e-3: sums kept by differences would be off by thousands."""
    capacity, batch = 4096, 256
    tree, update = st.init(capacity), setter(capacity)
    random = np.random.default_rng(0)
    for value in (1e6, 1e-3):
        order = random.permutation(capacity).astype(np.int32).reshape(-1, batch)
        for index in order:
            tree = update(tree, index, np.full(batch, value, np.float32))
    assert float(st.root(tree)) == pytest.approx(4096 * 1e-3, rel=1e-6)
    index, leaf = drawer(capacity, 65_536)(tree, jax.random.key(0))
    assert len(np.unique(np.asarray(index))) == capacity
    np.testing.assert_array_equal(leaf, np.float32(1e-3))


@pytest.mark.parametrize("batch", [1, 300])
def test_trees_written_together_are_those_written_alone(path: str, batch: int) -> None:
    capacity, kinds = 1000, ("sum", "min", "max")
    random = np.random.default_rng(batch)
    index = random.integers(-2, capacity + 2, batch).astype(np.int32)
    values = [random.lognormal(0, 4, batch).astype(np.float32) for _ in kinds]
    trees = [st.init(capacity, REDUCE[kind][1]) for kind in kinds]
    together = jax.jit(lambda t, i, v: st.set_all(t, i, v, capacity, reduce=kinds))(trees, index, values)
    for kind, tree, value, got in zip(kinds, trees, values, together, strict=True):
        np.testing.assert_array_equal(got, setter(capacity, kind)(tree, index, value))


def test_the_root_of_a_maximum_is_the_largest_now_held(path: str) -> None:
    """Not the largest ever written: it comes down when that leaf does."""
    held, tree, update = np.zeros(700, np.float32), st.init(700), setter(700, "max")
    random = np.random.default_rng(0)
    for _ in range(40):
        index = random.permutation(700)[:50].astype(np.int32)
        value = random.lognormal(0, 4, 50).astype(np.float32)
        held[index], tree = value, update(tree, index, value)
        assert st.root(tree) == held.max()


@pytest.mark.parametrize("batch", [256, pytest.param(4096, marks=pytest.mark.slow)])
def test_parents_after_ten_million_updates(batch: int) -> None:
    """Of 22 orders of magnitude, many twice, some zero: every parent is its children, every leaf the last one written."""
    capacity, steps = 65_537, -(-(10**7) // batch)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(trees: Any, key: jax.Array) -> Any:
        def step(trees: Any, key: jax.Array) -> tuple[Any, None]:
            first, second = (jax.random.bits(k, (batch,), jnp.uint32) for k in jax.random.split(key))
            index = (first % np.uint32(capacity)).astype(jnp.int32)
            size = (second % np.uint32(73)).astype(jnp.float32) - np.float32(36)
            leaf = jnp.where(
                second < np.uint32(2**29), np.float32(0), jnp.exp2(size) * (first | np.uint32(1)).astype(jnp.float32)
            )
            least = jnp.where(leaf > np.float32(0), leaf, np.float32(np.inf))
            return st.set_all(trees, index, (leaf, least), capacity, reduce=("sum", "min")), None

        return lax.scan(step, trees, jax.random.split(key, steps))[0]

    total, least = (np.asarray(t) for t in run((st.init(capacity), st.init(capacity, np.inf)), jax.random.key(0)))
    leaves = total[:capacity]
    assert np.all(np.isfinite(leaves)) and np.ptp(np.log10(leaves[leaves > 0])) > 20 and np.any(leaves == 0)
    np.testing.assert_array_equal(total, expected_tree(leaves))
    np.testing.assert_array_equal(least, expected_tree(np.where(leaves > 0, leaves, np.float32(np.inf)), "min"))


def test_a_million_rows_shrink_from_large_to_small() -> None:
    capacity, batch = 10**6, 4000

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(tree: jax.Array, order: jax.Array, value: jax.Array) -> jax.Array:
        def step(tree: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            return st.set(tree, index, jnp.full((batch,), value), capacity), None

        return lax.scan(step, tree, order)[0]

    tree = st.init(capacity)
    for value in (1e6, 1e-3):
        order = np.random.default_rng(0).permutation(capacity).astype(np.int32).reshape(-1, batch)
        tree = fill(tree, order, np.float32(value))
    assert float(st.root(tree)) == pytest.approx(1000, rel=1e-6)
    np.testing.assert_array_equal(np.asarray(tree), expected_tree(np.full(capacity, 1e-3, np.float32)))


# -------------------------------------------------------------------------------- what it draws


@pytest.mark.parametrize("capacity", [1, 8, 9, 65, 1000, 1_000_003])
def test_zero_leaves_are_never_drawn(path: str, capacity: int) -> None:
    random = np.random.default_rng(1)
    leaves = random.lognormal(0, 6, capacity).astype(np.float32)  # 1e-11 to 1e11
    leaves[random.random(capacity) < 0.7] = 0
    leaves[random.integers(capacity)] = 1
    draw = drawer(capacity, 4096, stratified=capacity % 2 == 0)
    for seed in range(5):
        index, leaf = draw(st.rebuild(jnp.asarray(leaves)), jax.random.key(seed))
        assert index.dtype == jnp.int32 and leaf.dtype == jnp.float32
        assert np.all((np.asarray(index) >= 0) & (np.asarray(index) < capacity))
        np.testing.assert_array_equal(np.asarray(leaf), leaves[np.asarray(index)])
        assert np.all(np.asarray(leaf) > 0)


@pytest.mark.parametrize("capacity", [9, 1000])
def test_a_half_filled_tree(path: str, capacity: int) -> None:
    """Nothing is drawn past the rows there are, and the last of them is."""
    held = -(-capacity // 2)
    tree = st.rebuild(jnp.asarray(np.r_[np.ones(held), np.zeros(capacity - held)].astype(np.float32)))
    index, leaf = drawer(capacity, 4096, stratified=capacity == 9)(tree, jax.random.key(0))
    assert np.all(np.asarray(index) < held) and np.all(np.asarray(leaf) == 1)
    assert np.max(np.asarray(index)) >= held - 1 - held / 200


@pytest.mark.parametrize("capacity", [2**18, pytest.param(2**24, marks=pytest.mark.slow)])
def test_every_row_can_be_drawn(capacity: int) -> None:
    """For each of 2^24 rows alike there are uniforms of 24 bits that draw it: its block's, and its own in the block."""
    block, part = 8 ** _descent.middle(capacity), 2**18
    tree = st.rebuild(jnp.ones((capacity,), jnp.float32))
    draw = jax.jit(functools.partial(_descent._descend_by_loop, batch=part, capacity=capacity))
    for first in range(0, capacity, part):
        row = np.arange(first, first + part)
        top, bottom = (row // block + 0.5) * (block / capacity), (row % block + 0.5) / block
        for uniform in (top, bottom):
            assert np.all(uniform * 2**24 == np.floor(uniform * 2**24))
        index, leaf = draw(tree, jnp.asarray(top, jnp.float32), jnp.asarray(bottom, jnp.float32))
        np.testing.assert_array_equal(index, row)
        assert np.all(np.asarray(leaf) == 1)


@pytest.mark.parametrize("capacity", [1, 2, 7, 9, 65, 65_536])
def test_one_leaf_or_none(path: str, capacity: int) -> None:
    draw, update = drawer(capacity, 64, True), setter(capacity)
    index, leaf = draw(st.init(capacity), jax.random.key(0))
    assert not np.any(index) and not np.any(leaf)
    for only in {0, capacity // 2, capacity - 1}:
        for value in (1e-30, 1.0, 1e30):
            tree = update(st.init(capacity), jnp.array([only]), jnp.array([value], jnp.float32))
            index, leaf = draw(tree, jax.random.key(1))
            assert np.all(np.asarray(index) == only) and np.all(np.asarray(leaf) > 0)


def test_extreme_uniforms(path: str) -> None:
    """Also 1.0, which the last stratum can round to: never past the last positive leaf."""
    leaves = np.zeros(5000, np.float32)
    leaves[[3, 77, 1000, 4000]] = [1e-8, 1, 3, 1e-8]
    top, bottom = np.meshgrid([0, 0.5, 1 - 2**-24, 1], [0, 0.5, 1 - 2**-24, 1])
    draw = functools.partial(_descent._descend_by_loop, batch=16, capacity=5000)
    index, leaf = jax.jit(draw)(
        st.rebuild(jnp.asarray(leaves)),
        jnp.asarray(top.ravel(), jnp.float32),
        jnp.asarray(bottom.ravel(), jnp.float32),
    )
    assert np.all(leaves[np.asarray(index)] > 0)
    np.testing.assert_array_equal(leaf, leaves[np.asarray(index)])


@pytest.mark.parametrize("batch", [1, 300, 16_384])  # few do with a spare one, many without
@pytest.mark.parametrize("capacity", [1, 9, 65, 1000, 1_000_003])
def test_both_paths_draw_the_same(capacity: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = np.random.default_rng(2).lognormal(0, 3, capacity).astype(np.float32)
    tree = st.rebuild(jnp.asarray(leaves))
    draw = drawer(capacity, batch, stratified=capacity > 9)
    by_loop = [draw(tree, jax.random.key(s)) for s in range(4)]
    monkeypatch.setattr(_descent, "_descend_by_loop", _descent._descend_by_level)
    draw = drawer(capacity, batch, stratified=capacity > 9)
    by_level = [draw(tree, jax.random.key(s)) for s in range(4)]
    for one, other in zip(by_loop, by_level, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
        np.testing.assert_array_equal(one[1], leaves[np.asarray(one[0])])


@pytest.mark.gpu
def test_accelerator_draws_and_writes_as_the_cpu() -> None:
    capacity = 1_000_003
    leaves = np.random.default_rng(2).lognormal(0, 3, capacity).astype(np.float32)
    results = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            tree = st.rebuild(jnp.asarray(leaves))
            index, leaf = drawer(capacity, 4096, True)(tree, jax.random.key(0))
            tree = setter(capacity)(tree, index, leaf + 1)
            results.append((np.asarray(index), np.asarray(tree)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
def test_accelerators_run_no_loop(platform: str) -> None:
    """One index after the other is what a processor does; elsewhere it would be thousands of tiny kernels."""
    step = jax.jit(functools.partial(_step, capacity=10_000))
    tree = jax.ShapeDtypeStruct((st.nodes(10_000),), jnp.float32)
    lowered = step.trace(tree, jax.random.key(0)).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in lowered) == (platform == "cpu")
    assert "stablehlo.gather" in lowered


@pytest.mark.parametrize("capacity", [1, 7, 64, 500])
def test_strata_bound_the_count_of_every_leaf(path: str, capacity: int) -> None:
    leaves = np.random.default_rng(3).random(capacity).astype(np.float32) + 0.1
    index, _ = drawer(capacity, 1024, True)(st.rebuild(jnp.asarray(leaves)), jax.random.key(0))
    counts = np.bincount(index, minlength=capacity)
    assert np.all(np.abs(counts - 1024 * leaves / leaves.sum()) < 2 + 1e-3)
    assert np.all(np.diff(np.asarray(index)) >= 0)


@pytest.mark.parametrize("capacity", [513, 10_000, 1_000_003])
def test_strata_bound_the_count_of_every_block(path: str, capacity: int) -> None:
    leaves = np.random.default_rng(3).random(capacity).astype(np.float32) + 0.1
    index, _ = drawer(capacity, 1024, True)(st.rebuild(jnp.asarray(leaves)), jax.random.key(0))
    block = 8 ** _descent.middle(capacity)
    mass = np.add.reduceat(leaves.astype(np.float64), np.arange(0, capacity, block))
    counts = np.bincount(np.asarray(index) // block, minlength=len(mass))
    assert np.all(np.abs(counts - 1024 * mass / mass.sum()) < 2 + 1e-3)


@pytest.mark.parametrize("capacity", [9, 65, 1000])
def test_draws_follow_the_leaves(path: str, capacity: int) -> None:
    leaves = np.random.default_rng(4).random(capacity).astype(np.float32) + 0.1
    leaves[::7] = 0
    counts = count(st.rebuild(jnp.asarray(leaves)), capacity, 4096, 250, seed=0)
    assert chi_square(counts, leaves) > 0.001
    # The test can fail: the same counts do not fit leaves 3% off.
    assert chi_square(counts, leaves * np.linspace(0.97, 1.03, capacity)) < 1e-6


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 5))])
def test_draws_follow_a_million_leaves(seed: int) -> None:
    """25.2 million independent draws; one float32 uniform for the whole descent fails this.

    The first keys tried, 0 to 4, gave p = 0.29, 0.04, 0.03, 0.0009 and 0.34. The same leaves with twelve
    other keys each, 1.5 billion draws, gave z-scores of mean 0.05 +- 0.13 and deviation 0.91, so that was
    chance; these are the first key of each twelve. The test below needs no luck.
    """
    leaves = np.random.default_rng(seed).random(10**6).astype(np.float32) + 0.1
    leaves[::7] = 0
    counts = count(st.rebuild(jnp.asarray(leaves)), 10**6, 2**16, 385, 1000 * (seed + 1))
    assert counts.sum() >= 25_000_000
    p = chi_square(counts, leaves)
    assert 0.001 < p < 0.999, p


def test_all_uniforms_together_give_every_leaf_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value of each uniform once: the exact bias, as what it adds to chi-square in 25 million draws.

    Chi-square over a million leaves has a standard deviation of 1,400; the bias must stay far below.
    """
    capacity, draws = 10**6, 25_000_000
    leaves = np.random.default_rng(3).random(capacity).astype(np.float32) + 0.1
    leaves[::7] = 0
    tree = st.rebuild(jnp.asarray(leaves))

    def shares(top: float | None, bottom: float | None, block: int) -> np.ndarray:
        draw = jax.jit(functools.partial(_descent._descend_by_loop, batch=2**20, capacity=capacity))
        counts = np.zeros(-(-capacity // block), np.int64)
        for part in np.arange(2**24, dtype=np.int32).reshape(16, -1):
            grid = part.astype(np.float32) * np.float32(2**-24)
            given = [grid if u is None else np.full_like(grid, u) for u in (top, bottom)]
            index = np.asarray(draw(tree, jnp.asarray(given[0]), jnp.asarray(given[1]))[0])
            counts += np.bincount(index // block, minlength=len(counts))
        return counts / 2**24

    def added(share: np.ndarray, mass: np.ndarray) -> float:
        mass = mass.astype(np.float64) / mass.sum(dtype=np.float64)
        assert not share[mass == 0].any()
        share, mass = share[mass > 0], mass[mass > 0]
        return float(draws * np.sum((share - mass) ** 2 / mass))

    block = 8 ** _descent.middle(capacity)
    mass = np.add.reduceat(leaves.astype(np.float64), np.arange(0, capacity, block))
    assert added(shares(None, 0.5, block), mass) < 1  # 0.2
    below = shares(0.3, None, 1)
    first = int(np.flatnonzero(below)[0]) // block * block
    within = slice(first, first + block)
    assert below[within].sum() == 1
    assert added(below[within], leaves[within]) < 1  # 0.01
    # The test can fail: with one uniform for the whole descent the bias is far above the deviation.
    monkeypatch.setattr(_descent, "middle", lambda capacity: 0)
    assert added(shares(None, 0.5, 1), leaves) > 10_000


# -------------------------------------------------------------------------- as JAX transforms it


def _step(tree: jax.Array, key: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    index, leaf = _descent.draw(tree, key, 64, capacity, stratified=True)
    return st.set(tree, index, leaf * np.float32(0.5), capacity), index


def test_eager_jit_and_scan_agree(path: str) -> None:
    start = st.rebuild(jnp.asarray(np.random.default_rng(5).random(1000).astype(np.float32)))
    keys = jax.random.split(jax.random.key(0), 3)
    step = functools.partial(_step, capacity=1000)
    eager, jitted, indices = start, start, []
    for key in keys:
        eager, index = step(eager, key)
        indices.append(index)
        jitted, also = jax.jit(step)(jitted, key)
        np.testing.assert_array_equal(index, also)
    scanned, also = lax.scan(step, start, keys)
    np.testing.assert_array_equal(jnp.stack(indices), also)
    np.testing.assert_array_equal(eager, jitted)
    np.testing.assert_array_equal(eager, scanned)


def test_vmap_over_trees_and_over_keys(path: str) -> None:
    leaves = np.random.default_rng(6).random((3, 600)).astype(np.float32)
    trees = jax.vmap(st.rebuild)(jnp.asarray(leaves))
    keys = jax.random.split(jax.random.key(0), 3)
    step = functools.partial(_step, capacity=600)
    many, indices = jax.jit(jax.vmap(step))(trees, keys)
    over_keys = jax.vmap(lambda k: _descent.draw(trees[0], k, 64, 600, stratified=True)[0])(keys)
    for lane in range(3):
        one, index = step(trees[lane], keys[lane])
        np.testing.assert_array_equal(many[lane], one)
        np.testing.assert_array_equal(indices[lane], index)
        np.testing.assert_array_equal(over_keys[lane], _descent.draw(trees[0], keys[lane], 64, 600, stratified=True)[0])


def test_gradients_pass_by(path: str) -> None:
    tree = st.rebuild(jnp.ones((100,), jnp.float32))

    def loss(x: jax.Array) -> jax.Array:
        index, _ = _descent.draw(tree * x, jax.random.key(0), 8, 100, stratified=False)
        new = st.set(tree, index, jnp.full((8,), x), 100)
        _, leaf = _descent.draw(new, jax.random.key(1), 8, 100, stratified=False)
        return jnp.sum(leaf) + x

    value, slope = jax.jit(jax.value_and_grad(loss))(jnp.float32(3))
    assert np.isfinite(value) and slope == 1


def test_raw_and_typed_keys_agree() -> None:
    tree = st.rebuild(jnp.arange(50, dtype=jnp.float32))
    typed, _ = _descent.draw(tree, jax.random.key(7), 16, 50, stratified=False)
    raw, _ = _descent.draw(tree, jax.random.PRNGKey(7), 16, 50, stratified=False)
    np.testing.assert_array_equal(typed, raw)


@pytest.mark.parametrize("x64", [False, True])
def test_clean_under_strict_jax(path: str, x64: bool) -> None:
    start = np.random.default_rng(5).random(1000).astype(np.float32)
    step = functools.partial(_step, capacity=1000)
    plain = jax.jit(step)(st.rebuild(jnp.asarray(start)), jax.random.key(0))
    with (
        jax.enable_x64(x64),
        jax.numpy_dtype_promotion("strict"),
        jax.debug_nans(True),
        jax.debug_infs(True),
    ):
        tree, key = jax.jit(st.rebuild)(start), jax.random.key(0)
        fresh = jax.jit(lambda t, k: step(t, k))
        with jax.transfer_guard("disallow"):
            strict = fresh(tree, key)
        empty = jax.jit(lambda k: _descent.draw(st.init(1000), k, 8, 1000, stratified=True))(key)
    assert strict[0].dtype == jnp.float32 and strict[1].dtype == jnp.int32
    assert empty[0].dtype == jnp.int32 and empty[1].dtype == jnp.float32
    np.testing.assert_array_equal(plain[0], strict[0])
    np.testing.assert_array_equal(plain[1], strict[1])


@pytest.mark.parametrize("batch", [2, 256, 4096])
def test_set_writes_in_place(path: str, batch: int) -> None:
    """No copy of the tree (4.6 MB): temporaries grow with the batch alone."""
    _check_in_place(batch)


def test_one_is_set_in_place() -> None:
    _check_in_place(1)  # by loop on every platform


def _check_in_place(batch: int) -> None:
    capacity = 10**6
    tree = jax.ShapeDtypeStruct((st.nodes(capacity),), jnp.float32)
    index = jax.ShapeDtypeStruct((batch,), jnp.int32)
    leaf = jax.ShapeDtypeStruct((batch,), jnp.float32)
    compiled = setter(capacity).lower(tree, index, leaf).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * batch + 8192

    def loop(state: Any, keys: jax.Array) -> Any:
        def step(state: Any, key: jax.Array) -> Any:
            tree, token = state
            drawn = _descent.draw(tree, key, batch, capacity, stratified=True)
            # As the buffer does: without it XLA may draw again after the write, from a copy.
            token, (index, leaf) = pin(token, drawn)
            tree = st.set(tree, index + token, leaf + np.float32(1), capacity)
            return (tree, token), (index, leaf)

        return lax.scan(step, state, keys)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 10))
    token = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(loop, donate_argnums=0).lower((tree, token), keys).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 320 * batch + 8192


def test_messages() -> None:
    with pytest.raises(ValueError, match=r"sumtree: capacity is 0; expected 1 to 2\*\*30"):
        st.init(0)
    with pytest.raises(ValueError, match=r"sumtree.init: fill is 2.0; .*rebuild\(jnp.full"):
        st.init(8, 2.0)


# --------------------------------------------------------------------------------------- words


def test_words_are_threefry_on_counters_that_jax_does_not_use() -> None:
    random = pytest.importorskip("jax.extend.random")
    key = jax.random.key(7)
    counters = jnp.concatenate([jnp.full((5,), _words._OURS, jnp.uint32), jnp.arange(5, dtype=jnp.uint32)])
    expected = random.threefry_2x32(jax.random.key_data(key), counters)
    np.testing.assert_array_equal(jnp.concatenate(_words.pairs(key, 5)), expected)
    assert _words._OURS > 0  # JAX's own counters begin with 0 below 2^32 elements


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_words_of_any_key(kind: str) -> None:
    """The same however long the batch, other for every key."""
    keys = jax.random.split(jax.random.key(0, impl=kind), 3)
    first, second = map(jnp.stack, zip(*(_words.pairs(key, 9) for key in keys), strict=True))
    words = np.concatenate([first, second]).ravel()
    assert words.dtype == np.uint32 and len(np.unique(words)) == 54
    for key, one, other in zip(keys, first, second, strict=True):
        short = jax.jit(lambda key: _words.pairs(key, 4))(key)
        np.testing.assert_array_equal(short[0], one[:4])
        np.testing.assert_array_equal(short[1], other[:4])


# ---------------------------------------------------------------------------------- duplicates


@pytest.mark.parametrize("below", [None, 334, 2**32 // 17 - 5, 2**31])  # in one word for any batch, up to 17, and none
@pytest.mark.parametrize("batch", [0, 1, 2, 17, 1000])
def test_keep_last(batch: int, below: int | None) -> None:
    high = max(1, batch // 3)
    if below is None:
        index = np.random.default_rng(batch).integers(-3, high, batch).astype(np.int32)
    else:  # the largest there may be among them
        index = (below - 1 - np.random.default_rng(batch).integers(0, high, batch)).astype(np.int32)
    last = {int(i): position for position, i in enumerate(index)}
    kept = np.asarray(jax.jit(keep_last, static_argnums=1)(index, below))
    assert kept.dtype == bool and kept.shape == (batch,)
    np.testing.assert_array_equal(np.flatnonzero(kept), sorted(last.values()))


# ---------------------------------------------------------------------------------- uniforms


def test_a_uniform_has_24_bits() -> None:
    words = np.array([0, 255, 256, 2**31, 2**32 - 1], np.uint32)
    expected = np.array([0, 0, 2**-24, 0.5, 1 - 2**-24], np.float32)
    np.testing.assert_array_equal(np.asarray(_descent._unit(jnp.asarray(words))), expected)


def test_strata_are_those_of_the_batch_whatever_is_drawn_beside_it() -> None:
    top, _ = _descent.uniforms(jax.random.key(0), 8, 9, stratified=True)
    np.testing.assert_array_equal(np.floor(np.asarray(top[:8]) * 8), np.arange(8))
