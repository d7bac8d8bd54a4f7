"""Saves of whole buffers in a process that is killed: what loads is a whole save, and draws its batches.

A child saves one moment after another, alternately in the foreground and the background, until it is killed. The loaded
buffer is compared with the same moment made again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf import storages
from fbuf.samplers import Prioritized

ROOT, BATCHES = Path(__file__).resolve().parents[2], 40

STORAGES: dict[str, Callable[[str], Any]] = {
    "Device": lambda folder: storages.Device(),
    "Deduplicated": lambda folder: storages.Deduplicated(keys=("obs",), blocks=4096),
    "Host": lambda folder: storages.Host(keys=("obs",)),
    "Compressed": lambda folder: storages.Compressed(keys=("obs",)),
    "Memmap": lambda folder: storages.Memmap(os.path.join(folder, "rows"), keys=("obs",)),
    "Ragged": lambda folder: storages.Ragged(),
}


def made(name: str, folder: str) -> fbuf.Buffer:
    return fbuf.Buffer(600, storage=STORAGES[name](folder), sampler=Prioritized())


def rows_of(number: int, count: int = 8) -> Any:
    """Return rows numbered by the save that follows them."""
    obs = np.random.default_rng(number).integers(0, 4, (count, 16, 16), np.uint8)
    return {"obs": obs, "t": np.arange(count, dtype=np.float32) + 100 * number}


@partial(jax.jit, static_argnums=0)
def priorities(buffer: fbuf.Buffer, state: fbuf.BufferState, error: jax.Array) -> fbuf.BufferState:
    return buffer.update_priority(state, buffer.last(state, 8).index, error)


def moment(buffer: fbuf.Buffer, state: fbuf.BufferState, number: int) -> fbuf.BufferState:
    """Return the state of save `number` from the one before."""
    return priorities(buffer, buffer.extend(state, rows_of(number)), jnp.arange(8.0) + number % 7)


def first(name: str, folder: str) -> tuple[fbuf.Buffer, fbuf.BufferState]:
    buffer = made(name, folder)
    state = buffer.init({"obs": np.zeros((16, 16), np.uint8), "t": np.float32(0)})
    return buffer, buffer.extend(state, rows_of(0, 500))


_CHILD = """
import sys
import fbuf
from tests.support.checkpoint_kills import first, moment
name, folder, path = sys.argv[1:]
buffer, state = first(name, folder)
number = 1
state = moment(buffer, state, number)
fbuf.save(path, buffer, state, sync=False, extra=number)
print("ready", flush=True)
while True:
    number += 1
    state = moment(buffer, state, number)
    print(number, flush=True)
    fbuf.save(path, buffer, state, wait=number % 2 == 0, sync=False, extra=number)
"""


@partial(jax.jit, static_argnums=0)
def batches(buffer: fbuf.Buffer, state: fbuf.BufferState) -> Any:
    """Draw batches, and set their priorities."""

    def step(state: fbuf.BufferState, number: jax.Array) -> Any:
        state, batch = buffer.sample(state, jax.random.fold_in(jax.random.key(0), number), 32)
        state = buffer.update_priority(state, batch.index, batch.data["t"] % 11.0)
        return state, (batch.index.slot, batch.weight, batch.data)

    return jax.lax.scan(step, state, jnp.arange(BATCHES))[1]


def killed(name: str, seed: int, tmp_path: Path) -> int:
    """Kill a child that saves at a random moment, and check what loads. Return the number of that save."""
    child, path, loading, again_at = (str(tmp_path / which) for which in ("child", "saved", "loaded", "again"))
    os.mkdir(child)
    process = subprocess.Popen([sys.executable, "-c", _CHILD, name, child, path], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    time.sleep(random.Random(seed).uniform(0, 0.4))
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = [int(line) for line in process.stdout.read().split()] or [1]
    process.stdout.close()
    into = made(name, loading) if name == "Memmap" else None  # the files of the child are still there
    loaded, again, number = fbuf.load(path, into, extra=True)
    # Every save but the last has ended, and one in the background, which the next save waits for.
    assert max(begun[-1] - 2, 1) <= number <= begun[-1], f"{name}, seed {seed}: began {begun}, loaded {number}"
    buffer, state = first(name, again_at)
    for n in range(1, number + 1):
        state = moment(buffer, state, n)
    for a, b in zip(jax.tree.leaves(batches(loaded, again)), jax.tree.leaves(batches(buffer, state)), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=f"{name}, seed {seed}, save {number}")
    fbuf.save(path, loaded, again)
    return int(number)
