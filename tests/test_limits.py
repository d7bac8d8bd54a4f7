"""`fbuf.limits` against Reverb's published cases, Python's fractions, a scan and threads."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf import limits
from fbuf.limits import Limit
from tests.support import trees
from tests.support.tables import by_tier

# Of rate_limiter_test.cc and rate_limiters_test.py: samples_per_insert, min_size, min_diff and max_diff of a limit; and after
# so many inserts, samples and deletes, whether so many more samples or inserts are allowed.
REVERB = """
CanSample: 1.0 1 -1.0 1.0
    0 0 0 sample 1 no, 1 0 0 sample 1 yes, 1 0 0 sample 2 yes, 1 0 0 sample 3 no
CanInsert: 1.5 2 0.0 5.0
    0 0 0 insert 1 yes, 0 0 0 insert 2 yes, 0 0 0 insert 3 yes, 0 0 0 insert 4 no
    3 0 0 insert 1 no, 3 2 0 insert 1 yes, 3 2 0 insert 2 no
BlocksSamplesUntilMinInsertsReached: 1.0 2 -1.0 1.0
    0 0 0 sample 1 no, 1 0 0 sample 1 no, 1 0 0 insert 1 yes, 2 0 0 sample 1 yes
OperationsWithinTheBufferAreNotBlocked: 1.5 1 -3.0 3.1
    1 0 0 insert 1 yes, 2 5 0 sample 1 yes, 2 6 0 sample 1 no
BlocksCallsThatExceedsTheMinMaxLimits: 1.5 2 -1.0 3.0
    2 0 0 sample 1 yes, 2 1 0 insert 1 no, 2 2 0 insert 1 yes
UnblocksInsertsIfDeletedItemsBringsSizeBelowMinSize: 5 2 0.0 5.0
    2 0 0 insert 1 no, 2 0 0 sample 1 yes, 2 1 0 insert 1 no, 2 1 1 insert 1 yes
BlocksSamplesIfDeleteBringsSizeBelowMinSize: 5 2 0.0 5.0
    2 0 1 sample 1 no, 3 0 1 sample 1 yes
