"""Saves of whole buffers in processes that are killed: what is loaded is a save that was whole, and goes on bit for bit.

A child saves one moment after another, in the foreground and in the background by turns, each a few rows and priorities
further; it is killed at a random instant. What `load` gives then is compared with the same moment made anew: the next batches
must be the same, and it can be saved again. One kill by default; 20 of each storage where slow tests run, 200 with
`FBUF_EXHAUSTIVE=1`, and 1,000 batches then.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
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
import pytest

import fbuf
from fbuf import storages
from fbuf.samplers import Prioritized

ROOT = Path(__file__).parent.parent
EXHAUSTIVE = os.environ.get("FBUF_EXHAUSTIVE", "") not in ("", "0")
KILLS, BATCHES = (200, 1000) if EXHAUSTIVE else (20, 40)

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
    """Rows that say which save they were written before."""
    obs = np.random.default_rng(number).integers(0, 4, (count, 16, 16), np.uint8)
    return {"obs": obs, "t": np.arange(count, dtype=np.float32) + 100 * number}


@partial(jax.jit, static_argnums=0)
def priorities(buffer: fbuf.Buffer, state: fbuf.BufferState, error: jax.Array) -> fbuf.BufferState:
    return buffer.update_priority(state, buffer.last(state, 8).index, error)


def moment(buffer: fbuf.Buffer, state: fbuf.BufferState, number: int) -> fbuf.BufferState:
    """The state of the save of this number, from that of the one before."""
    return priorities(buffer, buffer.extend(state, rows_of(number)), jnp.arange(8.0) + number % 7)


def first(name: str, folder: str) -> tuple[fbuf.Buffer, fbuf.BufferState]:
    buffer = made(name, folder)
    state = buffer.init({"obs": np.zeros((16, 16), np.uint8), "t": np.float32(0)})
    return buffer, buffer.extend(state, rows_of(0, 500))


_CHILD = """
import sys
import fbuf
from tests.test_checkpoint_kills import first, moment
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
    """The next ones, each with priorities of its own."""

    def step(state: fbuf.BufferState, number: jax.Array) -> Any:
        state, batch = buffer.sample(state, jax.random.fold_in(jax.random.key(0), number), 32)
        state = buffer.update_priority(state, batch.index, batch.data["t"] % 11.0)
        return state, (batch.index.slot, batch.weight, batch.data)

    return jax.lax.scan(step, state, jnp.arange(BATCHES))[1]


def killed(name: str, attempt: int, tmp_path: Path) -> int:
    """The number of the save that is there after a kill."""
    folders = child, path, loading, anew = [str(tmp_path / which) for which in ("child", "saved", "loaded", "anew")]
    os.mkdir(child)
    process = subprocess.Popen([sys.executable, "-c", _CHILD, name, child, path], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    time.sleep(random.Random(attempt).uniform(0, 0.4))
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = [int(line) for line in process.stdout.read().split()] or [1]
    process.stdout.close()
    into = made(name, loading) if name == "Memmap" else None  # the child's files are there still
    loaded, again, number = fbuf.load(path, into, extra=True)
    # What was begun before the last one has ended, but for a save in the background, which the next one waits for.
    assert max(begun[-1] - 2, 1) <= number <= begun[-1]
    buffer, state = first(name, anew)
    for n in range(1, number + 1):
        state = moment(buffer, state, n)
    for a, b in zip(jax.tree.leaves(batches(loaded, again)), jax.tree.leaves(batches(buffer, state)), strict=True):
        np.testing.assert_array_equal(a, b)
    fbuf.save(path, loaded, again)
    del again, state
    gc.collect()
    for folder in folders:  # buffers of the same paths are the same values: nothing compiles again
        shutil.rmtree(folder, ignore_errors=True)
    return int(number)


def test_a_kill_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    killed("Compressed", 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", STORAGES)
def test_many_kills_leave_the_old_or_the_new(name: str, tmp_path: Path) -> None:
    numbers = [killed(name, attempt, tmp_path) for attempt in range(1, KILLS + 1)]
    assert len(set(numbers)) > 3, numbers  # they hit different moments
