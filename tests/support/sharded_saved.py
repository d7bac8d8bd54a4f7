"""Saved sharded buffers: what a load on another number of shards must draw."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fbuf
from fbuf.sharded import Sharded
from tests.support import sharded as support
from tests.support.trees import same


def on(buffer: fbuf.Buffer, shards: int) -> Any:
    """The buffer over so many devices; 0: the plain buffer."""
    return Sharded(buffer, support.mesh_of(shards)) if shards else buffer


def without_tickets(batch: Any) -> Any:
    batch = jax.device_get(batch)
    return dataclasses.replace(batch, index=dataclasses.replace(batch.index, generation=0))


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
                known = np.asarray(stale.generation != 0)
                assert int(target.stats(state)["refused_stale"] - before_update) == known.sum()
            error = (np.arange(64) + turn).astype(np.float32)
            state, own = (target.update_priority(s, b.index, error) for s, b in ((state, drawn), (own, wanted)))
        more = {name: leaf[:7] for name, leaf in rows.items()} | {"id": rows["id"][:7] + 1000 * (turn + 1)}
        state, own = target.extend(state, more), target.extend(own, more)
    assert int(target.size(state)) == int(target.size(own))


def check_on_host(storage: Any, check_vma: bool, path: Path) -> None:
    """Rows on the host, in a store of each shard, are those that a device would hold; also saved and loaded."""
    mesh = support.mesh_of(2, axis_types=(AxisType.Auto,))
    one, other = (Sharded(support.buffer_of("prioritized", storage=s), mesh) for s in (storage, fbuf.storages.Device()))
    specs = {"in_specs": (P("data"), P(None, "data"), P()), "out_specs": (P("data"), (P("data"), P(), P(), P()))}
    rows, _, _ = support.rows_and_masks()
    rows = {name: leaf[:2] for name, leaf in rows.items()}
    step = support.step_of(one, 32)
    local = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs), donate_argnums=0)
    states = [support.fill(one), support.fill(other)]
    steps = [local, jax.jit(support.step_of(other, 32), donate_argnums=0)]
    assert len(fbuf.stores()) == 2
    for turn in range(3):
        found = []
        for i in range(2):
            states[i], (batch, *_) = steps[i](states[i], rows, jax.random.key(turn))
            found.append(jax.device_get(batch))
        same(*found)
    assert len(fbuf.stores()) == 2 and local._cache_size() == 1
    wanted = jax.device_get(other.peek(states[1], jax.random.key(9), 32))
    fbuf.save(path, one, states[0])
    for target in (one, other):
        same(jax.device_get(target.peek(fbuf.load(path, target)[1], jax.random.key(9), 32)), wanted)
    plain, state = fbuf.load(path)
    fbuf.save(path / "device", other, states.pop())
    plain_other, other_state = fbuf.load(path / "device")
    same(*(jax.device_get(b.rows(s).data) for b, s in ((plain, state), (plain_other, other_state))))
    states.clear()
    del state
    gc.collect()
    assert not fbuf.stores()


def check_no_lanes(buffer: fbuf.Buffer, before: int, after: int, path: Path) -> None:
    source, target = on(buffer, before), on(buffer, after)
    state = source.init({"id": np.int32(0), "version": np.int32(0)})
    for version in range(5):
        ids = np.arange(120 * version, 120 * (version + 1), dtype=np.int32)
        given = {"priority": ids.astype(np.float32) + 1} if buffer.sampler.prioritized else {}
        state = source.extend(state, {"id": ids, "version": np.full(120, version, np.int32)}, **given)
    fbuf.save(path, source, state)
    loaded, moved = fbuf.load(path, target)
    held = seen(source, state)
    assert held and seen(target, moved) == held
    more = {"id": np.arange(1000, 1000 + buffer.capacity // 2, dtype=np.int32)}
    more["version"] = np.full(more["id"].shape, 5, np.int32)
    after_more = seen(target, target.extend(moved, more))
    assert len(after_more) <= buffer.capacity and after_more >= {(row, None) for row in more["id"].tolist()}


def seen(buffer: Any, state: Any) -> set[Any]:
    """Return the ids of all rows drawn, with their probabilities unless they were never saved."""
    batch = jax.device_get(buffer.peek(state, jax.random.key(0), 2**14))
    pairs = zip(batch.data["id"][batch.mask].tolist(), batch.probability[batch.mask].tolist(), strict=True)
    return {(row, None if row >= 1000 else f"{chance:.4g}") for row, chance in pairs}
