"""Sharded buffers with shards of unequal fill and mass, and the same rows in one buffer.

Cases for eight devices are in files named `eight_devices*.py`, which `run` runs in a process of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf._buffer import state as state_ops
from fbuf.samplers import Prioritized, Staleness, Uniform
from fbuf.sharded import Sharded
from tests.support import members as oracle
from tests.support.processes import devices, run_python
from tests.support.uniformity import chi_square_z

LANES, LENGTH = 16, 24
CAPACITY = LANES * LENGTH
EMPTY = (6, 7)  # lanes of a shard without rows
SAMPLERS = {
    "uniform": Uniform(),
    "episodes": Uniform(over="episodes"),
    "prioritized": Prioritized(normalize=None),
    "batch": Prioritized(beta=0.7, stratified=False),
    "buffer": Prioritized(normalize="buffer", largest="held"),
    "inverse": Staleness(40, decay="inverse"),
    "exponential": Staleness(40, version="version", decay="exponential", half_life=3.0),
}


def run(tier: str, *files: str, share: str = "0/1") -> None:
    """Run the cases of a tier in files named `eight_devices*.py`; fail if there are none."""
    code = "import sys, pytest; sys.exit(pytest.main(['-q', '-n', '0', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    paths = [f"tests/sharded/{file}.py" for file in files]
    run_python(code, "--tier", tier, "--share", share, *paths, **devices(8))


def mesh_of(number: int = 8, **settings: Any) -> jax.sharding.Mesh:
    return jax.make_mesh((number,), ("data",), devices=jax.devices()[:number], **settings)


def buffer_of(sampler: str, **settings: Any) -> fbuf.Buffer:
    part = SAMPLERS[sampler]
    if part.by_episode:
        settings = {"view": fbuf.views.Sequence(2, autoreset="same_step"), **settings}
    return fbuf.Buffer(CAPACITY, lanes=LANES, sampler=part, **settings)


@functools.cache
def rows_and_masks() -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Return rows [N, E], which of them are added, and their priorities: lanes differ a lot in both."""
    rng, shape = np.random.default_rng(0), (LENGTH + 4, LANES)
    number = rng.integers(2, LENGTH + 5, LANES)
    number[list(EMPTY)] = 0
    mask = np.arange(shape[0])[:, None] < number[None, :]
    rows = {
        "id": np.arange(shape[0] * LANES, dtype=np.int32).reshape(shape),
        "version": np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None] // 4, shape),
        "terminated": rng.random(shape) < 0.15,
        "truncated": np.zeros(shape, bool),
    }
    priority = 10 ** rng.uniform(-2, 2, shape) * 10 ** rng.uniform(-1, 1, LANES)
    return rows, mask, priority.astype(np.float32)


def example() -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype), rows_and_masks()[0])


def fill(buffer: Any) -> Any:
    rows, mask, priority = rows_and_masks()
    own = buffer.buffer if isinstance(buffer, Sharded) else buffer
    given = {"priority": priority} if own.sampler.prioritized else {}
    return buffer.extend(buffer.init(example()), rows, mask=mask, **given)


def held() -> np.ndarray:
    """Return which rows are held in the end, by id: the newest of each lane."""
    _, mask, _ = rows_and_masks()
    later = mask[::-1].cumsum(axis=0)[::-1]
    return np.asarray(mask & (later <= LENGTH)).reshape(-1)


def drawable(buffer: fbuf.Buffer) -> np.ndarray:
    """Return 1 for each anchor, by id."""
    other = dataclasses.replace(buffer, sampler=Uniform())
    return (chances(other, fill(other)) > 0).astype(np.int64)


def chances(buffer: fbuf.Buffer, state: Any) -> np.ndarray:
    opened = state.open()
    anchors = state_ops.anchor_set(buffer, opened)
    inspected = buffer.sampler.inspect(opened.sampler, anchors).probability
    open_slots = buffer.get(state, jnp.arange(buffer.capacity))
    anchors = np.asarray(state_ops.is_anchor(opened, open_slots.index.slot, open_slots.mask))
    each = np.full(buffer.capacity, 1 / anchors.sum()) if inspected is None else np.asarray(inspected, np.float64)
    out = np.zeros(rows_and_masks()[0]["id"].size)
    out[np.asarray(open_slots.data["id"])[anchors]] = each[anchors]
    return out


