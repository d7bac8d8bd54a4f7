"""Buffers whose rows lie on the host, through JAX: order, expiry, threads, transformations, memory, flags.

`obs` (on the host) of row i starts with 10 i and `t` (on the device) is i, so any mix-up of rows shows in one batch. What
is late is late because of `late`, a computation of some tenths of a second; each test of order comes with a control in
which the mechanism is taken out and the wrong thing happens.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf import _verbs
from fbuf._host import callback, owner
from fbuf._host.codec import Zstd
from fbuf._host.store import Store
from fbuf.storages import _hosted, _side
from fbuf.testing import assert_inplace

STORAGES: dict[str, Any] = {
    "host": partial(fbuf.storages.Host, keys=("obs",)),
    "compressed": partial(fbuf.storages.Compressed, keys=("obs",), codec=Zstd(chunk=4)),
    "memmap": partial(fbuf.storages.Memmap, keys=("obs",)),
}
STORAGE = pytest.mark.parametrize("storage", ["host", "compressed", pytest.param("memmap", marks=pytest.mark.slow)])
EXAMPLE = {"obs": jax.ShapeDtypeStruct((6,), jnp.int32), "t": jax.ShapeDtypeStruct((), jnp.int32)}


def rows_of(first: int, count: int, lanes: int | None = None) -> dict[str, jax.Array]:
    """Rows `first`, `first + 1`, ...; with lanes in order of time, then lane."""
    t = np.arange(first, first + count * (lanes or 1), dtype=np.int32)
    t = t if lanes is None else t.reshape(count, lanes)
    obs = 10 * t[..., None] + np.arange(6, dtype=np.int32)
    return {"obs": jnp.asarray(obs), "t": jnp.asarray(t)}


def agree(batch: Any) -> np.ndarray:
    """The numbers of the rows in a batch, after a check that host and device parts are of one row each."""
    t, obs, mask = (np.asarray(x) for x in (batch.data["t"], batch.data["obs"], batch.mask))
    np.testing.assert_array_equal(obs, np.where(mask[..., None], 10 * t[..., None] + np.arange(6), 0))
    return t[mask]


def filled(buffer: fbuf.Buffer, count: int | None = None) -> Any:
    count = buffer.geometry.length if count is None else count
    return jax.block_until_ready(buffer.extend(buffer.init(EXAMPLE), rows_of(0, count, buffer.lanes)))


def store_of(state: Any) -> Store:
    return owner.find(owner.join_id(np.asarray(state.rows.id)))


_MATRIX = np.full((256, 256), 0.01, np.float32)


@jax.jit
def _late(x: Any, matrix: jax.Array) -> Any:
    slow = lax.fori_loop(0, 400, lambda i, a: jnp.tanh(a @ matrix), matrix)
    zero = jnp.isnan(slow[0, 0])  # False, but XLA cannot know
    return jax.tree.map(lambda leaf: leaf ^ zero if leaf.dtype == bool else leaf + zero.astype(leaf.dtype), x)


def late(x: Any) -> Any:
    """The same values, some tenths of a second later."""
    return _late(x, jnp.asarray(_MATRIX))


# ------------------------------------------------------------------------------------------------------- order


def overtaken(storage: str, capacity: int, form: str) -> bool:
    """Whether a write of C rows got ahead of a sample that was called first but whose key came late."""
    buffer = fbuf.Buffer(capacity=capacity, storage=STORAGES[storage](slack=0, on_expired="mask"))
    state, rows, key = filled(buffer), rows_of(100, capacity), np.array([0, 7], np.uint32)

    def step(state: Any, key: Any) -> Any:
        state, batch = buffer.sample(state, key, 16)
        return buffer.extend(state, rows), batch

    if form == "eager":
        state, batch = step(state, late(key))
    elif form == "jit":
        state, batch = jax.jit(lambda s, k: step(s, late(k)))(state, key)
    else:
        state, batch = jax.jit(step, donate_argnums=0)(state, late(key))
    seen = agree(batch)
    assert np.isin(seen, np.arange(capacity)).all()  # never other rows, whatever the order
    state, after = buffer.sample(state, key, 16)
    assert np.isin(agree(after), np.arange(100, 100 + capacity)).all() and after.mask.all()
    return not batch.mask.all()


@STORAGE
@pytest.mark.parametrize("form", ["eager", "jit", "donated"])
def test_no_write_overtakes_a_late_read(storage: str, form: str) -> None:
    assert not overtaken(storage, 8, form)


@pytest.fixture
def untied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Verbs traced now do not order reads before writes."""
    verbs = (_verbs.sample, _verbs.extend)
    monkeypatch.setattr(_verbs, "pin", lambda token, reads: (token, reads))
    for verb in verbs:
        verb._jitted.clear_cache()
    yield
    for verb in verbs:
        verb._jitted.clear_cache()


@STORAGE
@pytest.mark.parametrize("form", ["jit", "donated"])
def test_without_the_token_a_write_does(storage: str, form: str, untied: None) -> None:
    """The negative control of the test above (separate dispatches run one after another on CPU anyway)."""
    assert overtaken(storage, 8, form)


