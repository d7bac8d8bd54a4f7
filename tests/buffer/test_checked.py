"""`fbuf.checked(buffer)`: every condition that methods only count raises an error, eagerly and through checkify."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

import fbuf
from fbuf.samplers import Prioritized, Uniform
from fbuf.storages import Compressed, Deduplicated, Device, Host, Memmap, Ragged
from fbuf.views import Transition
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.support.trees import example_of, row_with

KEYS = {"keys": ("obs",), "on_expired": "mask", "slack": 0}
STORAGES = {
    "Device": Device(),
    "Compressed": Compressed(**KEYS),
    "Host": Host(**KEYS),
    "Memmap": Memmap(**KEYS),
    "Deduplicated": Deduplicated(keys=("obs",), blocks=4096),
    "Ragged": Ragged(keys=(), maximum={"obs": (8, 8)}, on_expired="mask"),
}
KEY = jax.random.key(0)


def rows_of(first, count):
    t = np.arange(first, first + count)
    return row_with(
        np.random.default_rng(first).integers(0, 255, (count, 8, 8), np.uint8),
        count,
        action=t.astype(np.int32),
        reward=t.astype(np.float32),
        terminated=t % 7 == 6,
    )


EXAMPLE = example_of(rows_of(0, 1), 1)


def buffer_of(storage="Device", capacity=8, **settings):
    return fbuf.Buffer(capacity, **({"storage": STORAGES[storage], "sampler": Prioritized()} | settings))


def filled(buffer, count=6):
    return buffer.extend(buffer.init(EXAMPLE), rows_of(0, count))


class Case(NamedTuple):
    """One condition, which `step(buffer, state, x)` meets where `x` is `bad`."""

    step: Any
    bad: Any
    good: Any
    message: str
    settings: Any = {}  # noqa: RUF012
    start: Any = filled
    storages: Any = tuple(STORAGES)


def updated(buffer, state, errors):
    state, batch = buffer.sample(state, KEY, 4)
    return buffer.update_priority(state, batch.index, errors)


def updated_at(buffer, state, slot):
    state, batch = buffer.sample(state, KEY, 4)
    slot = jnp.where(slot == 100, batch.index.slot, slot)
    return buffer.update_priority(state, dataclasses.replace(batch.index, slot=slot), jnp.ones(4))


def updated_late(buffer, state, mask):
    state, batch = buffer.sample(state, KEY, 4)
    state = buffer.extend(state, rows_of(50, 8), mask=mask)
    return buffer.update_priority(state, batch.index, jnp.ones(4))


def changed_late(buffer, state, mask):
    index = buffer.last(state, 2).index
    state = buffer.extend(state, rows_of(50, 8), mask=mask)
    return buffer.update_rows(state, index, {"reward": jnp.zeros(2)})


def got_late(buffer, state, mask):
    index = buffer.last(state, 2).index
    state = buffer.extend(state, rows_of(50, 8), mask=mask)
    return buffer.get(state, index)


def sampled_old(buffer, state, mask):
    """A state whose rows a later write, through another future, has pushed out of the store."""
    newer = buffer.extend(state, rows_of(50, 24), mask=mask)
    late = jnp.sum(jax.tree.leaves(newer.rows)[1].astype(jnp.uint32)) * jnp.uint32(0)  # after that write
    rows = jax.tree.map(lambda x: x + late.astype(x.dtype) if x.dtype == jnp.uint32 else x, state.rows)
    return newer, buffer.sample(dataclasses.replace(state, rows=rows), KEY, 4)


def priority_given(buffer, state, priority):
    return buffer.extend(state, rows_of(6, 2), priority=priority)


NAN, INF = jnp.float32(jnp.nan), jnp.float32(jnp.inf)
HOST = ("Compressed", "Host", "Memmap")
FEW = {"storage": Deduplicated(keys=("obs",), blocks=64), "sampler": Uniform(), "capacity": 200}
TWO = np.zeros(2, bool), np.ones(2, bool)  # none of two rows, and both
LATE = np.ones(8, bool), np.zeros(8, bool)  # eight rows more, and none
EMPTY = r"Buffer.{}: no row can be sampled. Ask buffer.can_sample\(state\) first"


def empty(method):
    def step(buffer, state, mask):
        return getattr(buffer, method)(buffer.extend(state, rows_of(0, 2), mask=mask), KEY, 4)

    return Case(step, *TWO, EMPTY.format(method), start=lambda buffer: buffer.init(EXAMPLE))


CASES = {
    "an empty sample": empty("sample"),
    "an empty peek": empty("peek"),
    "errors that are not finite": Case(
        updated,
        *(np.float32([1, np.nan, 2, np.inf]), np.ones(4, np.float32)),
        r"Buffer.update_priority: 2 priorities are NaN or infinite .* write jnp.nan_to_num\(td_error\)",
    ),
    "priorities of new rows that are not finite": Case(
        priority_given, jnp.array([1, NAN]), jnp.ones(2), "Buffer.extend: 1 priorities are NaN or infinite"
    ),
    "indices out of range": Case(
        updated_at,
        *(np.int32([-1, 8, 99, -(2**31)]), np.full(4, 100, np.int32)),
        "Buffer.update_priority: 4 indices name no slot and were skipped. Pass batch.index",
        {"sampler": Prioritized()},
    ),
    "stale indices": Case(
        updated_late, *LATE, "Buffer.update_priority: 4 indices are stale and were skipped: .* Call it before `extend`"
    ),
    "indices of closed rows": Case(
        updated_late,
        *(np.arange(8) < 3, np.zeros(8, bool)),
        r"Buffer.update_priority: \d indices name rows that can no longer be drawn|indices are stale",
        {"view": Transition(stack=4, observation="obs", autoreset="same_step")},
    ),
    "rows changed too late": Case(changed_late, *LATE, "Buffer.update_rows: 2 indices are stale and were skipped"),
    "rows got too late": Case(got_late, *LATE, "Buffer.get: 2 indices name no row of this state: they are stale"),
    "more rows asked for than there are": Case(
        lambda b, s, mask: b.last(b.extend(s, rows_of(6, 2), mask=mask), 8),
        *TWO,
        r"Buffer.last: 2 of the rows asked for are not held. Ask buffer.size\(state\) first",
    ),
    "expired rows": Case(
        sampled_old,
        *(np.ones(24, bool), np.zeros(24, bool)),
        "Buffer.sample: 4 rows have expired and are masked: the state is too old. Carry on the state",
        storages=HOST,
    ),
    "an invalid exponent": Case(
        lambda b, s, alpha: b.set(s, alpha=alpha), NAN, jnp.float32(0.3), "Buffer.set: alpha is nan; expected a finite"
    ),
    "an option that is negative": Case(
        lambda b, s, beta: b.sample(s, KEY, 4, beta=beta), jnp.float32(-1), jnp.float32(1), "Buffer.sample: beta is -1"
    ),
    "a share of more than all": Case(
        lambda b, s, eta: b.update_priority(s, b.last(s, 4).index, jnp.ones(4), eta=eta),
        *(jnp.float32(2), jnp.float32(0.5)),
        r"Buffer.update_priority: eta is (2.0|Array\(2., dtype=float32\)); expected one number from 0 to 1",
    ),
    "rows evicted for lack of room": Case(
        lambda b, s, mask: b.extend(s, rows_of(50, 30), mask=mask),
        *(np.ones(30, bool), np.zeros(30, bool)),
        r"Buffer.extend: \d+ of the oldest rows were evicted .* buffer.grow\(state\)",
        *(FEW, partial(filled, count=45), ("Deduplicated",)),
    ),
}
FIRST = [(name, case.storages[0]) for name, case in CASES.items() if case.storages[0] == "Device"]


def made(name, storage):
    case = CASES[name]
    return case, dataclasses.replace(buffer_of(storage), **case.settings)


def check_eager(name, storage):
    case, buffer = made(name, storage)
    checked = fbuf.checked(buffer)
    jax.block_until_ready(case.step(checked, case.start(checked), case.good))
    raises(ValueError, case.message, lambda: case.step(checked, case.start(checked), case.bad))


def check_jitted(name, storage):
    case, buffer = made(name, storage)
    checked = fbuf.checked(buffer)
    jitted = jax.jit(checkify.checkify(partial(case.step, checked)))
    for x in (case.good, case.bad):
        error, result = jitted(case.start(checked), x)
        assert (error.get() is None) == (x is case.good), error.get()
        plain = jax.jit(partial(case.step, buffer))(case.start(buffer), x)
        for a, b in zip(counts(result), counts(plain), strict=True):
            np.testing.assert_array_equal(a, b)
    raises(ValueError, case.message, error.throw)


def counts(tree):
    """What two runs over two stores must have in common: not the stores' ids and tickets."""

    def parts(x):
        if isinstance(x, fbuf.BufferState):
            return x.counters, x.ring, x.sampler
        return (x.data, x.index.slot, x.mask) if isinstance(x, fbuf.Sample | fbuf.Rows) else x

    own = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, fbuf.BufferState | fbuf.Sample | fbuf.Rows))
    return [np.asarray(leaf) for leaf in jax.tree.leaves([parts(x) for x in own])]


