"""`fbuf.checked(buffer)`: every condition that verbs only count is an error with words, eagerly and through checkify.

Each condition is a case: a step that meets it and one that does not. Both run eagerly and jitted under `checkify`, over
storages; what is returned is what the buffer without checks returns.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import fbuf
from tests.support.checked import EXAMPLE, FIRST, NAN, check_eager, filled, rows_of, updated
from tests.support.refusals import raises


@pytest.mark.parametrize(("name", "storage"), FIRST)
def test_an_eager_call_raises_at_once(name, storage):
    check_eager(name, storage)


def test_a_checked_buffer_is_a_value():
    buffer = fbuf.prioritized(8)
    checked = fbuf.checked(buffer)
    assert checked == fbuf.checked(fbuf.prioritized(8)) == fbuf.checked(checked) != fbuf.checked(fbuf.prioritized(9))
    assert hash(checked) == hash(fbuf.checked(fbuf.prioritized(8))) and checked != buffer
    assert checked != fbuf.checked(buffer, allow=("retired_rows",)) and repr(checked) == f"Checked(buffer={buffer!r})"
    assert jax.tree.leaves(checked) == [] and checked.buffer is buffer and checked.capacity == 8
    traces = []

    @partial(jax.jit, static_argnums=0)
    def size(buffer, state):
        traces.append(1)
        return buffer.size(state)

    state = filled(checked)
    assert [int(size(fbuf.checked(fbuf.prioritized(8)), state)) for _ in range(2)] == [6, 6] and len(traces) == 1
    assert checked.plan(EXAMPLE) == buffer.plan(EXAMPLE)
    with pytest.raises(AttributeError):
        checked.no_such_verb  # noqa: B018


def test_an_unchecked_buffer_compiles_as_before():
    def step(buffer, state, errors):
        return updated(buffer, buffer.extend(state, rows_of(6, 2)), errors)

    def text(fn):
        return jax.jit(fn).lower(state, jnp.ones(4)).as_text()

    buffer = fbuf.prioritized(8)
    state = filled(buffer)
    before = text(partial(step, buffer))
    checked = fbuf.checked(buffer)
    error, _ = jax.jit(checkify.checkify(partial(step, checked)))(state, jnp.ones(4))
    assert error.get() is None
    assert text(partial(step, buffer)) == before
    assert text(checkify.checkify(partial(step, checked))) != before
    free = fbuf.checked(buffer, allow=fbuf._buffer.state.COUNTERS)  # without a condition nothing is left of it
    assert text(partial(step, free)) == before


def test_donated_and_without_checkify():
    buffer = fbuf.checked(fbuf.prioritized(8))
    step = jax.jit(checkify.checkify(partial(updated, buffer)), donate_argnums=0)
    state = filled(buffer)
    error, state = step(state, jnp.ones(4))
    error.throw()
    error, state = step(state, jnp.full(4, NAN))
    assert "4 priorities are NaN" in str(error.get()) and int(state.counters[0]) == 4
    raises(ValueError, r"checkify\.checkify", lambda: jax.jit(partial(updated, buffer))(state, jnp.ones(4)))


def test_checked_refuses_other_arguments():
    raises(TypeError, "checked: got int; expected a Buffer, or a step of states", fbuf.checked, 3)
    with pytest.raises(ValueError, match="checked: allow names 'stale'; expected some of refused_nonfinite"):
        fbuf.checked(fbuf.uniform(8), allow=("stale",))
    with pytest.raises(TypeError, match=r"allow is 'retired_rows'; expected a tuple. Write allow=\('retired_rows',\)"):
        fbuf.checked(fbuf.uniform(8), allow="retired_rows")
    with pytest.raises(TypeError, match="but a step is given; expected a Buffer with it"):
        fbuf.checked(lambda s: s, allow=("retired_rows",))
