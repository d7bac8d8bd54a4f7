"""Saved buffers with every transform continue with the same batches, here and in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf.storages import Compressed, Device
from fbuf.transforms import (
    Augment,
    Cast,
    Chain,
    Concatenate,
    Drop,
    Normalize,
    NormalizeReward,
    Rename,
    RewardToGo,
    Scale,
    Select,
    Split,
    Stack,
    Unstack,
)
from tests.checkpointing import same

EVERY_WRITE = Chain(
    (
        Rename({"o": "obs"}),
        Drop("junk"),
        Concatenate(("a", "b"), "ab"),
        Stack(("c", "d"), "cd"),
        Cast("action", "int16"),
        RewardToGo(0.9, episode_end=("terminated",)),
        ("at_write", Normalize("ab", clip=3.0)),
    )
)


EVERY_READ = Chain(
    (
        Select(("obs", "ab", "cd", "action", "reward", "reward_to_go")),
        Split("ab", ("a", "b"), (2, 1)),
        Unstack("cd", ("c", "d")),
        NormalizeReward(),
        Augment("obs", 1),
        ("inner", Chain((Scale("obs"), Normalize("c", of="action")))),
    )
)


def rows_of(seed: int, count: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "o": rng.integers(0, 256, (count, 4, 4), np.uint8),
        "junk": np.zeros(count, np.int8),
        "a": rng.normal(size=(count, 2)).astype(np.float32),
        "b": rng.normal(size=(count, 1)).astype(np.float32),
        "c": rng.normal(size=count).astype(np.float32),
        "d": rng.normal(size=count).astype(np.float32),
        "action": rng.integers(0, 9, count).astype(np.int32),
        "reward": rng.normal(3, 4, count).astype(np.float32),
        "terminated": rng.random(count) < 0.2,
    }


EXAMPLE = jax.tree.map(lambda x: x[0], rows_of(0))


def steps(buffer: fbuf.Buffer, state: Any, first: int, number: int) -> Any:
    def step(state: Any, rows: Any, key: Any) -> Any:
        state, batch = buffer.sample(buffer.extend(state, rows), key, 4)
        return state, (batch.data, batch.index, batch.weight)

    run, out = jax.jit(step), []
    for i in range(first, first + number):
        state, batch = run(state, rows_of(i), jax.random.key(i))
        out.append(jax.device_get(batch))
    return state, out


@pytest.mark.parametrize(
    ("storage", "ahead"), [(Device(), {"prefetch": 1, "batch_size": 4}), (Compressed(keys=("obs",)), {})]
)
def test_a_loaded_buffer_continues_with_the_same_batches(storage: Any, ahead: Any, tmp_path: Path) -> None:
    buffer = fbuf.Buffer(20, storage=storage, on_write=EVERY_WRITE, on_read=EVERY_READ, **ahead)
    state, _ = steps(buffer, buffer.init(EXAMPLE), 0, 9)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    assert loaded == buffer and again.transforms.given == state.transforms.given
    same(again.transforms, state.transforms)
    want = steps(buffer, state, 100, 3)[1]
    same(steps(loaded, again, 100, 3)[1], want)
