"""Buffers and mixtures as items of an orbax CheckpointManager: saved as of `save`, restored bit for bit, never cast."""

import gc
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import fbuf
from fbuf import orbax as replay
from fbuf._formats import checkpoint
from tests.support.processes import devices, run_python
from tests.support.refusals import raises
from tests.support.threads import PATIENCE

pytestmark = pytest.mark.more

COMPRESSED = fbuf.Buffer(40, storage=fbuf.storages.Compressed(keys=("obs",)))
BUFFERS = {"device": fbuf.prioritized(40, normalize=None), "compressed": COMPRESSED}
ROW = {"obs": jnp.zeros((4, 4), jnp.uint8), "reward": jnp.float32(0)}


def rows(step, n=15):
    t = np.arange(n) + step * n
    obs = np.broadcast_to((t % 251).astype(np.uint8)[:, None, None], (n, 4, 4))
    return {"obs": obs, "reward": t.astype(np.float32)}


def save(manager, step, buffer, state, **settings):
    train = ocp.args.StandardSave({"w": jnp.full(3, step, jnp.float32)})
    manager.save(step, args=ocp.args.Composite(train=train, replay=replay.SaveArgs(buffer, state, **settings)))


def restore(manager, step, **settings):
    train = ocp.args.StandardRestore({"w": jnp.zeros(3)})
    return manager.restore(step, args=ocp.args.Composite(train=train, replay=replay.RestoreArgs(**settings)))


def same(buffer, one, other):
    for seed in range(3):
        batches = (buffer.peek(state, jax.random.key(seed), 16) for state in (one, other))
        first, second = (jax.tree.leaves((b.data, b.index.slot, b.probability)) for b in batches)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture(autouse=True)
