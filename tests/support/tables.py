"""Tests and fixtures from tables of their cases."""

import heapq
import inspect
import itertools

import pytest

from tests.support import tiers


def pairwise(*axes, refused=lambda *case: False):
    """Return cases, not refused, that hold every pair of values of two axes which any such case holds."""

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    cases = [case for case in itertools.product(*axes) if not refused(*case)]
    held = [pairs(case) for case in cases]
    missing, chosen = set().union(*held), []
    heap = [(-len(own), number) for number, own in enumerate(held)]  # of how many are missing, or were before
    heapq.heapify(heap)
    while missing:
        number = heap[0][1]
        now = -len(held[number] & missing), number
        if heapq.heapreplace(heap, now) == now:
            chosen.append(cases[number])
            missing -= held[number]
    return chosen


def _name(value):
    return getattr(value, "__name__", str(value))


def by_tier(*values, more=(), exhaustive=(), ids=None):
    """Return values as parameters; those of `more` and `exhaustive` are cases of that tier.

    A value that is listed twice is a case of the lower tier. A tuple holds a value of each argument. Of tiers that do not run
    no more than one parameter is made, as pytest skips a test that has none.
    """
    cases = []
    for table, marks in ((values, ()), (more, pytest.mark.more), (exhaustive, pytest.mark.exhaustive)):
        lower = [value for value, _ in cases]
        cases += [(value, marks) for value in table if value not in lower]
    made = [(value, marks) for value, marks in cases if tiers.is_made(marks.name if marks else "quick")]
    every = [(value if isinstance(value, tuple) else (value,), marks) for value, marks in made or cases[:1]]
    return [pytest.param(*value, marks=marks, id=ids and ids(*value)) for value, marks in every]


def product_by_tier(names, *axes, quick=(), more=()):
    """Return a parametrization by all values of some arguments; combinations that neither table lists are exhaustive."""
    every = list(itertools.product(*axes))
    unknown = [case for case in [*quick, *more] if case not in every]
    assert not unknown, f"not of the product: {unknown}"
    named = by_tier(*quick, more=more, exhaustive=every, ids=lambda *case: "-".join(map(_name, case)))
    return pytest.mark.parametrize(names, named)


def checks(*rows, more=(), exhaustive=()):
    """Return a test that calls each check with each of its arguments, given as `(check, [arguments, ...])`.

    The rows of `more` and `exhaustive` are cases of these tiers. A check whose last arguments are `tmp_path` and
    `monkeypatch` gets these of pytest.
    """

    def cases(rows):
        return [(check, args if isinstance(args, tuple) else (args,)) for check, every in rows for args in every]

    def name(check, args):
        return "-".join(map(_name, (check, *args)))

    table = by_tier(*cases(rows), more=cases(more), exhaustive=cases(exhaustive), ids=name)

    @pytest.mark.parametrize(("check", "args"), table)
    def test(check, args, request):
        fixtures = [name for name in inspect.signature(check).parameters if name in ("tmp_path", "monkeypatch")]
        check(*args, **{name: request.getfixturevalue(name) for name in fixtures})

    return test


def one_of(*values, more=(), exhaustive=()):
    """Return a fixture with each value; a case with a value of `more` or `exhaustive` is of that tier."""
    quick, second, third = ([(value,) for value in table] for table in (values, more, exhaustive))

    @pytest.fixture(params=by_tier(*quick, more=second, exhaustive=third, ids=_name))
    def value(request):
        return request.param

    return value
