"""Checkpoints: further storages, samplers and views, other buffers and capacities, kills."""

import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Host
from fbuf.views import Transition
from tests.support.checkpoint import check_goes_on, check_golden, check_killed
from tests.support.checkpoint_saving import check_mangled_meta, check_second_save, check_store_in_use
from tests.support.trees import same

pytestmark = pytest.mark.more


def test_batches_go_on_bit_for_bit(tmp_path):
    check_goes_on(("Device", "Staleness", "Sequence('mask')", 1), 8, tmp_path)


def test_a_killed_save_leaves_the_old_or_the_new_one(tmp_path):
    check_killed("Compressed", 0, tmp_path)


def test_golden_checkpoints_go_on(tmp_path):
    check_golden("ragged", tmp_path, draw=True)


def test_a_host_store_is_saved(tmp_path, monkeypatch):
    check_second_save(Host(keys=("obs",)), True, tmp_path / "one")
    check_second_save(Host(keys=("obs",)), False, tmp_path / "two")
    check_store_in_use(Host(keys=("obs",)), tmp_path / "three", monkeypatch)


def test_mangled_metadata_is_refused(tmp_path):
    check_mangled_meta("device", 1, tmp_path / "device")
    check_mangled_meta("compressed", 1, tmp_path / "compressed")


def test_only_written_rows_are_stored(tmp_path):
    sampler = Prioritized(largest="held", normalize="buffer")
    buffer = fbuf.Buffer(100_000, sampler=sampler, view=Transition(autoreset="same_step"))
    example = {"obs": jnp.zeros(25), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
    state = buffer.init(example)
    rows = {n: np.ones((1000, *jnp.shape(x)), jnp.asarray(x).dtype) for n, x in example.items()}
    rows["terminated"][:] = rows["truncated"][:] = False
    state = buffer.extend(state, rows)
    written = fbuf.save(tmp_path / "saved", buffer, state).result()
    assert written.bytes_total < 1000 * (100 + 4 + 4 + 2 + 3 * 4 + 1) + 2000
    again = fbuf.load(tmp_path / "saved")[1]
    same(again, state)


def test_replay_goes_on(tmp_path):
    buffer = fbuf.prioritized(40, storage=Compressed(keys=("t",)), prefetch=1, batch_size=4)
    replay = fbuf.Replay(buffer, {"t": 0.0}, seed=3, strict=False)
    replay.extend({"t": np.arange(30, dtype=np.float32)})
    replay.update_priority(replay.sample().index, np.array([1.0, np.nan, 2.0, 3.0]))
    replay.save(tmp_path / "saved", extra={"step": 9})
    again, extra = fbuf.Replay.load(tmp_path / "saved", extra=True)
    assert extra == {"step": 9} and not again.strict and again.stats() == replay.stats()
    for i in range(20):
        got, want = again.sample(to="numpy"), replay.sample(to="numpy")
        same(got, want)
        for one, batch in ((again, got), (replay, want)):
            one.update_priority(batch.index, np.arange(4.0))
            one.extend({"t": np.full(3, i, np.float32)})
    fbuf.save(tmp_path / "plain", buffer, replay.state)
    with pytest.raises(fbuf.SchemaError, match=r"saved without a key\. .* fbuf.load\(path\)"):
        fbuf.Replay.load(tmp_path / "plain")
