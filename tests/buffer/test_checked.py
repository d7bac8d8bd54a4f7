"""`fbuf.checked(step)`: every condition that methods only count raises an error, of eager and of jitted steps."""

import dataclasses
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    index = buffer.rows(state, last=2).index
    state = buffer.extend(state, rows_of(50, 8), mask=mask)
    return buffer.update_rows(state, index, {"reward": jnp.zeros(2)})


def sampled_old(buffer, state, mask):
    """A state whose rows a later write, through another future, has pushed out of the store."""
    newer = buffer.extend(state, rows_of(50, 24), mask=mask)
    late = jnp.sum(jax.tree.leaves(newer.rows)[1].astype(jnp.uint32)) * jnp.uint32(0)  # after that write
    rows = jax.tree.map(lambda x: x + late.astype(x.dtype) if x.dtype == jnp.uint32 else x, state.rows)
    return buffer.sample(dataclasses.replace(state, rows=rows), KEY, 4), newer


def priority_given(buffer, state, priority):
    return buffer.extend(state, rows_of(6, 2), priority=priority)


NAN, INF = jnp.float32(jnp.nan), jnp.float32(jnp.inf)
HOST = ("Compressed", "Host", "Memmap")
FEW = {"storage": Deduplicated(keys=("obs",), blocks=64), "sampler": Uniform(), "capacity": 200}
TWO = np.zeros(2, bool), np.ones(2, bool)  # none of two rows, and both
LATE = np.ones(8, bool), np.zeros(8, bool)  # eight rows more, and none


def sampled(buffer, state, mask):
    return buffer.sample(buffer.extend(state, rows_of(0, 2), mask=mask), KEY, 4)


CASES = {
    "an empty sample": Case(
        sampled, *TWO, "checked: no row can be sampled. Add rows", start=lambda buffer: buffer.init(EXAMPLE)
    ),
    "errors that are not finite": Case(
        updated,
        *(np.float32([1, np.nan, 2, np.inf]), np.ones(4, np.float32)),
        r"checked: 2 priorities are NaN or infinite .* pass jnp.nan_to_num\(x\)",
    ),
    "priorities of new rows that are not finite": Case(
        priority_given, jnp.array([1, NAN]), jnp.ones(2), "checked: 1 priorities are NaN or infinite"
    ),
    "indices out of range": Case(
        updated_at,
        *(np.int32([-1, 8, 99, -(2**31)]), np.full(4, 100, np.int32)),
        "checked: 4 indices name no slot and were skipped. Pass batch.index",
        {"sampler": Prioritized()},
    ),
    "stale indices": Case(
        updated_late, *LATE, "checked: 4 indices are stale and were skipped: .* Call it before `extend`"
    ),
    "indices of closed rows": Case(
        updated_late,
        *(np.arange(8) < 3, np.zeros(8, bool)),
        r"checked: \d indices name rows that can no longer be drawn|indices are stale",
        {"view": Transition(stack=4, observation="obs", autoreset="same_step")},
    ),
    "rows changed too late": Case(changed_late, *LATE, "checked: 2 indices are stale and were skipped"),
    "expired rows": Case(
        sampled_old,
        *(np.ones(24, bool), np.zeros(24, bool)),
        "checked: 4 rows have expired and are masked: the state is too old, or .* Carry on the newest state",
        storages=HOST,
    ),
}
FIRST = [(name, case.storages[0]) for name, case in CASES.items() if case.storages[0] == "Device"]


def made(name, storage):
    case = CASES[name]
    return case, dataclasses.replace(buffer_of(storage), **case.settings)


def check_eager(name, storage):
    case, buffer = made(name, storage)
    step = fbuf.checked(partial(case.step, buffer))
    jax.block_until_ready(step(case.start(buffer), case.good))
    raises(ValueError, case.message, step, case.start(buffer), case.bad)


def check_jitted(name, storage):
    case, buffer = made(name, storage)
    plain = jax.jit(partial(case.step, buffer))
    checked = fbuf.checked(plain)
    for x in (case.good, case.bad):
        with nullcontext() if x is case.good else pytest.raises(ValueError, match=case.message) as caught:
            result = checked(case.start(buffer), x)
        result = result if x is case.good else caught.value.result
        for a, b in zip(counts(result), counts(plain(case.start(buffer), x)), strict=True):
            np.testing.assert_array_equal(a, b)


def counts(tree):
    """What two runs over two stores must have in common: not the stores' ids and tickets."""

    def parts(x):
        if isinstance(x, fbuf.BufferState):
            return x.counters, x.ring, x.sampler
        return (x.data, x.index.slot, x.mask) if isinstance(x, fbuf.Sample | fbuf.Rows) else x

    own = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, fbuf.BufferState | fbuf.Sample | fbuf.Rows))
    return [np.asarray(leaf) for leaf in jax.tree.leaves([parts(x) for x in own])]


test_an_eager_call_raises_at_once = checks((check_eager, FIRST))


@pytest.mark.more
def test_rows_evicted_for_lack_of_room_are_no_error():
    buffer = dataclasses.replace(buffer_of(), **FEW)
    state = fbuf.checked(buffer.extend)(filled(buffer, 45), rows_of(50, 30))
    assert int(buffer.stats(state)["retired_rows"]) > 0


@pytest.mark.more
def test_stale_indices_of_a_batch_drawn_ahead_are_no_error():
    ahead, at_once = (buffer_of(**more) for more in ({"prefetch": 1, "batch_size": 4}, {"batch_size": 4}))

    def learn(buffer):
        state, batch = fbuf.checked(buffer.sample)(filled(buffer), KEY)
        state = fbuf.checked(buffer.extend)(state, rows_of(6, 8))  # in place of all rows
        return fbuf.checked(buffer.update_priority)(state, batch.index, jnp.ones(4))

    assert int(learn(ahead).counters.sum()) > 0
    raises(ValueError, "stale", learn, at_once)


@pytest.mark.more
def test_a_step_of_a_mixture_is_checked_for_each_buffer():
    mixture = fbuf.Mixture({name: buffer_of() for name in "ab"}, fractions=dict.fromkeys("ab", 0.5))
    empty = {name: buffer.init(EXAMPLE) for name, buffer in mixture.members}
    raises(ValueError, "no row can be sampled", fbuf.checked(mixture.sample), empty, KEY, 4)
    state = {name: buffer.extend(empty[name], rows_of(0, 6)) for name, buffer in mixture.members}
    state, batch = mixture.sample(state, KEY, 4)
    step = fbuf.checked(mixture.update_priority)
    step(state, batch.index, jnp.ones(4))
    raises(Exception, "NaN|finite", step, state, batch.index, jnp.full(4, jnp.nan))


def test_a_step_keeps_its_name_and_what_is_no_step_is_refused():
    assert fbuf.checked(updated).__name__ == "updated"
    raises(TypeError, r"checked: step is int; expected a function .* fbuf.checked\(buffer.sample\)", fbuf.checked, 3)
    raises(TypeError, "checked: step is Buffer; expected a function of states", fbuf.checked, fbuf.Buffer(8))
    buffer = buffer_of()
    said = r"called inside jit, .* Write fbuf.checked\(jax.jit\(step\)\)"
    raises(TypeError, said, jax.jit(fbuf.checked(buffer.clear)), buffer.init(EXAMPLE))


OTHERS = [(n, s) for n, case in CASES.items() for s in case.storages if (n, s) not in FIRST]
test_every_call_raises = checks(
    more=[(check_jitted, [("stale indices", "Compressed")])],
    exhaustive=[(check_eager, OTHERS), (check_jitted, FIRST + OTHERS)],
)