def shard_of(rows: np.ndarray) -> np.ndarray:
    """Return the shard of eight that holds each row, by id."""
    return (rows % LANES) // (LANES // 8)


def ids(batch: Any) -> np.ndarray:
    data = np.asarray(batch.data["id"])
    return data[:, 0] if data.ndim == 2 else data


def check_draws(sampler: str, draw: Any, draws: int, size: int = 2**15) -> None:
    """Rows are drawn as often as they should be, and say so; weights follow from it."""
    buffer = buffer_of(sampler)
    sharded = Sharded(buffer, mesh_of(), draw=draw)
    state, chance = fill(sharded), chances(buffer, fill(buffer))
    share = np.bincount(shard_of(np.arange(chance.size)), weights=chance, minlength=8)
    assert (share == 0).sum() == 1 and share.max() > 1.2 * share[share > 0].min()
    peek = jax.jit(sharded.peek, static_argnums=2)
    counts, turns = np.zeros(chance.size), -(-draws // size)
    for turn in range(turns):
        batch = jax.device_get(peek(state, jax.random.key(turn), size))
        drawn = ids(batch)[batch.mask]
        counts += np.bincount(drawn, minlength=chance.size)
    assert batch.mask.all() == (draw == "global")
    np.testing.assert_allclose(batch.probability[batch.mask], chance[drawn], rtol=1e-6)
    assert not batch.weight[~batch.mask].any() and not batch.probability[~batch.mask].any()
    np.testing.assert_array_equal(batch.index.shard, np.where(batch.mask, shard_of(ids(batch)), 8))

    part, rows = buffer.sampler, np.full(8, 1 / 8) if draw == "local" else share
    member = shard_of(np.arange(chance.size))
    every = np.zeros(chance.size)
    exact = oracle.weights([chance[member == s].tolist() for s in range(8)], rows.tolist(), getattr(part, "beta", 0.0))
    for s, own in enumerate(exact):
        every[member == s] = own
    normalize = getattr(part, "normalize", None)
    weight = every[drawn] / {None: 1.0, "batch": every[drawn].max(), "buffer": every.max()}[normalize]
    np.testing.assert_allclose(batch.weight[batch.mask], weight, rtol=1e-6)

    if draw == "local":  # each shard draws as many
        chance = chance / np.where(share > 0, share, 1)[shard_of(np.arange(chance.size))]
    z = chi_square_z(counts, chance, groups=7 if draw == "local" else 1)
    stratified = getattr(part, "stratified", False)
    assert z < 3.1 and (stratified or z > -3.1), z


def step_of(sharded: Any, size: int) -> Any:
    """Return a step of every method, for an outer `jit` with a donated state."""

    def step(state: Any, rows: Any, key: jax.Array) -> Any:
        state = sharded.extend(state, rows)
        state, batch = sharded.sample(state, key, size)
        if sharded.buffer.sampler.prioritized:
            state = sharded.update_priority(state, batch.index, jnp.float32(1000) * batch.probability)
        return sharded.cut(state), (batch, sharded.stats(state), sharded.size(state), sharded.can_sample(state))

    return step


def in_place(sharded: Sharded, row: Any, rows: int, size: int) -> tuple[Any, Any]:
    leading = (rows, sharded.buffer.lanes)
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*leading, *x.shape), x.dtype), row)
    state = jax.eval_shape(sharded.init, row)
    split = jax.sharding.NamedSharding(sharded.mesh, jax.sharding.PartitionSpec(sharded.axis))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), state)
    key = jax.eval_shape(lambda: jax.random.key(0))
    program = jax.jit(step_of(sharded, size), donate_argnums=0).lower(state, many, key).compile()
    return program, program.as_text()