def finalized():
    """Collect the coroutines of a failed save here, so that they do not warn in another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()


@pytest.fixture
def manager(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        yield manager


@pytest.mark.parametrize(("name", "background"), [("compressed", True), ("device", False)])
def test_a_buffer_is_saved_next_to_the_train_state(name, background, tmp_path):
    """Three saves; the last and an older one are restored, and one is resized."""
    buffer = BUFFERS[name]
    state = buffer.init(ROW)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    kept = {}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=background)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in range(3):
            state = extend(state, rows(step))
            if name == "device":
                state = buffer.update_priority(state, buffer.rows(state, last=5).index, np.arange(5, dtype=np.float32))
            save(manager, step, buffer, state)
            kept[step] = np.asarray(buffer.rows(state, last=15).data["reward"])
        manager.wait_until_finished()
        restored = restore(manager, 2)
        again, loaded = restored.replay
        assert again == buffer and restored.train["w"].tolist() == [2, 2, 2]
        same(buffer, state, loaded)
        same(buffer, extend(state, rows(7)), extend(loaded, rows(7)))
        _, older = restore(manager, 1, buffer=buffer).replay
        assert np.array_equal(buffer.rows(older, last=15).data["reward"], kept[1])
        assert manager.item_metadata(2).replay["rows"]["leaves"]
        larger, loaded = restore(manager, 2, resize=80).replay
        assert larger.capacity == 80 and int(larger.size(loaded)) == 40


def test_an_asynchronous_save_excludes_later_writes(manager, monkeypatch):
    """The thread waits until the state is donated and every row overwritten, on the host too."""
    buffer = COMPRESSED
    extend = jax.jit(buffer.extend, donate_argnums=0)
    state = extend(extend(buffer.init(ROW), rows(0)), rows(1))
    wanted = np.asarray(buffer.rows(state, last=30).data["obs"])
    overwritten, write = threading.Event(), checkpoint.write

    def late(*args, **kwargs):
        assert overwritten.wait(PATIENCE)
        return write(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write", late)
    save(manager, 0, buffer, state)
    for step in range(2, 20):
        state = extend(state, rows(step))
    jax.block_until_ready(state)
    overwritten.set()
    manager.wait_until_finished()
    _, loaded = restore(manager, 0).replay
    assert np.array_equal(buffer.rows(loaded, last=30).data["obs"], wanted)


def test_an_error_of_the_saving_thread_is_raised(tmp_path, monkeypatch):
    buffer, write = fbuf.Buffer(4), checkpoint.write
    state = buffer.init({"x": 0.0})
    manager = ocp.CheckpointManager(tmp_path / "run")
    save(manager, 0, buffer, state)
    manager.wait_until_finished()

    def full(*args, **kwargs):
        write(*args, **kwargs)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        with pytest.raises(OSError, match="No space left"):
            save(manager, 1, buffer, state)
            manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == [0] and int(buffer.size(restore(manager, 0).replay[1])) == 0


def test_flipped_bits_raise(manager, tmp_path):
    """orbax itself misses most of these."""
    buffer, state = fbuf.interop.from_arrays({"x": np.arange(2**14, dtype=np.float32)}).into()
    save(manager, 0, buffer, state)
    manager.wait_until_finished()
    (path,) = (tmp_path / "run" / "0" / "replay").glob("data-*.safetensors")
    whole = path.read_bytes()
    for at in np.linspace(0, len(whole) - 1, 20).astype(int):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        pytest.raises(fbuf.StoreCorrupted, restore, manager, 0)
    path.write_bytes(whole)
    restore(manager, 0)


def test_invalid_arguments_are_refused(manager, tmp_path):
    buffer, state = fbuf.interop.from_arrays({"x": np.arange(3, dtype=np.float32)}).into()
    save(manager, 0, buffer, state)
    manager.wait_until_finished()
    examples = ({"x": np.int8(0)}, {"x": np.zeros(2, np.float32)}, {"y": np.float32(0)})
    for wrong in (*({"example": example} for example in examples), {"buffer": fbuf.Buffer(4)}):
        pytest.raises(fbuf.SchemaError, restore, manager, 0, **wrong)
    for args in ((buffer, {"x": 0}), (None, state)):
        with pytest.raises(TypeError, match="expected a Buffer"):
            replay.SaveArgs(*args)  # before orbax writes other items
    raises(TypeError, "expected SaveArgs", lambda: replay.ReplayHandler().save(tmp_path, args=replay.RestoreArgs()))


def test_a_mixture_is_saved(manager):
    """With what its transforms learned."""
    learn = fbuf.transforms.NormalizeReward()
    online = fbuf.prioritized(40, on_write={"at_write": fbuf.transforms.Normalize("reward", clip=5.0)}, on_read=learn)
    offline = fbuf.Buffer(40, storage=fbuf.storages.Host(), on_read=learn)
    mixture = fbuf.Mixture({"online": online, "offline": offline}, fractions={"online": 0.75, "offline": 0.25})
    state = {name: buffer.extend(buffer.init(ROW), rows(2)) for name, buffer in mixture.members}
    save(manager, 0, mixture, state)
    manager.wait_until_finished()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loads = ({}, {"buffer": mixture, "example": {"online": ROW, "offline": ROW}}, {"sharding": sharding})
    for settings in loads:
        again, loaded = restore(manager, 0, **settings).replay
        assert again == mixture
        for read in (lambda m, s: m["online"].stats(s["online"]), lambda m, s: m.peek(s, jax.random.key(0), 8)):
            one, other = (jax.tree.leaves(read(m, s)) for m, s in ((mixture, state), (again, loaded)))
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    raises(ValueError, "holds a mixture of online, offline, not a Buffer", restore, manager, 0, buffer=online)
    with pytest.raises(TypeError, match=r"those of online, offline. Write fbuf.orbax.SaveArgs\(mixture, states\)"):
        replay.SaveArgs(mixture, state["online"])


SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp
import fbuf, fbuf.orbax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.support.refusals import raises
assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()), ("x",))
buffer = fbuf.prioritized(64, normalize=None)
rows = {"obs": jnp.arange(512.0).reshape(64, 8), "a": jnp.arange(64)}
state = buffer.extend(buffer.init({"obs": jnp.zeros(8), "a": 0}), rows)
spread = lambda mesh: jax.tree.map(lambda x: NamedSharding(mesh, P("x") if x.shape[:1] == (64,) else P()), state)
state = jax.tree.map(jax.device_put, state, spread(mesh))
assert len(state.rows["obs"].sharding.device_set) == 4 and not state.rows["obs"].is_fully_replicated
for asynchronous in (True, False):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous)
    with ocp.CheckpointManager(f"{sys.argv[1]}/{asynchronous}", options=options) as manager:
        manager.save(0, args=ocp.args.Composite(replay=fbuf.orbax.SaveArgs(buffer, state)))
        manager.wait_until_finished()
        two = Mesh(np.array(jax.devices()[2:]), ("x",))
        shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, spread(two))
        everywhere = NamedSharding(mesh, P())
        for asked in (None, state, spread(two), shapes, everywhere):
            args = fbuf.orbax.RestoreArgs(sharding=asked)
            again, loaded = manager.restore(0, args=ocp.args.Composite(replay=args)).replay
            assert jax.tree.structure(loaded) == jax.tree.structure(state)
            assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(state)))
            rows = loaded.rows["obs"]
            devices = {id(None): 1, id(state): 4, id(everywhere): 4}.get(id(asked), 2)
            assert len(rows.sharding.device_set) == devices, (asked, rows.sharding)
            assert rows.is_fully_replicated == (asked is None or asked is everywhere)
        args = ocp.args.Composite(replay=fbuf.orbax.RestoreArgs(sharding={"x": everywhere}))
        raises(ValueError, "sharding has NoneType for leaf", manager.restore, 0, args=args)
print("done")
"""


def test_sharded_arrays_are_restored_to_the_devices_asked_for(tmp_path):
    assert "done" in run_python(SHARDED, tmp_path, **devices(4)).stdout
