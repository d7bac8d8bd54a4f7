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


def checks(*rows):
    """Return a test that calls each check with each of its arguments, given as `(check, [arguments, ...])`.

    A check whose last arguments are `tmp_path` and `monkeypatch` gets these of pytest.
    """
    cases = []
    for check, every in rows:
        for args in every:
            args = args if isinstance(args, tuple) else (args,)
            cases.append(pytest.param(check, args, id="-".join(map(_name, (check, *args)))))

    @pytest.mark.parametrize(("check", "args"), cases)
    def test(check, args, request):
        fixtures = [name for name in inspect.signature(check).parameters if name in ("tmp_path", "monkeypatch")]
        check(*args, **{name: request.getfixturevalue(name) for name in fixtures})

    return test


def select_tests(module, *fixtures):
    """Return the tests of a module that take one of the fixtures, by name: they run again where others are defined."""
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_") and callable(test)}
    return {name: test for name, test in tests.items() if set(fixtures) & set(inspect.signature(test).parameters)}


def one_of(*values):
    @pytest.fixture(params=values, ids=_name)
    def value(request):
        return request.param

    return value
