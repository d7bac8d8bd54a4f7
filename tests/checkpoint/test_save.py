"""`fbuf.save`: what a second save writes, saves in the background, refusals, and extra values."""

import gc
import os
import threading
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._checkpoint import device_arrays
from fbuf._formats import checkpoint
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed
from tests.support.checkpoint_saving import (
    BUFFER,
    EXAMPLE,
    check_marks,
    check_second_save,
    check_store_in_use,
    filled,
    held_up,
    rows_of,
)
from tests.support.disk import flip
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.support.threads import Thread
from tests.support.trees import same

_extend_in_place = jax.jit(BUFFER.extend, donate_argnums=0)
test_a_second_save_writes_what_is_new = checks((check_second_save, [(None, True), (Compressed(keys=("obs",)), False)]))
test_marks_made_on_the_device = checks((check_marks, ["uint8", "complex64"]))


def test_unchanged_arrays_are_neither_copied_nor_read(tmp_path, monkeypatch):
    copied = []
    snapshot = checkpoint.snapshot

    def watched(*args):
        made = snapshot(*args)
        copied.extend(block for source in made.values() for block in source._blocks.values())
        return made

    monkeypatch.setattr(checkpoint, "snapshot", watched)
    state = filled(BUFFER, 10_000)
    fbuf.save(tmp_path / "saved", BUFFER, state).result()
    fbuf.save(tmp_path / "saved", BUFFER, state, wait=False).result()
    assert not copied
    state = BUFFER.extend(state, rows_of(10_000, 10))
    saving = fbuf.save(tmp_path / "saved", BUFFER, state, wait=False)
    assert 0 < sum(block.nbytes for block in copied) < saving.result().bytes_written < 3 * (1 << 18)
    same(fbuf.load(tmp_path / "saved")[1], state)


@pytest.mark.parametrize("rows", [0, 1, 3000, 70_001])
def test_blocks_read_from_a_device(rows, monkeypatch):
    monkeypatch.setattr(device_arrays, "SMALL_BYTES", 0)
    monkeypatch.setattr(device_arrays, "_platform", lambda array: "gpu")
    values = np.arange(3 * rows, dtype=np.int32).reshape(rows, 3) + 1
    leaf = device_arrays.DeviceLeaf(jnp.asarray(values), whole=True)
    starts = np.random.default_rng(0).permutation(range(0, rows, leaf.block)).tolist()
    for start in [*starts, *sorted(starts)]:
        same(leaf[start : start + leaf.block], values[start : start + leaf.block])
    same(leaf[0:rows], values)


@given(st.data())
def test_equal_rows_at_the_end_are_not_stored(data):
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "?", "<u2", "<f4", "<f8", "<c16"])))
    shape = (data.draw(st.sampled_from([1, 5, 2000, 40_000])), *data.draw(st.sampled_from([(), (1,), (3, 2)])))
    values = np.zeros(shape, dtype)
    values[: data.draw(st.integers(0, shape[0]))] = 1
    values.reshape(-1)[data.draw(st.integers(0, values.size - 1))] = data.draw(st.integers(0, 1))
    bits = values.reshape(-1).view(np.uint8).reshape(values.size, -1)
    differs = (bits != bits[-1]).any(axis=1).reshape(shape[0], -1).any(axis=1)
    assert device_arrays._count_written_host(values) == (np.flatnonzero(differs)[-1] + 1 if differs.any() else 0)


def test_sums_are_those_of_plain_python():
    values = np.random.default_rng(0).integers(0, 256, (6, 4), np.uint8)
    words = values.view("<u2").astype(np.uint64)
    key = jax.random.key(device_arrays._SEED, impl="threefry2x32")
    want = []
    for part in (words[:4], words[4:]):
        sums = []
        for i in range(8):
            keys = np.asarray(jax.random.bits(jax.random.fold_in(key, i), (4, 2), jnp.uint32)).astype(np.uint64)
            sums.append(int((part * keys[: len(part)]).sum()) % 2**32)
        want.append(sums)
    assert np.asarray(device_arrays._sums(jnp.asarray(values), 4)).tolist() == want


def test_a_state_may_be_donated_during_its_save(tmp_path):
    state = filled(BUFFER, 19_990)
    want = jax.device_get(state)
    saving = fbuf.save(tmp_path / "saved", BUFFER, state, wait=False)
    for i in range(3):
        state = _extend_in_place(state, rows_of(50_000 + i, 30))
    assert saving.result().generation == 1 and saving.done()
    saving.wait()
    same(jax.device_get(fbuf.load(tmp_path / "saved")[1]), want)


@pytest.mark.more
def test_a_host_store_goes_on_while_it_is_saved(tmp_path, monkeypatch):
    check_store_in_use(Compressed(keys=("obs",)), tmp_path, monkeypatch)


