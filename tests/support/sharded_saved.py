"""Saved sharded buffers: what a load on another number of shards must draw."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fbuf
from fbuf.sharded import Sharded
from tests.support import sharded as support
from tests.support.trees import same


def on(buffer: fbuf.Buffer, shards: int) -> Any:
    """The buffer over so many devices; 0: the plain buffer."""
    return Sharded(buffer, support.mesh_of(shards)) if shards else buffer


def without_tickets(batch: Any) -> Any:
    batch = jax.device_get(batch)
    return dataclasses.replace(batch, index=dataclasses.replace(batch.index, ticket=0))


def check_moved(buffer: fbuf.Buffer, before: int, after: int, path: Path) -> None:
    """A state that was saved on some shards draws on others what one does that was always there, also after more rows."""
    rows, _, _ = support.rows_and_masks()
    source, target = on(buffer, before), on(buffer, after)
    fbuf.save(path, source, support.fill(source))
    loaded, state = fbuf.load(path, target, example=support.example())
    assert loaded == target
    own = support.fill(target)
    sample = jax.jit(target.sample, static_argnums=2)
    stale = sample(own, jax.random.key(0), 64)[1].index
    for turn in range(4):
        state, drawn = sample(state, jax.random.key(turn), 64)
        own, wanted = sample(own, jax.random.key(turn), 64)
        same(without_tickets(drawn), without_tickets(wanted))
        assert drawn.mask.any()
        if buffer.sampler.prioritized:
            if not turn:
                before_update = target.stats(state)["refused_stale"]
                state = target.update_priority(state, stale, np.ones(64, np.float32))  # of the time before
                known = np.asarray(stale.ticket != 0)
                assert int(target.stats(state)["refused_stale"] - before_update) == known.sum()
            error = (np.arange(64) + turn).astype(np.float32)
            state, own = (target.update_priority(s, b.index, error) for s, b in ((state, drawn), (own, wanted)))
        more = {name: leaf[:7] for name, leaf in rows.items()} | {"id": rows["id"][:7] + 1000 * (turn + 1)}
        state, own = target.extend(state, more), target.extend(own, more)
    assert int(target.size(state)) == int(target.size(own))
