"""How often rows of each age or version should be drawn."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

import fbuf
from fbuf.samplers import Staleness
from tests.support.uniformity import chi_square_z

DRAWS = 2**17
INVERSE = [1, 1 / 2, 1 / 3, 1 / 4]


def check_chances(buffer: fbuf.Buffer, rows: Any, weights: np.ndarray) -> Any:
    """Write rows `[call, N, ...]`; draw each slot as often as its weight says, and tell its chance; the state."""
    example = jax.tree.map(lambda x: x.reshape(-1)[0], rows)

    @jax.jit
    def run(rows: Any) -> Any:
        state, _ = lax.scan(lambda s, x: (buffer.extend(s, x), None), buffer.init(example), rows)
        batch = buffer.peek(state, jax.random.key(0), DRAWS)
        return state, (batch.mask, batch.weight, batch.probability, batch.index.slot)

    state, (mask, weight, probability, slot) = run(rows)
    assert np.all(mask) and np.all(weight == 1)
    chances = np.asarray(weights, np.float64) / np.sum(weights)
    np.testing.assert_allclose(probability, chances[np.asarray(slot)], rtol=1e-5)
    assert abs(chi_square_z(np.bincount(slot, minlength=buffer.capacity), chances)) < 4
    return state


def check_versions(sampler: Staleness, weights: Any) -> None:
    """Two lanes that are not level: what counts is the newest version of all."""
    version = np.stack([np.repeat(np.arange(5), 6), np.repeat(np.arange(5), 6) - 1], axis=1).astype(np.int32)
    held = np.zeros(40, int)
    held[[t % 20 * 2 + e for t in range(10, 30) for e in range(2)]] = version[10:].reshape(-1)
    expected = np.array([([*weights, 0, 0])[4 - v] for v in held])
    buffer = fbuf.Buffer(40, lanes=2, sampler=sampler)
    check_chances(buffer, {"version": version.reshape(10, 3, 2)}, expected)
