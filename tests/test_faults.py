"""The fault catalogue: what can go wrong with a replay buffer, what fbuf promises then, and the test of it.

| # | fault | promise | shown by |
|---|---|---|---|
| 1-30 | checkpoints | an old or a new one, whole, or an error | test_files, test_checkpoint |
| 31 | no memory during `extend` | MemoryError; the state and its rows are as before, and nothing is leaked | here |
| 32 | no memory at `init` | `plan` says the bytes beforehand; `init` names them | here, test_plan |
| 33 | a callback raises inside jit | its words surface; the store is as before | here, test_host, test_memmap |
| 34 | the same with a donated state | the state is gone and says so; the rows of other states are there | here, test_memmap |
| 35 | a callback gives another dtype or shape | checked on the host before anything is copied | here, test_store |
| 36 | callbacks reordered, elided, repeated | writes run once each, in order; reads are pure | here, test_host |
| 37 | an old state reads a slot written since | its own rows, or an error, or a mask | test_host, test_model |
| 38-41 | priorities NaN, negative, infinite, all zero | refused; magnitudes; uniform | here, test_errors |
| 42 | an index out of range, unwritten or -1 | skipped and counted; no other slot is touched | here, test_errors |
| 43 | rows of another shape, dtype or structure | an error at trace time that names the leaf | test_errors |
| 44 | a batch or window larger than the buffer | an error; batches are drawn with replacement | here, test_errors |
| 45 | a sample of nothing | masked and counted; `Replay` and `checked` raise | test_errors, test_checked, test_replay |
| 46 | a key used twice | typed and raw keys; `jax_debug_key_reuse` finds it | here |

Of live stores in files rows 4, 5, 6, 12 to 15 are in test_recovery, test_disk and test_memmap.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf._host import callback, owner
from fbuf._host.store import Store
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Device, Host

HERE = Path(__file__).parent
EXAMPLE = {"x": np.zeros(8, np.float32), "t": np.int32(0)}


def rows_of(first: int, count: int) -> dict[str, Any]:
    t = np.arange(first, first + count, dtype=np.int32)
    return {"x": np.repeat(t[:, None].astype(np.float32), 8, 1), "t": t}


def held(buffer: fbuf.Buffer, state: Any) -> list[int]:
    rows = buffer.rows(state)
    return np.asarray(rows.data["t"])[np.asarray(rows.mask)].tolist()


# --------------------------------------------------------------------------------------------------- 31, 32: memory

SCARCE = """
import resource, sys
import jax, jax.numpy as jnp, numpy as np, fbuf
storage = {"host": fbuf.storages.Host(), "compressed": fbuf.storages.Compressed()}[sys.argv[1]]
buffer = fbuf.Buffer(200_000, storage=storage)
example = {"x": np.zeros(2048, np.uint8)}
rng = np.random.default_rng(0)
rows = {"x": rng.integers(0, 256, (2000, 2048), np.uint8)}
state = jax.block_until_ready(buffer.extend(buffer.init(example), rows))
before = np.asarray(buffer.last(state, 100).data["x"])
used = int(open("/proc/self/statm").read().split()[0]) * 4096
failed = False
resource.setrlimit(resource.RLIMIT_AS, (used + (120 << 20), resource.RLIM_INFINITY))
keep = []
try:
    for i in range(100):
        keep.append(np.ones(8 << 20, np.uint8))  # somebody else's
        state = jax.block_until_ready(buffer.extend(state, rows))
        before = np.asarray(buffer.last(state, 100).data["x"])
except BaseException as error:
    failed = True
    text = f"{type(error).__name__}: {error}"
    assert "emory" in text or "RESOURCE_EXHAUSTED" in text, text
keep.clear()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert failed
assert (np.asarray(buffer.last(state, 100).data["x"]) == before).all()
size = int(buffer.size(state))
state = jax.block_until_ready(buffer.extend(state, rows))
assert int(buffer.size(state)) == size + 2000
assert (np.asarray(buffer.last(state, 2000).data["x"]) == rows["x"]).all()
assert len(fbuf.stores()) == 1
print("as before")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("storage", ["host", pytest.param("compressed", marks=pytest.mark.slow)])
def test_no_memory_during_extend(storage: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCARCE, storage],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parent), "MALLOC_ARENA_MAX": "2"},
    )
    assert done.returncode == 0 and "as before" in done.stdout, done.stderr


