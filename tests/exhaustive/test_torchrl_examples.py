"""The three examples of torchrl's "CUDA prioritized replay buffers", with our verbs: where rows and where priorities live.

There: storage on CUDA with the sampler on CUDA; a memmap on the CPU with `sampler_device="cuda"`; storage on CUDA with
`sampler_device="cpu"`. Here the device is whatever JAX has, a CPU or a GPU. Small by default; at their full size (a million
rows of 32 floats, ten million in files, batches of 65,536) where there is a GPU.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers._hosttree import HostTree

WIDTH, STEPS = 32, 3


class Case(NamedTuple):
    """A buffer, what was asked of the documentation's, and how large it is there."""

    on: str
    files: bool
    capacity: int


CASES = {
    "rows and priorities on the device": Case("device", False, 1_000_000),
    "rows in files, priorities on the device": Case("device", True, 10_000_000),
    "rows on the device, priorities on the host": Case("host", False, 1_000_000),
}


def buffer_of(case: Case, path: Path, capacity: int, batch_size: int) -> fbuf.Buffer:
    storage = fbuf.storages.Memmap(str(path / "rows")) if case.files else fbuf.storages.Device()
    return fbuf.prioritized(
        capacity, alpha=0.7, beta=0.5, on=case.on, normalize="buffer", storage=storage, batch_size=batch_size
    )


def steps(buffer: fbuf.Buffer, number: int) -> tuple[Any, list[Any]]:
    """Adds rows with their errors, draws, sets the errors of what was drawn: one jitted program, the state donated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, key: jax.Array) -> Any:
        rows, ones = {"obs": jax.random.normal(key, (number, WIDTH), jnp.float32)}, jnp.ones((number,), jnp.float32)
        state, batch = buffer.sample(buffer.extend(state, rows, priority=ones), key)
        td_error = jax.random.uniform(key, batch.mask.shape, jnp.float32)
        return buffer.update_priority(state, batch.index, td_error), batch

    state, batches = buffer.init({"obs": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)}), []
    for i in range(STEPS):
        state, batch = step(state, jax.random.key(i))
        batches.append(batch)
    return state, batches


def where(array: jax.Array) -> str:
    return next(iter(array.devices())).platform


def check(case: Case, buffer: fbuf.Buffer, state: Any, batches: list[Any]) -> None:
    """Things are where they should be, and what was drawn was worth drawing."""
    device = jax.default_backend()
    sizes = buffer.nbytes(state)
    if case.on == "host":
        assert isinstance(state.sampler.tree, HostTree) and sizes["host"] > 4 * buffer.capacity
    else:
        assert where(state.sampler.tree) == device and sizes["device"] > 4 * buffer.capacity
    if case.files:
        assert sizes["disk"] >= 4 * WIDTH * int(buffer.size(state)) > sizes["device"] / 10
    else:
        assert where(state.rows["obs"]) == device and sizes["device"] > 4 * WIDTH * buffer.capacity
    for batch in batches:
        assert batch.data["obs"].shape == (buffer.batch_size, WIDTH) and where(batch.data["obs"]) == device
        assert bool(batch.mask.all()) and float(batch.weight.max()) <= 1 and float(batch.weight.min()) > 0
    stats = buffer.stats(state)
    assert not any(int(n) for name, n in stats.items() if name.startswith(("refused", "expired")))


def test_the_three_give_the_same_batches(tmp_path: Path) -> None:
    drawn = {}
    for name, case in CASES.items():
        buffer = buffer_of(case, tmp_path, capacity=3_000, batch_size=500)
        state, batches = steps(buffer, 1_200)
        check(case, buffer, state, batches)
        drawn[name] = jax.device_get([(b.data, b.index.slot, b.probability, b.weight) for b in batches])
    first, *others = drawn.values()
    for other in others:
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, other)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_at_full_size_on_an_accelerator(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    buffer = buffer_of(case, tmp_path, case.capacity, batch_size=65_536)
    state, batches = steps(buffer, 100_000)
    check(case, buffer, state, batches)