def test_an_error_in_the_background_is_raised_by_result_or_the_next_save(tmp_path):
    state, path, full = filled(BUFFER, 5), tmp_path / "saved", OSError(28, "No space left on device")
    with mock.patch.object(checkpoint, "write", side_effect=full):
        saving = fbuf.save(path, BUFFER, state, wait=False)
        for _ in range(2):
            pytest.raises(OSError, saving.result).match("No space left")
        assert saving.done() and "failed" in repr(saving)
    fbuf.save(path, BUFFER, state)  # the error was raised: the next save works
    with mock.patch.object(checkpoint, "write", side_effect=full):
        fbuf.save(path, BUFFER, state, wait=False)
    with pytest.raises(OSError, match="No space left") as caught:
        fbuf.save(path / ".", BUFFER, state)
    assert "wait=False, raised this" in "".join(caught.value.__notes__)
    fbuf.save(tmp_path / "other", BUFFER, state)
    fbuf.save(path, BUFFER, state)


def test_a_save_waits_for_the_one_under_way(tmp_path, monkeypatch):
    state = filled(BUFFER, 5)
    go = held_up(monkeypatch)
    one = fbuf.save(tmp_path / "saved", BUFFER, state, wait=False)
    pytest.raises(TimeoutError, one.result, 0.01).match("has not ended after 0.01 seconds")
    assert not one.done() and "under way" in repr(one)
    two = Thread(fbuf.save, tmp_path / "saved", BUFFER, state)
    go.set()
    generation = two.ends().result().generation
    assert one.done() and (one.result().generation, generation) == (1, 2)


@pytest.mark.parametrize("wait", [True, False])
def test_threads_that_save_to_one_path_take_turns(wait, tmp_path):
    state = filled(BUFFER, 5)

    def save():
        return fbuf.save(tmp_path / "saved", BUFFER, state, wait=wait, sync=False).result().generation

    assert sorted(thread.ends() for thread in [Thread(save) for _ in range(4)]) == [1, 2, 3, 4]


def test_a_thread_that_cannot_start_does_not_block_the_next_save(tmp_path):
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no new thread")):
        raises(RuntimeError, "no new thread", fbuf.save, tmp_path / "saved", BUFFER, filled(BUFFER, 5), wait=False)
    fetched = jax.device_get(filled(BUFFER, 7))
    assert fbuf.save(tmp_path / "saved", BUFFER, fetched).result().generation == 1
    same(fbuf.load(tmp_path / "saved")[1], fetched)


_EXITS = """
import sys
import jax.numpy as jnp
import fbuf
from fbuf._formats import checkpoint as _files
buffer = fbuf.Buffer(1000)
state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(500)})
write = _files.write
def fails(path, *args, **settings):
    if path.endswith("full"):
        raise OSError(28, "No space left on device")
    return write(path, *args, **settings)
_files.write = fails
for path in sys.argv[1:]:
    fbuf.save(path, buffer, state, wait=False)
"""


@pytest.mark.more
def test_a_process_waits_for_its_saves_at_exit_and_prints_errors(tmp_path):
    told = run_python(_EXITS, tmp_path / "saved", tmp_path / "full").stderr
    buffer, state = fbuf.load(tmp_path / "saved")
    assert int(buffer.size(state)) == 500
    assert told.count("its result() was never called") == told.count("[Errno 28] No space left on device") == 1
    assert str(tmp_path / "full") in told and str(tmp_path / "saved") not in told


@pytest.mark.more
def test_others_add_while_a_replay_is_saved(tmp_path):
    replay = fbuf.Replay(fbuf.Buffer(64, storage=Compressed(keys=("obs",))), EXAMPLE)
    stop = threading.Event()

    def add(number):
        for i in range(10_000):
            if stop.is_set():
                return
            value = 1000 * number + i
            obs = np.full((4, 16, 16), value % 251, np.uint8)
            replay.extend({"obs": obs, "t": np.full(4, value, np.float32)})

    replay.extend({"obs": np.zeros((4, 16, 16), np.uint8), "t": np.zeros(4, np.float32)})
    threads = [Thread(add, n) for n in (1, 2)]
    try:
        for wait in (True, False):
            saving = replay.save(tmp_path / "saved", wait=wait, sync=False)
            saving.result()
            again = fbuf.Replay.load(tmp_path / "saved")
            rows = again.rows()
            t = np.asarray(rows.data["t"])[np.asarray(rows.mask)].reshape(-1, 4)
            obs = np.asarray(rows.data["obs"])[np.asarray(rows.mask)].reshape(-1, 4, 256)
            assert (t == t[:, :1]).all() and (obs == (t % 251).astype(np.uint8)[:, :, None]).all()
    finally:
        stop.set()
    for thread in threads:
        thread.ends()