test_an_eager_call_raises_at_once = checks((check_eager, FIRST))


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
    assert not hasattr(checked, "no_such_verb")


def test_an_unchecked_buffer_compiles_as_before():
    def step(buffer, state, errors):
        return updated(buffer, buffer.extend(state, rows_of(6, 2)), errors)

    def text(fn):
        return jax.jit(fn).lower(state, jnp.ones(4)).as_text()

    buffer = fbuf.prioritized(8)
    state, checked = filled(buffer), fbuf.checked(buffer)
    before = text(partial(step, buffer))
    assert text(checkify.checkify(partial(step, checked))) != before
    free = fbuf.checked(buffer, allow=fbuf._buffer.state.COUNTERS)  # without a condition nothing is left of it
    assert text(partial(step, free)) == text(partial(step, buffer)) == before


def test_donated_and_without_checkify():
    buffer = fbuf.checked(fbuf.prioritized(8))
    step = jax.jit(checkify.checkify(partial(updated, buffer)), donate_argnums=0)
    state = filled(buffer)
    error, state = step(state, jnp.ones(4))
    error.throw()
    error, state = step(state, jnp.full(4, NAN))
    assert "4 priorities are NaN" in str(error.get()) and int(state.counters[0]) == 4
    raises(ValueError, r"checkify\.checkify", lambda: jax.jit(partial(updated, buffer))(state, jnp.ones(4)))


