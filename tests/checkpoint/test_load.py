"""`fbuf.load` into other buffers: what may differ, what is refused, and another capacity."""

import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._buffer.convert import may_have_lost_rows
from fbuf._formats import checkpoint
from fbuf._host.io.directory import Folder
from fbuf.samplers import Prioritized
from fbuf.storages import Ragged
from fbuf.views import Transition
from tests.support import combinations
from tests.support.checkpoint import check_resize, elsewhere, golden, numbered, saved_transitions
from tests.support.checkpoint_saving import BUFFER, filled, golden_parts
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.support.threads import Thread
from tests.support.trees import same, x64


def test_settings_that_change_rows_are_refused(tmp_path):
    buffer, _ = saved_transitions(tmp_path)
    path = tmp_path / "saved"

    three_steps = Transition(gamma=0.9, n_step=3, autoreset="same_step")
    for other, match in (
        ({"sampler": fbuf.samplers.Uniform()}, r"sampler: found Prioritized\(.*expected Uniform\(.*\n.*convert"),
        ({"sampler": Prioritized(largest="held")}, r"state/sampler/top: found nothing, expected float32\[40\]"),
        ({"view": three_steps}, r"draws other rows.*\n.*ahead: found 1, expected 3"),
        ({"view": fbuf.views.Row(), "episode_end": ()}, "expected none: every row is drawn"),
        ({"capacity": 80}, r"capacity of .* is 40; expected 80.*resize=True"),
        ({"lanes": 4}, "lanes of .* is 2; expected 4, the buffer's. Use lanes=2"),
        ({"storage": Ragged()}, r"Ragged\(\) cannot hold rows of"),
    ):
        with pytest.raises(fbuf.SchemaError, match=match) as caught:
            fbuf.load(path, dataclasses.replace(buffer, **other))
        assert str(path) in str(caught.value)
    example = {**combinations.EXAMPLE, "obs": jax.ShapeDtypeStruct((8, 8), np.float32), "new": 0}
    words = r"goal: found int32\[\], expected nothing\n.*obs: found uint8\[8, 8\], expected float32\[8, 8\]\n.*"
    del example["goal"]
    raises(fbuf.SchemaError, words + "new: found nothing, expected int32", fbuf.load, path, buffer, example=example)
    raises(TypeError, "buffer is str; expected a Buffer", fbuf.load, path, "buffer")


def test_functions_are_named_and_not_imported(tmp_path):
    buffer = combinations.make("Device", "Uniform", "Hindsight")
    state = buffer.extend(buffer.init(combinations.EXAMPLE), combinations.rows_of(np.random.default_rng(0), 9))
    fbuf.save(tmp_path / "saved", buffer, state)
    raises(fbuf.SchemaError, r"function tests.support.combinations:missed, which", fbuf.load, tmp_path / "saved")
    loaded, again = fbuf.load(tmp_path / "saved", buffer)
    same(loaded.rows(again), buffer.rows(state))


def test_rows_in_files_go_to_the_path_of_the_buffer_and_failed_loads_leave_none(tmp_path, monkeypatch):
    buffer = fbuf.Buffer(10, storage=fbuf.storages.Memmap(str(tmp_path / "rows")))
    state = numbered(buffer, buffer.init({"t": 0.0}), 0, 15)
    fbuf.save(tmp_path / "saved", buffer, state, extra={"a": 1})
    raises(BlockingIOError, "another path", fbuf.load, tmp_path / "saved")
    other = elsewhere(buffer, tmp_path / "others")
    raises(fbuf.SchemaError, "is not like the example", fbuf.load, tmp_path / "saved", other, extra={"b": 1})
    with monkeypatch.context() as patch:
        patch.setattr("fbuf._buffer.checks.fits", lambda *_: exec("assert False"))  # the last step of a load
        pytest.raises(AssertionError, fbuf.load, tmp_path / "saved", other)
    assert not (tmp_path / "others").exists()
    loaded, again = fbuf.load(tmp_path / "saved", other)
    same(loaded.rows(again), buffer.rows(state))  # the store in use stays
    again = numbered(loaded, again, 15, 1)
    want = jax.device_get(loaded.rows(again).data)
    del again
    same(jax.device_get(loaded.rows(loaded.resume({"t": 0.0})).data), want)


def test_damage_in_what_a_load_does_not_read_leaves_no_files(tmp_path):
    buffer = fbuf.Buffer(10, storage=fbuf.storages.Memmap(str(tmp_path / "rows")), prefetch=1, batch_size=4)
    state, _ = buffer.sample(numbered(buffer, buffer.init({"t": 0.0}), 0, 15), jax.random.key(0))
    fbuf.save(tmp_path / "saved", buffer, state)
    (file,) = (tmp_path / "saved").glob("data-*")
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    (at,) = (e["data_offsets"][0] for n, e in json.loads(data[8:start]).items() if "ahead/batch/index/slot" in n)
    data[start + at] ^= 1
    file.write_bytes(data)
    other = dataclasses.replace(elsewhere(buffer, tmp_path / "others"), prefetch=0, batch_size=None)
    raises(fbuf.StoreCorrupted, "damaged", fbuf.load, tmp_path / "saved", other)
    assert not (tmp_path / "others").exists()


