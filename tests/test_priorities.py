"""What `Prioritized` and `Ranked` offer beyond proportional draws: each option against float64, on cases worked out by hand,
and by chi-square. Sequences of verbs with these options are in `tests/test_model.py`, storages and views in
`tests/test_combinations.py`.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf import _ranks, _sumtree, _sweep
from fbuf._race import draw as race
from fbuf._weights import ignoring
from fbuf.samplers import Prioritized, Ranked
from tests.support.uniformity import chi_square_z, lanes_out_of_step, slots_drawn

KEY = jax.random.key(0)


def filled(sampler: Any, priority: Any, capacity: int | None = None, **parts: Any) -> tuple[fbuf.Buffer, Any]:
    """A buffer of numbered rows with these priorities."""
    priority = jnp.asarray(priority, jnp.float32)
    buffer = fbuf.Buffer(capacity or priority.shape[0], sampler=sampler, **parts)
    rows = jnp.arange(priority.shape[0], dtype=jnp.int32)
    return buffer, buffer.extend(buffer.init(jnp.int32(0)), rows, priority=priority)


def leaves(buffer: fbuf.Buffer, state: Any) -> np.ndarray:
    """As they count, whatever unit they are kept in."""
    unit = 1.0 if state.sampler.unit is None else float(state.sampler.unit[0])
    return np.asarray(state.sampler.tree)[: buffer.capacity].astype(np.float64) * unit


def index_of(buffer: fbuf.Buffer, state: Any, slots: list[int]) -> fbuf.Index:
    return buffer.get(state, jnp.asarray(slots, jnp.int32)).index


# ------------------------------------------------------------------------------------------- a share of all alike


@pytest.mark.slow
@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("ranked", [False, True])
def test_a_share_of_the_batch_ignores_priorities(ranked: bool, stratified: bool) -> None:
    sampler = (Ranked if ranked else Prioritized)(alpha=1.0, uniform=0.3, stratified=stratified)
    buffer, state, open_slots = lanes_out_of_step(sampler)
    slots = np.flatnonzero(open_slots)
    errors = np.random.default_rng(6).exponential(size=len(slots)).astype(np.float32)
    state = buffer.update_priority(state, index_of(buffer, state, slots.tolist()), jnp.asarray(errors))
    batch = jax.device_get(buffer.peek(state, KEY, 2**17))
    chances = np.zeros(buffer.capacity)
    chances[batch.index.slot] = batch.probability
    if not ranked:
        expected = 0.7 * (errors.astype(float) + 1e-6) / (errors.astype(float) + 1e-6).sum() + 0.3 / len(slots)
        np.testing.assert_allclose(chances[slots], expected, rtol=1e-5)
    assert abs(chances.sum() - 1) < 1e-4
    z = chi_square_z(np.bincount(batch.index.slot, minlength=buffer.capacity), chances / chances.sum())
    assert z < 4
    assert stratified or z > -4


@pytest.mark.slow
def test_a_share_of_none_and_of_all() -> None:
    priority = np.array([1.0, 0.0, 5.0, 100.0])
    plain, state = filled(Prioritized(eps=0.0), priority)
    mixed, other = filled(Prioritized(eps=0.0, uniform=0.5), priority)
    for one, two in zip(
        jax.tree.leaves(plain.peek(state, KEY, 16)),
        jax.tree.leaves(mixed.peek(mixed.set(other, uniform=0), KEY, 16)),
        strict=True,
    ):
        assert np.array_equal(one, two)
    batch = mixed.peek(other, KEY, 400, uniform=1.0)  # for this call alone
    np.testing.assert_allclose(batch.probability, 0.25)
    assert np.bincount(np.asarray(batch.index.slot)).min() > 60
    assert float(other.sampler.uniform) == 0.5


@pytest.mark.slow
def test_weights_by_the_buffer_know_rows_that_only_chance_draws() -> None:
    """A row of priority 0 is the least likely of all: its weight is 1, all others are smaller."""
    buffer, state = filled(Prioritized(alpha=1.0, beta=1.0, eps=0.0, normalize="buffer", uniform=0.5), [0.0, 1.0, 3.0])
    batch = jax.device_get(buffer.peek(state, KEY, 64))
    chance = 0.5 * np.array([0, 0.25, 0.75]) + 0.5 / 3
    np.testing.assert_allclose(batch.weight, (chance[0] / chance)[batch.index.slot], rtol=1e-6)
    assert set(batch.index.slot.tolist()) == {0, 1, 2}


def test_weights_by_the_buffer_where_chance_has_ended() -> None:
    """With a share of 0 a row of priority 0 is not drawn, so that it is not the least likely one."""
    sampler = Prioritized(alpha=1.0, beta=1.0, eps=0.0, normalize="buffer", uniform=0.0)
    buffer, state = filled(sampler, [0.0, 1.0, 3.0])
    batch = jax.device_get(buffer.peek(state, KEY, 64))
    assert set(batch.index.slot.tolist()) == {1, 2}
    np.testing.assert_allclose(batch.weight, np.array([0, 1, 1 / 3])[batch.index.slot], rtol=1e-6)


@pytest.mark.parametrize(
    "share", [0.1, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 1e-3, 1 / 3, 0.999, 1.0))]
)
def test_every_part_of_a_batch_gets_its_share(share: float) -> None:
    number = 65_537
    chosen = np.asarray(ignoring(KEY, jnp.float32(share), number, spread=True)).astype(int)
    upto = np.concatenate([[0], np.cumsum(chosen)])
    for m in (1, 2, 7, 1000, number):
        assert np.abs(upto[m:] - upto[:-m] - share * m).max() <= 1 + 1e-6 * number
    starts = jax.vmap(lambda key: ignoring(key, jnp.float32(share), 3, spread=True))(jax.random.split(KEY, 20_000))
    alone = ignoring(KEY, jnp.float32(share), 2**16, spread=False)
    for mean, count in ((np.asarray(starts).mean(axis=0), 20_000), (np.asarray(alone).mean(), 2**16)):
        assert np.all(np.abs(mean - share) <= 5 * np.sqrt(share * (1 - share) / count))


# --------------------------------------------------------------------------------------------------- no row twice


def sets_of(leaf: np.ndarray, number: int) -> dict[tuple[int, ...], float]:
    """Chance of each set of `number` leaves drawn one after another without putting back."""
    chances: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(leaf)), number):
        left, chance = leaf.sum(), 1.0
        for i in order:
            chance *= leaf[i] / left
            left -= leaf[i]
        chances[tuple(sorted(order))] = chances.get(tuple(sorted(order)), 0.0) + chance
    return chances


@functools.partial(jax.jit, static_argnums=(2, 3))
def races(tree: jax.Array, keys: jax.Array, batch_size: int, capacity: int) -> Any:
    return jax.vmap(lambda key: race(tree, key, batch_size, capacity))(keys)


@pytest.mark.parametrize("spread_out", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sets_are_those_of_drawing_one_after_another(spread_out: bool) -> None:
    """Six leaves beside one another, or far apart in a tree of four levels."""
    leaf = np.array([8.0, 1.0, 2.0, 0.25, 4.0, 0.5])
    capacity = 4000 if spread_out else 6
    at = np.array([0, 1, 700, 701, 2048, 3999]) if spread_out else np.arange(6)
    tree = _sumtree.rebuild(jnp.zeros(capacity, jnp.float32).at[at].set(jnp.asarray(leaf, jnp.float32)))
    got = jax.device_get(races(tree, jax.random.split(KEY, 60_000), 3, capacity))
    assert got.mask.all()
    expected = sets_of(leaf, 3)
    drawn = [tuple(s) for s in np.sort(np.searchsorted(at, got.slot), axis=1).tolist()]
    counts = np.array([drawn.count(s) for s in expected])
    assert abs(chi_square_z(counts, np.array(list(expected.values())))) < 4
    # In random order, so that the first of a batch is as good as its last.
    positions = [np.bincount(np.searchsorted(at, got.slot[:, i]), minlength=6) for i in range(3)]
    for one, two in itertools.combinations(positions, 2):
        assert np.abs(one - two).max() < 5 * np.sqrt(2 * max(one.max(), two.max()))


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "batch_size", "trials"), [(100, 30, 4000), (5000, 64, 3000)])
def test_chances_make_sums_unbiased(capacity: int, batch_size: int, trials: int) -> None:
    """The sum of f / chance over the batch is that of f over all, whatever f: here of who holds much and who little."""
    leaf = np.random.default_rng(1).pareto(1.2, capacity).astype(np.float32)
    leaf[::10] = 0
    tree = _sumtree.rebuild(jnp.asarray(leaf))
    got = jax.device_get(races(tree, jax.random.split(jax.random.key(1), trials), batch_size, capacity))
    assert got.mask.all() and (leaf[got.slot] > 0).all()
    assert all(len(set(s)) == batch_size for s in got.slot.tolist())
    order = np.argsort(leaf)
    for part in (order[-10:], order[-capacity // 3 :], np.flatnonzero(leaf)):
        of_part = np.isin(got.slot, part) / got.chance.astype(np.float64)
        sums = of_part.sum(axis=1)
        assert abs(sums.mean() - np.sum(leaf[part] > 0)) < 5 * sums.std() / np.sqrt(trials)


def test_a_batch_larger_than_what_there_is() -> None:
    buffer, state = filled(Prioritized(eps=0.0, replace=False, normalize=None), [2.0, 0.0, 7.0, 1e-30], capacity=9)
    batch = jax.device_get(buffer.peek(state, KEY, 6))
    assert batch.mask.tolist() == [True] * 3 + [False] * 3
    assert sorted(batch.data[:3].tolist()) == [0, 2, 3]  # what has no priority cannot be drawn
    np.testing.assert_allclose(batch.probability, [1 / 6] * 3 + [0] * 3, rtol=1e-6)
    assert batch.index.slot[3:].tolist() == [9] * 3 and not batch.weight[3:].any()
    state = buffer.update_priority(state, batch.index, jnp.zeros(6))
    assert not any(int(x) for name, x in buffer.stats(state).items() if name.startswith("refused"))
    batch = jax.device_get(buffer.peek(state, KEY, 6))  # all 0: all alike
    assert sorted(batch.data[:4].tolist()) == [0, 1, 2, 3] and not batch.mask[4:].any()


@pytest.mark.slow
@pytest.mark.parametrize("view", [fbuf.views.Row(), fbuf.views.Transition()])
def test_all_zero_without_replacement_is_a_part_of_all(view: Any) -> None:
    sampler = Prioritized(eps=0.0, replace=False, beta=1.0)
    if isinstance(view, fbuf.views.Row):
        buffer, state = filled(sampler, np.zeros(50))
        can = np.ones(50, bool)
    else:
        buffer, state, can = lanes_out_of_step(sampler, length=31)
        slots = np.flatnonzero(can).tolist()
        state = buffer.update_priority(state, index_of(buffer, state, slots), jnp.zeros(len(slots)))
    counts = np.zeros(buffer.capacity)
    for key in jax.random.split(KEY, 60):
        batch = jax.device_get(buffer.peek(state, key, 20))
        assert len(set(batch.index.slot.tolist())) == 20 and can[batch.index.slot].all()
        np.testing.assert_allclose(batch.weight, 1.0)
        counts += np.bincount(batch.index.slot, minlength=buffer.capacity)
    assert np.all(counts[can] > 0) and not counts[~can].any()


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [None, "batch", "buffer"])
def test_weights_of_draws_without_replacement(normalize: str | None) -> None:
    """With beta = 1 the weighted mean over the batch is that of all rows; normalized, it is a multiple of it."""
    priority = np.random.default_rng(2).exponential(size=40)
    buffer, state = filled(Prioritized(1.0, 1.0, 0.0, normalize=normalize, replace=False), priority)
    batches = jax.device_get(jax.jit(jax.vmap(lambda key: buffer.peek(state, key, 12)))(jax.random.split(KEY, 8000)))
    value = np.random.default_rng(3).normal(size=40) + 1
    weight = batches.weight.astype(np.float64)
    if normalize is None:
        means = (weight * value[batches.data]).mean(axis=1)
        assert abs(means.mean() - value.mean()) < 5 * means.std() / np.sqrt(len(means))
        np.testing.assert_allclose(weight, 1 / (40 * batches.probability.astype(np.float64)), rtol=1e-5)
    elif normalize == "batch":
        np.testing.assert_allclose(weight.max(axis=1), 1.0)
    else:
        least = np.argmin(priority)
        assert weight.max() <= 1 + 1e-5
        np.testing.assert_allclose(weight[batches.data == least], 1.0, rtol=1e-5)


# ------------------------------------------------------------------------------------------- the largest now held


@pytest.mark.slow
def test_new_rows_get_the_largest_now_held() -> None:
    buffer = fbuf.Buffer(4, sampler=Prioritized(alpha=1.0, eps=0.0, largest="held"))
    state = buffer.init(jnp.int32(0))

    def add(state: Any, *priority: float) -> Any:
        given = {"priority": jnp.asarray(priority, jnp.float32)} if priority else {}
        return buffer.extend(state, jnp.zeros(len(priority) or 1, jnp.int32), **given)

    state = add(add(add(state), 9.0, 2.0))  # 1, 9, 2 and another 9
    assert leaves(buffer, state).tolist() == [1, 9, 2, 9]
    state = buffer.update_priority(state, index_of(buffer, state, [1, 3]), jnp.array([3.0, -4.0]))
    assert float(buffer.stats(state)["max_priority"]) == 4.0
    state = add(add(state))
    assert leaves(buffer, state).tolist() == [4, 4, 2, 4]
    state = add(add(add(add(state, 0.5), 0.25), 0.5), 0.125)
    assert float(buffer.stats(state)["max_priority"]) == 0.5
    state = buffer.clear(state)
    assert leaves(buffer, add(state)).tolist() == [1, 0, 0, 0]


# -------------------------------------------------------------------------------------------------------- decay


def test_priorities_decay_for_ever_without_getting_lost() -> None:
    """Thousands of halvings: ratios are exact, nobody becomes 0, nobody overflows, in one scan."""
    sampler = Prioritized(1.0, eps=0.0, decay=0.5, normalize="buffer", largest="held")
    buffer, state = filled(sampler, np.arange(1.0, 11.0), capacity=12)
    every = index_of(buffer, state, list(range(10)))

    @functools.partial(jax.jit, donate_argnums=0)
    def updates(state: Any, number: jax.Array, error: jax.Array) -> Any:
        def step(_: jax.Array, carry: Any) -> Any:
            one = jax.tree.map(lambda x: x[:1], every)
            state = buffer.update_priority(carry[0], one, error[None])
            return state, jnp.minimum(carry[1], jnp.min(state.sampler.unit))

        return jax.lax.fori_loop(0, number, step, (state, jnp.float32(1)))

    state, least = updates(state, jnp.int32(60), jnp.float32(1))
    assert 2.0**-31 < least < 2.0**-29
    expected = np.array([1, *(np.arange(2.0, 11.0) * 2.0**-60), 0, 0])
    np.testing.assert_array_equal(leaves(buffer, state), expected)
    held = np.asarray(state.sampler.top)[:12] * float(state.sampler.unit[1])
    assert held.tolist() == [*expected[:10], -np.inf, -np.inf]
    again = _sumtree.rebuild(state.sampler.tree[:12])
    assert np.array_equal(again, state.sampler.tree)
    state, _ = updates(state, jnp.int32(3000), jnp.float32(1))
    kept = np.asarray(state.sampler.tree)[:10]
    assert (kept > 0).all() and np.isfinite(kept).all() and kept[0] / kept[1] > 2.0**90
    state = buffer.extend(state, jnp.int32([7]))
    assert leaves(buffer, state)[10] == 1.0  # as much as the largest held
    state, _ = updates(state, jnp.int32(3000), jnp.float32(0))  # nothing to hold any more
    state = buffer.extend(state, jnp.int32([8]))
    kept = np.asarray(state.sampler.tree)[:12]
    assert kept[0] == 0 and (kept[1:] > 0).all()


@pytest.mark.slow
def test_the_largest_seen_decays_but_not_to_0() -> None:
    buffer, state = filled(Prioritized(1.0, eps=0.0, decay=0.5), [1.0, 2.0], capacity=3)
    none = jax.tree.map(lambda x: x[:0], index_of(buffer, state, [0]))
    run = jax.jit(
        lambda state: jax.lax.fori_loop(0, 400, lambda _, s: buffer.update_priority(s, none, jnp.zeros(0)), state)
    )
    state = buffer.extend(run(state), jnp.int32([7]))
    assert (np.asarray(state.sampler.tree)[:3] > 0).all()


@pytest.mark.slow
def test_decay_gives_way_to_what_is_new() -> None:
    buffer, state = filled(Prioritized(0.5, eps=0.0, decay=0.25), [4.0, 9.0, 1.0])
    state = buffer.update_priority(state, index_of(buffer, state, [0]), jnp.array([16.0]))
    np.testing.assert_allclose(leaves(buffer, state), [4.0, 1.5, 0.5])  # sqrt of 16, 9 / 4 and 1 / 4
    assert float(buffer.stats(state)["max_priority"]) == 16.0
    state = buffer.update_priority(buffer.set(state, decay=1.0), index_of(buffer, state, [1]), jnp.array([1.0]))
    np.testing.assert_allclose(leaves(buffer, state), [4.0, 1.0, 0.5])
    state = buffer.update_priority(buffer.set(state, decay=0.5), index_of(buffer, state, []), jnp.zeros(0))
    assert float(buffer.stats(state)["max_priority"]) == 8.0


@pytest.mark.slow
def test_states_that_decay_at_their_own_pace() -> None:
    """Under vmap one state's leaves are brought back into range while the other's stay as they are, bit for bit."""
    buffer, state = filled(Prioritized(eps=0.0, decay=0.5, normalize="buffer"), [1.0, 2.0, 3.0, 1e-30])
    other = buffer.set(state, decay=0.999)
    index, error = index_of(buffer, state, [0]), jnp.array([5.0])

    def steps(state: Any) -> Any:
        return jax.lax.fori_loop(0, 70, lambda _, s: buffer.update_priority(s, index, error), state)

    both = jax.jit(jax.vmap(steps))(jax.tree.map(lambda a, b: jnp.stack([a, b]), state, other))
    for i, one in enumerate((state, other)):
        for a, b in zip(jax.tree.leaves(jax.jit(steps)(one)), jax.tree.leaves(both), strict=True):
            assert np.array_equal(a, b[i])


def test_a_sweep_touches_every_leaf_once_or_none() -> None:
    capacity = 2 * _sweep._BLOCK + 3
    tree = _sumtree.rebuild(jnp.arange(capacity, dtype=jnp.float32))

    def twice(tree: jax.Array, slot: jax.Array, at: jax.Array) -> jax.Array:
        return _sumtree.set(tree, slot, _sumtree.get(tree, at) * jnp.float32(2), capacity)

    sweep = jax.jit(lambda when: _sweep.every_leaf(tree, twice, capacity, when))
    assert np.array_equal(sweep(True), _sumtree.rebuild(2 * jnp.arange(capacity, dtype=jnp.float32)))
    assert np.array_equal(sweep(False), tree)


# ----------------------------------------------------------------------------------------------- keep and spread

ROW = {"x": jnp.int32(0), "done": jnp.array(False)}


def episodes(sampler: Any, done: list[int], capacity: int = 8, lanes: int | None = None) -> tuple[fbuf.Buffer, Any]:
    """Rows of priority 1 of which those numbered `done` end an episode."""
    buffer = fbuf.Buffer(capacity, sampler=sampler, episode_end=("done",), lanes=lanes)
    number = np.arange(capacity) // (lanes or 1)
    rows = {"x": jnp.arange(capacity, dtype=jnp.int32), "done": jnp.asarray(np.isin(number, done))}
    if lanes is not None:
        rows = {n: x.reshape(-1, lanes) for n, x in rows.items()}
    ones = jnp.ones(rows["x"].shape, jnp.float32)
    return buffer, buffer.extend(buffer.init(ROW), rows, priority=ones)


@pytest.mark.slow
def test_a_new_priority_keeps_a_share_of_the_old() -> None:
    buffer, state = filled(Prioritized(0.5, eps=0.0, keep=0.25, largest="held", normalize="buffer"), [16.0, 4.0, 1.0])
    index = index_of(buffer, state, [0, 1, 0])
    state = buffer.update_priority(state, index, jnp.array([9.0, 25.0, 0.0]))
    np.testing.assert_allclose(leaves(buffer, state), [2.0, 5.0, 1.0])  # 16 / 4 and not 9 / 4: the last error is 0
    assert np.asarray(state.sampler.top)[:3].tolist() == [4.0, 25.0, 1.0]
    state = buffer.update_priority(buffer.set(state, keep=0.0), index, jnp.zeros(3))
    assert leaves(buffer, state).tolist() == [0, 0, 1]


def test_a_surprise_raises_the_rows_before_it() -> None:
    sampler = Prioritized(1.0, eps=0.0, spread=3, rho=0.5, largest="held", normalize="buffer")
    buffer, state = episodes(sampler, done=[1])
    state = buffer.update_priority(state, index_of(buffer, state, [6]), jnp.array([16.0]))
    assert leaves(buffer, state).tolist() == [1, 1, 1, 2, 4, 8, 16, 1]
    assert np.asarray(state.sampler.top)[:8].tolist() == [1, 1, 1, 2, 4, 8, 16, 1]
    assert float(_sumtree.root(state.sampler.low)) == 1.0
    # Not beyond the end of the episode before, and nothing is lowered, whatever the order of the batch.
    index = index_of(buffer, state, [3, 6, 7])
    state = buffer.update_priority(state, index, jnp.array([32.0, 0.5, 1.0]))
    assert leaves(buffer, state).tolist() == [1, 1, 16, 32, 4, 8, 0.5, 1]
    index = index_of(buffer, state, [5, 4, 4])
    state = buffer.update_priority(buffer.set(state, rho=1.0), index, jnp.array([2.0, 99.0, 3.0]))
    assert leaves(buffer, state).tolist() == [1, 1, 16, 32, 3, 2, 0.5, 1]  # of two errors for one row the last counts
    state = buffer.update_priority(state, index_of(buffer, state, [1]), jnp.array([7.0]))
    assert leaves(buffer, state).tolist() == [7, 7, 16, 32, 3, 2, 0.5, 1]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Prioritized(1.0, eps=0.0, spread=3, rho=0.5), Ranked(spread=3, rho=0.5)])
def test_rows_before_the_oldest_are_not_those_at_the_ring_s_end(sampler: Any) -> None:
    """One long episode a lane; the ring has come round, so that before the oldest row lies the newest."""
    buffer, state = episodes(sampler, done=[], capacity=12, lanes=2)
    more = {"x": jnp.zeros((2, 2), jnp.int32), "done": jnp.zeros((2, 2), bool)}
    state = buffer.extend(state, more, priority=jnp.ones((2, 2)))  # positions 0 and 1 are the newest

    def seen(state: Any) -> list[float]:
        if isinstance(sampler, Ranked):
            return np.asarray(_ranks.lower_edge(_ranks.get(state.sampler.ranks, jnp.arange(12)))).tolist()
        return leaves(buffer, state).tolist()

    state = buffer.update_priority(state, index_of(buffer, state, [3 * 2]), jnp.array([8.0]))  # position 3 of lane 0
    assert seen(state) == [1, 1, 1, 1, 4, 1, 8, 1, 1, 1, 1, 1]
    state = buffer.update_priority(state, index_of(buffer, state, [1]), jnp.array([8.0]))  # position 0 of lane 1
    assert seen(state) == [1, 8, 1, 1, 4, 1, 8, 1, 1, 2, 1, 4]


# -------------------------------------------------------------------------------------------------------- rebuild


@pytest.mark.parametrize("capacity", [pytest.param(7, marks=pytest.mark.slow), _sweep._BLOCK + 5])
def test_a_new_alpha_for_all_rows(capacity: int) -> None:
    """Bit for bit what a buffer that had it from the start holds; draws follow; nothing compiles again."""
    priority = np.random.default_rng(0).exponential(size=capacity - 2).astype(np.float32)
    sampler = Prioritized(0.9, largest="held", normalize="buffer")
    buffer, state = filled(sampler, priority, capacity=capacity)
    fresh, expected = filled(Prioritized(0.3, largest="held", normalize="buffer"), priority, capacity=capacity)
    again = jax.jit(lambda state, alpha: buffer.rebuild(buffer.set(state, alpha=alpha)), donate_argnums=0)
    for alpha in (0.5, 0.0, 0.3):
        state = again(state, jnp.float32(alpha))
    assert again._cache_size() == 1
    for one, two in zip(jax.tree.leaves(state.sampler), jax.tree.leaves(expected.sampler), strict=True):
        np.testing.assert_array_equal(one, two)
    one, two = buffer.peek(state, KEY, 32), fresh.peek(expected, KEY, 32)
    np.testing.assert_array_equal(one.index.slot, two.index.slot)


def test_who_cannot_rebuild_says_so() -> None:
    for sampler, text in (
        (Prioritized(), r"keeps what the numbers.*Prioritized\(largest='held'\)"),
        (fbuf.samplers.Uniform(), "has no priorities"),
    ):
        buffer = fbuf.Buffer(3, sampler=sampler)
        with pytest.raises(TypeError, match=text):
            buffer.rebuild(buffer.init(jnp.int32(0)))
    with pytest.raises(TypeError, match="first argument is int, expected BufferState"):
        buffer.rebuild(3)
    ranked = fbuf.Replay(fbuf.Buffer(3, sampler=Ranked()), jnp.int32(0), seed=0)
    ranked.extend(jnp.arange(2))
    ranked.rebuild()
    assert len(ranked) == 2


# ---------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    "alpha", [0.7, 1.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 0.3, 1.0001, 2.0, 6.0))]
)
def test_masses_of_ranks(alpha: float) -> None:
    """Against sums in float64, from one rank to a million, near the first and far from it."""
    terms = np.arange(1, 2_000_001, dtype=np.float64) ** -alpha
    upto = np.concatenate([[0], np.cumsum(terms)])
    cases = [(0, 1), (0, 16), (0, 17), (3, 40), (15, 1), (16, 1), (17, 3), (1000, 1), (99_999, 1), (0, 2_000_000)]
    cases += [(500_000, 12), (1_999_999, 1), (12, 1_000_000), (0, 0), (77, 0)]
    above, number = (jnp.asarray(x, jnp.int32) for x in zip(*cases, strict=True))
    got = np.asarray(_ranks.mass_of(above, number, jnp.float32(alpha)))
    expected = [terms[a : a + n].sum() if n < 1000 else upto[a + n] - upto[a] for a, n in cases]
    np.testing.assert_allclose(got, expected, rtol=2e-6 * max(1, alpha * 5), atol=1e-38)


def test_buckets_are_in_order_of_magnitude() -> None:
    edge = np.asarray(_ranks.lower_edge(jnp.arange(1, 513)))
    assert np.array_equal(_ranks.bucket_of(jnp.asarray(edge)), np.arange(1, 513))
    assert np.array_equal(_ranks.bucket_of(jnp.asarray(np.nextafter(edge, np.float32(np.inf)))), np.arange(1, 513))
    below = np.asarray(_ranks.bucket_of(jnp.asarray(np.nextafter(edge, np.float32(0)))))
    assert np.array_equal(below, np.maximum(np.arange(0, 512), 1))
    assert edge[0] == 2.0**-32 and (edge[1:] / edge[:-1]).max() <= 1.125 and edge[-1] < 2.0**32 <= edge[-1] * 1.125
    odd = jnp.array([0.0, 1e-44, 1e-30, 1e30, 3e38], jnp.float32)
    assert np.asarray(_ranks.bucket_of(odd)).tolist() == [1, 1, 1, 512, 512]


@pytest.mark.parametrize(
    "capacity", [5000, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 5, 512, 513, 40_000))]
)
@given(seed=st.integers(0, 2**16))
def test_ranks_are_kept_and_found(capacity: int, seed: int) -> None:
    """Random changes against a list: buckets, counts, and every row of every bucket by its number."""
    rng = np.random.default_rng(seed)
    ranks, model = _ranks.init(capacity), np.zeros(capacity, int)
    for _ in range(4):
        slot = rng.integers(-1, capacity + 2, 64)
        bucket = rng.choice([0, 1, 7, 8, 300, 512], 64)
        ranks = put(ranks, jnp.asarray(slot, jnp.int32), jnp.asarray(bucket, jnp.int32), capacity)
        for s, b in zip(slot, bucket, strict=True):
            if 0 <= s < capacity:
                model[s] = b
    assert np.array_equal(ranks.bucket[:capacity], model) and not np.any(ranks.bucket[capacity:])
    total = np.bincount(model, minlength=513)[1:]
    assert np.array_equal(ranks.total, total)
    rows = np.flatnonzero(model)
    order = rows[np.lexsort((rows, model[rows]))]  # by bucket, then by slot
    nth = np.concatenate([np.arange(n) for n in total]) if len(order) else np.zeros(0, int)
    if len(order):
        pad = 256 - len(order)
        index = jnp.asarray(np.pad(model[order] - 1, (0, pad), "edge"), jnp.int32)
        found = find(ranks, index, jnp.asarray(np.pad(nth, (0, pad), "edge"), jnp.int32), capacity)
        assert np.array_equal(found[: len(order)], order)


@functools.partial(jax.jit, static_argnums=3)
def put(ranks: Any, slot: jax.Array, bucket: jax.Array, capacity: int) -> Any:
    return _ranks.set(ranks, slot, bucket, capacity, jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnums=3)
def find(ranks: Any, index: jax.Array, nth: jax.Array, capacity: int) -> jax.Array:
    return _ranks.nth_of(ranks, index, nth, capacity)


@pytest.mark.parametrize("stratified", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_draws_by_rank(stratified: bool) -> None:
    """Four orders of magnitude; three outliers weigh no more than their ranks."""
    number = 3000
    priority = 10 ** np.random.default_rng(0).uniform(-2, 2, number)
    priority[[5, 50, 500]] = 1e12, 1e9, 3e8
    buffer, state = filled(Ranked(0.7, stratified=stratified, normalize=None), priority, capacity=4000)
    bucket = np.asarray(_ranks.bucket_of(jnp.asarray(priority, jnp.float32)))
    terms = np.arange(1, number + 1, dtype=np.float64) ** -0.7
    order = np.argsort(-priority)
    rank_of = np.empty(number, int)
    rank_of[order] = np.arange(number)
    chances = np.zeros(4000)
    for b in np.unique(bucket):
        tied = np.flatnonzero(bucket == b)
        chances[tied] = terms[rank_of[tied]].mean() / terms.sum()
    z = chi_square_z(slots_drawn(buffer, state, 1, 2**18), chances)
    assert z < 4
    assert stratified or z > -4
    batch = jax.device_get(buffer.peek(state, KEY, 512, beta=0.5))
    np.testing.assert_allclose(batch.probability, chances[batch.data], rtol=1e-5)
    np.testing.assert_allclose(batch.weight, (number * chances[batch.data]) ** -0.5, rtol=1e-5)
    # A tie is never broken by more than what the bucket spans: the exact rank's chance is within it.
    exact = terms[rank_of] / terms.sum()
    for b in np.unique(bucket):
        tied = np.flatnonzero(bucket == b)
        assert exact[tied].min() <= chances[tied[0]] * (1 + 1e-6) and chances[tied[0]] <= exact[tied].max() * (1 + 1e-6)


@pytest.mark.slow
def test_a_changed_alpha_of_ranks_applies_at_once() -> None:
    buffer, state = filled(Ranked(normalize="buffer"), [4.0, 2.0, 1.0])
    for alpha in (0.0, 1.0, 2.0):
        batch = jax.device_get(buffer.peek(buffer.set(state, alpha=alpha), KEY, 64, beta=1.0))
        chances = np.array([1, 2, 3.0]) ** -alpha
        np.testing.assert_allclose(batch.probability, (chances / chances.sum())[batch.data], rtol=1e-6)
        np.testing.assert_allclose(batch.weight, (chances.min() / chances)[batch.data], rtol=1e-5)


@pytest.mark.slow
def test_new_rows_are_among_the_first_ranks_held() -> None:
    seen, held = (filled(Ranked(largest=largest), [8.0, 2.0], capacity=4) for largest in ("seen", "held"))
    for (buffer, state), expected in ((seen, [0.5, 2, 8, 0]), (held, [0.5, 2, 2, 0])):
        state = buffer.update_priority(state, index_of(buffer, state, [0]), jnp.array([0.5]))
        state = buffer.extend(state, jnp.int32([3]))
        bucket = _ranks.get(state.sampler.ranks, jnp.arange(4))
        assert np.where(bucket > 0, _ranks.lower_edge(bucket), 0).tolist() == expected


# -------------------------------------------------------------------------------------------------------- torchrl


def torchrl_weights(priority: np.ndarray, alpha: float, beta: float, eps: float) -> np.ndarray:
    """Its formula (torchrl/data/replay_buffers/samplers.py): by the smallest leaf of the buffer."""
    leaf = (priority.astype(np.float64) + eps) ** alpha
    return (leaf / leaf.min()) ** -beta


@pytest.mark.parametrize(
    ("priority", "alpha", "beta", "eps", "known"),
    [
        pytest.param(
            [2.0, 3.0, 1.0], 1.0, 1.0, 0.0, [0.5, 1 / 3, 1.0], marks=pytest.mark.slow
        ),  # what torchrl 0.14 gave
        ([0.0, 1.0], 0.6, 0.4, 1e-8, [1.0, 0.012]),  # the same: one near 0 makes all others small
        pytest.param(np.random.default_rng(0).exponential(size=300), 0.7, 0.9, 1e-6, None, marks=pytest.mark.slow),
    ],
)
def test_weights_by_the_buffer_are_those_of_torchrl(
    priority: Any, alpha: float, beta: float, eps: float, known: Any
) -> None:
    priority = np.asarray(priority, np.float32)
    expected = torchrl_weights(priority, alpha, beta, eps)
    if known is not None:
        np.testing.assert_allclose(expected, known, rtol=2e-2)
    buffer, state = filled(Prioritized(alpha, beta, eps, normalize="buffer"), priority)
    batch = jax.device_get(buffer.peek(state, KEY, 2048))
    np.testing.assert_allclose(batch.weight, expected[batch.data], rtol=1e-5)
    by_batch, state = filled(Prioritized(alpha, beta, eps, normalize="batch"), priority)
    other = jax.device_get(by_batch.peek(state, KEY, 4))
    np.testing.assert_allclose(other.weight, expected[other.data] / expected[other.data].max(), rtol=1e-5)


def test_weights_by_the_buffer_are_what_torchrl_gives() -> None:
    """Where its extension loads."""
    samplers = pytest.importorskip("torchrl.data.replay_buffers.samplers")
    torch, data = pytest.importorskip("torch"), pytest.importorskip("torchrl.data")
    try:
        sampler = samplers.PrioritizedSampler(64, 0.7, 0.5, eps=1e-6)
    except RuntimeError as error:
        pytest.skip(f"torchrl's trees do not load: {error}")
    priority = np.random.default_rng(1).exponential(size=50).astype(np.float32)
    theirs = data.ReplayBuffer(storage=data.LazyTensorStorage(64), sampler=sampler, batch_size=512)
    theirs.extend(torch.arange(50))
    theirs.update_priority(torch.arange(50), torch.from_numpy(priority))
    _, info = theirs.sample(return_info=True)
    buffer, state = filled(Prioritized(0.7, 0.5, 1e-6, normalize="buffer"), priority)
    batch = jax.device_get(buffer.peek(state, KEY, 2048))
    ours = dict(zip(batch.data.tolist(), batch.weight.tolist(), strict=True))
    for i, weight in zip(
        info["index"].tolist(), np.asarray(info.get("priority_weight", info.get("_weight"))).tolist(), strict=True
    ):
        assert ours.get(i, weight) == pytest.approx(weight, rel=1e-4)


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Prioritized(uniform=1.5), "Prioritized: uniform is 1.5; expected a Python number from 0 to 1"),
        (lambda: Prioritized(uniform=True), "Prioritized: uniform is True"),
        (lambda: Prioritized(decay=0.0), "Prioritized: decay is 0.0; expected a Python number from 0.001 to 1"),
        (lambda: Prioritized(keep=float("nan")), "Prioritized: keep is nan"),
        (lambda: Prioritized(spread=1, rho=2.0), "Prioritized: rho is 2.0; expected a Python number from 0 to 1"),
        (lambda: Prioritized(rho=None), "Prioritized: rho is None"),
        (lambda: Prioritized(spread=-1), "Prioritized: spread is -1; expected an int from 0 to 1024"),
        (lambda: Prioritized(spread=2.0), "Prioritized: spread is 2.0"),
        (lambda: Prioritized(largest="now"), 'Prioritized: largest is \'now\'; expected "seen" or "held"'),
        (lambda: Prioritized(uniform=0.1, replace=False), "Prioritized: uniform is 0.1 and replace is False"),
        (lambda: Ranked(alpha=-1), "Ranked: alpha is -1; expected a finite Python number >= 0"),
        (lambda: Ranked(uniform=-0.1), "Ranked: uniform is -0.1; expected a Python number from 0 to 1"),
        (lambda: Ranked(normalize="all"), "Ranked: normalize is 'all'"),
        (lambda: Ranked(largest=1), "Ranked: largest is 1"),
        (lambda: Ranked(spread=9999), "Ranked: spread is 9999"),
        (lambda: fbuf.Buffer(9, sampler=Prioritized(spread=1)), "goes by episodes, but .* nothing ends an episode"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_numbers_beyond_their_range_are_refused_or_brought_back() -> None:
    buffer, state = filled(Prioritized(uniform=0.1, decay=0.5, keep=0.5), [1.0, 2.0])
    for numbers in ({"uniform": 1.1}, {"decay": 2}, {"keep": np.float32(3)}):
        with pytest.raises(ValueError, match=r"Buffer.set: .* expected a number from 0 to 1"):
            buffer.set(state, **numbers)
    with pytest.raises(ValueError, match=r"Buffer.sample: uniform is 7; expected a number from 0 to 1"):
        buffer.sample(state, KEY, 2, uniform=7)
    with pytest.raises(ValueError, match="has no number 'rho'"):
        buffer.set(state, rho=0.5)


@pytest.mark.parametrize(
    "sampler",
    [
        Prioritized(uniform=0.1, decay=0.5, keep=0.5, spread=1, normalize="buffer"),
        pytest.param(Ranked(uniform=0.1, normalize="buffer"), marks=pytest.mark.slow),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_what_is_traced_is_brought_into_range(sampler: Any) -> None:
    """Numbers gone wrong for one step: whatever is drawn then is a row, weights are finite, and the tree lives on."""
    number = 20
    buffer = fbuf.Buffer(65, sampler=sampler, episode_end=("end",))
    rows = {"t": jnp.arange(number, dtype=jnp.int32), "end": jnp.zeros(number, bool)}
    start = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)

    @jax.jit
    def step(state: Any, numbers: dict[str, jax.Array], beta: jax.Array) -> Any:
        state, batch = buffer.sample(buffer.set(state, **numbers), KEY, 8, beta=beta)
        return buffer.update_priority(state, batch.index, jnp.arange(8.0)), batch

    usual = {name: jnp.float32(getattr(sampler, name)) for name in sampler.numbers}
    for name in (*usual, ""):
        for value in (-1.0, 5.0, 1e30, float("nan"), float("inf"), -float("inf"), 0.0):
            beta = jnp.float32(0.4 if name else value)
            state, _ = step(start, usual | ({name: jnp.float32(value)} if name else {}), beta)
            for _ in range(2):
                state, batch = jax.device_get(step(state, usual | ({name: jnp.float32(value)} if name else {}), beta))
                assert batch.mask.all() and batch.index.slot.max() < number
                assert np.isfinite(batch.weight).all() and np.isfinite(batch.probability).all()
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.sampler.max_priority, batch)))
            state, batch = jax.device_get(step(state, usual, jnp.float32(0.4)))
            assert (batch.weight > 0).all() and (batch.probability > 0).all()
