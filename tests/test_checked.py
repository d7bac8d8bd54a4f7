"""`fbuf.checked(buffer)`: every condition that verbs only count is an error with words, eagerly and through checkify.

Each condition is a case: a step that meets it and one that does not. Both run eagerly and jitted under `checkify`, over
storages; what is returned is what the buffer without checks returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Compressed, Deduplicated, Device, Host, Memmap, Ragged
from fbuf.views import Transition

EXAMPLE = {
    "obs": jax.ShapeDtypeStruct((8, 8), jnp.uint8),
    "action": jax.ShapeDtypeStruct((), jnp.int32),
    "reward": jax.ShapeDtypeStruct((), jnp.float32),
    "terminated": jax.ShapeDtypeStruct((), jnp.bool_),
    "truncated": jax.ShapeDtypeStruct((), jnp.bool_),
}
KEYS = {"keys": ("obs",), "on_expired": "mask", "slack": 0}
STORAGES: dict[str, Any] = {
    "Device": Device(),
    "Compressed": Compressed(**KEYS),
    "Host": Host(**KEYS),
    "Memmap": Memmap(**KEYS),
    "Deduplicated": Deduplicated(keys=("obs",), blocks=4096),
    "Ragged": Ragged(keys=(), maximum={"obs": (8, 8)}, on_expired="mask"),
}
KEY = jax.random.key(0)


def rows_of(first: int, count: int) -> dict[str, Any]:
    t = np.arange(first, first + count)
    return {
        "obs": np.random.default_rng(first).integers(0, 255, (count, 8, 8), np.uint8),
        "action": t.astype(np.int32),
        "reward": t.astype(np.float32),
        "terminated": t % 7 == 6,
        "truncated": np.zeros(count, bool),
    }


def buffer_of(storage: str = "Device", capacity: int = 8, **settings: Any) -> fbuf.Buffer:
    if storage == "Deduplicated":
        settings = {"storage": Deduplicated(keys=("obs",), blocks=4096)} | settings
    return fbuf.Buffer(capacity, **({"storage": STORAGES[storage], "sampler": Prioritized()} | settings))


def filled(buffer: Any, count: int = 6) -> Any:
    return buffer.extend(buffer.init(EXAMPLE), rows_of(0, count))


class Case(NamedTuple):
    """One condition: `step(buffer, state, x)` meets it where `x` is `bad`."""

    step: Callable[..., Any]
    bad: Any
    good: Any
    message: str
    settings: dict[str, Any] = {}  # noqa: RUF012
    start: Callable[[Any], Any] = filled
    storages: tuple[str, ...] = tuple(STORAGES)


def updated(buffer: Any, state: Any, errors: Any) -> Any:
    state, batch = buffer.sample(state, KEY, 4)
    return buffer.update_priority(state, batch.index, errors)


def updated_at(buffer: Any, state: Any, slot: Any) -> Any:
    state, batch = buffer.sample(state, KEY, 4)
    slot = jnp.where(slot == 100, batch.index.slot, slot)
    return buffer.update_priority(state, dataclasses.replace(batch.index, slot=slot), jnp.ones(4))


def updated_late(buffer: Any, state: Any, mask: Any) -> Any:
    state, batch = buffer.sample(state, KEY, 4)
    state = buffer.extend(state, rows_of(50, 8), mask=mask)
    return buffer.update_priority(state, batch.index, jnp.ones(4))


def changed_late(buffer: Any, state: Any, mask: Any) -> Any:
    index = buffer.last(state, 2).index
    state = buffer.extend(state, rows_of(50, 8), mask=mask)
    return buffer.update_rows(state, index, {"reward": jnp.zeros(2)})


def got_late(buffer: Any, state: Any, mask: Any) -> Any:
    index = buffer.last(state, 2).index
    state = buffer.extend(state, rows_of(50, 8), mask=mask)
    return buffer.get(state, index)


def sampled_old(buffer: Any, state: Any, mask: Any) -> Any:
    """A state whose rows a later write, through another future, has pushed out of the store."""
    newer = buffer.extend(state, rows_of(50, 24), mask=mask)
    late = jnp.sum(jax.tree.leaves(newer.rows)[1].astype(jnp.uint32)) * jnp.uint32(0)  # after that write
    rows = jax.tree.map(lambda x: x + late.astype(x.dtype) if x.dtype == jnp.uint32 else x, state.rows)
    return newer, buffer.sample(dataclasses.replace(state, rows=rows), KEY, 4)


def priority_given(buffer: Any, state: Any, priority: Any) -> Any:
    return buffer.extend(state, rows_of(6, 2), priority=priority)


NAN, INF = jnp.float32(jnp.nan), jnp.float32(jnp.inf)
HOST = ("Compressed", "Host", "Memmap")
FEW: dict[str, Any] = {"storage": Deduplicated(keys=("obs",), blocks=64), "sampler": Uniform(), "capacity": 200}
CASES = {
    "an empty sample": Case(
        lambda b, s, mask: b.sample(b.extend(s, rows_of(0, 2), mask=mask), KEY, 4),
        jnp.zeros(2, bool),
        jnp.ones(2, bool),
        r"Buffer.sample: there is nothing to draw. Ask buffer.can_sample\(state\) first",
        start=lambda b: b.init(EXAMPLE),
    ),
    "an empty peek": Case(
        lambda b, s, mask: b.peek(b.extend(s, rows_of(0, 2), mask=mask), KEY, 4),
        jnp.zeros(2, bool),
        jnp.ones(2, bool),
        r"Buffer.peek: there is nothing to draw. Ask buffer.can_sample\(state\) first",
        start=lambda b: b.init(EXAMPLE),
    ),
    "errors that are not finite": Case(
        updated,
        jnp.array([1, NAN, 2, INF]),
        jnp.ones(4),
        r"Buffer.update_priority: 2 priorities are NaN or infinite .* write jnp.nan_to_num\(td_error\)",
    ),
    "priorities of new rows that are not finite": Case(
        priority_given, jnp.array([1, NAN]), jnp.ones(2), "Buffer.extend: 1 priorities are NaN or infinite"
    ),
    "indices out of range": Case(
        updated_at,
        jnp.array([-1, 8, 99, -(2**31)], jnp.int32),
        jnp.full(4, 100, jnp.int32),
        "Buffer.update_priority: 4 indices name no slot and were skipped. Pass batch.index",
        {"sampler": Prioritized()},
    ),
    "stale indices": Case(
        updated_late,
        jnp.ones(8, bool),
        jnp.zeros(8, bool),
        "Buffer.update_priority: 4 indices are stale and were skipped: .* Call it before `extend`",
    ),
    "indices of closed rows": Case(
        updated_late,
        jnp.arange(8) < 3,
        jnp.zeros(8, bool),
        r"Buffer.update_priority: \d indices name rows that can no longer be drawn|indices are stale",
        {"view": Transition(stack=4, observation="obs")},
    ),
    "rows changed too late": Case(
        changed_late, jnp.ones(8, bool), jnp.zeros(8, bool), "Buffer.update_rows: 2 indices are stale and were skipped"
    ),
    "rows got too late": Case(
        got_late,
        jnp.ones(8, bool),
        jnp.zeros(8, bool),
        "Buffer.get: 2 indices name no row of this state: they are stale",
    ),
    "more rows asked for than there are": Case(
        lambda b, s, mask: b.last(b.extend(s, rows_of(6, 2), mask=mask), 8),
        jnp.zeros(2, bool),
        jnp.ones(2, bool),
        r"Buffer.last: 2 of the rows asked for are not held. Ask buffer.size\(state\) first",
    ),
    "expired rows": Case(
        sampled_old,
        jnp.ones(24, bool),
        jnp.zeros(24, bool),
        "Buffer.sample: 4 rows have expired and are masked: the state is too old. Carry on the state",
        storages=HOST,
    ),
    "an exponent that is none": Case(
        lambda b, s, alpha: b.set(s, alpha=alpha), NAN, jnp.float32(0.3), "Buffer.set: alpha is nan; expected a finite"
    ),
    "an option that is negative": Case(
        lambda b, s, beta: b.sample(s, KEY, 4, beta=beta), jnp.float32(-1), jnp.float32(1), "Buffer.sample: beta is -1"
    ),
    "a share of more than all": Case(
        lambda b, s, eta: b.update_priority(s, b.last(s, 4).index, jnp.ones(4), eta=eta),
        jnp.float32(2),
        jnp.float32(0.5),
        r"Buffer.update_priority: eta is (2.0|Array\(2., dtype=float32\)); expected one number from 0 to 1",
    ),
    "rows given up for want of room": Case(
        lambda b, s, mask: b.extend(s, rows_of(50, 30), mask=mask),
        jnp.ones(30, bool),
        jnp.zeros(30, bool),
        r"Buffer.extend: \d+ of the oldest rows were given up .* buffer.grow\(state\)",
        FEW,
        partial(filled, count=45),
        storages=("Deduplicated",),
    ),
}


JITTED = {("stale indices", "Compressed")}
"""Jitted by default; most of them run eagerly."""
EAGER_SLOW = {("indices of closed rows", "Device"), ("rows given up for want of room", "Deduplicated")}


def pairs(by_default: Callable[[str, str], bool]) -> list[Any]:
    return [
        pytest.param(
            name, storage, marks=[] if by_default(name, storage) else [pytest.mark.slow], id=f"{name}-{storage}"
        )
        for name, case in CASES.items()
        for storage in case.storages
    ]


def made(name: str, storage: str) -> tuple[Case, fbuf.Buffer]:
    case = CASES[name]
    return case, dataclasses.replace(buffer_of(storage), **case.settings)


@pytest.mark.parametrize(
    ("name", "storage"),
    pairs(lambda name, storage: storage == CASES[name].storages[0] and (name, storage) not in EAGER_SLOW),
)
def test_an_eager_call_raises_at_once(name: str, storage: str) -> None:
    case, buffer = made(name, storage)
    checked = fbuf.checked(buffer)
    jax.block_until_ready(case.step(checked, case.start(checked), case.good))
    with pytest.raises(ValueError, match=case.message):
        case.step(checked, case.start(checked), case.bad)


@pytest.mark.parametrize(("name", "storage"), pairs(lambda name, storage: (name, storage) in JITTED))
def test_a_jitted_step_raises_through_checkify(name: str, storage: str) -> None:
    case, buffer = made(name, storage)
    checked = fbuf.checked(buffer)
    jitted = jax.jit(checkify.checkify(partial(case.step, checked)))
    error, result = jitted(case.start(checked), case.good)
    assert error.get() is None, error.get()
    plain = jax.jit(partial(case.step, buffer))(case.start(buffer), case.good)
    for a, b in zip(counts(result), counts(plain), strict=True):
        np.testing.assert_array_equal(a, b)
    error, result = jitted(case.start(checked), case.bad)
    assert error.get() is not None
    with pytest.raises(ValueError, match=case.message):
        error.throw()
    plain = jax.jit(partial(case.step, buffer))(case.start(buffer), case.bad)
    for a, b in zip(counts(result), counts(plain), strict=True):
        np.testing.assert_array_equal(a, b)


def counts(tree: Any) -> list[np.ndarray]:
    """What two runs over two stores must have in common: not the stores' ids and tickets."""

    def parts(x: Any) -> Any:
        if isinstance(x, fbuf.BufferState):
            return x.counters, x.ring, x.sampler
        return (x.data, x.index.slot, x.mask) if isinstance(x, fbuf.Sample | fbuf.Rows) else x

    own = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, fbuf.BufferState | fbuf.Sample | fbuf.Rows))
    return [np.asarray(leaf) for leaf in jax.tree.leaves([parts(x) for x in own])]