def test_invalid_arguments_of_save_are_refused(tmp_path):
    state = filled(BUFFER, 5)
    path = str(tmp_path / "saved")
    traced = jax.jit(lambda state: fbuf.save(path, BUFFER, state) and 0)
    raises(TypeError, "the call or the state is traced", traced, state)
    raises(TypeError, "the call or the state is", lambda: jax.jit(lambda x: fbuf.save(path, BUFFER, state) and x)(0))
    refused = [
        ("the state contains shapes; expected arrays", (path, BUFFER, jax.eval_shape(lambda: state))),
        (r"buffer is Replay; .* Write replay.save\(path\)", (path, fbuf.Replay(BUFFER, EXAMPLE, 0), state)),
        (r"buffer is BufferState; .* Write fbuf.save\(path, buffer, state\)", (path, state, BUFFER)),
        ("state is dict; expected a BufferState", (path, BUFFER, {})),
        ("path is None; expected a folder", (None, BUFFER, state)),
    ]
    for message, arguments in refused:
        pytest.raises(TypeError, fbuf.save, *arguments).match(message)
    raises(ValueError, "made by another buffer", lambda: fbuf.save(path, fbuf.Buffer(20_000), state))
    _extend_in_place(state, rows_of(0, 30))
    pytest.raises(RuntimeError, fbuf.save, path, BUFFER, state).match("the state was donated. Save what")
    assert not os.path.exists(path)


def test_invalid_arguments_of_load_are_refused(tmp_path):
    pytest.raises(fbuf.CheckpointNotFound, lambda: fbuf.load(tmp_path / "none")).match("there is no checkpoint at")
    checkpoint.write(str(tmp_path / "arrays"), {"x": np.zeros(3)}, {})
    pytest.raises(fbuf.SchemaError, lambda: fbuf.load(tmp_path / "arrays")).match("holds no buffer")
    fbuf.save(tmp_path / "saved", BUFFER, filled(BUFFER, 3))
    with pytest.raises(TypeError, match="fbuf.load: the call is traced"):
        jax.jit(lambda x: fbuf.load(tmp_path / "saved")[1].token + x)(0)
    for resize in (0, -1, True, 2.5, "10"):
        raises(ValueError, "resize is .*; expected a capacity", fbuf.load, tmp_path / "saved", resize=resize)
    pytest.raises(ValueError, lambda: fbuf.load(tmp_path / "saved", verify="all")).match("verify is 'all'")


@pytest.mark.more
def test_damage_is_an_error_or_loads_the_generation_before(tmp_path):
    buffer = fbuf.Buffer(50, storage=Compressed(keys=("obs",)), sampler=Prioritized())
    for count in (20, 30):
        fbuf.save(tmp_path / "saved", buffer, filled(buffer, count))
    older, newer = sorted((tmp_path / "saved").glob("data-*"))
    flip(newer, -100, by=16)
    with pytest.warns(RuntimeWarning, match="generation 1 of .* is loaded, not the newest"):
        loaded, state = fbuf.load(tmp_path / "saved")
    assert int(loaded.size(state)) == 20
    flip(older, -100, by=16)
    for verify in ("full", "lazy"):
        raises(fbuf.StoreCorrupted, older.name, fbuf.load, tmp_path / "saved", verify=verify)


def test_extra_returns(tmp_path):
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
    other = extra | {"step": jnp.float32(0)}
    del other["name"]
    words = r"name: found str, expected nothing\n.*step: found int, expected float32\[\]"
    raises(fbuf.SchemaError, words, fbuf.load, tmp_path / "saved", extra=other)
    fbuf.save(tmp_path / "saved", BUFFER, state)
    pytest.raises(fbuf.SchemaError, lambda: fbuf.load(tmp_path / "saved", extra=True)).match("was saved without extra")
    for wrong in ({"x": object()}, {"x": np.array(["text"])}, {"x": np.ma.array([1, 2], mask=[0, 1])}):
        raises(TypeError, "extra 'x' is .*; expected", fbuf.save, tmp_path / "saved", BUFFER, state, extra=wrong)
    with pytest.raises(ValueError, match="two leaves have the name 'a/b'"):
        fbuf.save(tmp_path / "saved", BUFFER, state, extra={"a/b": 1, "a": {"b": 2}})


def test_a_handle_keeps_no_state_alive(tmp_path):
    state = filled(BUFFER, 7)
    gone = weakref.ref(state.rows["obs"])
    savings = [fbuf.save(tmp_path / "saved", BUFFER, state, wait=wait) for wait in (True, False)]
    del state
    savings[1].wait()
    gc.collect()
    assert gone() is None and [saving.result().generation for saving in savings] == [1, 2]


def test_progress_counts_bytes(tmp_path):
    told = []
    fbuf.save(tmp_path / "saved", BUFFER, filled(BUFFER, 3000), progress=lambda *at: told.append(at))
    assert told[-1][0] == told[-1][1] > 3000 * 256
    for verify in ("full", "lazy"):
        total = told[-1][1]
        told.clear()
        fbuf.load(tmp_path / "saved", verify=verify, progress=lambda *at: told.append(at))
        assert told[-1] == (total, total) and len(told) > 2  # while arrays are read, not only verified
    for error in (ZeroDivisionError, KeyError, ValueError):  # of the caller, not of the file

        def fail(done, total, error=error):
            raise error

        with pytest.raises(error):
            fbuf.load(tmp_path / "saved", progress=fail)
