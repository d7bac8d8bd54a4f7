"""Run fbuf's cases about priorities, with public methods alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks.defects import Outcome

KEY = 0


def eight(rows: int = 8, priorities: Any = None) -> tuple[fbuf.Buffer, Any]:
    """Return a prioritized buffer of capacity 8 and alpha 1 with rows 0, 1, ... of these priorities."""
    buffer = fbuf.prioritized(8, alpha=1.0, beta=1.0, eps=0.0)
    state = buffer.init(jnp.int32(0))
    for t in range(rows):
        state = buffer.add(state, jnp.int32(t))
    if priorities is not None:
        state = update(buffer, state, range(len(priorities)), priorities)
    return buffer, state


def update(buffer: fbuf.Buffer, state: Any, slots: Any, priorities: Any) -> Any:
    """Set priorities of up to eight slots; padding to eight avoids compiling again."""
    slots = list(slots)
    index = buffer.get(state, np.array(slots + [slots[0]] * (8 - len(slots)), np.int32)).index
    values = np.array([*priorities, *[np.nan] * (8 - len(slots))], np.float32)
    return buffer.update_priority(state, pad(index, len(slots)), values)


def pad(index: fbuf.Index, number: int) -> fbuf.Index:
    """Keep the first `number` entries; the others name no row."""
    there = np.arange(8) < number
    return fbuf.Index(jnp.where(there, index.slot, jnp.int32(8)), jnp.where(there, index.generation, jnp.uint32(0)))


def drawn(buffer: fbuf.Buffer, state: Any, batch_size: int = 256) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the slots, probabilities and mask of a batch."""
    batch = buffer.peek(state, jax.random.key(KEY), batch_size)
    return np.asarray(batch.index.slot), np.asarray(batch.probability), np.asarray(batch.mask)


def chances(buffer: fbuf.Buffer, state: Any) -> dict[int, float]:
    """Return the probability of each slot in a batch of 256."""
    slot, probability, mask = drawn(buffer, state)
    return dict(zip(slot[mask].tolist(), probability[mask].tolist(), strict=True))


def refused(buffer: fbuf.Buffer, state: Any, reason: str) -> int:
    return int(buffer.stats(state)[f"refused_{reason}"])


def near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= 1e-5 * abs(wanted)


def new_row_priority() -> Outcome:
    buffer, state = eight(1, [2.75])
    state = buffer.add(state, jnp.int32(1))
    state = update(buffer, state, [0], [1.0])
    got = chances(buffer, state)
    leaf = got[1] / got[0]
    return Outcome(f"largest 2.75: the next row gets {leaf:.4g}", near(leaf, 2.75))


def not_finite() -> Outcome:
    buffer, state = eight(8, [1.0] * 8)
    state = update(buffer, state, [0, 1], [np.nan, np.inf])
    skipped = refused(buffer, state, "nonfinite")
    state = update(buffer, state, [0], [1.0])
    got = chances(buffer, state)
    even = set(got) == set(range(8)) and all(near(p, 1 / 8) for p in got.values())
    return Outcome(f"{skipped} rejected and counted; all 8 rows are drawn as before: {even}", skipped == 2 and even)


def negative() -> Outcome:
    buffer, state = eight(2, [-3.0, 1.0])
    got = chances(buffer, state)
    return Outcome(f"-3 counts as 3: probability {got.get(0, 0):.2g} beside a priority of 1", near(got.get(0, 0), 0.75))


def out_of_range() -> Outcome:
    buffer, state = eight(8, [1.0] * 8)
    index = fbuf.Index(jnp.full(8, 100, jnp.int32), jnp.ones(8, jnp.uint32))
    state = buffer.update_priority(state, pad(index, 1), np.full(8, 5.0, np.float32))
    got, skipped = chances(buffer, state), refused(buffer, state, "out_of_range")
    right = skipped >= 1 and all(near(p, 1 / 8) for p in got.values())
    return Outcome(f"rejected and counted; the sum of 8 leaves of 1 is {1 / max(got.values()):.4g}", right)


def never_written() -> Outcome:
    buffer, state = eight(2, [1.0, 1.0])
    index = fbuf.Index(jnp.full(8, 5, jnp.int32), jnp.ones(8, jnp.uint32))
    after = buffer.update_priority(state, pad(index, 1), np.full(8, 5.0, np.float32))
    before, now = buffer.stats(state), buffer.stats(after)
    skipped = sum(int(now[name]) - int(before[name]) for name in now if name.startswith("refused_"))
    got = set(chances(buffer, after))
    return Outcome(f"rejected ({skipped} counted); rows drawn: {sorted(got)}", got == {0, 1} and skipped >= 1)


def empty_sample() -> Outcome:
    buffer, state = eight(0)
    batch = buffer.peek(state, jax.random.key(KEY), 256)
    clean = not batch.mask.any() and not batch.weight.any() and not batch.probability.any()
    return Outcome(f"mask False, weight and probability 0, nothing NaN: {bool(clean)}", bool(clean))