def test_stale_indices_of_a_batch_drawn_ahead_are_no_error():
    ahead, at_once = (fbuf.checked(buffer_of(**more)) for more in ({"prefetch": 1, "batch_size": 4}, {"batch_size": 4}))

    def learn(buffer):
        state, batch = buffer.sample(filled(buffer), KEY)
        state = buffer.extend(state, rows_of(6, 8))  # in place of all rows
        return buffer.update_priority(state, batch.index, jnp.ones(4))

    assert int(learn(ahead).counters.sum()) > 0
    raises(Exception, "stale", learn, at_once)


def test_a_step_of_a_mixture_is_checked_for_each_buffer():
    mixture = fbuf.Mixture({name: buffer_of() for name in "ab"}, fractions=dict.fromkeys("ab", 0.5))
    empty = {name: buffer.init(EXAMPLE) for name, buffer in mixture.members}
    raises(ValueError, "no row can be sampled", fbuf.checked(mixture.sample), empty, KEY, 4)
    state = {name: buffer.extend(empty[name], rows_of(0, 6)) for name, buffer in mixture.members}
    state, batch = mixture.sample(state, KEY, 4)
    step = fbuf.checked(mixture.update_priority)
    step(state, batch.index, jnp.ones(4))
    raises(Exception, "NaN|finite", step, state, batch.index, jnp.full(4, jnp.nan))


def test_checked_refuses_other_arguments():
    raises(TypeError, "checked: got int; expected a Buffer, or a step of states", fbuf.checked, 3)
    raises(ValueError, "checked: allow names 'stale'", lambda: fbuf.checked(fbuf.Buffer(8), allow=("stale",)))
    raises(TypeError, r"allow is 'retired_rows'; expected", lambda: fbuf.checked(fbuf.Buffer(8), allow="retired_rows"))
    raises(TypeError, "but a step is given; expected a", lambda: fbuf.checked(lambda s: s, allow=("retired_rows",)))
