"""Rows of several members are weighed as rows of one whole: against plain Python, with JAX and with NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._members import quota, weights
from tests.support import members as oracle
from tests.support.uniformity import chi_square_z

XP = pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
MEMBER = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 50.0]), max_size=4)
MASSES = st.one_of(*(st.lists(MEMBER, min_size=n, max_size=n) for n in (1, 2, 5)))  # few shapes: each compiles
ROWS = 20  # of any masses at most


def padded(xp, *rows):
    """Return arrays of one length, whose further rows are masked."""
    return [xp.asarray(np.pad(row, (0, ROWS - len(row)))) for row in rows]


def told(masses, units, xp):
    """What each member tells of itself: mass, unit, least mass, number of rows."""
    scale = 2.0 ** -np.array(units)
    total = np.array([sum(own) for own in masses]) * scale
    least = np.array([min((m for m in own if m), default=np.inf) for own in masses]) * scale
    columns = total, np.array(units, float), least, np.array([len(own) for own in masses], float)
    return [xp.asarray(column, np.float32 if xp is jnp else np.float64) for column in columns]


@XP
@given(masses=MASSES, data=st.data())
def test_shares_and_least_probabilities_are_by_mass(xp, masses, data):
    units = data.draw(st.lists(st.integers(-30, 30), min_size=len(masses), max_size=len(masses)))
    share, least = weights.by_mass(*told(masses, units, xp))
    q = oracle.probabilities(masses)
    exact = 1e-5 if xp is jnp else 1e-12  # exp2 of float32
    np.testing.assert_allclose(share, [sum(own) for own in q], rtol=exact)
    np.testing.assert_allclose(least, [min((p for p in own if p), default=-1) for own in q], rtol=exact)


@XP
@given(
    masses=MASSES.filter(lambda masses: any(map(any, masses))), data=st.data(), beta=st.sampled_from([0.0, 0.4, 1.0])
)
def test_weights_are_those_of_the_definition(xp, masses, data, beta):
    """Whatever the parts of the batch that members provide; the largest is found from what members tell."""
    parts = data.draw(st.lists(st.integers(1, 9), min_size=len(masses), max_size=len(masses)))
    rows = np.array(parts) / sum(parts)
    share, least = weights.by_mass(*told(masses, [0] * len(masses), xp))
    q = oracle.probabilities(masses)
    wanted = oracle.weights(q, rows, beta)
    of = np.repeat(np.arange(len(masses)), [len(own) for own in masses])
    flat, exact = np.array(sum(q, [])), np.array(sum(wanted, []))
    number = np.count_nonzero(flat)
    factor = share / xp.asarray(rows, share.dtype)
    relative, mask, member = padded(xp, np.asarray(number * flat, share.dtype), flat > 0, of)
    weight = weights.weigh(relative, mask, xp.asarray(beta, share.dtype), factor[member])
    np.testing.assert_allclose(weight[: len(flat)], exact, rtol=1e-5)
    largest = weights.largest_weight(number, least, xp.asarray(beta, share.dtype), factor)
    np.testing.assert_allclose(weights.normalized(weight, largest)[: len(flat)], exact / exact.max(), rtol=1e-5)
    # Normalised by the rows drawn: of each member the rarest one.
    drawn = data.draw(st.lists(st.booleans(), min_size=len(flat), max_size=len(flat)))
    drawn = np.array(drawn) & (flat > 0)
    chance = [min(flat[drawn & (of == s)], default=np.inf) / (sum(q[s]) or 1) for s in range(len(masses))]
    rarest = weights.least_drawn(share, xp.asarray(chance, share.dtype))
    largest = weights.largest_weight(number, rarest, xp.asarray(beta, share.dtype), factor)
    np.testing.assert_allclose(largest, max(exact[drawn], default=0), rtol=1e-5)


@XP
def test_weights_stay_finite(xp):
    relative = xp.asarray([0.0, 1e-38, 1e38, 1.0], np.float32)
    for beta in (0.0, 1.0, 1e6, np.inf, np.nan, -1.0):
        weight = np.asarray(weights.weigh(relative, xp.ones(4, bool), xp.asarray(beta, np.float32)))
        assert np.isfinite(weight).all() and weight[3] == 1, beta


@XP
def test_rows_of_shards_follow_their_shares(xp):
    share, rng = np.array([0.1, 0, 0.55, 0.35, 0], np.float32), np.random.default_rng(0)
    for uniforms, exact in ((rng.random(500, np.float32), True), (rng.random((500, 10), np.float32), False)):
        ends = [np.asarray(quota.ends_by_mass(xp.asarray(share), 10, xp.asarray(u))) for u in uniforms]
        number = np.diff(ends, axis=1, prepend=0)
        assert (number.sum(axis=1) == 10).all() and not number[:, share == 0].any()
        if exact:
            assert (np.abs(number - 10 * share) < 1).all()
            np.testing.assert_allclose(number.mean(axis=0), 10 * share, atol=0.1)
        else:
            assert abs(chi_square_z(number.sum(axis=0), share.astype(np.float64) / share.sum(dtype=np.float64))) < 4