def stale_windows(length: int = 16, window: int = 4) -> Outcome:
    """Draw, overwrite three rows, then set the priorities of the drawn windows."""
    buffer = fbuf.Buffer(length, view=fbuf.views.Sequence(window, episode_end=()), sampler=fbuf.samplers.Prioritized())
    state = buffer.extend(buffer.init({"t": jnp.int32(0)}), {"t": jnp.arange(length)})
    state, batch = buffer.sample(state, jax.random.key(0), 256)
    state = buffer.extend(state, {"t": jnp.arange(length, length + 3)})
    state = buffer.update_priority(state, batch.index, jnp.full(256, 100.0))
    broken = total = 0
    for seed in range(5):
        state, batch = buffer.sample(state, jax.random.key(1 + seed), 256)
        steps = np.diff(np.asarray(batch.data["t"]), axis=1)
        broken, total = broken + int((steps != 1).any(axis=1).sum()), total + 256
    return Outcome(
        f"{broken} of {total} windows cross it; {refused(buffer, state, 'stale')} stale updates rejected", broken == 0
    )


def shrunk(odd: float) -> tuple[fbuf.Buffer, Any, np.ndarray]:
    """Return a buffer whose priorities were about 1000, then about 0.01 (times `odd` in odd rows), and the priorities."""
    rows = 10_000
    buffer = fbuf.prioritized(16_384, alpha=1.0, eps=0.0)
    state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(rows, dtype=jnp.int32))
    order = np.random.default_rng(0).permutation(rows).reshape(-1, 250).astype(np.int32)
    leaf = np.zeros(rows)
    for scale in (1e3, 1e-2):
        values = scale * (0.5 + np.random.default_rng(1).random(order.shape))
        values *= np.where((order % 2 == 1) & (scale < 1), odd, 1)
        state = _updated(buffer, state, order, values.astype(np.float32))
        leaf[order] = values
    return buffer, state, leaf


@functools.partial(jax.jit, static_argnums=0)
def _updated(buffer: fbuf.Buffer, state: Any, *items: Any) -> Any:
    def step(state: Any, item: Any) -> Any:
        return buffer.update_priority(state, buffer.get(state, item[0]).index, item[1]), None

    return jax.lax.scan(step, state, items)[0]


def drift() -> Outcome:
    buffer, state, leaf = shrunk(1.0)
    slot, probability, _ = drawn(buffer, state)
    error = float(np.median(leaf[slot] / probability)) / leaf.sum() - 1
    return Outcome(f"relative error of the sum: {error:.1e}", abs(error) < 1e-5)


def zero_drawn() -> Outcome:
    buffer, state, _ = shrunk(0.0)
    slot, probability, mask = drawn(buffer, state, 25_600)
    missed = int((~mask | (slot % 2 == 1) | (probability <= 0)).sum())
    return Outcome(f"{missed} of 25,600 draws", missed == 0)


def mixture() -> Outcome:
    rows = jnp.arange(100, dtype=jnp.int32)
    both = fbuf.Mixture({name: fbuf.prioritized(100) for name in ("one", "other")})
    state = {name: buffer.extend(buffer.init(rows[0]), rows) for name, buffer in both.members}
    seen = np.concatenate([np.asarray(both.peek(state, jax.random.key(i), 64).data) for i in range(40)])
    distinct = len(set(seen.tolist()))
    return Outcome(f"{distinct} of 100 rows drawn, mean {seen.mean():.1f}", distinct == 100)


def reachable(capacity: int = 2**24) -> Outcome:
    buffer = fbuf.prioritized(capacity, alpha=1.0, stratified=False)
    state = buffer.init(jnp.int32(0))
    rows, extend = jnp.zeros(2**20, jnp.int32), jax.jit(buffer.extend, donate_argnums=0)
    for _ in range(capacity // 2**20):
        state = extend(state, rows)
    odd = drawn(buffer, state, 2**18)[0] % 2
    return Outcome(f"{odd.mean():.0%} of 262,144 draws are odd rows", abs(odd.mean() - 0.5) < 0.01)


def one_tiny_priority() -> Outcome:
    buffer = fbuf.prioritized(8, alpha=0.6, beta=0.4)
    state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(8, dtype=jnp.int32))
    state = update(buffer, state, [0], [0.0])
    state, batch = buffer.sample(state, jax.random.key(0), 256)
    weight = np.asarray(batch.weight)[np.asarray(batch.index.slot) > 0]
    text = f"weights of the others: {weight.min():.2g} to {weight.max():.2g} (normalised by the batch maximum)"
    return Outcome(text, weight.min() > 0.5)


def alpha_zero() -> Outcome:
    buffer = fbuf.prioritized(8, alpha=0.0, eps=0.0)
    state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(8, dtype=jnp.int32))
    state = buffer.set(state, alpha=1.0)
    state = update(buffer, state, range(8), [3.0] + [1.0] * 7)
    got = chances(buffer, state)
    return Outcome(f"alpha 0, then 1: priority 3 among seven of 1 has probability {got[0]:.2g}", near(got[0], 0.3))


def no_extension() -> Outcome:
    buffer, state = eight(8, [1.0, 2.0])
    right = len(chances(buffer, state)) > 1
    return Outcome(f"works without an extension: {right}", right)