@pytest.mark.more
def test_of_two_loads_into_one_path_one_succeeds(tmp_path, monkeypatch):
    buffer = fbuf.Buffer(10, storage=fbuf.storages.Memmap(str(tmp_path / "rows")))
    state = numbered(buffer, buffer.init({"t": 0.0}), 0, 15)
    fbuf.save(tmp_path / "saved", buffer, state)
    other = elsewhere(buffer, tmp_path / "others")
    inside, go = threading.Event(), threading.Event()
    publish = Folder.publish

    def slowly(folder):  # as a large load
        inside.set()
        assert go.wait(60)
        publish(folder)

    monkeypatch.setattr(Folder, "publish", slowly)
    first = Thread(lambda: fbuf.load(tmp_path / "saved", other))
    assert inside.wait(60)
    raises(BlockingIOError, "another path", fbuf.load, tmp_path / "saved", other)
    go.set()
    loaded, again = first.ends()
    first.value = None
    same(loaded.rows(again), buffer.rows(state))
    again = numbered(loaded, again, 15, 1)
    want = jax.device_get(loaded.rows(again).data)
    del again
    same(jax.device_get(loaded.rows(loaded.resume({"t": 0.0})).data), want)


def test_settings_that_were_removed_are_named_where_they_did_something(tmp_path):
    unused, spread = {"spread": 0, "rho": 0.9}, {"spread": 2}
    used = (("device", {"decay": 0.9}), ("device", {"keep": 0.0}), ("device", spread), ("ranked", spread))
    for name, fields in (("device", unused), ("ranked", unused), *used):
        arrays, meta = golden_parts(name)
        meta["buffer"]["sampler"] |= fields
        path, buffer = tmp_path / "-".join((name, *fields)), golden.BUFFERS[name]
        checkpoint.write(str(path), arrays, meta)
        if fields is unused:
            assert fbuf.load(path)[0] == fbuf.load(path, buffer)[0] == buffer
            continue
        (field, value), kind = *fields.items(), type(buffer.sampler).__name__
        words = rf"with {kind}\({field}={value}\), but {field} was removed"
        for given in ((), (buffer,)):
            pytest.raises(fbuf.VersionError, fbuf.load, path, *given).match(words)


@pytest.mark.more
def test_64_bits_need_x64(tmp_path):
    """A step count beyond 2^31 would return as another."""
    buffer, plain = fbuf.Buffer(4), filled(BUFFER, 3)
    with x64():
        state = buffer.add(buffer.init({"t": jnp.float64(0.1)}), {"t": jnp.float64(0.1)})
        fbuf.save(tmp_path / "rows", buffer, state)
        same(fbuf.load(tmp_path / "rows")[1], state)
        extra = {"step": jnp.int64(2**40), "host": np.int64(2**40)}
        fbuf.save(tmp_path / "extra", BUFFER, plain, extra=extra)
        same(fbuf.load(tmp_path / "extra", extra=True)[2], extra)
    raises(fbuf.SchemaError, r"leaf 't' is float64, but x64 is off.*jax_enable_x64", fbuf.load, tmp_path / "rows")
    raises(fbuf.SchemaError, r"extra 'step' of .* is int64, but x64 is off", fbuf.load, tmp_path / "extra", extra=True)


test_the_newest_rows_stay = checks(
    (check_resize, [(("Compressed", "Prioritized", "Row", 16, 9),)]),
    more=[(check_resize, [(("Device", "Uniform", "Transition", 80, 20),)])],
)


@pytest.mark.parametrize("capacity", [10, 30])
def test_earlier_indices_are_stale(capacity, tmp_path):
    buffer = fbuf.Buffer(20)
    state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(35)})
    index = fbuf.Index(jnp.arange(20), buffer.rows(state).index.generation)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved", resize=capacity)
    assert loaded == dataclasses.replace(buffer, capacity=capacity)
    assert may_have_lost_rows(loaded, again).all()  # row 15 is not taken for the first ever
    for i in range(4):
        assert not np.asarray(loaded.get(again, index).mask).any()
        again = loaded.extend(again, {"t": jnp.arange(10 * i, 10 * i + 10)})
    assert np.asarray(loaded.rows(again, last=5).data["t"]).tolist() == [35, 36, 37, 38, 39]


def test_rows_that_had_expired_when_they_were_saved_are_an_error(tmp_path):
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Host(slack=0, on_expired="mask"))
    old = numbered(buffer, buffer.init({"t": 0.0}), 0, 8)
    numbered(buffer, old, 8, 3)
    fbuf.save(tmp_path / "saved", buffer, old)
    raises(fbuf.SchemaError, "3 rows do not fit .*, or had expired", fbuf.load, tmp_path / "saved", resize=16)


@pytest.mark.more
def test_a_batch_drawn_ahead_is_dropped_where_another_is_drawn(tmp_path):
    view = Transition(gamma=0.9, autoreset="same_step")
    buffer = fbuf.Buffer(40, lanes=combinations.LANES, view=view, prefetch=1, batch_size=4)
    state = buffer.extend(buffer.init(combinations.EXAMPLE), combinations.rows_of(np.random.default_rng(0), 9))
    state, _ = buffer.sample(state, jax.random.key(0))
    fbuf.save(tmp_path / "saved", buffer, state)
    assert fbuf.load(tmp_path / "saved")[1].ahead.batch.mask.any()
    for change in ({"batch_size": 8}, {"view": dataclasses.replace(view, gamma=0.5)}):
        again = fbuf.load(tmp_path / "saved", dataclasses.replace(buffer, **change))[1]
        assert not again.ahead.batch.mask.any()
