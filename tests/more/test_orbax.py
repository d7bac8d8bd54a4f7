"""Buffers and mixtures as items of an orbax CheckpointManager, and sharded arrays."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

import fbuf
from tests.test_orbax import ROW, check_manager, finalized, manager, replay, restore, rows, save

__all__ = ["finalized", "manager"]  # fixtures
ROOT = Path(__file__).resolve().parents[2]


def test_a_buffer_next_to_the_train_state(manager):
    check_manager(manager, "device")


def test_a_mixture(manager):
    """With what its transforms know, and its own fractions: the batches go on."""
    learn = fbuf.transforms.NormalizeReward()
    online = fbuf.prioritized(40, on_write={"at_write": fbuf.transforms.Normalize("reward", clip=5.0)}, on_read=learn)
    offline = fbuf.Buffer(40, storage=fbuf.storages.Host(), on_read=learn)
    mixture = fbuf.Mixture({"online": online, "offline": offline}, annealed=True)
    state = mixture.init({"online": ROW, "offline": ROW})
    for name in mixture.names:
        state = mixture.extend(state, name, rows(2))
    state = mixture.set(state, fractions={"online": 0.75})
    save(manager, 0, mixture, state)
    manager.wait_until_finished()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loads = ({}, {"buffer": mixture, "example": {"online": ROW, "offline": ROW}}, {"sharding": sharding})
    for settings in loads:
        again, loaded = restore(manager, 0, **settings).replay
        assert again == mixture
        for verb in (lambda m, s: m.stats(s), lambda m, s: m.peek(s, jax.random.key(0), 8)):
            one, other = (jax.tree.leaves(verb(m, s)) for m, s in ((mixture, state), (again, loaded)))
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    with pytest.raises(
        ValueError, match="holds a mixture of online, offline, but a Buffer is given; expected a Mixture"
    ):
        restore(manager, 0, buffer=online)
    with pytest.raises(TypeError, match=r"expected a MixtureState. Write fbuf.orbax.SaveArgs\(mixture, state\)"):
        replay.SaveArgs(mixture, state["online"])


SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp
import fbuf, fbuf.orbax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
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
        try:
            manager.restore(0, args=ocp.args.Composite(replay=fbuf.orbax.RestoreArgs(sharding={"x": everywhere})))
        except ValueError as error:
            assert "sharding has NoneType for leaf" in str(error), error
        else:
            raise AssertionError("not refused")
print("done")
"""


def test_sharded_arrays(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
