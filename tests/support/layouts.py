"""A device buffer with rows of every form of packed leaf, and what it gives in either layout."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf._core.packed_leaf import is_packed
from fbuf.samplers import Prioritized
from fbuf.storages import Device
from fbuf.views import Row, Sequence, Transition
from tests.support.trees import same

LANES, STEPS = 3, 4


def rows_of(seed: int, number: int = 7) -> dict[str, Any]:
    rng, lead = np.random.default_rng(seed), (number, LANES)
    return {
        "obs": rng.integers(0, 255, (*lead, 12, 84), np.uint8),
        "action": rng.normal(size=(*lead, 5)).astype(np.float32),
        "hits": rng.random((*lead, 3)) < 0.5,
        "reward": rng.normal(size=lead).astype(np.float32),
        "terminated": rng.random(lead) < 0.1,
        "truncated": rng.random(lead) < 0.05,
    }


EXAMPLE = jax.tree.map(lambda x: x[0, 0], rows_of(0))
VIEWS = {
    "row": Row(),
    "stacks": Transition(n_step=2, stack=2, autoreset="same_step"),
    "windows": Sequence(4, boundary="mask", autoreset="same_step"),
}
FORMS = {"obs": "tiles", "action": "flat", "hits": "flat"}


def buffer_of(layout: Any, view: str = "row", capacity: int = 24, **parts: Any) -> fbuf.Buffer:
    return fbuf.Buffer(capacity, lanes=LANES, storage=Device(layout), view=VIEWS[view], **parts)


def packed_of(state: Any) -> dict[str, str]:
    return {name: leaf.packing.form for name, leaf in state.rows.items() if is_packed(leaf)}


def run(buffer: fbuf.Buffer) -> tuple[fbuf.BufferState, list[Any]]:
    """Return the state after some steps, their batches, and all rows."""
    state, out = buffer.init(EXAMPLE), []

    @jax.jit
    def step(state: Any, rows: Any, key: Any) -> Any:
        state, batch = buffer.sample(buffer.extend(state, rows), key, 8)
        first = jax.tree.map(lambda x: x.reshape(8, -1)[:, 0], batch.index)
        state = buffer.update_rows(state, first, {"action": jnp.ones((8, 5), jnp.float32)})
        return state, (batch.data, batch.mask, batch.weight)

    for seed in range(STEPS):
        state, drawn = step(state, rows_of(seed), jax.random.key(seed))
        out.append(jax.device_get(drawn))
    return state, [*out, jax.device_get(buffer.rows(state))]


def check_layouts_agree(view: str) -> None:
    """Both layouts give the same batches and rows, and either buffer takes a state of either."""
    plain, packed = (buffer_of(layout, view, sampler=Prioritized()) for layout in ("rows", "tiles"))
    (before, wanted), (state, got) = run(plain), run(packed)
    same(wanted, got)
    assert packed_of(before) == {} and packed_of(state) == FORMS
    for name, leaf in before.rows.items():
        assert state.rows[name].shape == leaf.shape and np.array_equal(np.asarray(state.rows[name]), leaf)
    same(plain.peek(state, jax.random.key(0), 4).data, packed.peek(before, jax.random.key(0), 4).data)
    assert str(state) == str(before)


def check_checkpoints(saved: str, loaded: str, path: Path, calls: int = 2) -> None:
    """A checkpoint of one layout loads in the other, and saves there without writing rows again; also resized."""
    buffer = buffer_of(saved, sampler=Prioritized())
    state = buffer.init(EXAMPLE)
    for seed in range(calls):
        state = buffer.extend(state, rows_of(seed, 3))
    fbuf.save(path, buffer, state)
    target = dataclasses.replace(buffer, storage=Device(loaded))
    got, again = fbuf.load(path, target)
    assert got == target and bool(packed_of(again)) == (loaded == "tiles")
    same(buffer.rows(state), target.rows(again))
    for capacity in (12, 30):
        other, resized = fbuf.load(path, dataclasses.replace(target, capacity=capacity), resize=True)
        newest = min(capacity // LANES, int(state.ring.size[0]))
        same(buffer.rows(state, last=newest).data, other.rows(resized, last=newest).data)
    assert fbuf.save(path, target, again).result().bytes_written < 8_000
