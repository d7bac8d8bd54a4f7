"""Each option of `Prioritized` and `Ranked` against float64, on cases worked out by hand, and by chi-square."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._algorithms import rank_buckets, sum_tree
from fbuf._buffer import state as state_ops
from fbuf._core import control_flow
from fbuf.samplers import Prioritized, Ranked, _prioritized
from fbuf.samplers._base import uniform_mask
from tests.support import priorities, refusals, same_step
from tests.support.platforms import as_on_gpus
from tests.support.priorities import KEY, filled, index_of, leaves, races, sets_of
from tests.support.refusals import raises
from tests.support.tables import by_tier, one_of
from tests.support.uniformity import chi_square_z, lanes_out_of_step


def test_of_more_rows_than_fit_the_newest_stay_with_their_priorities():
    buffer = fbuf.Buffer(4, sampler=Prioritized(alpha=1.0, eps=0.0))
    priority = np.arange(1, 11, dtype=np.float32)
    state = buffer.extend(buffer.init(np.int32(0)), np.arange(10, dtype=np.int32), priority=priority)
    assert buffer.rows(state).data.tolist() == [6, 7, 8, 9]
    assert buffer.priorities(state, buffer.rows(state).index).tolist() == [7, 8, 9, 10]


def test_a_slot_without_a_row_gets_no_priority():
    buffer = fbuf.Buffer(4, sampler=Prioritized())
    state = buffer.extend(buffer.init(np.int32(0)), np.arange(2, dtype=np.int32))
    empty = fbuf.Index(jnp.array([3], jnp.int32), jnp.zeros(1, jnp.uint32))
    state = buffer.update_priority(state, empty, jnp.array([9.0], jnp.float32))
    assert np.asarray(leaves(buffer, state))[2:].tolist() == [0, 0]


@pytest.mark.parametrize(("share", "least"), [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (0.5, 2.0)])
def test_a_share_of_the_batch_ignores_priorities(share, least):
    """A row of priority 0 is the least likely one, unless the share is 0: then it is not drawn."""
    priority = np.array([3.0, least, 5.0, 100.0])
    buffer, state = filled(Prioritized(1.0, 1.0, 0.0, normalize="buffer", uniform=0.3), priority)
    for batch in (buffer.peek(state, KEY, 256, uniform=share), buffer.peek(buffer.set(state, uniform=share), KEY, 256)):
        batch = jax.device_get(batch)
        chance = (1 - share) * priority / priority.sum() + share / 4
        assert set(batch.data.tolist()) == set(np.flatnonzero(chance).tolist())
        np.testing.assert_allclose(batch.probability, chance[batch.data], rtol=1e-6)
        np.testing.assert_allclose(batch.weight, (chance[chance > 0].min() / chance[batch.data]), rtol=1e-5)
        assert np.abs(np.bincount(batch.data, minlength=4) - 256 * chance).max() <= 40
    plain, other = filled(Prioritized(1.0, 1.0, 0.0, normalize="buffer"), priority)
    if share == 0:
        jax.tree.map(np.testing.assert_array_equal, batch, jax.device_get(plain.peek(other, KEY, 256)))
    assert float(state.sampler.uniform) == np.float32(0.3)


def test_a_batch_has_a_row_of_each_part_of_the_total():
    buffer, state = filled(Prioritized(1.0, 1.0, 0.0), np.ones(16))
    assert sorted(buffer.peek(state, KEY, 16).data.tolist()) == list(range(16))


@functools.partial(jax.jit, static_argnums=0)
def shares(number, share):
    starts = jax.vmap(lambda key: uniform_mask(key, share, 3, spread=True))(jax.random.split(KEY, 20_000))
    return uniform_mask(KEY, share, number, spread=True), starts, uniform_mask(KEY, share, 2**16, spread=False)


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.1, 1 / 3, 0.999, 1.0])
def test_every_part_of_a_batch_gets_its_share(share):
    number = 65_537
    chosen, starts, alone = jax.device_get(shares(number, np.float32(share)))
    upto = np.concatenate([[0], np.cumsum(chosen)])
    for m in (1, 2, 7, 1000, number):
        assert np.abs(upto[m:] - upto[:-m] - share * m).max() <= 1 + 1e-6 * number
    for mean, count in ((starts.mean(axis=0), 20_000), (alone.mean(), 2**16)):
        assert np.all(np.abs(mean - share) <= 5 * np.sqrt(share * (1 - share) / count))


far_apart = one_of(True, exhaustive=[False])


def test_sets_are_those_of_drawing_one_after_another(far_apart):
    """Six leaves beside one another, or far apart in a tree of four levels."""
    leaf = np.array([8.0, 1.0, 2.0, 0.25, 4.0, 0.5])
    capacity = 4000 if far_apart else 6
    at = np.array([0, 1, 700, 701, 2048, 3999]) if far_apart else np.arange(6)
    priority = np.zeros(capacity, np.float32)
    priority[at] = leaf
    got = jax.device_get(races(sum_tree.rebuild(priority), jax.random.split(KEY, 60_000), 3, capacity))
    assert got.mask.all()
    expected = sets_of(leaf, 3)
    drawn = np.searchsorted(at, got.slot)
    names = np.sort(drawn, axis=1) @ [36, 6, 1]
    counts = np.array([(names == np.dot(s, [36, 6, 1])).sum() for s in expected])
    assert abs(chi_square_z(counts, np.array(list(expected.values())))) < 4
    # In random order, so that the first of a batch is as good as its last.
    positions = [np.bincount(drawn[:, i], minlength=6) for i in range(3)]
    for one, two in itertools.combinations(positions, 2):
        assert np.abs(one - two).max() < 5 * np.sqrt(2 * max(one.max(), two.max()))
    more = jax.device_get(races(sum_tree.rebuild(priority), jax.random.split(KEY, 20_000), 5, capacity, np.int32(3)))
    assert (more.mask == [True, True, True, False, False]).all()
    # The sum of f / chance over a batch is on average that of f over all rows: here of f that is 1 for one row.
    for slot, chance in ((got.slot, got.chance), (more.slot[:, :3], more.chance[:, :3])):
        for i in at:
            sums = ((slot == i) / chance.astype(np.float64)).sum(axis=1)
            assert abs(sums.mean() - 1) < 5 * sums.std() / np.sqrt(len(sums))


@pytest.mark.parametrize("by", [Prioritized(0.5, eps=0.25), Ranked()], ids=str)
def test_chances_and_priorities_can_be_inspected(by):
    buffer, state = filled(by, [1.0, 2.0, 3.0, 4.0, 0.0], capacity=6)
    see = jax.jit(lambda state: by.inspect(state.sampler, state_ops.anchor_set(buffer, state)))
    chance, _ = jax.device_get(see(state))
    priority = by.priority(state.sampler, jnp.arange(6))
    known = [1.25, 2.25, 3.25, 4.25, 0.25] if isinstance(by, Prioritized) else [4, 3, 2, 1, 5]
    expected = np.array(known) ** (0.5 if isinstance(by, Prioritized) else -0.7)
    np.testing.assert_allclose(chance, np.append(expected / expected.sum(), 0), rtol=1e-5)
    np.testing.assert_allclose(priority[:5], [1, 2, 3, 4, 0], rtol=1e-5, atol=1e-6)


def test_a_batch_larger_than_what_there_is():
    buffer, state = filled(Prioritized(eps=0.0, replace=False), [2.0, 0.0, 7.0, 1e-30], capacity=9)
    batch = jax.device_get(buffer.peek(state, KEY, 6))
    assert batch.mask.tolist() == [True] * 3 + [False] * 3
    assert sorted(batch.data[:3].tolist()) == [0, 2, 3]  # what has no priority cannot be drawn
    np.testing.assert_allclose(batch.probability, [1 / 6] * 3 + [0] * 3, rtol=1e-6)
    assert batch.index.slot[3:].tolist() == [9] * 3 and not batch.weight[3:].any()
    np.testing.assert_allclose(batch.weight[:3], 1.0, rtol=1e-6)
    state = buffer.update_priority(state, batch.index, np.zeros(6, np.float32))
    assert not any(int(x) for name, x in buffer.stats(state).items() if name.startswith("refused"))
    batch = jax.device_get(buffer.peek(state, KEY, 6))  # all 0: all alike
    assert sorted(batch.data[:4].tolist()) == [0, 1, 2, 3] and not batch.mask[4:].any()


@pytest.mark.more
@pytest.mark.parametrize("replace", by_tier(False, more=[True]))
def test_gpus_draw_the_same_rows_where_every_priority_is_zero(replace):
    view = fbuf.views.Sequence(2, episode="id", episode_end=())  # its anchors have flags
    buffer = fbuf.Buffer(37, view=view, sampler=Prioritized(eps=0.0, replace=replace))
    rows = {"id": np.arange(30, dtype=np.int32) // 5, "row": np.arange(30, dtype=np.int32)}
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))

    def draw(state):
        anchors, wanted = state_ops.anchor_set(buffer, state), jnp.int32(32)
        return buffer.sampler.draw_some(state.sampler, KEY, 32, wanted, anchors, {}, state.token)

    @jax.jit
    def both(state):
        with as_on_gpus():
            other = draw(state)
        return draw(state), other

    for priority in (np.zeros(30, np.float32), np.ones(30, np.float32)):
        state = buffer.extend(state, rows, priority=priority)
        jax.tree.map(np.testing.assert_array_equal, *both(state))


@pytest.mark.more
@pytest.mark.parametrize(("n_step", "stack", "lanes"), by_tier((1, None, 2), more=[(2, 3, 1)]))
def test_accelerators_write_each_slot_of_a_priority_once(n_step, stack, lanes, monkeypatch):
    """A slot closes and opens again in one write: in any order, its priority is that of the row that opens."""
    view = same_step.Transition(n_step=n_step, stack=stack)
    buffer = fbuf.Buffer(8 * lanes, sampler=Prioritized(), view=view, lanes=lanes)
    rng, write = np.random.default_rng(0), sum_tree.set_all
    orders = []

    def write_backwards(trees, index, leaves, capacity, *, reduce, distinct=False):
        orders.append(distinct)
        if distinct:
            index, leaves = index[::-1], [leaf[::-1] for leaf in leaves]
        return write(trees, index, leaves, capacity, reduce=reduce, distinct=distinct)

    twin = dataclasses.replace(buffer, view=dataclasses.replace(view, gamma=0.5))  # of another program

    def step(buffer, state, rows, priority, index, error):
        state = buffer.extend(state, rows, priority=priority)
        return state, buffer.update_priority(state, index, error)

    @jax.jit
    def both(*arguments):
        with as_on_gpus(), monkeypatch.context() as patch:
            patch.setattr(sum_tree, "set_all", write_backwards)
            other = step(twin, *arguments)
        return step(buffer, *arguments), other

    row = {"obs": np.float32(0), "action": np.float32(0), "reward": np.float32(0)}
    row |= {"terminated": np.bool_(False), "truncated": np.bool_(False)}
    state = buffer.init(row)
    for _ in range(6):
        number = (5, lanes)
        rows = {name: np.zeros(number, np.asarray(x).dtype) for name, x in row.items()}
        rows["terminated"] = rng.random(number) < 0.2
        generation = (state.ring.lap[0] + rng.integers(-1, 2, 40)).astype(np.uint32)
        index = fbuf.Index(rng.integers(-1, buffer.capacity + 2, 40).astype(np.int32), generation)  # with repeats
        error = np.where(rng.random(40) < 0.1, np.nan, rng.exponential(size=40)).astype(np.float32)
        arguments = rows, rng.exponential(size=number).astype(np.float32), index, error
        (state, updated), other = both(state, *arguments)
        jax.tree.map(np.testing.assert_array_equal, (state, updated), other)
    assert orders == [True, False]
    stats = buffer.stats(updated)
    assert all(stats[f"refused_{name}"] > 0 for name in ("nonfinite", "out_of_range", "stale", "closed"))


@pytest.mark.parametrize("kind", by_tier(Prioritized, more=[Ranked]))
def test_new_rows_are_drawn_where_every_priority_held_is_zero(kind):
    parts = {"alpha": 1.0} | ({"eps": 0.0} if kind is Prioritized else {})
    buffer = fbuf.Buffer(8, sampler=kind(largest="held", **parts))
    state = buffer.extend(buffer.init(0.0), jnp.zeros(4), priority=jnp.zeros(4))
    state = buffer.add(state, 1.0)
    assert buffer.priorities(state)[:5].tolist() == [0, 0, 0, 0, 1]
    state = buffer.update_priority(state, buffer.rows(state, last=1).index, jnp.full(1, 0.25))
    state = buffer.add(state, 1.0)  # as the largest held
    assert float(buffer.priorities(state)[5]) == 0.25


@pytest.mark.parametrize("largest", ["seen", "held"])
def test_new_rows_get_the_largest_priority(largest):
    held = largest == "held"
    buffer = fbuf.Buffer(4, sampler=Prioritized(alpha=1.0, eps=0.0, largest=largest))
    state = buffer.init(np.int32(0))

    def add(state, *priority):
        for number in priority:
            given = {} if number is None else {"priority": np.array([number], np.float32)}
            state = buffer.extend(state, np.zeros(1, np.int32), **given)
        return state

    state = add(state, None, 9.0, 2.0, None)  # 1, 9, 2 and another 9
    assert leaves(buffer, state).tolist() == [1, 9, 2, 9]
    state = buffer.update_priority(state, index_of(buffer, state, [1, 3]), np.array([3.0, -4.0], np.float32))
    assert float(buffer.stats(state)["max_priority"]) == (4.0 if held else 9.0)
    state = add(state, None, None)
    assert leaves(buffer, state).tolist() == ([4, 4, 2, 4] if held else [9, 9, 2, 4])
    state = add(state, 0.5, 0.0, 0.5, 0.125)
    assert float(buffer.stats(state)["max_priority"]) == (0.5 if held else 9.0)
    assert leaves(buffer, state).tolist() == [0.5, 0.125, 0.5, 0.0]
    state = buffer.clear(buffer.set(state, beta=0.75))
    assert leaves(buffer, add(state, None)).tolist() == [1, 0, 0, 0]
    assert float(state.sampler.beta) == 0.75 and float(state.sampler.alpha) == 1


@pytest.mark.parametrize("largest", by_tier("held", more=["seen"]))
def test_new_rows_are_among_the_first_ranks(largest):
    buffer, state = filled(Ranked(largest=largest), [8.0, 2.0], capacity=4)
    state = buffer.update_priority(state, index_of(buffer, state, [0]), np.array([0.5], np.float32))
    state = buffer.extend(state, np.array([3], np.int32))
    bucket = np.asarray(rank_buckets.get(state.sampler.ranks, np.arange(4, dtype=np.int32)))
    expected = [0.5, 2, 8, 0] if largest == "seen" else [0.5, 2, 2, 0]
    assert np.where(bucket > 0, rank_buckets.lower_edge(bucket), 0).tolist() == expected


def test_a_new_alpha_for_all_rows():
    """Bit for bit what a buffer that had it from the start holds; draws follow; nothing compiles again."""
    capacity = _prioritized.BLOCK + 5
    priority = np.random.default_rng(0).exponential(size=capacity - 2).astype(np.float32)
    sampler = Prioritized(0.9, largest="held", normalize="buffer")
    buffer, state = filled(sampler, priority, capacity=capacity)
    fresh, expected = filled(Prioritized(0.3, largest="held", normalize="buffer"), priority, capacity=capacity)
    again = jax.jit(lambda state, alpha: buffer.set(state, alpha=alpha, rebuild=True), donate_argnums=0)
    for alpha in (0.5, 0.0, 0.3):
        state = again(state, np.float32(alpha))
    assert again._cache_size() == 1
    for one, two in zip(jax.tree.leaves(state.sampler), jax.tree.leaves(expected.sampler), strict=True):
        np.testing.assert_array_equal(one, two)
    one, two = buffer.peek(state, KEY, 32), fresh.peek(expected, KEY, 32)
    np.testing.assert_array_equal(one.index.slot, two.index.slot)


def test_who_cannot_rebuild_says_so():
    for sampler, text in (
        (Prioritized(), r"stores powers of priorities.*Prioritized\(largest='held'\)"),
        (fbuf.samplers.Uniform(), "has no priorities"),
    ):
        buffer = fbuf.Buffer(3, sampler=sampler)
        raises(TypeError, text, lambda b=buffer: b.set(b.init(np.int32(0)), rebuild=True))
    raises(TypeError, "first argument is int, expected BufferState", lambda: buffer.set(3, rebuild=True))
    raises(TypeError, "rebuild is 1; expected", lambda: buffer.set(buffer.init(np.int32(0)), rebuild=1))
    ranked = fbuf.Replay(fbuf.Buffer(3, sampler=Ranked()), np.int32(0), seed=0)
    ranked.extend(np.arange(2))
    ranked.set(rebuild=True)
    assert len(ranked) == 2


capacity = one_of(5000, exhaustive=[1, 5, 512, 513, 40_000])


@functools.partial(jax.jit, static_argnums=3)
def put(ranks, slot, bucket, capacity):
    return rank_buckets.set(ranks, slot, bucket, capacity, jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnums=3)
def find(ranks, index, nth, capacity):
    return rank_buckets.nth_of(ranks, index, nth, capacity)


mass_of = jax.jit(rank_buckets.mass_of)


stratified = one_of(False, exhaustive=[True])


@pytest.mark.more
def test_draws_by_rank(stratified):
    """Four orders of magnitude; three outliers weigh no more than their ranks."""
    number, draws = 3000, 2**17
    priority = 10 ** np.random.default_rng(0).uniform(-2, 2, number)
    priority[[5, 50, 500]] = 1e12, 1e9, 3e8
    sampler = Ranked(0.7, 0.5, stratified=stratified, normalize=None)
    buffer, state = filled(sampler, priority, capacity=4000)
    bucket = np.asarray(rank_buckets.bucket_of(priority.astype(np.float32)))
    terms = np.arange(1, number + 1, dtype=np.float64) ** -0.7
    rank_of = np.empty(number, int)
    rank_of[np.argsort(-priority)] = np.arange(number)
    chances, exact = np.zeros(4000), terms[rank_of] / terms.sum()
    for b in np.unique(bucket):
        tied = np.flatnonzero(bucket == b)
        chances[tied] = exact[tied].mean()
        # A tie is never broken by more than what the bucket spans: the exact rank's chance is within it.
        assert exact[tied].min() <= chances[tied[0]] * (1 + 1e-6) and chances[tied[0]] <= exact[tied].max() * (1 + 1e-6)
    batch = jax.device_get(buffer.peek(state, jax.random.key(1), draws))
    assert batch.mask.all() and np.array_equal(batch.data, batch.index.slot)
    z = chi_square_z(np.bincount(batch.data, minlength=4000), chances)
    assert z < 4
    assert stratified or z > -4
    np.testing.assert_allclose(batch.probability, chances[batch.data], rtol=1e-5)
    np.testing.assert_allclose(batch.weight, (number * chances[batch.data]) ** -0.5, rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0, 1.0001, 2.0, 6.0])
def test_masses_of_ranks(alpha):
    """Against sums in float64, from one rank to a million, near the first and far from it."""
    terms = np.arange(1, 2_000_001, dtype=np.float64) ** -alpha
    upto = np.concatenate([[0], np.cumsum(terms)])
    cases = [(0, 1), (0, 16), (0, 17), (3, 40), (15, 1), (16, 1), (17, 3), (1000, 1), (99_999, 1), (0, 2_000_000)]
    cases += [(500_000, 12), (1_999_999, 1), (12, 1_000_000), (0, 0), (77, 0)]
    above, number = (np.array(x, np.int32) for x in zip(*cases, strict=True))
    got = np.asarray(mass_of(above, number, np.float32(alpha)))
    expected = [terms[a : a + n].sum() if n < 1000 else upto[a + n] - upto[a] for a, n in cases]
    np.testing.assert_allclose(got, expected, rtol=2e-6 * max(1, alpha * 5), atol=1e-38)


def test_buckets_are_in_order_of_magnitude():
    edge = np.asarray(rank_buckets.lower_edge(np.arange(1, 513, dtype=np.int32)))
    assert np.array_equal(rank_buckets.bucket_of(edge), np.arange(1, 513))
    assert np.array_equal(rank_buckets.bucket_of(np.nextafter(edge, np.float32(np.inf))), np.arange(1, 513))
    below = np.asarray(rank_buckets.bucket_of(np.nextafter(edge, np.float32(0))))
    assert np.array_equal(below, np.maximum(np.arange(0, 512), 1))
    assert edge[0] == 2.0**-32 and (edge[1:] / edge[:-1]).max() <= 1.125 and edge[-1] < 2.0**32 <= edge[-1] * 1.125
    odd = np.array([0.0, 1e-44, 1e-30, 1e30, 3e38], np.float32)
    assert np.asarray(rank_buckets.bucket_of(odd)).tolist() == [1, 1, 1, 512, 512]


@given(seed=st.integers(0, 2**16))
def test_ranks_are_kept_and_found(capacity, seed):
    """Random changes against a list: buckets, counts, and every row of every bucket by its number."""
    rng = np.random.default_rng(seed)
    ranks, model = rank_buckets.init(capacity), np.zeros(capacity, int)
    for _ in range(4):
        slot = rng.integers(-1, capacity + 2, 64)
        bucket = rng.choice([0, 1, 7, 8, 300, 512], 64)
        ranks = put(ranks, slot.astype(np.int32), bucket.astype(np.int32), capacity)
        for s, b in zip(slot, bucket, strict=True):
            if 0 <= s < capacity:
                model[s] = b
    buckets = np.asarray(ranks.bucket)
    assert np.array_equal(buckets[:capacity], model) and not np.any(buckets[capacity:])
    total = np.bincount(model, minlength=513)[1:]
    assert np.array_equal(ranks.total, total)
    rows = np.flatnonzero(model)
    order = rows[np.lexsort((rows, model[rows]))]  # by bucket, then by slot
    nth = np.concatenate([np.arange(n) for n in total]) if len(order) else np.zeros(0, int)
    if len(order):
        pad = 256 - len(order)
        index = np.pad(model[order] - 1, (0, pad), "edge").astype(np.int32)
        found = find(ranks, index, np.pad(nth, (0, pad), "edge").astype(np.int32), capacity)
        assert np.array_equal(np.asarray(found)[: len(order)], order)


@pytest.mark.parametrize("case", refusals.cases(priorities.REFUSED))
def test_numbers_beyond_their_range_are_refused(case):
    plain, shared = (jax.eval_shape(buffer.init, np.int32(0)) for buffer in (priorities.PLAIN, priorities.SHARED))
    refusals.check(case, vars(priorities), plain=plain, shared=shared)


sampler = one_of(Prioritized(uniform=0.1, normalize="buffer"), exhaustive=[Ranked(uniform=0.1, normalize="buffer")])


def test_traced_numbers_are_brought_into_range(sampler):
    """Numbers gone wrong for one step: whatever is drawn then is a row, weights are finite, and the tree lives on."""
    number = 20
    buffer = fbuf.Buffer(65, sampler=sampler)
    start = buffer.extend(buffer.init(np.int32(0)), np.arange(number, dtype=np.int32))

    @jax.jit
    def step(state, numbers, beta):
        state, batch = buffer.sample(buffer.set(state, **numbers), KEY, 8, beta=beta)
        return buffer.update_priority(state, batch.index, jnp.arange(8.0)), batch

    usual = {name: np.float32(getattr(sampler, name)) for name in sampler.numbers}
    for name in (*usual, ""):
        for value in (-1.0, 5.0, 1e30, float("nan"), float("inf"), -float("inf"), 0.0):
            beta = jnp.float32(0.4 if name else value)
            state, _ = step(start, usual | ({name: np.float32(value)} if name else {}), beta)
            for _ in range(2):
                state, batch = jax.device_get(step(state, usual | ({name: np.float32(value)} if name else {}), beta))
                assert batch.mask.all() and batch.index.slot.max() < number
                assert np.isfinite(batch.weight).all() and np.isfinite(batch.probability).all()
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.sampler.max_priority, batch)))
            state, batch = jax.device_get(step(state, usual, np.float32(0.4)))
            assert (batch.weight > 0).all() and (batch.probability > 0).all()


def test_rows_that_cannot_be_drawn_take_no_priority():
    """The newest row waits for its next observation: it is held, but no anchor yet."""
    view = fbuf.views.Transition(observation="t", action=None, reward="r", autoreset="same_step")
    buffer = fbuf.Buffer(4, sampler=Prioritized(eps=0.0, alpha=1.0), view=view)
    zeros = np.zeros(3, np.float32)
    rows = {"t": zeros, "r": zeros, "terminated": zeros > 0, "truncated": zeros > 0}
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    state = buffer.extend(state, rows, priority=np.array([0.5, 2, 7], np.float32))
    assert leaves(buffer, state).tolist() == [0.5, 2, 0, 0] and float(state.sampler.max_priority) == 2
    state = buffer.update_priority(state, buffer.rows(state, last=1).index, np.array([9.0], np.float32))
    assert leaves(buffer, state).tolist() == [0.5, 2, 0, 0]
    assert int(buffer.stats(state)["refused_closed"]) == 1 and float(state.sampler.max_priority) == 2


def test_priorities_of_masked_rows_are_neither_refused_nor_kept():
    buffer = fbuf.Buffer(4, sampler=Prioritized(alpha=1.0, eps=0.0))
    priority = np.array([np.nan, -2, np.inf, np.nan], np.float32)
    mask = np.array([False, True, False, True])
    state = buffer.extend(buffer.init(np.int32(0)), np.arange(4, dtype=np.int32), priority=priority, mask=mask)
    assert int(buffer.stats(state)["refused_nonfinite"]) == 1
    # The magnitude counts, and a row whose priority was refused gets the largest seen before.
    assert leaves(buffer, state).tolist() == [2, 1, 0, 0]


@pytest.mark.parametrize("scale", by_tier(1.0, more=[0.0]))
def test_gpus_select_what_other_platforms_branch_to(scale, monkeypatch):
    """Every priority is 0, or none is: the host of a GPU waits for a branch, so both sides are computed."""
    sampler = Prioritized(eps=0.0)
    buffer = fbuf.Buffer(40, lanes=2, sampler=sampler, view=fbuf.views.Sequence(3, autoreset="same_step"))
    row = {"x": np.float32(0), "terminated": np.bool_(False), "truncated": np.bool_(False)}
    rows = {name: np.zeros((33, 2), leaf.dtype) for name, leaf in row.items()}
    rows["x"][:] = np.arange(66, dtype=np.float32).reshape(33, 2)
    state = buffer.extend(buffer.init(row), rows, priority=jnp.arange(1, 67, dtype=jnp.float32).reshape(33, 2) * scale)

    def draw(state, key):
        held = state_ops.anchor_set(buffer, state)
        number = jnp.float32(9)
        return _prioritized.with_replacement(state.sampler, key, 64, held, number, None, True)[:3]

    expected = jax.device_get(jax.jit(draw)(state, KEY))

    def on_gpus(*args, gpu=None, default, cpu=None):
        return (gpu or default)(*args)

    monkeypatch.setattr(control_flow, "platform_dependent", on_gpus)
    got = jax.device_get(jax.jit(lambda *args: draw(*args))(state, KEY))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert len(set(got[0].tolist())) > 9 and (scale or set(got[2]) == {np.float32(1 / 9)})


ranked = one_of(True, exhaustive=[False, True])


@pytest.mark.more
def test_a_share_of_a_buffer_with_lanes_ignores_priorities(ranked, stratified):
    sampler = (Ranked if ranked else Prioritized)(alpha=1.0, uniform=0.3, stratified=stratified)
    buffer, state, open_slots = lanes_out_of_step(sampler)
    slots = np.flatnonzero(open_slots)
    errors = np.random.default_rng(6).exponential(size=len(slots)).astype(np.float32)
    state = buffer.update_priority(state, index_of(buffer, state, slots.tolist()), errors)
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


@pytest.mark.more
@pytest.mark.parametrize("normalize", [None, "batch", "buffer"])
def test_weights_of_draws_without_replacement(normalize):
    """With beta = 1 the weighted mean over the batch is that of all rows; normalized, it is a multiple of it."""
    priority = np.random.default_rng(2).exponential(size=40)
    buffer, state = priorities.filled(Prioritized(1.0, 1.0, 0.0, normalize=normalize, replace=False), priority)
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("size", "batch_size", "trials"), [(100, 30, 4000), (5000, 64, 3000)])
def test_chances_make_sums_unbiased(size, batch_size, trials):
    """The sum of f / chance over the batch is that of f over all, whatever f: here of who holds much and who little."""
    leaf = np.random.default_rng(1).pareto(1.2, size).astype(np.float32)
    leaf[::10] = 0
    tree = sum_tree.rebuild(leaf)
    got = jax.device_get(races(tree, jax.random.split(jax.random.key(1), trials), batch_size, size))
    assert got.mask.all() and (leaf[got.slot] > 0).all()
    assert all(len(set(s)) == batch_size for s in got.slot.tolist())
    order = np.argsort(leaf)
    for part in (order[-10:], order[-size // 3 :], np.flatnonzero(leaf)):
        of_part = np.isin(got.slot, part) / got.chance.astype(np.float64)
        sums = of_part.sum(axis=1)
        assert abs(sums.mean() - np.sum(leaf[part] > 0)) < 5 * sums.std() / np.sqrt(trials)


@pytest.mark.exhaustive
@pytest.mark.parametrize("view", [fbuf.views.Row(), same_step.Transition()])
def test_all_zero_without_replacement_is_a_part_of_all(view):
    sampler = Prioritized(eps=0.0, replace=False, beta=1.0)
    if isinstance(view, fbuf.views.Row):
        buffer, state = priorities.filled(sampler, np.zeros(50))
        can = np.ones(50, bool)
    else:
        buffer, state, can = lanes_out_of_step(sampler, length=31)
        slots = np.flatnonzero(can).tolist()
        state = buffer.update_priority(state, index_of(buffer, state, slots), np.zeros(len(slots), np.float32))
    counts = np.zeros(buffer.capacity)
    for key in jax.random.split(KEY, 60):
        batch = jax.device_get(buffer.peek(state, key, 20))
        assert len(set(batch.index.slot.tolist())) == 20 and can[batch.index.slot].all()
        np.testing.assert_allclose(batch.weight, 1.0)
        counts += np.bincount(batch.index.slot, minlength=buffer.capacity)
    assert np.all(counts[can] > 0) and not counts[~can].any()