def order_of_writes(storage: str, monkeypatch: pytest.MonkeyPatch, verbs: str, capacity: int) -> tuple[list[str], Any]:
    """The calls a store gets from a jit of two writes whose first has late rows; and all rows afterwards."""
    buffer = fbuf.Buffer(capacity=capacity, storage=STORAGES[storage](slack=0))
    state, calls = filled(buffer), []
    index = buffer.last(state, 2).index

    @jax.jit
    def step(state: Any, first: Any, second: Any) -> Any:
        for verb, rows in zip(verbs, (late(first), second), strict=True):
            if verb == "e":
                state = buffer.extend(state, rows)
            else:
                state = buffer.update_rows(state, index, {n: x[:2] for n, x in rows.items()})
        return state

    def record(method: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(method.__name__)
            calls.append(str(int((args[1][0] if method.__name__ == "write" else args[3][0]).reshape(-1)[0])))
            return method(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", record(Store.write))
        patch.setattr(Store, "patch", record(Store.patch))
        state = jax.block_until_ready(step(state, rows_of(100, capacity // 2), rows_of(200, capacity // 2)))
    return calls, buffer.rows(state)


@STORAGE
def test_writes_of_one_jit_reach_the_store_in_order(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rows = order_of_writes(storage, monkeypatch, "ee", 16)
    assert calls == ["write", "1000", "write", "2000"]
    np.testing.assert_array_equal(agree(rows), [*range(100, 108), *range(200, 208)])


@pytest.mark.parametrize(("verbs", "want"), [("re", [*range(8, 14), 100, 101]), ("er", [*range(100, 108)])])
def test_changes_and_writes_of_one_jit_keep_their_order(
    verbs: str, want: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, rows = order_of_writes("host", monkeypatch, verbs, 16)
    assert calls[1::2] == ["1000", "2000"]
    first = agree(rows)
    expected = [*want, *range(200, 208)] if verbs == "re" else [*range(8, 14), 200, 201, *want]
    np.testing.assert_array_equal(first, expected)


def test_without_the_ticket_table_writes_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the store expires rows of the newest state."""
    monkeypatch.setattr(_side, "_after", lambda rows: jnp.zeros((1, 2), jnp.uint32))
    calls, _ = order_of_writes("host", monkeypatch, "ee", 18)
    assert calls == ["write", "2000", "write", "1000"]


# ------------------------------------------------------------------------------------------------------ expiry


@STORAGE
def test_an_old_state_reads_its_own_rows_then_raises(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage](slack=5))
    old = filled(buffer)
    state = buffer.extend(old, rows_of(8, 5))
    np.testing.assert_array_equal(agree(buffer.rows(old)), np.arange(8))
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(5, 13))
    state = buffer.add(state, jax.tree.map(lambda x: x[0], rows_of(13, 1)))
    with pytest.raises((RuntimeError, ValueError), match=r"1 of 8 rows have expired.*Carry on the state"):
        jax.block_until_ready(buffer.rows(old))
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(6, 14))


@STORAGE
def test_an_old_state_can_mask_instead(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage](slack=2, on_expired="mask"))
    old = filled(buffer)
    buffer.extend(old, rows_of(8, 6))
    kept = buffer.rows(old)
    np.testing.assert_array_equal(agree(kept), np.arange(4, 8))
    assert not np.asarray(kept.index.ticket)[:4].any()
    after, batch = buffer.sample(old, jax.random.key(0), 64)
    assert set(agree(batch)) == {4, 5, 6, 7}
    lost = ~np.asarray(batch.mask)
    for array in (*jax.tree.leaves(batch.data), batch.probability, batch.weight, batch.index.ticket):
        assert not np.asarray(array)[lost].any()
    assert (np.asarray(batch.index.slot)[lost] == 8).all()
    assert int(buffer.stats(after)["expired_rows"]) == lost.sum() > 0


@STORAGE
def test_a_window_that_lost_a_row_is_masked_whole(storage: str) -> None:
    view = fbuf.views.Transition(stack=3, action=None, reward="t", terminated="end", truncated=None)
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage](slack=2, on_expired="mask"), view=view)
    rows = rows_of(0, 8) | {"end": jnp.zeros(8, bool)}
    rows["t"] = rows["t"].astype(jnp.float32)
    old = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    buffer.extend(old, rows)
    batch = buffer.peek(old, jax.random.key(0), 64)
    assert set(np.asarray(batch.data["reward"])[np.asarray(batch.mask)].astype(int)) <= {6, 7}
    assert not np.asarray(batch.data["obs"])[~np.asarray(batch.mask)].any()


@STORAGE
def test_two_futures_of_one_state_never_read_each_others_rows(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage](slack=64))
    root = filled(buffer)
    left, right = root, root
    for i in range(3):
        left = buffer.extend(left, rows_of(100 + 3 * i, 3))
        right = buffer.extend(right, rows_of(200 + 3 * i, 3))
    np.testing.assert_array_equal(agree(buffer.rows(left)), np.arange(101, 109))
    np.testing.assert_array_equal(agree(buffer.rows(right)), np.arange(201, 209))
    np.testing.assert_array_equal(agree(buffer.rows(root)), np.arange(8))


# ----------------------------------------------------------------------------------------------------- threads


def in_threads(*functions: Callable[[], None]) -> None:
    """Runs them at once; raises what they raise."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


@STORAGE
def test_readers_beside_a_writer(storage: str) -> None:
    """Slack of a few writes lets readers use the state of a moment ago."""
    buffer = fbuf.Buffer(capacity=32, lanes=2, storage=STORAGES[storage](slack=4000, on_expired="mask"))
    latest, done, read = [filled(buffer)], threading.Event(), [0, 0]

    def writer() -> None:
        try:
            for i in range(100):
                latest[0] = buffer.extend(latest[0], rows_of(32 + 8 * i, 4, 2))
            jax.block_until_ready(latest[0])
        finally:
            done.set()

    def reader(me: int) -> None:
        key = jax.random.key(me)
        while not done.is_set() or not read[me]:
            key, now = jax.random.split(key)
            batch = buffer.peek(latest[0], now, 16)
            assert agree(batch).size == 16
            read[me] += 1

    in_threads(writer, partial(reader, 0), partial(reader, 1))
    assert min(read) > 0
    np.testing.assert_array_equal(agree(buffer.rows(latest[0])), np.arange(800, 832))


@STORAGE
def test_two_threads_train_at_once(storage: str) -> None:
    """One jitted step, two stores: results as if each had been alone."""
    buffer = fbuf.Buffer(capacity=16, storage=STORAGES[storage](slack=0))

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, key: Any, rows: Any) -> Any:
        state = buffer.extend(state, rows)
        return buffer.sample(state, key, 8)

    def train(first: int, out: list[np.ndarray]) -> None:
        state = filled(buffer)
        for i in range(40):
            state, batch = step(state, jax.random.key(i), rows_of(first + 4 * i, 4))
            out.append(agree(batch))

    results: list[list[np.ndarray]] = [[], [], [], []]
    in_threads(partial(train, 1000, results[0]), partial(train, 9000, results[1]))
    train(1000, results[2])
    train(9000, results[3])
    for at_once, alone in ((0, 2), (1, 3)):
        np.testing.assert_array_equal(results[at_once], results[alone])


# ------------------------------------------------------------------------------------------ forms and counters


def history(buffer: fbuf.Buffer, form: str) -> list[Any]:
    """Batches of one fixed history in one form of calling."""
    state, keys = filled(buffer, 3), jax.random.split(jax.random.key(3), 6)
    rows = jax.tree.map(lambda *x: jnp.stack(x), *(rows_of(3 + 5 * i, 5) for i in range(6)))
    mask = jnp.asarray(np.random.default_rng(0).random((6, 5)) < 0.7)

    def step(state: Any, given: Any) -> Any:
        key, rows, mask = given
        state = buffer.extend(state, rows, mask=mask)
        state, batch = buffer.sample(state, key, 6)
        state = buffer.update_rows(state, batch.index, {"obs": batch.data["obs"] + 0, "t": batch.data["t"]})
        return state, (batch.data, batch.index.slot, batch.mask, batch.probability)

    if form == "scan":
        return [jax.jit(lambda s, g: lax.scan(step, s, g))(state, (keys, rows, mask))[1]]
    run: Any = {"eager": step, "jit": jax.jit(step), "donated": jax.jit(step, donate_argnums=0)}[form]
    out = []
    for i in range(6):
        state, batch = run(state, jax.tree.map(lambda x, i=i: x[i], (keys, rows, mask)))
        out.append(batch)
    return [jax.tree.map(lambda *x: jnp.stack(x), *out)]


@pytest.mark.parametrize(
    ("storage", "form"), [*(("compressed", form) for form in ("eager", "jit", "donated", "scan")), ("host", "donated")]
)
def test_every_form_gives_the_batches_of_device(storage: str, form: str) -> None:
    got = history(fbuf.Buffer(capacity=7, storage=STORAGES[storage]()), form)
    want = history(fbuf.Buffer(capacity=7), "jit")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@STORAGE
@pytest.mark.parametrize("lanes", [None, 3])
def test_counters_cross_2_to_32(storage: str, lanes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (2**32 - 5) // (lanes or 1)
    monkeypatch.setattr(_hosted, "Store", partial(Store, first_seq=first))
    buffer = fbuf.Buffer(capacity=12, lanes=lanes, storage=STORAGES[storage](slack=0))
    state = buffer.init(EXAMPLE)
    each = 12 // (lanes or 1)
    tickets: set[int] = set()
    for i in range(3):
        state = buffer.extend(state, rows_of(12 * i, each, lanes))
        np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(12 * i, 12 * i + 12))
        tickets |= {low + (high << 32) for low, high in np.asarray(state.rows.ticket).tolist()}
    assert len(tickets) == 36 and min(tickets) < 2**32 < max(tickets)
    state, batch = buffer.sample(state, jax.random.key(0), 32)
    assert agree(batch).size == 32
    state = buffer.update_rows(state, batch.index, {"t": batch.data["t"], "obs": batch.data["obs"]})
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(24, 36))


# --------------------------------------------------------------------------------------------- transformations


@STORAGE
def test_what_cannot_be_vmapped_says_so(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage]())
    state = filled(buffer)
    before = store_of(state).stats()
    many = jax.tree.map(lambda x: jnp.stack([x, x]), rows_of(0, 4))
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    keys = jax.random.split(jax.random.key(0), 2)
    flags = jnp.array([True, False])
    index = buffer.last(state, 2).index
    attempts = {
        "write": lambda: jax.vmap(lambda r: buffer.extend(state, r))(many),
        "write in cond": lambda: jax.vmap(
            lambda go: lax.cond(go, lambda s: buffer.extend(s, rows_of(0, 4)), lambda s: s, state)
        )(flags),
        "change": lambda: jax.vmap(lambda x: buffer.update_rows(state, index, {"obs": x}))(
            jnp.zeros((2, 2, 6), jnp.int32)
        ),
        "state, sample": lambda: jax.vmap(lambda s, k: buffer.sample(s, k, 4))(states, keys),
        "state, extend": lambda: jax.vmap(lambda s: buffer.extend(s, rows_of(0, 4)))(states),
        "state, rows": lambda: jax.vmap(buffer.rows)(states),
        "in jit": lambda: jax.jit(jax.vmap(lambda r: buffer.extend(state, r)))(many),
    }
    for name, attempt in attempts.items():
        with pytest.raises(TypeError, match=r"cannot be vmapped.*lanes=E.*storages\.Device\(\)"):
            attempt()
            pytest.fail(name)
    assert store_of(state).stats() == before


@STORAGE
def test_peek_vmaps_over_keys(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage]())
    state, keys = filled(buffer), jax.random.split(jax.random.key(0), 5)
    many = jax.jit(jax.vmap(lambda k: buffer.peek(state, k, 4)))(keys)
    one = [buffer.peek(state, k, 4) for k in keys]
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(jax.tree.map(lambda *x: jnp.stack(x), *one)), strict=True):
        np.testing.assert_array_equal(a, b)


@STORAGE
def test_an_untaken_branch_writes_nothing(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage]())
    state, rows = filled(buffer), rows_of(8, 2)
    step = jax.jit(lambda go, s: lax.cond(go, lambda s: buffer.extend(s, rows), lambda s: s, s))
    same = jax.block_until_ready(step(jnp.array(False), state))
    assert store_of(state).stats()["rows_accepted"] == 8
    np.testing.assert_array_equal(agree(buffer.rows(same)), np.arange(8))
    more = jax.block_until_ready(step(jnp.array(True), state))
    assert store_of(state).stats()["rows_accepted"] == 10
    np.testing.assert_array_equal(agree(buffer.rows(more)), np.arange(2, 10))


@STORAGE
def test_learning_behind_can_sample(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage]())
    key = jax.random.key(0)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, rows: Any, mask: Any) -> Any:
        def learn(state: Any) -> Any:
            state, batch = buffer.sample(state, key, 4)
            return state, jnp.sum(batch.data["obs"], dtype=jnp.int32)

        state = buffer.extend(state, rows, mask=mask)
        return lax.cond(buffer.can_sample(state), learn, lambda s: (s, jnp.zeros((), jnp.int32)), state)

    state, total = step(buffer.init(EXAMPLE), rows_of(1, 4), jnp.zeros(4, bool))
    assert int(total) == 0 and store_of(state).stats()["rows_accepted"] == 0
    state, total = step(state, rows_of(1, 4), jnp.ones(4, bool))
    assert int(total) > 0