SAMPLERS: dict[str, Any] = {
    "Uniform": Uniform(),
    "Prioritized": Prioritized(),
    "Prioritized(on='host')": Prioritized(on="host"),
    "Ranked": Ranked(),
    "Epoch": Epoch(),
    "Consume": Consume(2),
    "Staleness": Staleness(4),
}
DEFAULT_PAIRS = {("Compressed", "Prioritized(on='host')")}


@pytest.mark.parametrize(
    ("storage", "sampler"),
    [
        pytest.param(a, b, marks=[] if (a, b) in DEFAULT_PAIRS else [pytest.mark.slow])
        for a in STORAGES
        for b in SAMPLERS
    ],
)
def test_every_sampler_over_every_storage_is_checked(storage: str, sampler: str) -> None:
    """In a scan: nothing is wrong at first and the batches are those of the buffer; then there is nothing to draw."""
    buffer = buffer_of(storage, sampler=SAMPLERS[sampler])
    checked = fbuf.checked(buffer)

    def run(buffer: Any, state: Any, keys: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            state, batch = buffer.sample(state, key, 4)
            if buffer.sampler.prioritized:
                state = buffer.update_priority(state, batch.index, batch.data["reward"])
            return state, (batch.data, batch.index.slot, batch.mask)

        return lax.scan(step, state, keys)

    keys = jax.random.split(KEY, 3)
    jitted = jax.jit(checkify.checkify(partial(run, checked)))
    error, (state, batches) = jitted(filled(checked), keys)
    assert error.get() is None, error.get()
    other, expected = jax.jit(partial(run, buffer))(filled(buffer), keys)
    for a, b in zip(jax.tree.leaves(batches), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(state.counters, other.counters)
    error, _ = jitted(checked.clear(state), keys)
    assert "Buffer.sample: there is nothing to draw" in str(error.get())


def test_a_checked_buffer_is_a_value() -> None:
    buffer = fbuf.prioritized(8)
    checked = fbuf.checked(buffer)
    assert checked == fbuf.checked(fbuf.prioritized(8)) == fbuf.checked(checked) != fbuf.checked(fbuf.prioritized(9))
    assert hash(checked) == hash(fbuf.checked(fbuf.prioritized(8))) and checked != buffer
    assert checked != fbuf.checked(buffer, allow=("retired_rows",)) and repr(checked) == f"Checked(buffer={buffer!r})"
    assert jax.tree.leaves(checked) == [] and checked.buffer is buffer and checked.capacity == 8
    traces = []

    @partial(jax.jit, static_argnums=0)
    def size(buffer: Any, state: Any) -> Any:
        traces.append(1)
        return buffer.size(state)

    state = filled(checked)
    assert [int(size(fbuf.checked(fbuf.prioritized(8)), state)) for _ in range(2)] == [6, 6] and len(traces) == 1
    assert checked.plan(EXAMPLE) == buffer.plan(EXAMPLE)
    with pytest.raises(AttributeError):
        checked.no_such_verb  # noqa: B018


def test_the_buffer_without_checks_compiles_to_what_it_did() -> None:
    """And the checked one does compile to something else, so that the comparison can fail."""

    def step(buffer: Any, state: Any, errors: Any) -> Any:
        return updated(buffer, buffer.extend(state, rows_of(6, 2)), errors)

    def text(fn: Any) -> str:
        return jax.jit(fn).lower(state, jnp.ones(4)).as_text()

    buffer = fbuf.prioritized(8)
    state = filled(buffer)
    before = text(partial(step, buffer))
    checked = fbuf.checked(buffer)
    error, _ = jax.jit(checkify.checkify(partial(step, checked)))(state, jnp.ones(4))
    assert error.get() is None
    assert text(partial(step, buffer)) == before
    assert text(checkify.checkify(partial(step, checked))) != before
    free = fbuf.checked(buffer, allow=fbuf._state.COUNTERS)  # without a condition nothing is left of it
    assert text(partial(step, free)) == before


def test_under_cond_and_vmap() -> None:
    buffer = fbuf.checked(fbuf.prioritized(8))

    def maybe(state: Any, wanted: Any) -> Any:
        return lax.cond(wanted, lambda s: buffer.sample(s, KEY, 4)[0], lambda s: s, state)

    jitted = jax.jit(checkify.checkify(maybe))
    empty = buffer.init(EXAMPLE)
    assert jitted(empty, False)[0].get() is None
    assert "Buffer.sample: there is nothing to draw" in str(jitted(empty, True)[0].get())

    keys = jax.random.split(KEY, 3)
    peeks = jax.jit(checkify.checkify(lambda s, k: jax.vmap(lambda k: buffer.peek(s, k, 4).index.slot)(k)))
    assert peeks(filled(buffer), keys)[0].get() is None and "nothing to draw" in str(peeks(empty, keys)[0].get())

    many = jax.tree.map(lambda *x: jnp.stack(x), filled(buffer), empty, filled(buffer))
    each = jax.jit(jax.vmap(checkify.checkify(lambda s, k: buffer.sample(s, k, 4)[1].mask)))
    error, mask = each(many, keys)
    assert mask.any(axis=1).tolist() == [True, False, True]
    assert str(error.get()).count("there is nothing to draw") == 1 and "mapped index 1" in str(error.get())


def test_donated_and_without_checkify() -> None:
    buffer = fbuf.checked(fbuf.prioritized(8))
    step = jax.jit(checkify.checkify(partial(updated, buffer)), donate_argnums=0)
    state = filled(buffer)
    error, state = step(state, jnp.ones(4))
    error.throw()
    error, state = step(state, jnp.full(4, NAN))
    assert "4 priorities are NaN" in str(error.get()) and int(state.counters[0]) == 4
    with pytest.raises(ValueError, match=r"checkify\.checkify"):
        jax.jit(partial(updated, buffer))(state, jnp.ones(4))


@pytest.mark.parametrize("storage", [pytest.param(s, marks=pytest.mark.slow) for s in ("Device", "Compressed")])
def test_with_prefetch_only_what_is_nobodys_mistake_passes(storage: str) -> None:
    checked = fbuf.checked(buffer_of(storage, prefetch=1, batch_size=4))
    state = filled(checked)
    error, _ = jax.jit(checkify.checkify(partial(updated_late, checked)))(state, jnp.ones(8, bool))
    assert error.get() is None, error.get()
    state = filled(checked)  # the rows of the other may have expired
    error, _ = jax.jit(checkify.checkify(partial(updated, checked)))(state, jnp.full(4, INF))
    assert "4 priorities are NaN or infinite" in str(error.get())
    with pytest.raises(ValueError, match="there is nothing to draw"):
        checked.sample(checked.clear(state), KEY)


@pytest.mark.slow
def test_what_is_allowed_is_only_counted() -> None:
    few = dataclasses.replace(buffer_of(), **FEW)
    state = fbuf.checked(few, allow=("retired_rows", "refused_rows")).extend(filled(few, 45), rows_of(50, 30))
    assert int(few.stats(state)["retired_rows"]) > 0
    checked = fbuf.checked(few, allow=("retired_rows",))
    assert fbuf.checked(checked) == fbuf.checked(checked, allow=("retired_rows",)) == checked
    assert fbuf.checked(checked, allow=("empty_samples",)).allow == ("retired_rows", "empty_samples")
    grown, state = checked.grow(state)
    assert isinstance(grown, type(checked)) and grown.allow == checked.allow and grown.buffer != few
    other = dataclasses.replace(grown.buffer, sampler=Prioritized())
    assert int(grown.convert(fbuf.checked(other), state).ring.size[0]) == int(grown.size(state))


def test_what_it_is_not_given_for() -> None:
    with pytest.raises(
        TypeError, match=r"checked: got int; expected a Buffer, or a step .* Write fbuf.checked\(buffer\)"
    ):
        fbuf.checked(3)
    with pytest.raises(ValueError, match="checked: allow names 'stale'; expected some of refused_nonfinite"):
        fbuf.checked(fbuf.uniform(8), allow=("stale",))
    with pytest.raises(TypeError, match=r"allow is 'retired_rows'; expected a tuple. Write allow=\('retired_rows',\)"):
        fbuf.checked(fbuf.uniform(8), allow="retired_rows")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="but a step is given; expected a Buffer with it"):
        fbuf.checked(lambda s: s, allow=("retired_rows",))


def test_a_step_is_checked_as_before() -> None:
    buffer = fbuf.prioritized(8)
    step = fbuf.checked(jax.jit(partial(updated, buffer)))
    with pytest.raises(ValueError, match="checked: refused one by one: 4 nonfinite"):
        step(filled(buffer), jnp.full(4, NAN))