@pytest.mark.parametrize(("storage", "place"), [(Device(), "device"), (Host(), "host")])
def test_no_memory_at_init(storage: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes is known beforehand, and is in the message of the allocation that fails."""
    buffer = fbuf.Buffer(1 << 30, storage=storage)
    size = (1 << 30) * 36
    plan = buffer.plan(EXAMPLE)
    assert plan.device == pytest.approx(size if place == "device" else 8 << 30, rel=0.01)
    assert plan.host >= (size if place == "host" else 0)

    def full(*args: Any, **kwargs: Any) -> Any:
        if place == "host":
            raise MemoryError("Unable to allocate 32.0 GiB")
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 34359738368 bytes.")

    monkeypatch.setattr(Store, "__init__", full)
    monkeypatch.setattr("fbuf.storages._arrays.allocate", full)
    with pytest.raises(
        MemoryError, match=rf"Buffer.init: there is no room for .*\d+ bytes on the {place}.*buffer.plan"
    ):
        buffer.init(EXAMPLE)
    monkeypatch.undo()
    assert fbuf.stores() == []


# ------------------------------------------------------------------------------------------------ 33 to 36: callbacks


@pytest.mark.parametrize("verb", ["write", pytest.param("read", marks=pytest.mark.slow)])
@pytest.mark.parametrize("donated", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_callback_that_raises_at_any_call(verb: str, donated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a scan of four steps: what was written before it is there, nothing else is, and a state from before goes on."""
    buffer = fbuf.Buffer(64, storage=Host())

    def run(state: Any, firsts: Any) -> Any:
        def step(state: Any, first: Any) -> Any:
            rows = {"x": jnp.ones((2, 8)) * first, "t": first + jnp.arange(2, dtype=jnp.int32)}
            state, batch = buffer.sample(buffer.extend(state, rows), jax.random.key(0), 3)
            return state, batch.data["t"]

        return lax.scan(step, state, firsts)

    jitted = jax.jit(run, donate_argnums=0 if donated else ())
    firsts = jnp.arange(100, 140, 10, dtype=jnp.int32)
    real = getattr(Store, verb)
    for failing in range(4):
        state = jax.block_until_ready(buffer.extend(buffer.init(EXAMPLE), rows_of(0, 5)))
        old = jax.tree.map(jnp.copy, state)
        store = owner.find(owner.join_id(np.asarray(state.rows.id)))
        calls = []

        def raising(self: Store, *args: Any, calls: list[int] = calls, failing: int = failing, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) > failing:
                raise KeyError(f"injected into call {len(calls)}")
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(Store, verb, raising)
            with pytest.raises(Exception, match=rf"injected into call {failing + 1}"):
                jax.block_until_ready(jitted(state, firsts))
        assert len(calls) == failing + 1  # nothing goes on after it
        assert store.stats()["rows_accepted"] == 5 + 2 * (failing + (verb == "read"))
        assert held(buffer, old) == list(range(5))
        if donated:
            with pytest.raises(RuntimeError, match="deleted|donated"):
                np.asarray(state.ring.size)
        again = buffer.extend(old, rows_of(50, 2))
        assert held(buffer, again) == [0, 1, 2, 3, 4, 50, 51]
        del state, old, again, store
    assert fbuf.stores() == []


@pytest.mark.parametrize(
    ("item", "dtype", "message"),
    [((8,), "int32", "float32"), ((9,), "float32", "shape"), ((), "float32", "shape"), ((8,), "float16", "float32")],
)
def test_a_callback_of_another_dtype_or_shape_is_refused(item: Any, dtype: str, message: str) -> None:
    """Before a byte is copied: JAX would cast, or read past the end, in silence."""
    buffer = fbuf.Buffer(8, storage=Host(keys=("x",)))
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 5))
    with pytest.raises(
        Exception, match=f"Store.read: out of 'x' .*expected .*{message if message != 'shape' else '8'}"
    ):
        jax.block_until_ready(callback.read(state.rows.id, [(0, state.rows.ticket, (item, jnp.dtype(dtype)))], True))
    assert held(buffer, state) == list(range(5))


