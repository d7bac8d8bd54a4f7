"""Checkpoints: further storages, samplers and views, other buffers and capacities, kills."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Host
from fbuf.views import Transition
from tests.support import combinations
from tests.support.checkpoint import check_goes_on, check_golden, steps
from tests.support.checkpoint_saving import check_mangled_meta, check_second_save, check_store_in_use
from tests.support.processes import devices, run_python
from tests.support.trees import same


def test_batches_go_on_bit_for_bit(tmp_path: Path) -> None:
    check_goes_on(("Device", "Staleness", "Sequence('mask')", 1), 8, tmp_path)


def test_golden_checkpoints_go_on() -> None:
    check_golden("ragged", draw=True)


def test_annealed_numbers_and_indices_return(tmp_path: Path) -> None:
    buffer = combinations.make("Device", "Prioritized", "Row")
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 5)
    state = buffer.set(state, alpha=0.25, beta=0.75)
    index = buffer.last(state, 2).index
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    assert float(again.sampler.alpha) == 0.25 and float(again.sampler.beta) == 0.75
    same(loaded.get(again, index), buffer.get(state, index))
    again, _ = steps(loaded, again, 200, 20)
    assert not np.asarray(loaded.get(again, index).mask).any()


def test_rows_in_files_at_a_path_are_resized(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(20, storage=Compressed(path=str(tmp_path / "one")))
    state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(35)})
    fbuf.save(tmp_path / "saved", buffer, state)
    for capacity, where in ((10, "two"), (30, "three")):
        other = fbuf.Buffer(capacity, storage=Compressed(path=str(tmp_path / where)))
        loaded, again = fbuf.load(tmp_path / "saved", other, resize=True)
        assert np.asarray(loaded.last(again, 4).data["t"]).tolist() == [31, 32, 33, 34]
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("fbuf-")) == []
    del again
    assert np.asarray(loaded.last(loaded.resume({"t": 0}), 2).data["t"]).tolist() == [33, 34]


def test_a_host_store_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_second_save(Host(keys=("obs",)), True, tmp_path / "one")
    check_second_save(Host(keys=("obs",)), False, tmp_path / "two")
    check_store_in_use(Host(keys=("obs",)), tmp_path / "three", monkeypatch)


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
    run_python(_SHARDED, tmp_path / "one", tmp_path / "two", **devices(4))
    buffer = fbuf.Buffer(40, lanes=4)
    want = buffer.extend(buffer.init({"t": jnp.zeros(3)}), {"t": jnp.arange(60.0).reshape(5, 4, 3)})
    same(fbuf.load(tmp_path / "one")[1], want)
    _, state, (rows, columns) = fbuf.load(tmp_path / "two", extra=True)
    same(state, want)
    same(rows, np.arange(48, dtype=np.float32).reshape(8, 6))
    same(columns, np.arange(48, dtype=np.float32).reshape(6, 8))


def test_mangled_metadata_is_refused(tmp_path: Path) -> None:
    check_mangled_meta("device", 1, tmp_path / "device")
    check_mangled_meta("compressed", 1, tmp_path / "compressed")


def test_only_written_rows_are_stored(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(
        100_000, sampler=Prioritized(largest="held", normalize="buffer"), view=Transition(autoreset="same_step")
    )
    example = {"obs": jnp.zeros(25), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
    state = buffer.init(example)
    rows = {n: np.ones((1000, *jnp.shape(x)), jnp.asarray(x).dtype) for n, x in example.items()}
    rows["terminated"][:] = rows["truncated"][:] = False
    state = buffer.extend(state, rows)
    written = fbuf.save(tmp_path / "saved", buffer, state).result()
    assert written.bytes_total < 1000 * (100 + 4 + 4 + 2 + 3 * 4 + 1) + 2000
    again = fbuf.load(tmp_path / "saved")[1]
    same(again, state)


def test_replay_goes_on(tmp_path: Path) -> None:
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