"""


def test_reverb_cases_give_reverb_answers() -> None:
    for line in REVERB.strip().splitlines():
        if not line.startswith(" "):
            ratio, size, *bounds = line.partition(": ")[2].split()
            limit = Limit(float(ratio), int(size), *map(float, bounds))
            continue
        for case in line.split(","):
            inserts, samples, deletes, what, count, answer = case.split()
            for host in (True, False):
                pace = limit.sampled(limit.added(limit.init(host=host), int(inserts)), int(samples))
                ask = limit.can_sample if what == "sample" else limit.can_add
                allowed = bool(ask(pace, int(count), size=int(inserts) - int(deletes)))
                assert allowed == (answer == "yes"), (limit, case)
                assert int(deletes) or bool(ask(pace, int(count))) == allowed


def test_error_buffers_are_checked_as_in_reverb() -> None:
    for good in ((0.5, 10, 1.1), (1, 10, (5, 9)), (1, 10, (7, 12))):  # Reverb warns of the second
        limits.samples_per_insert(*good)
    pairs = (5, 10, (8, 12)), (0.1, 10, (9.5, 10.5)), (1, 10, (11, 15)), (1, 0, (-9, 9))
    for bad in ((5, 10, 4), (0.5, 10, 0.9), *pairs):
        pytest.raises(ValueError, limits.samples_per_insert, *bad).match("Limit|error_buffer")


def test_other_limiters_allow_what_those_of_reverb_do() -> None:
    limits.min_size(1)
    limit = limits.min_size(3)
    pace = limit.added(limit.init(host=True), 3)
    assert limit.can_add(pace, 10**9) and limit.can_sample(pace, 10**9)
    assert not limit.can_sample(limit.init(host=True))
    limit = limits.queue(4)
    pace = limit.added(limit.init(host=True), 4)
    assert not limit.can_add(pace) and limit.can_sample(pace, 4) and not limit.can_sample(pace, 5)
    limit = limits.at_most(2)
    pace = limit.added(limit.init(host=True), 3)
    assert limit.can_add(pace, 10**9) and limit.can_sample(pace, 6) and not limit.can_sample(pace, 7)


RATIOS = st.sampled_from([1, 8, 0.1, 0.25, 1.5, Fraction(1, 3), 32.7, Fraction(2**31 - 1, 2**31 - 2)])
COUNTS = st.sampled_from([0, 1, 2, 7, 256, 2**20, 2**31 - 1])
STARTS = st.sampled_from([0, 3, 2**24 + 1, 2**32 - 2, 2**53 + 1])


@given(
    ratio=RATIOS,
    size=st.integers(1, 9),
    bounds=st.tuples(*[st.one_of(st.none(), st.floats(0, 20).map(lambda x: round(x, 2)))] * 2),
    start=STARTS,
    program=st.lists(st.tuples(st.booleans(), COUNTS), max_size=8),
)
def test_the_arithmetic_is_that_of_fractions(
    ratio: Any, size: int, bounds: tuple[Any, Any], start: int, program: list[tuple[bool, int]]
) -> None:
    exact = Fraction(str(ratio))
    low = None if bounds[0] is None else -bounds[0]
    limit = Limit(ratio, size, low, bounds[1])
    drawn = int(exact * start)
    added = start
    paces = [limit.init(added=added, drawn=drawn), limit.init(added=added, drawn=drawn, host=True)]
    for adds, count in [*program, (True, 1), (False, 1)]:
        surplus = exact * added - drawn
        assume((abs(surplus) + max(exact, 1) * count) * exact.denominator < 2**63)  # the surplus has 64 bits
        may_add = added + count <= size or bounds[1] is None or surplus + exact * count <= Fraction(str(bounds[1]))
        may_draw = added >= size and (low is None or surplus - count >= Fraction(str(low)))
        for pace in paces:
            assert bool(limit.can_add(pace, count)) == may_add
            assert bool(limit.can_sample(pace, count)) == may_draw
        paces = [(limit.added if adds else limit.sampled)(pace, count) for pace in paces]
        added, drawn = added + count * adds, drawn + count * (not adds)
        assert paces[1].surplus == (exact * added - drawn) * exact.denominator
    words = {n: np.asarray(getattr(paces[0], n)).tolist() for n in ("added", "drawn", "surplus")}
    assert words["added"] == list(divmod(added, 2**32)) and words["drawn"] == list(divmod(drawn, 2**32))
    assert words["surplus"] == list(divmod(paces[1].surplus % 2**64, 2**32))
    for name, value in limit.stats(paces[1]).items():
        assert float(limit.stats(paces[0])[name]) == pytest.approx(value, rel=1e-5, abs=1e-6)


@given(
    ratio=st.sampled_from([1, 8, 0.25, 1.5, Fraction(1, 3)]),
    size=st.integers(1, 60),
    rows=st.integers(1, 20),
    draws=st.integers(1, 40),
    turns=st.lists(st.booleans(), max_size=60),
    buffer=st.one_of(st.none(), st.integers(0, 100)),
)
def test_steps_that_were_checked_never_wait_for_one_another(
    ratio: Any, size: int, rows: int, draws: int, turns: list[bool], buffer: int | None
) -> None:
    try:
        limit = limits.samples_per_insert(ratio, size, buffer, rows=rows, draws=draws)
    except ValueError:
        assert buffer is not None
        return
    pace = limit.init(host=True)
    for adds in turns:
        can = limit.can_add(pace, rows), limit.can_sample(pace, draws)
        assert any(can), "both wait"
        if can[not adds]:
            pace = limit.added(pace, rows) if adds else limit.sampled(pace, draws)
    if pace.added >= size:
        low, high = Fraction(limit.min_diff), Fraction(limit.max_diff)
        surplus = Fraction(str(ratio)) * pace.added - pace.drawn
        assert low <= surplus <= high


def test_a_scan_keeps_the_ratio() -> None:
    buffer = fbuf.Buffer(64)
    limit = limits.samples_per_insert(2, min_size=16, rows=4, draws=8)

    def step(carry: Any, given: Any) -> Any:
        rows, key = given

        def learn(carry: Any) -> Any:
            replay, pace, learnt = carry
            replay, batch = buffer.sample(replay, jax.random.fold_in(key, learnt), 8)
            return replay, limit.sampled(pace, 8), learnt + jnp.int32(1)

        replay, pace, learnt = carry
        carry = buffer.extend(replay, rows), limit.added(pace, 4), learnt
        carry = lax.while_loop(lambda carry: limit.can_sample(carry[1], 8), learn, carry)
        return carry, (carry[2], limit.can_add(carry[1], 4))

    start = (buffer.init(jnp.int32(0)), limit.init(), jnp.int32(0))
    given = jnp.arange(400, dtype=jnp.int32).reshape(100, 4), jax.random.split(jax.random.key(0), 100)
    (replay, pace, learnt), (counts, can) = jax.jit(lambda c, g: lax.scan(step, c, g), donate_argnums=0)(start, given)
    model, drawn = limit.init(host=True), []
    for _ in range(100):
        model = limit.added(model, 4)
        while limit.can_sample(model, 8):
            model = limit.sampled(model, 8)
        drawn.append(model.drawn // 8)
    assert np.asarray(counts).tolist() == drawn and np.asarray(can).all()
    assert limit.stats(pace) == {n: pytest.approx(x) for n, x in limit.stats(model).items()}
    assert abs(model.drawn - 2 * 400) <= 2 * 16 + 16


def test_counts_may_be_traced_and_a_pace_is_saved_beside_the_buffer(tmp_path: Path) -> None:
    limit, buffer = Limit(1, 2, 0, 10), fbuf.Buffer(8)
    run = jax.jit(lambda pace, rows: (limit.added(pace, rows), limit.can_add(pace, rows, size=rows)))
    pace, add = run(limit.init(added=2**33, drawn=2**33 - 5), jnp.int32(6))
    assert not bool(add) and np.asarray(pace.added).tolist() == [2, 6]
    fbuf.save(tmp_path, buffer, buffer.init({"t": 0}), extra={"pace": pace})
    again = fbuf.load(tmp_path, extra={"pace": limit.init()})[2]["pace"]
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(pace), jax.tree.leaves(again), strict=True))


REFUSALS = [
    (lambda: Limit(0), r"samples_per_insert is 0; expected a number > 0"),
    (lambda: Limit(1, 4.0), r"min_size is 4\.0; .* Write 4\."),
    (lambda: Limit(1, 1, 1, 0), r"min_diff is 1, above max_diff=0\. Swap them\."),
    (lambda: Limit(1, 1, 0, float("inf")), r"max_diff is inf; .* Write None"),
    (lambda: Limit(1e-10), r"Use Fraction\(x\)\.limit_denominator"),
    (lambda: Limit(float("nan")), r"samples_per_insert is nan"),
    (lambda: Limit("2"), r"samples_per_insert is '2'"),
    (lambda: Limit(1, True), r"min_size is True"),
    (lambda: Limit(1, 4, 5), r"min_diff is 5; expected at most samples_per_insert \* min_size = 4"),
    (lambda: Limit(0.5, 1, None, 1e19), r"max_diff is 1e\+19; expected less than 2\^62 / 2"),
    (lambda: Limit(2, 10, 0, 40).check_call(rows=21), r"moves the surplus by 42, .* room for 40: .*rows=21\)"),
    (lambda: Limit(1, 60, 0, 40).check_call(draws=61), r"moves the surplus by 61, .* room for 60: .*draws=61\)"),
    (lambda: Limit(1).check_call(rows=-1), r"rows is -1; expected an int from 0"),
    (lambda: Limit().init(added=-1), r"added is -1; expected an int from 0"),
    (lambda: Limit().init(added=2**64 - 1), r"beyond 63 bits\. Use host=True"),
    (lambda: Limit().added(Limit().init(), -1), r"Limit\.added: rows is -1"),
    (lambda: Limit().added(Limit().init(host=True), -1), r"Limit\.added: rows is -1"),
    (lambda: Limit().can_add(Limit().init(host=True), jnp.array(-1)), r"Limit\.can_add: rows is .*-1"),
    (lambda: limits.min_size(-1), r"min_size is -1; expected an int from 1"),
    (lambda: limits.min_size(0), r"min_size is 0; expected an int from 1"),
    (lambda: limits.queue(0), r"size is 0; expected an int from 1"),
    (lambda: limits.samples_per_insert(8, 10, rows=0), r"samples_per_insert: rows is 0"),
    (lambda: limits.samples_per_insert(8, 10, draws=2.5), r"samples_per_insert: draws is 2\.5"),
    (lambda: limits.samples_per_insert(8, 10, (1, 2, 3)), r"error_buffer is \(1, 2, 3\); expected a number or two\."),
    (lambda: limits.samples_per_insert(8, 1000, 100, rows=16, draws=256), r"expected 383 or more.*error_buffer=192"),
    (lambda: limits.samples_per_insert(1, 5, 7, rows=13, draws=1), r"with 13 rows.* Use min_size=13"),
]


def test_invalid_numbers_are_refused_with_the_fix() -> None:
    for make, message in REFUSALS:
        pytest.raises(ValueError, make).match(message)


@given(RATIOS, st.integers(1, 9), st.integers(0, 9), st.integers(0, 30), st.booleans(), st.integers(1, 9))
def test_check_call_refuses_calls_that_can_never_be_allowed(
    ratio: Any, size: int, below: int, room: int, add: bool, count: int
) -> None:
    low = Fraction(str(ratio)) * size - below
    limit = Limit(ratio, size, low, low + room)
    each = limit._ratio.numerator
    first, last = limit._bounds
    most = last if add else max(last, each * size)
    surplus = first if add else most
    pace = limits.LimitState(size, 0, surplus)
    allowed = limit.can_add(pace, count, size=size) if add else limit.can_sample(pace, count, size=size)
    try:
        limit.check_call(**{"rows" if add else "draws": count})
        assert allowed
    except ValueError:
        assert not allowed


def test_counts_that_are_not_whole_and_the_state_of_a_buffer_as_pace_are_refused() -> None:
    limit = Limit(min_diff=0, max_diff=9)
    for count in (np.ones(3, int), 1.5, "3", {"obs": 1}, None):
        for call, name in (("added", "rows"), ("sampled", "draws"), ("can_add", "rows"), ("can_sample", "draws")):
            for pace in (limit.init(), limit.init(host=True)):
                with pytest.raises(TypeError, match=rf"Limit\.{call}: {name} is .*; expected an int"):
                    getattr(limit, call)(pace, count)
    state = fbuf.Buffer(4).init(0)
    for call in ("added", "sampled", "can_add", "can_sample", "stats"):
        with pytest.raises(TypeError, match=rf"Limit\.{call}: pace is BufferState; .* Use pace = limit\.init\(\)"):
            getattr(Limit(), call)(state)


def test_any_whole_number_is_counted_as_a_python_int() -> None:
    limit = Limit(2, min_diff=0, max_diff=9)
    pace = limit.init(host=True)
    for number in (np.int64(2), np.uint8(1), jnp.int32(1)):
        assert limit.can_add(pace, number)
        pace = limit.added(pace, number)
    for number in (jnp.uint32(3), np.array(2)):
        assert limit.can_sample(pace, number, size=jnp.int32(4))
        pace = limit.sampled(pace, number)
    assert pace == limits.LimitState(4, 5, 3) and all(type(n) is int for n in (pace.added, pace.drawn, pace.surplus))


def test_a_limit_is_a_value() -> None:
    assert Limit(0.5, 3) == Limit(0.5, 3) and hash(Limit(0.5, 3)) == hash(Limit(0.5, 3))
    assert Limit(np.float32(0.1)).samples_per_insert == np.float32(0.1)
    assert Limit(np.float32(0.1)).added(Limit(0.1).init(host=True), 10).surplus == 10


@pytest.mark.parametrize("x64", by_tier(True, more=[False]))
def test_strict_promotion_and_x64(x64: bool) -> None:
    with jax.numpy_dtype_promotion("strict"), trees.x64(x64):
        limit = limits.samples_per_insert(0.5, 4, rows=2, draws=3)
        pace = limit.sampled(limit.added(limit.init(), 8), jnp.int32(3))
        assert bool(limit.can_add(pace, 2, size=jnp.int32(8))) and not limit.can_sample(pace, 4)
        assert pace.added.dtype == pace.surplus.dtype == jnp.uint32
        assert float(limit.stats(pace)["surplus"]) == 1


@pytest.mark.parametrize("host", [True, False])
def test_bounds_between_two_steps_of_the_surplus_are_kept(host: bool) -> None:
    limit = Limit(Fraction(1, 2), min_diff=-0.3, max_diff=0.3)
    assert limit.can_add(limit.init(added=1, drawn=1, host=host), 1)  # to 0
    assert not limit.can_add(limit.init(added=1, drawn=1, host=host), 2)  # to 0.5
    assert limit.can_sample(limit.init(added=2, host=host), 1)  # to 0
    assert not limit.can_sample(limit.init(added=3, drawn=1, host=host), 1)  # to -0.5
    assert limit.stats(limit.init(added=1, drawn=1, host=host))["surplus"] == -0.5


def test_counts_beyond_63_bits_are_more_than_min_size() -> None:
    limit = Limit(1, min_size=3, min_diff=-1, max_diff=1)
    pace = limit.init(added=2**63 + 7, drawn=2**63 + 6)
    assert limit.can_sample(pace, 1) and not limit.can_add(pace, 1)
