"""How many rows of a batch come from which buffer, how likely each was and what it counts: against closed forms."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._members import quota as _quota
from fbuf._members.mixture.draw import weigh
from fbuf.samplers import Consume, Epoch, Prioritized
from tests.support.tables import by_tier
from tests.support.uniformity import chi_square_z

PARTS = st.lists(st.integers(0, 64), min_size=1, max_size=5).filter(any)


def largest_remainder(parts, total):
    """By definition: seats one after another to who is furthest below its share."""
    exact = [Fraction(p * total, sum(parts)) for p in parts]
    out = [e.numerator // e.denominator for e in exact]
    while sum(out) < total:
        behind = [e - o if o < e else Fraction(-1) for e, o in zip(exact, out, strict=True)]
        out[behind.index(max(behind))] += 1
    return out


@given(parts=PARTS, total=st.integers(0, 300))
def test_quotas_are_those_of_the_largest_remainder(parts, total):
    quotas = _quota.quotas([p / 64 for p in parts], total)
    assert list(quotas) == largest_remainder(parts, total)
    assert sum(quotas) == total
    assert all(abs(q - p * total / sum(parts)) < 1 and (p or not q) for p, q in zip(parts, quotas, strict=True))


traced = jax.jit(_quota.traced)


@given(data=st.data(), size=st.integers(1, 5), total=st.integers(0, 300))
def test_traced_quotas_are_the_same(data, size, total):
    cuts = sorted(data.draw(st.lists(st.integers(0, 64), min_size=size - 1, max_size=size - 1)))
    parts = np.diff([0, *cuts, 64]).tolist()
    padded = np.zeros(5, np.float32)
    padded[:size] = np.array(parts) / 64
    got = np.asarray(traced(padded, np.int32(total)))
    assert got[:size].tolist() == largest_remainder(parts, total) and not got[size:].any()
    odd = np.asarray(data.draw(st.lists(st.floats(0, 1, width=32), min_size=5, max_size=5)), np.float32)
    odd = np.asarray(_quota.normalized(jnp.asarray(odd)))
    if odd.any():
        got = np.asarray(traced(odd, np.int32(total)))
        assert got.sum() == total and (np.abs(got - odd.astype(np.float64) * total) < 1.001).all()
        assert not got[odd == 0].any()


def test_decimals_are_taken_as_they_are_written():
    assert _quota.quotas((0.1, 0.2, 0.7), 10) == (1, 2, 7)
    assert _quota.quotas((0.1,) * 10, 30) == (3,) * 10
    assert np.asarray(traced(np.array([0.1, 0.2, 0.7], np.float32), np.int32(10))).tolist() == [1, 2, 7]
    assert np.asarray(traced(np.full(4, 0.25, np.float32), np.int32(6))).tolist() == [2, 2, 1, 1]


def test_fractions_that_make_no_sense_count_as_none():
    for odd, wanted in (
        ([np.nan, 1, 1], [0, 0.5, 0.5]),
        ([-1, 3, 1], [0, 0.75, 0.25]),
        ([0, 0, 0], [0, 0, 0]),
        ([np.inf, 1, 0], [1, 1e-30, 0]),
    ):
        got = np.asarray(_quota.normalized(jnp.asarray(odd, jnp.float32)))
        np.testing.assert_allclose(got, np.asarray(wanted, np.float32), rtol=1e-6)
    assert np.asarray(traced(np.zeros(3, np.float32), np.int32(9))).tolist() == [0, 0, 0]


shared = jax.jit(_quota.shared)


@given(data=st.data())
def test_what_is_left_over_goes_to_the_others_by_quotas(data):
    parts = data.draw(st.lists(st.integers(0, 8), min_size=3, max_size=3).filter(any))
    there = np.array(data.draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    quota = largest_remainder(parts, 16)
    source = np.repeat(np.arange(3, dtype=np.int32), quota)
    fractions = (np.array(parts) / sum(parts)).astype(np.float32)
    got = np.asarray(shared(source, fractions, there))
    over = ~there[source]
    assert (got[~over] == 3).all()
    open_to = [p if t else 0 for p, t in zip(parts, there, strict=True)]
    if not any(open_to):
        assert (got == 3).all()
        return
    wanted = largest_remainder(open_to, int(over.sum()))
    given = np.bincount(got[over], minlength=3)
    # Equal remainders may be a hair apart in float32.
    assert given.sum() == over.sum() and (np.abs(given - np.array(wanted)) <= 1).all()
    assert not given[np.array(open_to) == 0].any()
    assert (np.diff(got[over]) >= 0).all()


def test_sources_at_random_have_their_chances():
    fractions = np.array([0, 0.1, 0, 0.6, 0.3, 0], np.float32)
    source = np.asarray(_quota.at_random(jax.random.key(0), jnp.asarray(fractions), 100_000))
    counts = np.bincount(source, minlength=6)
    assert abs(chi_square_z(counts, fractions.astype(np.float64) / fractions.sum())) < 4
    nothing = np.asarray(_quota.at_random(jax.random.key(0), jnp.zeros(3), 5))
    assert nothing.tolist() == [3] * 5


def weights(target, beta, normalize):
    """Chances and weights of all anchors of three buffers, of 3, 5 and 2."""
    rng = np.random.default_rng(0)
    number = np.array([3, 5, 2], np.int32)
    source = np.repeat(np.arange(3, dtype=np.int32), number)
    chance = rng.random(10)
    for s in range(3):
        chance[source == s] /= chance[source == s].sum()
    share = np.array([0.25, 0.75, 0])
    mask = source < 2
    given = source, chance.astype(np.float32), mask, share.astype(np.float32), number, np.float32(beta)
    probability, weight = weigh(*map(jnp.asarray, given), target, normalize)
    return source, chance, share, mask, np.asarray(probability), np.asarray(weight)


@pytest.mark.parametrize("normalize", ["batch", None])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_those_of_the_closed_form(beta, normalize):
    for target in ("union", "source"):
        source, chance, share, mask, probability, weight = weights(target, beta, normalize)
        density = share[source] * chance
        np.testing.assert_allclose(probability, np.where(mask, density, 0), rtol=1e-6)
        number = np.array([3, 5, 2])[source]
        relative = 8 * density if target == "union" else number * chance  # the third buffer gives nothing
        wanted = np.where(mask, np.where(mask, relative, 1) ** -beta, 0)
        wanted = wanted / wanted.max() if normalize else wanted
        np.testing.assert_allclose(weight, wanted, rtol=2e-6)


LIMITED = by_tier(
    Epoch(), Consume(), Prioritized(), more=[Epoch(drop_last=True), Consume(2), Prioritized(replace=False)], ids=str
)


@pytest.mark.parametrize("sampler", LIMITED)
def test_draw_some_equals_a_smaller_draw(sampler):
    buffer = fbuf.Buffer(30, sampler=sampler)
    state = buffer.extend(buffer.init(jnp.float32(0)), jnp.arange(20.0))
    if sampler.prioritized:
        index = buffer.rows(state).index
        state = buffer.update_priority(state, index, jnp.arange(1.0, 31.0))
    held = fbuf._buffer.state.anchor_set(buffer, state)

    @jax.jit
    def some(own, key, wanted):
        return sampler.draw_some(own, key, 12, wanted, held, {}, state.token)

    own, drawn = state.sampler, []
    for i, wanted in enumerate([5, 0, 12, 3, 7]):
        before = own
        own, draw = some(own, jax.random.key(i), wanted)
        mask, slot = np.asarray(draw.mask), np.asarray(draw.slot)
        assert not mask[wanted:].any() and (slot[~mask] == 30).all() and not np.asarray(draw.probability)[~mask].any()
        assert (np.diff(mask.astype(int)) <= 0).all()  # in the first places
        left = 20 - len(drawn) if sampler == Consume() else 20
        if not isinstance(sampler, Epoch):
            assert mask.sum() == min(wanted, left)
        if wanted == 0:
            assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), before, own))
        if not sampler.prioritized or not sampler.replace:
            assert len(set(slot[mask])) == mask.sum()
        drawn += slot[mask].tolist()
    if sampler in (Epoch(), Consume()):  # nothing that was not handed out counts as drawn
        assert len(set(drawn[:20])) == 20
    if sampler == Epoch(drop_last=True):
        assert len(drawn) == 27 and len(set(drawn[:20])) == 20


@pytest.mark.parametrize("total", [2**27, 2**30])
def test_what_float32_rounds_away_of_a_huge_batch_is_made_up(total):
    """A third of 2^30 is 11 rows off in float32, of each buffer."""
    quota = np.asarray(traced(np.full(3, 1 / 3, np.float32), np.int32(total)))
    assert quota.sum() == total and (abs(quota - total / 3) < 64).all()
