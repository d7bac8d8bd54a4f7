"""What the tests of checkpoints share: steps that draw, write and update, and their batches compared bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from tests.support import combinations


def same(one: Any, two: Any) -> None:
    """Two pytrees of arrays agree in structure, dtypes, shapes and bits."""
    pairs = jax.tree_util.tree_flatten_with_path(one)[0]
    others = jax.tree_util.tree_flatten_with_path(two)[0]
    assert [path for path, _ in pairs] == [path for path, _ in others]
    for (path, a), (_, b) in zip(pairs, others, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


@functools.partial(jax.jit, static_argnums=0)
def step(buffer: fbuf.Buffer, state: Any, rows: Any, key: Any) -> Any:
    """Writes, draws, and gives new priorities."""
    state = buffer.extend(state, rows)
    state, batch = buffer.sample(state, key) if buffer.batch_size else buffer.sample(state, key, combinations.BATCH)
    if buffer.sampler.prioritized:
        error = jnp.arange(1.0, batch.mask.shape[0] + 1) * jnp.float32(0.37)
        state = buffer.update_priority(state, batch.index, error)
    return state, (batch.data, batch.index, batch.probability, batch.weight, batch.mask)


def steps(buffer: fbuf.Buffer, state: Any, first: int, number: int, size: int = 3) -> tuple[Any, list[Any]]:
    """So many steps; each has rows and a key of its own number."""
    out = []
    for i in range(first, first + number):
        rows = combinations.rows_of(np.random.default_rng(i), size)
        state, drawn = step(buffer, state, rows, jax.random.key(i))
        out.append(jax.device_get(drawn))
    return state, out


def elsewhere(buffer: fbuf.Buffer, path: Path) -> fbuf.Buffer:
    """The same buffer; where its rows lie in files at a path, at another."""
    if isinstance(getattr(buffer.storage, "path", None), str):
        return dataclasses.replace(buffer, storage=dataclasses.replace(buffer.storage, path=str(path)))
    return buffer


def load(path: Any, buffer: fbuf.Buffer, to: Path) -> tuple[fbuf.Buffer, Any]:
    """By the path alone where that can be."""
    if elsewhere(buffer, to) is buffer and "Hindsight" not in repr(buffer):
        loaded, state = fbuf.load(path)
        assert loaded == buffer
        return loaded, state
    return fbuf.load(path, elsewhere(buffer, to))
