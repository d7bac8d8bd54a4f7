"""`Replay`: further storages between threads, exits of the interpreter, and another device."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from fbuf.storages import Host
from tests.support.replay import ROOT, at_exit, frame_rows, make_frames, same_batches_as_the_buffer, soak
from tests.support.row_blocks import compare, make_pair
from tests.support.tables import one_of


def test_actors_and_learners_share_a_replay():
    soak("prefetch", batches=60)


def test_batches_are_those_of_the_buffer():
    same_batches_as_the_buffer(Host(keys=("obs",)))


def test_rows_and_batches_of_torch():
    torch = pytest.importorskip("torch")
    replay = make_frames()
    replay.extend({name: torch.from_numpy(leaf) for name, leaf in frame_rows(0).items()})
    assert np.asarray(replay.rows().data["reward"])[:8].tolist() == list(range(8))
    batch = replay.sample(4, to="torch")
    with replay.batches(4, to="torch", device="cpu") as batches:
        for each in (batch, next(batches)):
            assert all(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves(each))
            replay.update_priority(each.index, each.data["reward"])
    assert replay.stats()["max_priority"] >= 1.0


def test_the_interpreter_exits():
    at_exit("actor")


_DEVICES = """
import jax, numpy as np, fbuf
one, two = jax.devices()
replay = fbuf.Replay(fbuf.prioritized(64), {"t": np.float32(0)})
replay.extend({"t": np.arange(20, dtype=np.float32)})
with replay.batches(4, device=two) as batches:
    batch = next(batches)
    assert all(leaf.devices() == {two} for leaf in jax.tree.leaves(batch))
    replay.update_priority(batch.index, batch.data["t"] + 1)
    replay.update_rows(batch.index, {"t": batch.data["t"]})
assert replay.state.token.devices() == {one} and replay.stats()["max_priority"] > 1
mesh = jax.sharding.Mesh(np.array([one, two]), "x")
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
with replay.batches(4, device=sharding) as batches:
    batch = next(batches)
    assert batch.data["t"].sharding == sharding
    replay.update_priority(batch.index, batch.data["t"])

replay, other = (fbuf.Replay(fbuf.uniform(64), {"t": np.float32(0)}) for _ in range(2))
for each in replay, other:
    each.add({"t": np.float32(1)})
other.state = jax.device_put(other.state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
for step in range(3):
    batches = [each.sample(4, to="numpy") for each in (replay, other)]
    jax.tree.map(np.testing.assert_array_equal, *batches)
    for each in replay, other:
        each.add({"t": np.float32(step)})
print("well")
"""


def test_batches_go_to_another_device_and_return():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", _DEVICES], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout == "well\n", done.stderr


CASES = [
    ("device", "ranked", "transition", 2),
    ("device", "host priorities", "episode", None),
    ("compressed", "prioritized", "transition", 2),
    ("deduplicated", "uniform", "transition", None),
]


case = one_of(*CASES)


def test_collected_rows_give_the_batches_of_rows_written_at_once(case):
    storage, sampler, view, lanes = case
    compare(make_pair(storage, sampler, view, lanes), steps=16, seed=1)
