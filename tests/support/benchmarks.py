"""Frames and buffers for the tests of the benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np

import fbuf
from benchmarks import bench_deduplicated


def made_up(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Frames with a moving square, and episodes of 1 to 40 frames."""
    random = np.random.default_rng(seed)
    frames = np.zeros((count, 84, 84), np.uint8)
    for t in range(count):
        frames[t, 3 * t % 70 : 3 * t % 70 + 9, t % 60 : t % 60 + 9] = 1 + t % 200
    starts = np.zeros(count, np.bool_)
    starts[np.minimum(np.cumsum(random.integers(1, 40, count)), count - 1)] = True
    starts[0] = True
    return frames, starts


def deduplicated(**parts: Any) -> fbuf.storages.Deduplicated:
    return fbuf.storages.Deduplicated(keys=("obs",), **parts)


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (count, 84, 84), np.uint8)


def written(storage: Any, frames: np.ndarray, **options: Any) -> Any:
    buffer = fbuf.uniform(len(frames), storage=storage)
    lots = bench_deduplicated.lots({"obs": frames}, 2)
    return bench_deduplicated.write_all(buffer, buffer.init({"obs": frames[0]}), lots, **options)