@STORAGE
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_gradients_pass_around_a_sample(storage: str, wrap: Any) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage]())

    def loss(weight: jax.Array, buffer: fbuf.Buffer, state: Any) -> Any:
        state, batch = buffer.sample(state, jax.random.key(1), 4)
        return jnp.sum(jnp.sin(weight * batch.data["obs"].astype(jnp.float32))), state

    def gradient(buffer: fbuf.Buffer) -> Any:
        around = wrap(partial(loss, buffer=buffer, state=filled(buffer)))
        return jax.jit(jax.value_and_grad(around, has_aux=True))(jnp.float32(0.1))

    (value, state), slope = gradient(buffer)
    (want_value, _), want = gradient(fbuf.Buffer(capacity=8))
    np.testing.assert_allclose([value, slope], [want_value, want], rtol=1e-5)
    assert agree(buffer.rows(state)).size == 8


def test_gradients_do_not_flow_into_the_store() -> None:
    buffer = fbuf.Buffer(capacity=4, storage=fbuf.storages.Host())
    state = buffer.init(jnp.zeros(2))

    def through(x: jax.Array) -> jax.Array:
        after = buffer.extend(state, jnp.stack([x, x]))
        return jnp.sum(buffer.peek(after, jax.random.key(0), 3).data + x[None])

    np.testing.assert_array_equal(jax.jit(jax.grad(through))(jnp.ones(2)), [3.0, 3.0])


