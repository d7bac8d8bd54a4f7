"""What the tests of buffers on the host share: writes that overtake reads, and histories in every form of calling."""

import types
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._bridge import callbacks
from fbuf._host.store.store import Store
from tests.support.ownership import agree, filled, late, make, rows_of


def overtaken(storage: str, form: str) -> bool:
    """Whether a write of C rows got ahead of a sample that was called first but whose key came late."""
    buffer = make(storage, slack=0, on_expired="mask")
    state, rows, key = filled(buffer), rows_of(100, 8), np.array([0, 7], np.uint32)

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
    assert np.isin(seen, np.arange(8)).all()  # never other rows, whatever the order
    state, after = buffer.sample(state, key, 16)
    assert np.isin(agree(after), np.arange(100, 108)).all() and after.mask.all()
    return not batch.mask.all()


def order_of_writes(storage: str, monkeypatch: pytest.MonkeyPatch, verbs: str, capacity: int) -> tuple[list[str], Any]:
    """The calls a store gets from a jit of two writes whose first has late rows; and all rows afterwards."""
    buffer = make(storage, capacity, slack=0)
    state, calls = filled(buffer), []
    index = buffer.rows(state, last=2).index

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
            name = method.__name__.removeprefix("try_")
            calls.append(name)
            calls.append(str(int((args[1][0] if name == "write" else args[3][0]).reshape(-1)[0])))
            return method(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Store, "try_write", record(Store.try_write))
        patch.setattr(Store, "try_update_rows", record(Store.try_update_rows))
        state = jax.block_until_ready(step(state, rows_of(100, capacity // 2), rows_of(200, capacity // 2)))
    return calls, buffer.rows(state)


def history(buffer: fbuf.Buffer, calls: str) -> list[Any]:
    keys = np.random.default_rng(3).integers(0, 2**32, (6, 2), dtype=np.uint32)
    rows = jax.tree.map(lambda *x: np.stack(x), *(rows_of(3 + 5 * i, 5) for i in range(6)))
    mask = np.random.default_rng(0).random((6, 5)) < 0.7

    def step(state: Any, given: Any) -> Any:
        key, rows, mask = given
        state = buffer.extend(state, rows, mask=mask)
        state, batch = buffer.sample(state, key, 6)
        state = buffer.update_rows(state, batch.index, {"obs": batch.data["obs"] + 0, "t": batch.data["t"]})
        return state, (batch.data, batch.index.slot, batch.mask, batch.probability)

    state = filled(buffer, count=3)
    if calls == "scan":
        return jax.tree.leaves(jax.jit(lambda s, g: lax.scan(step, s, g))(state, (keys, rows, mask))[1])
    run: Any = {"eager": step, "jit": jax.jit(step), "donated": jax.jit(step, donate_argnums=0)}[calls]
    out = []
    for i in range(6):
        state, batch = run(state, jax.tree.map(lambda x, i=i: x[i], (keys, rows, mask)))
        out.append(jax.device_get(batch))
    return jax.tree.leaves(jax.tree.map(lambda *x: np.stack(x), *out))


def use_other_callbacks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trace what is lowered off CPUs, where there is no buffer_callback. Return which of the others are used from now on."""
    used: list[str] = []
    for name in ("io_callback", "pure_callback"):
        module = jax.experimental if name == "io_callback" else jax
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, real=real, **k: (used.append(n), real(*a, **k))[1])
    trace_for_accelerators(monkeypatch)
    return used


def trace_for_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let host stores use on the CPU what is lowered for any other platform."""

    def choose(*args: Any, cpu: Any, default: Any) -> Any:
        return default(*args)

    changed = vars(lax) | {"platform_dependent": choose}
    monkeypatch.setattr(callbacks, "lax", types.SimpleNamespace(**changed))
