"""Bad input: each refusal names the call, the leaf, what came, what was expected and the code that fixes it.

What can be known of structure, dtype and shape is refused while tracing, which computes nothing. What only values can tell
(empty, stale, not finite) is masked and counted instead.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized, Uniform
from fbuf.views import Transition
from tests.support import errors, refusals
from tests.support.errors import BATCH, BUFFER, CAPACITY, EXAMPLE, KEY, PRIORITIZED, ROW, index, many, rows, zeros


@pytest.mark.parametrize("case", refusals.cases(errors.ROWS))
def test_rows_that_do_not_fit_are_refused(case: Any) -> None:
    refusals.check(case, vars(errors), **errors.states())


@pytest.mark.parametrize("case", refusals.cases(errors.ARGUMENTS))
def test_arguments_that_do_not_fit_are_refused(case: Any) -> None:
    refusals.check(case, vars(errors), **errors.states())


def test_every_verb_refuses_what_is_no_state() -> None:
    no = Uniform()
    for verb, arguments in {
        "extend": (no, rows(1)),
        "add": (no, rows()),
        "sample": (no, KEY, 1),
        "peek": (no, KEY, 1),
        "update_priority": (no, index(1), zeros(1)),
        "update_rows": (no, index(1), {"reward": zeros(1)}),
        "get": (no, index(1)),
        "last": (no, 1),
        "convert": (BUFFER, no),
        **dict.fromkeys(("clear", "set", "rows", "stats", "can_sample"), (no,)),
    }.items():
        expected = rf"Buffer\.{verb}: first argument is Uniform, expected BufferState\. The order"
        with pytest.raises(TypeError, match=expected):
            getattr(PRIORITIZED, verb)(*arguments)


def test_a_donated_state_is_named() -> None:
    state = BUFFER.init(EXAMPLE)
    jax.jit(BUFFER.extend, donate_argnums=0)(state, rows(2))
    for verb in (
        lambda state: BUFFER.sample(state, KEY, BATCH),
        lambda state: BUFFER.extend(state, rows(2)),
        BUFFER.size,
        BUFFER.rows,
        BUFFER.clear,
    ):
        with pytest.raises(RuntimeError, match=r"^Buffer\.\w+: the state was donated.*state = step\(state\)"):
            verb(state)


def test_errors_leave_the_state_usable() -> None:
    state = BUFFER.extend(BUFFER.init(EXAMPLE), rows(2))
    with pytest.raises(TypeError):
        BUFFER.extend(state, rows(5, obs=zeros(5, 2)))
    assert int(BUFFER.size(BUFFER.extend(state, rows(2)))) == 4


@pytest.mark.parametrize("case", refusals.cases(errors.CONFIGURATIONS))
def test_configurations_that_cannot_be_are_refused(case: Any) -> None:
    refusals.check(case, vars(errors))


@pytest.mark.parametrize("case", refusals.cases(errors.EXAMPLES))
def test_examples_that_do_not_fit_are_refused(case: Any) -> None:
    refusals.check(case, vars(errors))


# ------------------------------------------------------------------------------------- values: masked and counted


def counts(buffer: fbuf.Buffer, state: Any) -> dict[str, int]:
    names = ("refused_nonfinite", "refused_out_of_range", "refused_stale", "refused_closed", "empty_samples")
    stats = jax.device_get(buffer.stats(state))
    return {name: int(stats[name]) for name in names if stats[name]}


@pytest.fixture(params=[Uniform(), Prioritized()], ids=str)
def sampler(request: pytest.FixtureRequest) -> Any:
    """The other samplers are in tests/exhaustive."""
    return request.param


@pytest.fixture(params=[Transition(n_step=2, stack=2)], ids=str)
def view(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_an_empty_sample_is_masked_and_counted(sampler: Any, view: Any) -> None:
    buffer = fbuf.Buffer(capacity=CAPACITY, sampler=sampler, view=view)
    state, batch = buffer.sample(buffer.init(ROW), KEY, BATCH)
    assert not bool(buffer.can_sample(state))
    for leaf in jax.tree.leaves((batch.data, batch.probability, batch.weight, batch.mask, batch.index.ticket)):
        assert not np.any(leaf)
    assert np.all(np.asarray(batch.index.slot) == CAPACITY)
    assert counts(buffer, state) == {"empty_samples": 1}
    if sampler.prioritized:  # and what it gave is skipped without being counted as anyone's mistake
        after = buffer.update_priority(state, batch.index, np.ones(BATCH, np.float32))
        assert counts(buffer, after) == {"empty_samples": 1}


@functools.cache
def prioritized() -> tuple[fbuf.Buffer, Any]:
    """A buffer with eight rows of priority 1."""
    buffer = fbuf.Buffer(capacity=CAPACITY, sampler=Prioritized(alpha=1.0, eps=0.0))
    return buffer, buffer.extend(buffer.init(ROW), many(8, ROW))


def leaves(state: Any) -> list[float]:
    return np.asarray(state.sampler.tree)[:CAPACITY].tolist()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("slot", "ticket", "error", "counted"),
    [(0, 1, bad, "refused_nonfinite") for bad in (NAN, INF, -INF)]
    + [(slot, 1, 7.0, "refused_out_of_range") for slot in (-1, CAPACITY, CAPACITY + 5, 2**31 - 1, -(2**31))]
    + [(CAPACITY - 1, ticket, 7.0, "refused_stale") for ticket in (0, 1)],  # never written
)
def test_one_bad_priority_is_skipped_and_counted(slot: int, ticket: int, error: float, counted: str) -> None:
    buffer, state = prioritized()
    where = fbuf.Index(np.array([slot, 1], np.int32), np.array([ticket, 1], np.uint32))
    after = buffer.update_priority(state, where, np.array([error, 5.0], np.float32))
    assert counts(buffer, after) == {counted: 1}
    assert leaves(after) == [1, 5, *[1] * 6, *[0] * 4] and np.asarray(after.sampler.tree).max() == 12
    assert float(after.sampler.max_priority) == 5.0


def test_priorities_that_are_not_finite_are_refused_by_extend() -> None:
    buffer, state = prioritized()
    after = buffer.extend(state, many(3, ROW), priority=np.array([NAN, 3.0, INF], np.float32))
    assert counts(buffer, after) == {"refused_nonfinite": 2}
    # as if none was given: the largest so far, which the other one raises only afterwards
    assert leaves(after)[8:11] == [1.0, 3.0, 1.0]


def test_stale_indices_are_refused() -> None:
    buffer, state = prioritized()
    state, batch = buffer.sample(state, KEY, BATCH)
    ones = jax.tree.map(np.ones_like, many(8, ROW))
    state = buffer.extend(buffer.extend(state, ones), ones)  # every row it named is gone
    after = buffer.update_priority(state, batch.index, np.full(BATCH, 9.0, np.float32))
    assert counts(buffer, after) == {"refused_stale": BATCH}
    assert float(after.sampler.max_priority) == 1.0
    after = buffer.update_rows(after, batch.index, {"reward": np.full(BATCH, 9.0, np.float32)})
    assert counts(buffer, after) == {"refused_stale": 2 * BATCH}
    assert np.all(np.asarray(buffer.rows(after).data["reward"]) == 1.0)
    assert not np.any(buffer.get(after, batch.index).mask)


def test_clear_makes_every_index_stale() -> None:
    buffer, state = prioritized()
    state, batch = buffer.sample(state, KEY, BATCH)
    state = buffer.extend(buffer.clear(state), many(8, ROW))
    after = buffer.update_priority(state, batch.index, np.ones(BATCH, np.float32))
    assert counts(buffer, after) == {"refused_stale": BATCH}