# ------------------------------------------------------------------------------------------- in place (invariant 2)

BIG = 1_000_000
BIG_EXAMPLE = {
    "obs": jax.ShapeDtypeStruct((1024,), jnp.uint8),
    "action": jax.ShapeDtypeStruct((), jnp.int32),
    "reward": jax.ShapeDtypeStruct((), jnp.float32),
    "terminated": jax.ShapeDtypeStruct((), jnp.bool_),
    "truncated": jax.ShapeDtypeStruct((), jnp.bool_),
}


def big_state(buffer: fbuf.Buffer) -> Any:
    """Shapes of a state; no store is opened, nothing allocated."""
    spec = buffer.checked_spec("test", BIG_EXAMPLE)
    rows = buffer.storage.abstract(buffer.geometry, spec, jax.tree.structure(BIG_EXAMPLE))
    return jax.eval_shape(partial(_verbs.empty_state, buffer), rows)


@pytest.mark.parametrize(("order", "form"), [("sreu", "jit"), ("seu", "scan"), ("tesr", "scan")])
def test_the_device_part_stays_in_place(order: str, form: str) -> None:
    """The orders of verbs that write after they read; tickets, flags and tree each exceed the bound."""
    check_in_place(order, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jit", "scan"])
def test_more_orders_stay_in_place(form: str) -> None:
    for order in ("e", "s", "r", "esu", "seu", "soe", "rse", "eses", "sreu", "tesr"):
        check_in_place(order, form)


def check_in_place(order: str, form: str) -> None:
    buffer = fbuf.Buffer(
        capacity=BIG,
        lanes=2,
        storage=fbuf.storages.Compressed(keys=("obs",)),
        sampler=fbuf.samplers.Prioritized(),
        view=fbuf.views.Transition(n_step=3, stack=2),
    )

    def step(state: Any, given: Any) -> Any:
        index, out = given["index"], []
        for verb in order:
            if verb == "e":
                state = buffer.extend(state, given["rows"])
            elif verb == "s":
                state, batch = buffer.sample(state, given["key"], 4)
                index = batch.index
                out.append(batch)
            elif verb == "u":
                state = buffer.update_priority(state, index, given["error"])
            elif verb == "o":
                state = buffer.update_priority(state, given["index"], given["error"])
            elif verb == "r":
                state = buffer.update_rows(state, index, {"obs": given["obs"], "reward": given["error"]})
            else:
                out.append(buffer.stats(state))
        return state, out

    lead = () if form == "jit" else (3,)

    def shape(*dims: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((*lead, *dims), dtype)

    given = {
        "rows": {n: shape(3, 2, *x.shape, dtype=x.dtype) for n, x in BIG_EXAMPLE.items()},
        "key": shape(2, dtype=jnp.uint32),
        "error": shape(4, dtype=jnp.float32),
        "obs": shape(4, 1024, dtype=jnp.uint8),
        "index": fbuf.Index(shape(4, dtype=jnp.int32), shape(4, dtype=jnp.uint32)),
    }
    state = big_state(buffer)
    run = step if form == "jit" else lambda s, g: lax.scan(step, s, g)
    memory = assert_inplace(run, state, given)
    for leaf in jax.tree.leaves(state):
        size = leaf.size * leaf.dtype.itemsize
        assert size < 1024 or size > memory.bound, f"a copy of {leaf} would go unnoticed"
    assert fbuf.stores() == []


# ------------------------------------------------------------------------------------------------- other verbs


@STORAGE
def test_changed_rows_leave_the_old_state_alone(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage](slack=0))
    old = filled(buffer)
    index = buffer.get(old, jnp.array([1, 6, 1])).index
    state = buffer.update_rows(old, index, rows_of(40, 3))
    np.testing.assert_array_equal(agree(buffer.rows(state)), [0, 42, 2, 3, 4, 5, 41, 7])
    np.testing.assert_array_equal(agree(buffer.rows(old)), np.arange(8))
    np.testing.assert_array_equal(agree(buffer.get(state, index)), [42, 41, 42])  # the index still names the row
    state = buffer.extend(state, rows_of(8, 1))
    np.testing.assert_array_equal(agree(buffer.rows(state)), [42, 2, 3, 4, 5, 41, 7, 8])
    only = buffer.update_rows(state, buffer.last(state, 1).index, {"obs": rows_of(9, 1)["obs"]})
    last = buffer.last(only, 1)
    assert int(last.data["t"][0]) == 8 and int(last.data["obs"][0, 0]) == 90


@STORAGE
def test_many_changes_of_one_slot_expire_no_other_row(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=STORAGES[storage](slack=3))
    old = state = filled(buffer)
    index = buffer.get(state, jnp.array([2])).index
    step = jax.jit(lambda s, rows: buffer.update_rows(s, index, rows))
    for i in range(50, 100):
        state = step(state, rows_of(i, 1))
    np.testing.assert_array_equal(agree(buffer.rows(state)), [0, 1, 99, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(agree(buffer.rows(old)), np.arange(8))
    assert store_of(state).stats()["patches"] <= 5


@STORAGE
def test_get_rows_last_clear_and_convert(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=12, lanes=2, storage=STORAGES[storage](slack=0))
    state = filled(buffer, 9)
    np.testing.assert_array_equal(buffer.rows(state).data["t"], np.arange(6, 18).reshape(6, 2))
    agree(buffer.rows(state))
    np.testing.assert_array_equal(agree(buffer.last(state, 2)), [14, 15, 16, 17])
    index = buffer.last(state, 2).index
    np.testing.assert_array_equal(agree(buffer.get(state, index)), [14, 15, 16, 17])
    empty = buffer.get(state, jnp.zeros((0,), jnp.int32))
    assert empty.data["obs"].shape == (0, 6) and empty.mask.shape == (0,)
    assert agree(buffer.get(state, jnp.array([-1, 12, 99]))).size == 0

    other = fbuf.Buffer(capacity=12, lanes=2, storage=buffer.storage, sampler=fbuf.samplers.Prioritized())
    converted = buffer.convert(other, state)
    converted, batch = other.sample(converted, jax.random.key(0), 16)
    assert np.isin(agree(batch), np.arange(6, 18)).all() and batch.mask.all()
    converted = other.update_priority(converted, batch.index, jnp.ones(16))
    np.testing.assert_array_equal(agree(buffer.rows(state)), agree(other.rows(converted)))

    cleared = buffer.clear(state)
    assert not buffer.rows(cleared).mask.any() and not buffer.get(cleared, index).mask.any()
    assert agree(buffer.peek(cleared, jax.random.key(0), 4)).size == 0
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(6, 18))
    cleared = buffer.extend(cleared, rows_of(70, 2, 2))
    np.testing.assert_array_equal(agree(buffer.rows(cleared)), np.arange(70, 74))


@STORAGE
def test_rows_taken_out_and_put_back_give_the_same_batches(storage: str) -> None:
    buffer = fbuf.Buffer(capacity=12, lanes=2, storage=STORAGES[storage]())
    state = filled(buffer, 9)
    newest = buffer.last(state, 1).index
    newest = fbuf.Index(newest.slot.reshape(-1), newest.ticket.reshape(-1))
    state = buffer.update_rows(state, newest, rows_of(90, 2))
    arrays = buffer.storage.to_arrays(state.rows)
    arrays = {n: np.array(a) for n, a in arrays.items()}
    assert not any(a.dtype.hasobject for a in arrays.values())
    spec, structure = buffer.storage.spec(state.rows)
    rows = buffer.storage.from_arrays(arrays, buffer.geometry, spec, structure)
    copy = fbuf.BufferState(rows, state.ring, state.anchors, state.sampler, state.counters, state.token)
    assert owner.join_id(np.asarray(copy.rows.id)) != owner.join_id(np.asarray(state.rows.id))
    for i in range(4):
        key = jax.random.key(i)
        state, want = buffer.sample(state, key, 8)
        copy, got = buffer.sample(copy, key, 8)
        agree(got)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        state, copy = (buffer.extend(s, rows_of(100 + 6 * i, 3, 2)) for s in (state, copy))
    del state
    np.testing.assert_array_equal(agree(buffer.rows(copy)), np.arange(112, 124))  # stands on its own


# --------------------------------------------------------------------------------------------------- callbacks

DTYPES = ["bool", "int8", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"]


@STORAGE
def test_every_dtype_and_shape_crosses_the_callback(storage: str) -> None:
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 1, 5)]
    leaves = [(dtype, shapes[i % 3]) for i, dtype in enumerate(DTYPES)] + [
        ("int32", (0,)),
        ("bool", ()),
        ("uint32", ()),
    ]
    rows = {
        f"{i}": jnp.asarray(rng.integers(0, 2, (5, *shape)).astype(np.float32)).astype(dtype)
        for i, (dtype, shape) in enumerate(leaves)
    }
    kind = STORAGES[storage].func
    buffer = fbuf.Buffer(capacity=5, storage=kind(keys=tuple(rows)))
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    got = jax.jit(lambda s: buffer.rows(s))(state).data
    for name, want in rows.items():
        assert got[name].dtype == want.dtype and got[name].shape == want.shape
        assert np.asarray(got[name]).tobytes() == np.asarray(want).tobytes(), name


def test_outputs_are_always_filled_and_inputs_never_written() -> None:
    """Straight into the callbacks, with outputs full of rubbish."""
    buffer = fbuf.Buffer(capacity=4, storage=fbuf.storages.Compressed(keys=("obs",), slack=0, on_expired="mask"))
    state = buffer.extend(filled(buffer), rows_of(4, 2))
    id, token, after = np.asarray(state.rows.id), np.zeros((), np.int32), np.zeros((1, 2), np.uint32)
    pairs = np.array([[0, 0], [1, 0], [6, 0], [7, 9], [5, 2**31]], np.uint32)  # none, expired, there, unknown twice
    rows, there = np.full((5, 6), 171, np.int32), np.frombuffer(b"\2" * 5, np.bool_).copy()
    callback._read_rows((0,), False, None, [rows, there], id, pairs)
    np.testing.assert_array_equal(rows[:, 0], [0, 0, 50, 0, 0])
    np.testing.assert_array_equal(there.view(np.uint8), [1, 0, 1, 0, 0])

    fresh = np.asarray(rows_of(6, 2)["obs"])[:, None].copy()
    out = np.full((2, 1, 2), 171, np.uint32)
    callback._write_rows(None, out, id, token, after, np.array([[False], [True]]), fresh)
    np.testing.assert_array_equal(out[:, 0], [[0, 0], [7, 0]])
    assert not fresh.flags.writeable  # the view that user codecs and the store get
    out = np.full((5, 2), 171, np.uint32)
    keep = np.array([True, True, True, True, False])
    callback._patch_rows((0,), None, out, id, token, after, pairs, keep, np.zeros((5, 6), np.int32))
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(pairs, 2, 0))
    assert out[2, 1] == 2**31


