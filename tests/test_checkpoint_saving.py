"""Saves: what a second one writes, what goes on in the background, what is refused, and what is left after a kill."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf import _files
from fbuf._checkpoint import _fingerprint, _held, _leaves
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Host, Ragged
from tests.support.checkpoint import same

ROOT = Path(fbuf.__file__).parent.parent
EXAMPLE = {"obs": jax.ShapeDtypeStruct((16, 16), np.uint8), "t": jax.ShapeDtypeStruct((), np.float32)}
BUFFER = fbuf.Buffer(20_000, sampler=Prioritized())


def rows_of(first: int, count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(first)
    return {
        "obs": rng.integers(0, 256, (count, 16, 16), np.uint8),
        "t": np.arange(first, first + count, dtype=np.float32),
    }


def filled(buffer: fbuf.Buffer, count: int) -> Any:
    return buffer.extend(buffer.init(EXAMPLE), rows_of(0, count))


_extend_in_place = jax.jit(BUFFER.extend, donate_argnums=0)


# ------------------------------------------------------------------------------------------------- a second save


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(None, id="Device"),
        pytest.param(Compressed(keys=("obs",)), id="Compressed"),
        pytest.param(Host(keys=("obs",)), id="Host", marks=pytest.mark.slow),
    ],
)
def test_a_second_save_writes_what_is_new(storage: Any, wait: bool, tmp_path: Path) -> None:
    buffer = BUFFER if storage is None else fbuf.Buffer(20_000, sampler=Prioritized(), storage=storage)
    state = filled(buffer, 10_000)
    first = fbuf.save(tmp_path / "saved", buffer, state, wait=wait).result()
    raw = 10_000 * (256 + 8)
    assert 0.9 * raw < first.bytes_written < 1.3 * raw
    state = buffer.extend(state, rows_of(10_000, 100))
    second = fbuf.save(tmp_path / "saved", buffer, state, wait=wait).result()
    # One block of a leaf is 256 KiB: of obs the last two at most; tree and t have one or two blocks each.
    assert second.bytes_written < 0.35 * raw
    again = fbuf.load(tmp_path / "saved")[1]
    same(buffer.rows(again), buffer.rows(state))
    same(again.sampler, state.sampler)


def test_what_did_not_change_is_neither_copied_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[_held.Held] = []
    made = _held.Held.__init__

    def watched(self: Any, *args: Any) -> None:
        made(self, *args)
        held.append(self)

    state = filled(BUFFER, 10_000)
    fbuf.save(tmp_path / "saved", BUFFER, state, wait=False).result()
    monkeypatch.setattr(_held.Held, "__init__", watched)
    fbuf.save(tmp_path / "saved", BUFFER, state, wait=False).result()
    assert sum(h.nbytes for h in held) < 150_000  # what is smaller than 64 KiB is copied without asking
    held.clear()
    state = BUFFER.extend(state, rows_of(10_000, 10))
    fbuf.save(tmp_path / "saved", BUFFER, state, wait=False).result()
    assert sum(h.nbytes for h in held) < 150_000 + 3 * (1 << 18)
    same(fbuf.load(tmp_path / "saved")[1], state)


@pytest.mark.parametrize(
    "dtype",
    [
        *("uint8", "bfloat16", "complex64"),
        *(pytest.param(d, marks=pytest.mark.slow) for d in ("bool", "float32", "int4", "float8_e4m3fn")),
    ],
)
def test_marks_made_on_the_device(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of one bit anywhere changes its block's mark and no other; rows not stored make no difference."""
    monkeypatch.setattr(_leaves, "SMALL", 0)
    monkeypatch.setattr(_leaves, "_platform", lambda array: "gpu")
    rng = np.random.default_rng(0)
    kind = jnp.dtype(getattr(jnp, "bool_" if dtype == "bool" else dtype))
    values = rng.integers(0, 2, (40, 3, 5)).astype(kind)
    values[33:] = np.zeros((), kind)

    def leaf(values: np.ndarray) -> Any:
        made = _leaves.DeviceLeaf(jnp.asarray(values))
        made.block = 8
        return made

    plain = leaf(values)
    assert not plain.near and plain.shape[0] == 33 and len(plain.marks) == 5
    same(np.concatenate([plain[a : min(a + 8, 33)] for a in range(0, 33, 8)]), values[:33])
    for row in (0, 7, 8, 20, 32):
        other = values.copy()
        other[row, 1, 2] = np.array(float(np.real(values[row, 1, 2])) == 0).astype(kind)
        marks = leaf(other).marks
        assert [i for i, (a, b) in enumerate(zip(marks, plain.marks, strict=True)) if a != b] == [row // 8]


@pytest.mark.parametrize("rows", [0, 1, 3000, 70_001])
def test_pieces_fetched_from_a_device(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks come at once, in any order they are asked for."""
    monkeypatch.setattr(_leaves, "SMALL", 0)
    monkeypatch.setattr(_leaves, "_platform", lambda array: "gpu")
    values = np.arange(3 * rows, dtype=np.int32).reshape(rows, 3) + 1
    leaf = _leaves.DeviceLeaf(jnp.asarray(values), whole=True)
    starts = np.random.default_rng(0).permutation(range(0, rows, leaf.block)).tolist()
    for start in [*starts, *sorted(starts)]:
        same(leaf[start : start + leaf.block], values[start : start + leaf.block])
    same(leaf[0:rows], values)


@given(st.data())
def test_rows_at_the_end_that_are_all_alike(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "?", "<u2", "<f4", "<f8", "<c16"])))
    shape = (data.draw(st.sampled_from([1, 5, 2000, 40_000])), *data.draw(st.sampled_from([(), (1,), (3, 2)])))
    values = np.zeros(shape, dtype)
    values[: data.draw(st.integers(0, shape[0]))] = 1
    values.reshape(-1)[data.draw(st.integers(0, values.size - 1))] = data.draw(st.integers(0, 1))
    bits = values.reshape(-1).view(np.uint8).reshape(values.size, -1)
    differs = (bits != bits[-1]).any(axis=1).reshape(shape[0], -1).any(axis=1)
    assert _leaves._last_differing(values) == (np.flatnonzero(differs)[-1] + 1 if differs.any() else 0)


def test_sums_are_those_of_plain_python() -> None:
    values = np.random.default_rng(0).integers(0, 256, (6, 4), np.uint8)
    words = values.view("<u2").astype(np.uint64)
    key = jax.random.key(_fingerprint._SEED, impl="threefry2x32")
    want = []
    for part in (words[:4], words[4:]):
        sums = []
        for i in range(8):
            keys = np.asarray(jax.random.bits(jax.random.fold_in(key, i), (4, 2), jnp.uint32)).astype(np.uint64)
            sums.append(int((part * keys[: len(part)]).sum()) % 2**32)
        want.append(sums)
    assert np.asarray(_fingerprint._sums(jnp.asarray(values), 4)).tolist() == want


# ------------------------------------------------------------------------------------------------ in the background


def test_the_state_may_be_donated_at_once(tmp_path: Path) -> None:
    state = filled(BUFFER, 19_990)
    want = jax.device_get(state)
    saving = fbuf.save(tmp_path / "saved", BUFFER, state, wait=False)
    for i in range(3):
        state = _extend_in_place(state, rows_of(50_000 + i, 30))
    assert saving.result().generation == 1 and saving.done()
    saving.wait()
    same(jax.device_get(fbuf.load(tmp_path / "saved")[1]), want)


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(Compressed(keys=("obs",)), id="Compressed"),
        pytest.param(Host(keys=("obs",)), id="Host", marks=pytest.mark.slow),
    ],
)
def test_a_host_store_goes_on_while_it_is_saved(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is overwritten before the thread comes to it is saved as it was."""
    buffer = fbuf.Buffer(500, storage=storage)
    state = filled(buffer, 700)
    want = jax.device_get(buffer.rows(state))
    go, write = threading.Event(), _files.write

    def late(*args: Any, **settings: Any) -> Any:
        go.wait(30)
        return write(*args, **settings)

    monkeypatch.setattr(_files, "write", late)
    saving = fbuf.save(tmp_path / "saved", buffer, state, wait=False)
    for i in range(10):
        state = buffer.extend(state, rows_of(1000 + 200 * i, 200))
    go.set()
    saving.result()
    loaded, again = fbuf.load(tmp_path / "saved")
    same(jax.device_get(loaded.rows(again)), want)


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_files, "write", fail)


def test_an_error_in_the_background_is_raised_by_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = filled(BUFFER, 5)
    with monkeypatch.context() as broken:
        failing(broken)
        saving = fbuf.save(tmp_path / "saved", BUFFER, state, wait=False)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                saving.result()
        assert saving.done() and "failed" in repr(saving)
    fbuf.save(tmp_path / "saved", BUFFER, state)  # seen, so that the next one saves


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = filled(BUFFER, 5)
    with monkeypatch.context() as broken:
        failing(broken)
        fbuf.save(tmp_path / "saved", BUFFER, state, wait=False)
    with pytest.raises(OSError, match="No space left") as caught:
        fbuf.save(tmp_path / "saved" / ".", BUFFER, state)
    assert "how the save before, wait=False" in "".join(caught.value.__notes__)
    fbuf.save(tmp_path / "other", BUFFER, state)
    fbuf.save(tmp_path / "saved", BUFFER, state)


def test_a_save_waits_for_the_one_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = filled(BUFFER, 5)
    go, write = threading.Event(), _files.write

    def late(*args: Any, **settings: Any) -> Any:
        go.wait(30)
        return write(*args, **settings)

    monkeypatch.setattr(_files, "write", late)
    one = fbuf.save(tmp_path / "saved", BUFFER, state, wait=False)
    with pytest.raises(TimeoutError, match="has not ended after 0.01 seconds"):
        one.result(0.01)
    assert not one.done() and "under way" in repr(one)
    threading.Timer(0.05, go.set).start()
    two = fbuf.save(tmp_path / "saved", BUFFER, state)
    assert one.done() and (one.result().generation, two.result().generation) == (1, 2)


@pytest.mark.parametrize("wait", [True, False])
def test_threads_that_save_to_one_path_take_turns(wait: bool, tmp_path: Path) -> None:
    states, errors = [filled(BUFFER, 5 + i) for i in range(6)], list[Exception]()

    def work(state: Any) -> None:
        try:
            fbuf.save(tmp_path / "saved", BUFFER, state, wait=wait, sync=False).result()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert fbuf.save(tmp_path / "saved", BUFFER, states[0], sync=False).result().generation == 7


def test_where_no_thread_can_be_started_the_next_save_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            fbuf.save(tmp_path / "saved", BUFFER, filled(BUFFER, 5), wait=False)
    assert fbuf.save(tmp_path / "saved", BUFFER, filled(BUFFER, 5)).result().generation == 1


_EXITS = """
import sys
import jax.numpy as jnp
import fbuf
from fbuf import _files
buffer = fbuf.Buffer(1000)
state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(500)})
fbuf.save(sys.argv[1], buffer, state, wait=False)
if sys.argv[2] == "fail":
    write = _files.write
    def fail(*args, **settings):
        raise OSError(28, "No space left on device")
    _files.write = fail
    fbuf.save(sys.argv[1], buffer, state, wait=False)
"""


@pytest.mark.parametrize("how", [pytest.param("well", marks=pytest.mark.slow), "fail"])
def test_a_process_that_ends_waits_and_tells(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _EXITS, str(tmp_path / "saved"), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    buffer, state = fbuf.load(tmp_path / "saved")
    assert int(buffer.size(state)) == 500
    told = "nobody asked for its result()" in done.stderr and "No space left on device" in done.stderr
    assert told == (how == "fail")


def test_others_add_while_a_replay_is_saved(tmp_path: Path) -> None:
    """Each checkpoint is the state of one moment: rows of one block of numbers, none torn."""
    replay = fbuf.Replay(fbuf.Buffer(64, storage=Compressed(keys=("obs",))), EXAMPLE)
    stop, errors = threading.Event(), []

    def add(number: int) -> None:
        try:
            for i in range(10_000):
                if stop.is_set():
                    return
                value = 1000 * number + i
                obs = np.full((4, 16, 16), value % 251, np.uint8)
                replay.extend({"obs": obs, "t": np.full(4, value, np.float32)})
        except Exception as error:
            errors.append(error)

    replay.extend({"obs": np.zeros((4, 16, 16), np.uint8), "t": np.zeros(4, np.float32)})
    threads = [threading.Thread(target=add, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        for i in range(4):
            saving = replay.save(tmp_path / "saved", wait=i % 2 == 0, sync=False)
            saving.result()
            again = fbuf.Replay.load(tmp_path / "saved")
            rows = again.rows()
            t = np.asarray(rows.data["t"])[np.asarray(rows.mask)].reshape(-1, 4)
            obs = np.asarray(rows.data["obs"])[np.asarray(rows.mask)].reshape(-1, 4, 256)
            assert (t == t[:, :1]).all() and (obs == (t % 251).astype(np.uint8)[:, :, None]).all()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


# ------------------------------------------------------------------------------------------------------- refusals


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    state = filled(BUFFER, 5)
    path = str(tmp_path / "saved")
    with pytest.raises(TypeError, match="the call or the state is traced"):
        jax.jit(lambda state: fbuf.save(path, BUFFER, state) and 0)(state)
    with pytest.raises(TypeError, match="the call or the state is traced"):
        jax.jit(lambda x: fbuf.save(path, BUFFER, state) and x)(0)
    with pytest.raises(TypeError, match="the state has shapes in it; expected arrays"):
        fbuf.save(path, BUFFER, jax.eval_shape(lambda: state))
    with pytest.raises(TypeError, match=r"buffer is Replay; expected a Buffer. Write replay.save\(path\)"):
        fbuf.save(path, fbuf.Replay(BUFFER, EXAMPLE, 0), state)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="buffer is Checked; expected a Buffer. Write fbuf.save.path, checked.buffer"):
        fbuf.save(path, fbuf.checked(BUFFER), state)
    with pytest.raises(
        TypeError, match=r"buffer is BufferState; expected a Buffer. Write fbuf.save\(path, buffer, state\)"
    ):
        fbuf.save(path, state, BUFFER)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state is dict; expected a BufferState"):
        fbuf.save(path, BUFFER, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path is None; expected the path of a folder"):
        fbuf.save(None, BUFFER, state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="made by another buffer"):
        fbuf.save(path, fbuf.Buffer(20_000), state)
    _extend_in_place(state, rows_of(0, 30))
    with pytest.raises(RuntimeError, match="the state was donated, and its arrays are gone"):
        fbuf.save(path, BUFFER, state)
    assert not os.path.exists(path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fbuf.CheckpointNotFound, match="there is no checkpoint at"):
        fbuf.load(tmp_path / "none")
    _files.write(str(tmp_path / "arrays"), {"x": np.zeros(3)}, {})
    with pytest.raises(fbuf.SchemaError, match="holds arrays, but no buffer"):
        fbuf.load(tmp_path / "arrays")
    fbuf.save(tmp_path / "saved", BUFFER, filled(BUFFER, 3))
    with pytest.raises(TypeError, match="fbuf.load: the call is traced"):
        jax.jit(lambda x: fbuf.load(tmp_path / "saved")[1].token + x)(0)
    for resize in (0, -1, True, 2.5, "10"):
        with pytest.raises(ValueError, match="resize is .*; expected the capacity"):
            fbuf.load(tmp_path / "saved", resize=resize)
    with pytest.raises(ValueError, match="verify is 'all'"):
        fbuf.load(tmp_path / "saved", verify="all")


def test_damage_is_found_or_the_generation_before_is_taken(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(50, storage=Compressed(keys=("obs",)), sampler=Prioritized())
    for count in (20, 30):
        fbuf.save(tmp_path / "saved", buffer, filled(buffer, count))
    newest = tmp_path / "saved" / "data-000000000002.safetensors"
    data = bytearray(newest.read_bytes())
    data[-100] ^= 16
    newest.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="generation 1 of .* is loaded, not the newest"):
        loaded, state = fbuf.load(tmp_path / "saved")
    assert int(loaded.size(state)) == 20
    fbuf.save(tmp_path / "one", buffer, filled(buffer, 20), keep=1)
    (file,) = (tmp_path / "one").glob("data-*")
    data = bytearray(file.read_bytes())
    data[-100] ^= 16
    file.write_bytes(data)
    for verify in ("full", "lazy"):
        with pytest.raises(fbuf.StoreCorrupted, match=file.name):
            fbuf.load(tmp_path / "one", verify=verify)


# ---------------------------------------------------------------------------------------------------------- extra


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "key": jax.random.key(5, impl="rbg"),
        "keys": jax.random.split(jax.random.key(1), 3),
        "raw": jax.random.PRNGKey(0),
        "step": 2**70,
        "flag": True,
        "rate": 0.1,
        "nothing": None,
        "name": "ü",
        "numpy": (np.arange(6).reshape(2, 3)[:, ::-1], np.float64(0.1), np.zeros((0, 2))),
        "jax": [jnp.bfloat16(1.5), jnp.zeros((2, 0)), jnp.float32("nan")],
    }
    state = filled(BUFFER, 3)
    fbuf.save(tmp_path / "saved", BUFFER, state, extra=extra)
    assert len(fbuf.load(tmp_path / "saved")) == 2
    for example in (True, extra):
        got = fbuf.load(tmp_path / "saved", extra=example)[2]
        assert jax.tree.structure(got) == jax.tree.structure(extra)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(extra), strict=True):
            assert type(a) is type(b)
            if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                assert jax.random.key_impl(a) == jax.random.key_impl(b)
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            same(a, b) if hasattr(a, "dtype") else pytest.approx(a) == b
        assert got["step"] == 2**70 and got["rate"] == 0.1 and got["name"] == "ü" and got["flag"] is True
    with pytest.raises(fbuf.SchemaError, match=r"step: found int, expected float32\[\]"):
        fbuf.load(tmp_path / "saved", extra={**extra, "step": jnp.float32(0)})
    with pytest.raises(fbuf.SchemaError, match="name: found str, expected nothing"):
        fbuf.load(tmp_path / "saved", extra={n: x for n, x in extra.items() if n != "name"})
    fbuf.save(tmp_path / "saved", BUFFER, state)
    with pytest.raises(fbuf.SchemaError, match="was saved without extra"):
        fbuf.load(tmp_path / "saved", extra=True)
    for wrong in ({"x": object()}, {"x": np.array(["text"])}, {"x": np.ma.array([1, 2], mask=[0, 1])}):
        with pytest.raises(TypeError, match="extra 'x' is .*; expected arrays, PRNG keys, numbers or text"):
            fbuf.save(tmp_path / "saved", BUFFER, state, extra=wrong)
    with pytest.raises(ValueError, match="two leaves have the name 'a/b'"):  # not one of them, without a word
        fbuf.save(tmp_path / "saved", BUFFER, state, extra={"a/b": 1, "a": {"b": 2}})


# -------------------------------------------------------------------------------------------------------- devices

_SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import fbuf
mesh = Mesh(np.array(jax.devices()), ("x",))
assert mesh.size == 4
buffer = fbuf.Buffer(40, lanes=4)
state = buffer.extend(buffer.init({"t": jnp.zeros(3)}), {"t": jnp.arange(60.0).reshape(5, 4, 3)})
def spread(x):
    spec = PartitionSpec("x") if x.ndim and x.shape[0] % 4 == 0 else PartitionSpec()
    return jax.device_put(x, NamedSharding(mesh, spec))
fbuf.save(sys.argv[1], buffer, jax.tree.map(spread, state))
rows = jax.device_put(jnp.arange(48.0).reshape(8, 6), NamedSharding(mesh, PartitionSpec(None, None)))
columns = jax.device_put(jnp.arange(48.0).reshape(6, 8), NamedSharding(mesh, PartitionSpec(None, "x")))
fbuf.save(sys.argv[2], buffer, state, extra=[rows, columns], wait=False)
"""


def test_arrays_spread_over_devices(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SHARDED, str(tmp_path / "one"), str(tmp_path / "two")]
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=flags)
    assert done.returncode == 0, done.stderr
    buffer = fbuf.Buffer(40, lanes=4)
    want = buffer.extend(buffer.init({"t": jnp.zeros(3)}), {"t": jnp.arange(60.0).reshape(5, 4, 3)})
    same(fbuf.load(tmp_path / "one")[1], want)
    _, state, (rows, columns) = fbuf.load(tmp_path / "two", extra=True)
    same(state, want)
    same(rows, np.arange(48, dtype=np.float32).reshape(8, 6))
    same(columns, np.arange(48, dtype=np.float32).reshape(6, 8))


def test_rows_of_any_shape_in_the_background(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(30, storage=Ragged())
    state = buffer.extend(buffer.init({"text": "", "n": 0}), [{"text": "x" * n, "n": n} for n in range(40)])
    saving = fbuf.save(tmp_path / "saved", buffer, state, wait=False)
    state = buffer.extend(state, [{"text": "y" * n, "n": n} for n in range(40)])
    saving.result()
    loaded, again = fbuf.load(tmp_path / "saved")
    assert loaded.rows(again).lazy["text"] == ["x" * n for n in range(10, 40)]


def test_rows_of_64_bits_want_x64(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(4)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        state = buffer.add(buffer.init({"t": jnp.float64(0.1)}), {"t": jnp.float64(0.1)})
        fbuf.save(tmp_path / "saved", buffer, state)
        same(fbuf.load(tmp_path / "saved")[1], state)
    with pytest.raises(fbuf.SchemaError, match=r"leaf 't' is float64, but x64 is off; .*jax_enable_x64"):
        fbuf.load(tmp_path / "saved")


def test_extra_of_64_bits_wants_x64(tmp_path: Path) -> None:
    """A step count beyond 2^31 would come back as another."""
    state = filled(BUFFER, 3)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        extra = {"step": jnp.int64(2**40), "host": np.int64(2**40)}
        fbuf.save(tmp_path / "saved", BUFFER, state, extra=extra)
        same(fbuf.load(tmp_path / "saved", extra=True)[2], extra)
    with pytest.raises(fbuf.SchemaError, match=r"extra 'step' of .* is int64, but x64 is off"):
        fbuf.load(tmp_path / "saved", extra=True)


def test_a_state_that_was_fetched_can_be_saved(tmp_path: Path) -> None:
    state = jax.device_get(filled(BUFFER, 7))
    fbuf.save(tmp_path / "saved", BUFFER, state)
    same(fbuf.load(tmp_path / "saved")[1], state)


def test_a_handle_keeps_no_state(tmp_path: Path) -> None:
    state = filled(BUFFER, 7)
    gone = weakref.ref(state.rows["obs"])
    savings = [fbuf.save(tmp_path / "saved", BUFFER, state, wait=wait) for wait in (True, False)]
    del state
    savings[1].wait()
    gc.collect()
    assert gone() is None and [saving.result().generation for saving in savings] == [1, 2]


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    fbuf.save(tmp_path / "saved", BUFFER, filled(BUFFER, 3000), progress=lambda *at: told.append(at))
    assert told[-1][0] == told[-1][1] > 3000 * 256
    for verify in ("full", "lazy"):
        total = told[-1][1]
        told.clear()
        fbuf.load(tmp_path / "saved", verify=verify, progress=lambda *at: told.append(at))
        assert told[-1] == (total, total) and len(told) > 2  # while it is read, and not only while the rest is checked
    with pytest.raises(ZeroDivisionError):
        fbuf.load(tmp_path / "saved", progress=lambda *at: 1 // 0)
