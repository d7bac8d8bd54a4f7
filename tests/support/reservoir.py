"""Algorithm R in plain Python, and which rows many reservoirs hold."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import _words
from fbuf.writers import Reservoir
from tests.support.uniformity import chi_square_z

CAPACITY, AT_ONCE = 12, 40
EXAMPLE = {"id": jax.ShapeDtypeStruct((), np.int32)}


def buffer_of(seed: int = 0, capacity: int = CAPACITY, **parts: Any) -> fbuf.Buffer:
    return fbuf.Buffer(capacity, writer=Reservoir(seed), **parts)


def put(buffer: fbuf.Buffer, state: Any, first: int, number: int, mask: Any = None) -> Any:
    """Adds rows `first`, `first` + 1, ... at most forty."""
    mask = np.ones(number, bool) if mask is None else mask
    rows = {"id": first + np.arange(AT_ONCE, dtype=np.int32)}
    return buffer.extend(state, rows, mask=np.pad(mask, (0, AT_ONCE - number)))


def by_slot(buffer: fbuf.Buffer, state: Any) -> list[int]:
    got = jax.device_get(buffer.get(state, jnp.arange(buffer.capacity, dtype=jnp.int32)))
    return np.where(got.mask, got.data["id"], -1).tolist()


words_at = jax.jit(_words.at)


class Model:
    """Algorithm R, one row after the other, with Python's numbers of any size."""

    def __init__(self, key: Any, capacity: int, seen: int = 0):
        self.key, self.capacity, self.seen = jnp.asarray(key), capacity, seen
        self.slots: list[int] = [-1] * capacity

    def add(self, row: int) -> None:
        self.seen += 1
        high, low = divmod(self.seen, 2**32)
        one, other = words_at(self.key, np.uint32([high]), np.uint32([low]))
        random = (int(one[0]) << 32) + int(other[0])
        slot = self.seen - 1 if self.seen <= self.capacity else random * self.seen >> 64
        if slot < self.capacity:
            self.slots[slot] = row


def held_sets(rows: int, calls: int, capacity: int, runs: int) -> np.ndarray:
    """bool[runs, rows], which rows many buffers hold after some calls; each with a key of its own."""
    buffer = buffer_of(capacity=capacity)

    def one(key: jax.Array) -> jax.Array:
        state = buffer.writer.rekeyed(buffer.init(EXAMPLE), key)  # type: ignore[attr-defined]
        for ids in np.array_split(np.arange(rows, dtype=np.int32), calls):
            state = buffer.extend(state, {"id": ids})
        held = buffer.get(state, jnp.arange(capacity, dtype=jnp.int32)).data["id"]
        return jnp.zeros(rows, bool).at[held].set(True)

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(7), runs)))


def check_sets(calls: int) -> None:
    """Hold each set of three of eight rows equally often."""
    runs = 40_000
    held = held_sets(rows=8, calls=calls, capacity=3, runs=runs)
    assert (held.sum(axis=1) == 3).all()
    sets = list(itertools.combinations(range(8), 3))
    counts = np.array([held[:, list(s)].all(axis=1).sum() for s in sets])
    assert counts.sum() == runs and abs(chi_square_z(counts, np.full(len(sets), 1 / len(sets)))) < 4


def check_beyond(seen: int) -> None:
    """Go on as algorithm R does after so many rows."""
    buffer = buffer_of()
    state = put(buffer, buffer.init(EXAMPLE), 0, 12)
    own = dataclasses.replace(state.scatter.own, seen=jnp.array(divmod(seen, 2**32), jnp.uint32))
    state = dataclasses.replace(state, scatter=dataclasses.replace(state.scatter, own=own))
    model = Model(own.key, CAPACITY, seen)
    model.slots = list(range(12))
    for turn in range(2):
        state = put(buffer, state, 100 + 40 * turn, 40)
        for i in range(40):
            model.add(100 + 40 * turn + i)
    high, low = np.asarray(state.scatter.own.seen).tolist()
    assert (high << 32) + low == seen + 80 and by_slot(buffer, state) == model.slots
    assert float(buffer.stats(state)["seen"]) == pytest.approx(seen + 80, rel=1e-6)


def check_inplace(number: int) -> None:
    buffer = buffer_of(capacity=200_000)

    def step(state: Any, rows: Any, key: Any) -> Any:
        state, batch = buffer.sample(state, key, 8)
        return buffer.extend(state, rows), batch

    rows = {"id": jax.ShapeDtypeStruct((number,), np.int32)}
    fbuf.testing.assert_inplace(step, jax.eval_shape(buffer.init, EXAMPLE), rows, jax.random.key(0))
