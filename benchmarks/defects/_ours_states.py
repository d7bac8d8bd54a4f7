"""Run fbuf's cases about keys, counters, copies, saved states, prefetch and draws without replacement."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks.defects import Outcome
from benchmarks.defects._ours import drawn, eight, refused


def same_key() -> Outcome:
    buffer, state = eight(8, [1.0, 2.0, 3.0, 4.0])
    one, two = drawn(buffer, state)[0], drawn(buffer, state)[0]
    same = bool((one == two).all())
    return Outcome(f"the same batch with the same key: {same}", same)


def counters() -> Outcome:
    """Add 20 rows to a buffer whose lap count is almost 2^32."""
    buffer = fbuf.Buffer(4)
    state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(4, dtype=jnp.int32))
    state = state.replace(ring=dataclasses.replace(state.ring, lap=jnp.full((1,), 2**32 - 2, jnp.uint32)))
    for t in range(4, 24):
        state = buffer.add(state, jnp.int32(t))
    rows = np.asarray(buffer.rows(state).data).tolist()
    held = buffer.get(state, buffer.rows(state).index).mask.all()
    return Outcome(
        f"after 2^32 laps: rows {rows}, all found by their index: {bool(held)}", rows == [20, 21, 22, 23] and held
    )


def copied_once() -> Outcome:
    one, other = fbuf.Buffer(100), fbuf.Buffer(200)
    state = one.extend(one.init(jnp.int32(0)), jnp.arange(100, dtype=jnp.int32))
    copy = other.extend(other.init(jnp.int32(0)), one.rows(state).data)
    kept = len(set(np.asarray(other.rows(copy).data)[:100].tolist()))
    return Outcome(f"extend(rows(state)): {kept} of 100 rows", kept == 100)


def epoch_sizes() -> Outcome:
    buffer = fbuf.Buffer(10, sampler=fbuf.samplers.Epoch())
    state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(10, dtype=jnp.int32))
    shown = []
    for seed in range(3):
        state, batch = buffer.sample(state, jax.random.key(seed), 4)
        shown.append((batch.data.shape[0], int(batch.mask.sum())))
    right = shown == [(4, 4), (4, 4), (4, 2)]
    return Outcome(f"batches of {[rows for _, rows in shown]}, all of shape [4], as the mask says", right)


def prefetched() -> Outcome:
    """Overwrite the rows of a prefetched batch, then set their priorities."""
    buffer = fbuf.Buffer(8, sampler=fbuf.samplers.Prioritized(), prefetch=1, batch_size=8)
    state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(8, dtype=jnp.int32))
    state, _ = buffer.sample(state, jax.random.key(0))
    state = buffer.extend(state, jnp.arange(8, 16, dtype=jnp.int32))
    state, batch = buffer.sample(state, jax.random.key(1))
    state = buffer.update_priority(state, batch.index, jnp.full(8, 50.0))
    stale, skipped = int(buffer.stats(state)["stale_draws"]), refused(buffer, state, "stale")
    state, batch = buffer.sample(state, jax.random.key(2))
    fresh = bool((np.asarray(batch.data) >= 8).all())
    text = (
        f"one batch of old rows, as documented: {stale} counted, {skipped} updates rejected; the next is new: {fresh}"
    )
    return Outcome(text, stale == 8 and skipped == 8 and fresh)


def dtypes() -> Outcome:
    large, buffer = 2**24 + 1, fbuf.Buffer(4)
    example = {"frame": jnp.zeros(8, jnp.uint8), "reward": jnp.float32(0), "id": jnp.int32(large)}
    state = buffer.add(buffer.init(example), example)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.rows)) // 4
    back = int(buffer.rows(state).data["id"][0])
    return Outcome(
        f"a row of 16 bytes takes {size}; int32 {large:,} is returned as {back:,}", back == large and size == 16
    )


def priorities_saved() -> Outcome:
    buffer, state = eight(8, [1.0, 2.0, 3.0, 4.0])
    same = _round_trip(buffer, _saved(state)[1], state)
    return Outcome(f"saved as arrays and loaded: the same draws: {same}", same)


def restored_twice() -> Outcome:
    buffer, state = eight(8, [1.0, 2.0, 3.0, 4.0])
    same = _round_trip(buffer, _saved(state)[1], state) and _round_trip(buffer, _saved(state)[1], state)
    return Outcome(f"saved as arrays and loaded twice: the same draws: {same}", same)


def _saved(state: Any) -> tuple[Any, Any]:
    """Save to a file of NumPy arrays and load it."""
    leaves, structure = jax.tree.flatten(state)
    file = io.BytesIO()
    np.savez(file, *leaves)
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return structure, jax.tree.unflatten(structure, [jnp.asarray(arrays[name]) for name in arrays.files])


def _round_trip(buffer: fbuf.Buffer, loaded: Any, state: Any) -> bool:
    return all((a == b).all() for a, b in zip(drawn(buffer, loaded), drawn(buffer, state), strict=True))
