"""`Replay`: further storages between threads, exits of the interpreter, and another device."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from fbuf.storages import Deduplicated, Host
from tests.support.replay import BUFFERS, ROOT, at_exit, same_batches_as_the_buffer, soak


@pytest.mark.parametrize("name", [name for name in BUFFERS if name != "consumed"])
def test_actors_and_learners_share_a_replay(name: str) -> None:
    soak(name, batches=60)


@pytest.mark.parametrize("storage", [Host(keys=("obs",)), Deduplicated(keys=("obs",), blocks=256)])
def test_batches_are_those_of_the_buffer(storage: Any) -> None:
    same_batches_as_the_buffer(storage)


@pytest.mark.parametrize("how", ["room", "error"])
def test_the_interpreter_exits(how: str) -> None:
    at_exit(how)


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
print("well")
"""


def test_batches_go_to_another_device_and_return() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", _DEVICES], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout == "well\n", done.stderr
