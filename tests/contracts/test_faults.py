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

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf._bridge import callbacks
from fbuf._host.store.store import Store
from fbuf.samplers import Prioritized, Uniform
from fbuf.storages import Device, Host
from tests.support.faults import (
    EXAMPLE,
    PRIORITIES,
    SIZE,
    check_key_reuse,
    check_no_memory,
    check_priorities,
    check_raising,
    held,
    rows_of,
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_memory_during_extend() -> None:
    check_no_memory("host")


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
    monkeypatch.setattr("fbuf.storages._array_rows.allocate", full)
    with pytest.raises(
        MemoryError, match=rf"Buffer.init: there is no room for .*\d+ bytes on the {place}.*buffer.plan"
    ):
        buffer.init(EXAMPLE)
    monkeypatch.undo()
    assert fbuf.stores() == []


def test_a_callback_that_raises_at_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    check_raising("write", True, monkeypatch)


def test_a_callback_of_another_dtype_or_shape_is_refused() -> None:
    """Before a byte is copied: JAX would cast, or read past the end, in silence."""
    buffer = fbuf.Buffer(8, storage=Host(keys=("x",)))
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 5))
    for item, dtype, expected in (
        ((8,), "int32", "float32"),
        ((9,), "float32", "8"),
        ((), "float32", "8"),
        ((8,), "float16", "float32"),
    ):
        with pytest.raises(Exception, match=f"Store.read: out of 'x' .*expected .*{expected}"):
            jax.block_until_ready(
                callbacks.read(state.rows.id, [(0, state.rows.ticket, (item, jnp.dtype(dtype)))], True)
            )
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


@settings(max_examples=60)
@given(**PRIORITIES)
def test_any_priorities_leave_a_buffer_that_draws(errors: list[float], alpha: float) -> None:
    check_priorities(Prioritized(alpha=1.0, eps=0.0), errors, alpha)


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
    with pytest.raises(ValueError, match=r"Sequence\(.*reads 6 rows at a time, but there are 4.*capacity=6"):
        fbuf.Buffer(4, view=fbuf.views.Sequence(6, boundary="cross"))
    with pytest.raises(ValueError, match="n is 5; expected an int from 1 to 4"):
        buffer.last(state, 5)


def test_a_key_used_twice_is_found() -> None:
    check_key_reuse(Uniform(), 1)
