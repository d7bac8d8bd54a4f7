"""Run the cases of flashbax, with its buffers used as documented."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.defects import Outcome


def items(capacity: int, batch: int = 256) -> Any:
    """Return a prioritised item buffer with alpha 1 that takes sequences of rows."""
    import flashbax

    return flashbax.make_prioritised_item_buffer(
        capacity, 1, min(batch, capacity), add_sequences=True, priority_exponent=1.0
    )


def eight(rows: int = 8) -> tuple[Any, Any]:
    """Return a buffer of capacity 8 with rows 0, 1, ... of priority 1."""
    buffer = items(8)
    state = buffer.init({"t": jnp.int32(0)})
    for t in range(rows):
        state = buffer.add(state, {"t": jnp.array([t], jnp.int32)})
    return buffer, state


def put(buffer: Any, state: Any, indices: Any, priorities: Any) -> Any:
    return buffer.set_priorities(state, jnp.asarray(indices, jnp.int32), jnp.asarray(priorities, jnp.float32))


def leaves(state: Any) -> np.ndarray:
    tree = state.sum_tree_state
    return np.asarray(tree.nodes[2**tree.tree_depth - 1 :])


def root(state: Any) -> float:
    return float(state.sum_tree_state.nodes[0])


def new_row_priority() -> Outcome:
    buffer, state = eight(1)
    state = put(buffer, state, [0], [2.75])
    state = buffer.add(state, {"t": jnp.array([1], jnp.int32)})
    leaf = float(leaves(state)[1])
    return Outcome(f"largest 2.75: the next row gets {leaf:.4g}", leaf == 2.75)


def not_finite() -> Outcome:
    buffer, state = eight()
    state = put(buffer, state, [0], [np.nan])
    state = put(buffer, state, [0], [1.0])
    batch = buffer.sample(state, jax.random.key(0))
    drawn = sorted(set(np.asarray(batch.indices).tolist()))
    text = f"after NaN, then 1.0: the sum is {root(state):.3g}, rows drawn: {drawn}"
    return Outcome(text, bool(np.isfinite(root(state))))


def negative() -> Outcome:
    buffer, state = eight(2)
    state = put(buffer, state, [0], [-3.0])
    leaf = float(leaves(state)[0])
    return Outcome(f"-3 is stored: the leaf is {leaf:.3g}, the sum {root(state):.3g}", leaf >= 0)


def out_of_range() -> Outcome:
    buffer, state = eight()
    state = put(buffer, state, [100], [5.0])
    total = float(leaves(state).sum())
    return Outcome(
        f"index 100 of 8: the root is {root(state):.4g}, the sum of the leaves {total:.4g}", root(state) == total == 8
    )


def never_written() -> Outcome:
    buffer, state = eight(2)
    state = put(buffer, state, [5], [5.0])
    drawn = sorted(set(np.asarray(buffer.sample(state, jax.random.key(0)).indices).tolist()))
    return Outcome(f"priority of slot 5 in a buffer of two rows: rows drawn: {drawn}", drawn == [0, 1])


def empty_sample() -> Outcome:
    buffer = items(8)
    batch = buffer.sample(buffer.init({"t": jnp.int32(0)}), jax.random.key(0))
    chance = float(batch.probabilities[0])
    return Outcome(f"row {int(batch.indices[0])}, probability {chance}, no error", bool(np.isfinite(chance)))


def stale_windows(length: int = 16, window: int = 4) -> Outcome:
    import flashbax

    buffer = flashbax.make_prioritised_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=256,
        sample_sequence_length=window,
        period=1,
        min_length_time_axis=window,
        max_length_time_axis=length,
    )
    state = buffer.init({"t": jnp.int32(0)})
    state = buffer.add(state, {"t": jnp.arange(length, dtype=jnp.int32)[None]})
    indices = buffer.sample(state, jax.random.key(0)).indices
    state = buffer.add(state, {"t": jnp.arange(length, length + 3, dtype=jnp.int32)[None]})
    state = buffer.set_priorities(state, indices, jnp.full(256, 100.0))
    broken = total = 0
    for seed in range(5):
        steps = np.diff(np.asarray(buffer.sample(state, jax.random.key(1 + seed)).experience["t"]), axis=1)
        broken, total = broken + int((steps != 1).any(axis=1).sum()), total + 256
    return Outcome(f"{broken} of {total} windows cross the write position", broken == 0)


def shrunk(odd: float) -> tuple[Any, Any, float]:
    """Return a buffer whose priorities were about 1000, then about 0.01 (times `odd` in odd rows), and their sum."""
    rows, buffer = 10_000, items(16_384)
    state = buffer.init({"t": jnp.int32(0)})
    state = jax.jit(buffer.add)(state, {"t": jnp.arange(rows, dtype=jnp.int32)})
    order = np.random.default_rng(0).permutation(rows).reshape(-1, 250).astype(np.int32)
    run = jax.jit(
        lambda state, *items: jax.lax.scan(lambda s, i: (buffer.set_priorities(s, *i), None), state, items)[0]
    )
    for scale in (1e3, 1e-2):
        values = scale * (0.5 + np.random.default_rng(1).random(order.shape))
        values *= np.where((order % 2 == 1) & (scale < 1), odd, 1)
        state = run(state, order, values.astype(np.float32))
    return buffer, state, values.sum()


def drift() -> Outcome:
    _, state, total = shrunk(1.0)
    error = root(state) / total - 1
    return Outcome(f"relative error of the sum: {error:.1e}", abs(error) < 1e-5)


def zero_drawn() -> Outcome:
    buffer, state, _ = shrunk(0.0)
    sample = jax.jit(buffer.sample)
    drawn = np.concatenate([np.asarray(sample(state, key).indices) for key in jax.random.split(jax.random.key(0), 100)])
    missed = int((drawn % 2 == 1).sum())
    return Outcome(f"{missed:,} of 25,600 draws", missed == 0)


def mixture() -> Outcome:
    import flashbax

    buffers = [items(100, 64) for _ in range(2)]
    states = []
    for buffer in buffers:
        state = buffer.init({"t": jnp.int32(0)})
        states.append(buffer.add(state, {"t": jnp.arange(100, dtype=jnp.int32)}))
    mixer = flashbax.make_mixer(buffers, 64, [1, 1])
    batches = [np.asarray(mixer.sample(states, jax.random.key(i)).indices) for i in range(40)]
    seen = np.concatenate(batches)
    distinct = len(set(seen.tolist()))
    return Outcome(f"{distinct} of 100 rows drawn, mean {seen.mean():.1f}", distinct == 100)


def reachable(capacity: int = 2**24) -> Outcome:
    from flashbax.buffers import sum_tree

    tree = sum_tree.init(capacity)
    levels = [np.full(2**n, 2.0 ** (tree.tree_depth - n), np.float32) for n in range(tree.tree_depth + 1)]
    tree = tree.replace(nodes=jnp.asarray(np.concatenate(levels)))
    odd = np.asarray(jax.jit(sum_tree.stratified_sample, static_argnums=1)(tree, 2**18, jax.random.key(0))) % 2
    return Outcome(f"{odd.mean():.0%} of 262,144 draws are odd rows", abs(odd.mean() - 0.5) < 0.01)
