"""Frozen buffers beside `Device` buffers that hold the same rows."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import DataSet
from fbuf.views import Episode, Hindsight, Row, Sequence, Transition
from fbuf.writers import Frozen
from tests import pieces

BATCH = 6
STACKS = Transition(stack=3, n_step=2)
SAMPLERS = {
    "Uniform": Uniform(),
    "Uniform(over='episodes')": Uniform(over="episodes"),
    "Epoch": Epoch(),
    "Consume": Consume(2),
    "Prioritized": Prioritized(),
    "Prioritized(on='host')": Prioritized(on="host"),
    "Prioritized(replace=False)": Prioritized(replace=False, largest="held"),
    "Ranked": Ranked(uniform=0.2, largest="held"),
    "Staleness(version=...)": Staleness(6, version="action"),
    "Staleness": Staleness(4, unit=3),
}
VIEWS = {
    "Row": Row(),
    "Transition": Transition(n_step=2, stack=3),
    "Sequence('stop')": Sequence(4, stride=2),
    "Sequence('mask')": Sequence(4, boundary="mask", at=1),
    "Sequence('cross')": Sequence(4, boundary="cross"),
    "Episode": Episode(6),
    "Hindsight": Hindsight(
        Transition(n_step=2, stack=3), lambda a, g: -(a != g).astype(jnp.float32), goal="goal", achieved="reached"
    ),
}


def device(rows: pieces.Rows, **settings: Any) -> tuple[fbuf.Buffer, Any]:
    """The oracle."""
    buffer = fbuf.Buffer(len(rows["action"]), **settings)
    return buffer, buffer.extend(buffer.init({name: array[0] for name, array in rows.items()}), rows)


def same(one: Any, two: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@functools.cache
def stepping(buffer: fbuf.Buffer) -> Any:
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, key: Any) -> Any:
        state, batch = buffer.sample(state, key, BATCH)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.arange(1.0, BATCH + 1))
        return state, batch

    return step


def check_batches(path: Path, rows: pieces.Rows, sampler: str, view: str) -> None:
    """Draw and update as a buffer on the device does, bit for bit."""
    settings: Any = {"view": VIEWS[view], "sampler": SAMPLERS[sampler], "episode_end": ("terminated", "truncated")}
    one, two = fbuf.datasets.open(path, **settings), device(rows, **settings)
    if one[1].anchors is not None:
        same((one[1].anchors.flags, one[1].anchors.count), (two[1].anchors.flags, two[1].anchors.count))
    drawn = 0
    for i in range(6):
        (one_state, batch), (two_state, wanted) = (
            stepping(buffer)(state, jax.random.key(i)) for buffer, state in (one, two)
        )
        same(batch, wanted)
        drawn += int(batch.mask.sum())
        one, two = (one[0], one_state), (two[0], two_state)
    same(one[0].stats(one[1]), two[0].stats(two[1]))
    assert drawn > BATCH


def frozen(capacity: int, sampler: Any, view: Any) -> tuple[fbuf.Buffer, Any]:
    """A buffer of a data set that there is none of, and the shapes of its state."""
    buffer = fbuf.Buffer(capacity, storage=DataSet("x"), writer=Frozen(), sampler=sampler, view=view)
    spec = {leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in pieces.SCHEMA.leaves}
    rows = buffer.storage.abstract(buffer.geometry, spec, jax.tree.structure(spec))
    return buffer, jax.eval_shape(functools.partial(fbuf._buffer._ahead.empty_state, buffer), rows)
