"""What people write themselves: a Python list of rows, and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers import ALPHA, BETA, Rows, Thunk


class Uniform:
    """A list used as a ring."""

    def __init__(self, capacity: int, example: Any):
        self.capacity, self.rows, self.position = capacity, [], 0
        self.random = np.random.default_rng(0)
        self.leaf: np.ndarray | None = None  # (|p| + eps)^alpha of each row

    def writer(self, rows: Rows) -> Thunk:
        items = [{name: leaf[i] for name, leaf in rows.items()} for i in range(len(next(iter(rows.values()))))]

        def write() -> None:
            for item in items:
                row = {name: np.array(leaf) for name, leaf in item.items()}  # an environment's array is its own
                if len(self.rows) < self.capacity:
                    self.rows.append(row)
                else:
                    self.rows[self.position] = row
                if self.leaf is not None:
                    self.leaf[self.position] = 1.0
                self.position = (self.position + 1) % self.capacity

        return write

    def _stacked(self, index: np.ndarray) -> Any:
        drawn = [self.rows[i] for i in index]
        return {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}

    def sampler(self, batch_size: int) -> Thunk:
        return lambda: self._stacked(self.random.integers(0, len(self.rows), batch_size))

    def stepper(self, batch_size: int) -> Thunk:
        def step() -> Any:
            total = np.cumsum(self.leaf)
            index = np.searchsorted(total, self.random.random(batch_size) * total[-1], side="right")
            batch = self._stacked(index)
            weight = (self.leaf[index] / total[-1]) ** -BETA
            self.leaf[index] = (np.abs(batch["reward"] - 1) + 1e-6) ** ALPHA
            return batch, weight / weight.max()

        return step


def Prioritized(capacity: int, example: Any) -> Uniform:
    """The same with an array of priorities."""
    driver = Uniform(capacity, example)
    driver.leaf = np.zeros(capacity)
    return driver
