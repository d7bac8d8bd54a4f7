"""Tables of refusals: an expression and the error that it raises, which may continue indented below it.

    Buffer(capacity=0) => ValueError Buffer: capacity is 0 | expected an int >= 1

The message contains every part between the bars.
"""

import builtins

import jax
import pytest


def cases(table):
    """Return one parameter of a test for each expression: `(expression, kind, parts)`."""
    found = []
    for line in table.strip().splitlines():
        if line.startswith(" "):
            found[-1][1] += " " + line.strip()
        else:
            found.append(line.split(" => "))
    return [pytest.param((call, *_error(said)), id=call) for call, said in found]


def _error(said):
    kind, _, message = said.strip().partition(" ")
    return getattr(builtins, kind), message.split(" | ")


def check(case, scope, **traced):
    """Evaluate the expression, with these states traced, so that nothing is computed, if there are any."""
    call, kind, parts = case
    with pytest.raises(kind) as caught:
        if traced:
            jax.eval_shape(lambda given: eval(call, scope, given), traced)
        else:
            eval(call, scope)
    message = str(caught.value).split("\n--------------------")[0]
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert len(message) < 600, message


def check_all(table, scope):
    for case in cases(table):
        check(*case.values, scope)


def raises_late(match, call, *args, **options):
    """Check that the call raises, at once (its own error) or when its results are awaited (JAX's)."""
    with pytest.raises((RuntimeError, ValueError, OSError), match=match):
        jax.block_until_ready(call(*args, **options))


def raises(error, match, call, *args, **options):
    """Check that the call raises this error, with a message that matches unless `match` is None."""
    with pytest.raises(error, match=match):
        call(*args, **options)
