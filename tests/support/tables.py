"""Tests and fixtures from tables of their cases."""

import inspect
import itertools

import pytest


def pairwise(*axes, refused=lambda *case: False):
    """Return cases, not refused, that hold every pair of values of two axes which any such case holds."""

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    every = {case: pairs(case) for case in itertools.product(*axes) if not refused(*case)}
    missing, chosen = set().union(*every.values()), []
    while missing:
        chosen.append(max(every, key=lambda case: len(every[case] & missing)))
        missing -= every[chosen[-1]]
    return chosen


def _name(value):
    return getattr(value, "__name__", str(value))


def _params(quick, more, exhaustive):
    """Return the parameters of three tables of `(id, values)`, marked with their tiers."""
    every = [id for table in (quick, more, exhaustive) for id in {id for id, _ in table}]
    twice = {id for id in every if every.count(id) > 1}
    assert not twice, f"of two tiers: {sorted(twice)}"
    marked = ((quick, ()), (more, pytest.mark.more), (exhaustive, pytest.mark.exhaustive))
    return [pytest.param(*values, id=id, marks=marks) for table, marks in marked for id, values in table]


def checks(*rows, more=(), exhaustive=()):
    """Return a test that calls each check with each of its arguments, given as `(check, [arguments, ...])`.

    The rows of `more` and `exhaustive` are cases of these tiers. A check whose last arguments are `tmp_path` and
    `monkeypatch` gets these of pytest.
    """

    def cases(rows):
        for check, every in rows:
            for args in every:
                args = args if isinstance(args, tuple) else (args,)
                yield "-".join(map(_name, (check, *args))), (check, args)

    @pytest.mark.parametrize(("check", "args"), _params(*map(list, map(cases, (rows, more, exhaustive)))))
    def test(check, args, request):
        fixtures = [name for name in inspect.signature(check).parameters if name in ("tmp_path", "monkeypatch")]
        check(*args, **{name: request.getfixturevalue(name) for name in fixtures})

    return test


def select_tests(module, *fixtures):
    """Return the tests of a module that take one of the fixtures, by name: they run again where others are defined."""
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_") and callable(test)}
    return {name: test for name, test in tests.items() if set(fixtures) & set(inspect.signature(test).parameters)}


def one_of(*values, more=(), exhaustive=()):
    """Return a fixture with each value; a case with a value of `more` or `exhaustive` is of that tier."""
    tables = ([(_name(value), (value,)) for value in table] for table in (values, more, exhaustive))

    @pytest.fixture(params=_params(*tables))
    def value(request):
        return request.param

    return value