def test_each_write_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its result is not used, twice with the same rows, and in loops and branches."""
    buffer = fbuf.Buffer(64, storage=Host())
    calls, real = list[int](), Store.write
    monkeypatch.setattr(Store, "write", lambda self, rows, *args: calls.append(len(rows[0])) or real(self, rows, *args))
    rows = jax.tree.map(jnp.asarray, rows_of(0, 3))

    def twice(state: Any) -> Any:
        buffer.extend(state, rows)  # nobody looks at it
        return buffer.extend(state, rows)

    def looped(state: Any) -> Any:
        return lax.fori_loop(0, 5, lambda i, s: buffer.extend(s, rows), state)

    def scanned(state: Any) -> Any:
        def step(state: Any, wanted: Any) -> Any:
            return lax.cond(wanted, lambda s: buffer.extend(s, rows), lambda s: s, state), None

        return lax.scan(step, state, jnp.array([True, False, True, False]))[0]

    for fn, expected in ((twice, 2), (looped, 5), (scanned, 2)):
        state = jax.block_until_ready(buffer.init(EXAMPLE))
        calls.clear()
        state = jax.block_until_ready(jax.jit(fn)(state))
        assert calls == [3] * expected, fn.__name__
        kept = {"twice": 1, "looped": 5, "scanned": 2}[fn.__name__]
        assert held(buffer, state) == [0, 1, 2] * kept
        tickets = np.asarray(state.rows.ticket)[: 3 * kept].view(np.uint64).reshape(-1)
        assert len(set(tickets.tolist())) == len(tickets)  # no two rows alike


# ------------------------------------------------------------------------------------------- 38 to 42: priorities

SAMPLERS: dict[str, Any] = {"Prioritized": Prioritized(alpha=1.0, eps=0.0), "Ranked": Ranked()}
SIZE = 16
WILD = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, -0.0, 1e-45, -3.0, 3.4e38])


@pytest.mark.parametrize("sampler", ["Prioritized", pytest.param("Ranked", marks=pytest.mark.slow)])
@settings(max_examples=60)
@given(errors=st.lists(WILD, min_size=SIZE, max_size=SIZE), alpha=st.sampled_from([0.0, 0.6, 1.0]))
def test_any_priorities_leave_a_buffer_that_draws(sampler: str, errors: list[float], alpha: float) -> None:
    """NaN and infinite ones are refused and counted, negative ones count by magnitude; chances are what they say."""
    buffer = fbuf.Buffer(SIZE, sampler=SAMPLERS[sampler])
    state = buffer.set(buffer.extend(buffer.init(EXAMPLE), rows_of(0, SIZE)), alpha=alpha)
    given = np.array(errors, np.float32)
    state = buffer.update_priority(state, buffer.rows(state).index, given)
    fine = np.isfinite(given)
    assert int(buffer.stats(state)["refused_nonfinite"]) == int((~fine).sum())
    state, batch = buffer.sample(state, jax.random.key(0), 64)
    slot, chance, weight = (np.asarray(x) for x in (batch.index.slot, batch.probability, batch.weight))
    assert batch.mask.all() and ((slot >= 0) & (slot < SIZE)).all()
    assert np.isfinite(chance).all() and (chance > 0).all() and (chance <= 1 + 1e-6).all()
    assert np.isfinite(weight).all() and (weight > 0).all() and (weight <= 1).all()
    np.testing.assert_array_equal(batch.data["t"], slot)
    if sampler == "Prioritized" and alpha == 1.0:
        leaf = np.where(fine, np.abs(given), 1.0).astype(np.float64)  # 1.0: what new rows begin with
        if leaf.sum() < 3e38 and leaf.max() > 1e-30:
            np.testing.assert_allclose(chance, (leaf / leaf.sum())[slot], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("sampler", ["Prioritized", pytest.param("Ranked", marks=pytest.mark.slow)])
def test_all_zero_is_uniform(sampler: str) -> None:
    buffer = fbuf.Buffer(SIZE, sampler=SAMPLERS[sampler])
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 12))
    state = buffer.update_priority(state, jax.tree.map(lambda x: x[:12], buffer.rows(state).index), jnp.zeros(12))
    state, batch = buffer.sample(state, jax.random.key(0), 6000)
    number = np.bincount(np.asarray(batch.index.slot), minlength=SIZE)
    assert batch.mask.all() and (number[12:] == 0).all() and (number[:12] > 300).all()
    if sampler == "Prioritized":
        np.testing.assert_allclose(batch.probability, 1 / 12, rtol=1e-5)


INT32 = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=60)
@given(
    slots=st.lists(st.integers(-2, SIZE + 2) | INT32, min_size=6, max_size=6),
    tickets=st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), min_size=6, max_size=6),
)
def test_any_indices_touch_only_what_they_name(slots: list[int], tickets: list[int]) -> None:
    """Rows 5 to 9 are written, in the first lap; every other index is skipped and counted, of priorities and of rows."""
    buffer = fbuf.Buffer(SIZE, sampler=Prioritized(alpha=1.0, eps=0.0))
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 10))
    index = fbuf.Index(jnp.array(slots, jnp.int32), jnp.array(tickets, jnp.uint32))
    leaf, value = np.array([1.0] * 10 + [0.0] * 6), np.array([*range(10)])
    refused = 0
    for at, (slot, ticket) in enumerate(zip(slots, tickets, strict=True)):
        if 0 <= slot < 10 and ticket == 1:
            leaf[slot], value[slot] = 5 + at, 100 + at
        elif not (slot == SIZE and ticket == 0):  # what a masked row of a batch is called
            refused += 1
    after = buffer.update_priority(state, index, 5 + jnp.arange(6.0))
    after = buffer.update_rows(after, index, {"t": 100 + jnp.arange(6, dtype=jnp.int32)})
    np.testing.assert_array_equal(np.asarray(after.sampler.tree)[:SIZE], leaf)
    assert held(buffer, after) == value.tolist()
    counted = buffer.stats(after)
    assert int(counted["refused_out_of_range"]) + int(counted["refused_stale"]) == 2 * refused
    got = buffer.get(after, index)
    np.testing.assert_array_equal(got.mask, [0 <= s < 10 and t == 1 for s, t in zip(slots, tickets, strict=True)])


# ---------------------------------------------------------------------------------------------- 44, 46: the rest


def test_batches_and_windows_larger_than_the_buffer() -> None:
    buffer = fbuf.Buffer(4)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 9))  # of more rows than fit the newest stay
    assert held(buffer, state) == [5, 6, 7, 8]
    _, batch = buffer.sample(state, jax.random.key(0), 50)
    assert batch.mask.all() and set(np.asarray(batch.data["t"]).tolist()) == {5, 6, 7, 8}
    with pytest.raises(ValueError, match=r"Sequence\(.*looks at 6 rows at a time, but there is room for 4.*capacity=6"):
        fbuf.Buffer(4, view=fbuf.views.Sequence(6, boundary="cross"))
    with pytest.raises(ValueError, match="n is 5; expected an int from 1 to 4"):
        buffer.last(state, 5)


CONSUMED = (Uniform(), Ranked(), Consume(2), Staleness(4))
"""Samplers whose draws JAX's checker sees; `Prioritized` reads the key's words itself, and `Epoch` in a loop."""


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    "sampler",
    [
        s if isinstance(s, Uniform | Epoch) else pytest.param(s, marks=pytest.mark.slow)
        for s in (*CONSUMED, Epoch(), Prioritized(), Prioritized(on="host"))
    ],
    ids=repr,
)
def test_a_key_used_twice_is_found(sampler: Any, prefetch: int) -> None:
    """And keys that are split are not taken for one."""
    buffer = fbuf.Buffer(8, sampler=sampler, prefetch=prefetch, batch_size=4)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 6))

    def split(state: Any, key: Any) -> Any:
        first, second = jax.random.split(key)
        return buffer.sample(buffer.sample(state, first)[0], second)

    def twice(state: Any, key: Any) -> Any:
        return buffer.sample(buffer.sample(state, key)[0], key)

    with jax.debug_key_reuse(True):
        jax.block_until_ready(jax.jit(split)(state, jax.random.key(1)))
        if sampler in CONSUMED:
            with pytest.raises(jax.errors.KeyReuseError):
                jax.jit(twice)(state, jax.random.key(1))


@pytest.mark.parametrize(
    "sampler",
    [
        Prioritized(replace=False),
        *(pytest.param(s, marks=pytest.mark.slow) for s in (Prioritized(), Ranked(), Epoch())),
    ],
    ids=repr,
)
def test_no_key_of_many_states_is_taken_for_one_used_twice(sampler: Any) -> None:
    """Where states are mapped over too, branches become selects, between keys as well."""
    buffer = fbuf.Buffer(8, sampler=sampler, batch_size=4)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 6))
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    keys = jax.random.split(jax.random.key(0))
    with jax.debug_key_reuse(True):
        many = jax.jit(jax.vmap(buffer.sample))(states, keys)[1]
    np.testing.assert_array_equal(many.index.slot[1], buffer.sample(state, keys[1])[1].index.slot)