class Vandal:
    """A codec that fails on demand."""

    chunk = 2
    broken = False

    def encode(self, rows: np.ndarray) -> bytes:
        if Vandal.broken:
            raise OverflowError("the vandal is out of ink")
        return rows.tobytes()

    def decode(self, data: Any, out: np.ndarray) -> None:
        if Vandal.broken:
            raise OverflowError("the vandal cannot read")
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("form", ["eager", "jit"])
def test_an_exception_in_a_codec_surfaces_and_changes_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=fbuf.storages.Compressed(keys=("obs",), codec=Vandal(), slack=0))
    state = filled(buffer)
    extend: Any = buffer.extend if form == "eager" else jax.jit(buffer.extend)
    before = store_of(state).stats()
    monkeypatch.setattr(Vandal, "broken", True)
    with pytest.raises((RuntimeError, ValueError), match="out of ink"):
        jax.block_until_ready(extend(state, rows_of(8, 4)))
    assert isinstance(store_of(state).last_error, OverflowError)
    with pytest.raises((RuntimeError, ValueError), match="cannot read"):
        jax.block_until_ready(buffer.rows(state))
    monkeypatch.setattr(Vandal, "broken", False)
    assert store_of(state).stats() == before
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(8))
    state = extend(state, rows_of(8, 4))
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(4, 12))


@pytest.mark.parametrize("storage", ["compressed"])
def test_the_callbacks_for_accelerators_agree(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off CPU there is no buffer_callback; `io_callback` and `pure_callback` run here just as well."""
    monkeypatch.setattr(jax, "default_backend", lambda: "elsewhere")
    used: list[str] = []
    for name in ("io_callback", "pure_callback"):
        module = jax.experimental if name == "io_callback" else jax
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, real=real, **k: (used.append(n), real(*a, **k))[1])
    got = history(fbuf.Buffer(capacity=7, storage=STORAGES[storage](slack=17)), "scan")
    want = history(fbuf.Buffer(capacity=7), "scan")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    buffer = fbuf.Buffer(capacity=9, storage=STORAGES[storage](slack=1))
    old = filled(buffer)
    keys = jax.random.split(jax.random.key(0), 3)
    assert agree(jax.vmap(lambda k: buffer.peek(old, k, 4))(keys)).size == 12
    with pytest.raises(TypeError, match="cannot be vmapped"):
        jax.vmap(lambda x: buffer.extend(old, rows_of(0, 3) | {"obs": x}))(jnp.zeros((2, 3, 6), jnp.int32))
    buffer.extend(old, rows_of(9, 9))
    with pytest.raises((RuntimeError, ValueError), match="8 of 9 rows have expired"):
        jax.block_until_ready(buffer.rows(old))
    assert set(used) == {"io_callback", "pure_callback"}


# --------------------------------------------------------------------------------------------- flags, processes

FLAGS = {
    "x64": ("jax_enable_x64", True),
    "strict promotion": ("jax_numpy_dtype_promotion", "strict"),
    "debug nans": ("jax_debug_nans", True),
    "transfer guard": ("jax_transfer_guard", "disallow"),
    "tracer leaks": ("jax_check_tracer_leaks", True),
}


@pytest.mark.parametrize(("flag", "storage"), [*((flag, "compressed") for flag in FLAGS), ("x64", "host")])
def test_clean_under(flag: str, storage: str) -> None:
    name, value = FLAGS[flag]
    buffer = fbuf.Buffer(capacity=10, storage=STORAGES[storage](on_expired="mask"))
    state, rows, key = buffer.init(EXAMPLE), rows_of(0, 7), jax.random.key(0)
    mask = jnp.ones(7, bool)
    example = {"x": jnp.full(3, jnp.nan), "y": jnp.zeros(())}
    floats = fbuf.Buffer(capacity=4, storage=fbuf.storages.Host())
    nans = floats.init(example)
    before: Any = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        if flag == "x64":  # 64-bit leaves, and an init under the flag
            state = buffer.init(EXAMPLE)
            wide = {"i": jnp.arange(4) + 2**40, "f": jnp.arange(4.0) + 1e-12}
            kind: Any = type(buffer.storage)
            wider = fbuf.Buffer(capacity=4, storage=kind(keys=("i", "f")))
            there = wider.rows(wider.extend(wider.init(jax.tree.map(lambda x: x[0], wide)), wide)).data
            for n in wide:
                assert there[n].dtype.itemsize == 8
                np.testing.assert_array_equal(there[n], wide[n])
        for _ in range(3):
            state = buffer.extend(state, rows, mask=mask)
            state, batch = buffer.sample(state, key, 6)
            state = buffer.update_rows(state, batch.index, batch.data)
        out = (
            batch,
            buffer.peek(state, key, 3),
            buffer.rows(state),
            buffer.last(state, 2),
            buffer.get(state, batch.index),
        )
        state = buffer.clear(state)
        if flag == "debug nans":  # the empty buffer makes none
            assert not floats.peek(nans, key, 2).mask.any()
    finally:
        jax.config.update(name, before)
    for part in out:
        agree(part)
    assert batch.data["t"].dtype == jnp.int32 and batch.weight.dtype == jnp.float32
    assert state.rows.ticket.dtype == jnp.uint32 and state.token.dtype == jnp.int32


def run_script(script: str, **environment: str) -> str:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    root = os.path.dirname(os.path.dirname(os.path.abspath(fbuf.__file__)))
    env["PYTHONPATH"] = os.pathsep.join([root, os.path.dirname(os.path.abspath(__file__)), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_one_core_and_a_pending_megabyte_do_not_hang() -> None:
    """`io_callback` waits for ever here: with one core nobody is left to copy its operand."""
    script = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, fbuf
from test_host import late
for storage in (fbuf.storages.Host(keys=("obs",)), fbuf.storages.Compressed(keys=("obs",))):
    buffer = fbuf.Buffer(capacity=256, storage=storage)
    state = buffer.init({"obs": jax.ShapeDtypeStruct((128, 128), jnp.uint8), "t": jnp.zeros((), jnp.int32)})
    for i in range(3):
        rows = late({"obs": jnp.full((128, 128, 128), i, jnp.uint8), "t": jnp.full((128,), i, jnp.int32)})
        state = buffer.extend(state, rows)
        state, batch = buffer.sample(state, jax.random.key(i), 64)
    assert bool(jnp.all(batch.data["obs"] == batch.data["t"][:, None, None].astype(jnp.uint8)))
print("done")
"""
    assert run_script(script).strip() == "done"


def test_eight_devices() -> None:
    """A store serves any one device; inputs that span several are refused with words of our own."""
    script = """
import jax, jax.numpy as jnp, numpy as np, fbuf
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from test_host import EXAMPLE, STORAGES, agree, filled, rows_of
devices = jax.devices()
assert len(devices) == 8
mesh = Mesh(np.array(devices), ("d",))
sharded, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
for kind in STORAGES.values():
    buffer = fbuf.Buffer(capacity=16, storage=kind(slack=0))
    step = jax.jit(lambda s, k, r: buffer.sample(buffer.extend(s, r), k, 8), donate_argnums=0)
    state = jax.device_put(filled(buffer), devices[3])
    key, rows = jax.device_put((jax.random.key(0), rows_of(16, 8)), devices[3])
    state, batch = step(state, key, rows)
    state = buffer.extend(state, jax.device_put(rows_of(24, 8), devices[3]))
    assert batch.data["obs"].devices() == {devices[3]} == state.rows.ticket.devices()
    assert np.isin(agree(batch), np.arange(8, 24)).all() and batch.mask.all()
    assert agree(buffer.rows(state)).tolist() == list(range(16, 32))

    with jax.default_device(devices[5]):
        own = filled(buffer)
        assert own.rows.ticket.devices() == {devices[5]}
        assert agree(buffer.rows(own)).tolist() == list(range(16))

    plain = filled(buffer)
    put = jax.device_put
    both = {
        "rows sharded": lambda f: f(plain, put(rows_of(16, 8), sharded)),
        "rows everywhere": lambda f: f(plain, put(rows_of(16, 8), everywhere)),
        "state everywhere": lambda f: f(put(plain, everywhere), rows_of(16, 8)),
    }
    for name, call in both.items():
        for form, f in (("eager", buffer.extend), ("jit", jax.jit(lambda s, r: buffer.extend(s, r)))):
            try:
                jax.block_until_ready(call(f))
            except ValueError as error:
                assert "serves one device, but this computation spans 8" in str(error), (name, form, error)
                assert "jax.device_put(x, jax.devices()[0])" in str(error)
            else:
                raise AssertionError((name, form, "was not refused"))
    for f in (buffer.sample, jax.jit(buffer.sample, static_argnums=2)):
        try:
            jax.block_until_ready(f(put(plain, everywhere), jax.random.key(0), 4))
        except ValueError as error:
            assert "serves one device" in str(error), error
        else:
            raise AssertionError("sample was not refused")
    assert agree(buffer.rows(plain)).tolist() == list(range(16))
print("done")
"""
    flags = "--xla_force_host_platform_device_count=8"
    assert run_script(script, XLA_FLAGS=flags).strip() == "done"
