"""fbuf's side of the rows about priorities: small buffers, looked at through the verbs alone."""

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
    """A prioritized buffer of capacity 8, alpha 1, with some rows 0, 1, ... of the priorities given."""
    buffer = fbuf.prioritized(8, alpha=1.0, beta=1.0, eps=0.0)
    state = buffer.init(jnp.int32(0))
    for t in range(rows):
        state = buffer.add(state, jnp.int32(t))
    if priorities is not None:
        state = update(buffer, state, range(len(priorities)), priorities)
    return buffer, state


def update(buffer: fbuf.Buffer, state: Any, slots: Any, priorities: Any) -> Any:
    """New priorities, eight indices at a time, so that one program does it (slot C is nowhere)."""
    slots = list(slots)
    index = buffer.get(state, np.array(slots + [slots[0]] * (8 - len(slots)), np.int32)).index
    values = np.array([*priorities, *[np.nan] * (8 - len(slots))], np.float32)
    return buffer.update_priority(state, pad(index, len(slots)), values)


def pad(index: fbuf.Index, number: int) -> fbuf.Index:
    """The first `number`, and no rows after them."""
    there = np.arange(8) < number
    return fbuf.Index(jnp.where(there, index.slot, jnp.int32(8)), jnp.where(there, index.ticket, jnp.uint32(0)))


def drawn(buffer: fbuf.Buffer, state: Any, batch_size: int = 256) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slots, probabilities, mask) of a batch."""
    batch = buffer.peek(state, jax.random.key(KEY), batch_size)
    return np.asarray(batch.index.slot), np.asarray(batch.probability), np.asarray(batch.mask)


def chances(buffer: fbuf.Buffer, state: Any) -> dict[int, float]:
    """Slot to its probability, of the slots that a batch of 256 met."""
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
    return Outcome(f"largest 2.75: the next row got {leaf:.4g}", near(leaf, 2.75))


def not_finite() -> Outcome:
    buffer, state = eight(8, [1.0] * 8)
    state = update(buffer, state, [0, 1], [np.nan, np.inf])
    skipped = refused(buffer, state, "nonfinite")
    state = update(buffer, state, [0], [1.0])
    got = chances(buffer, state)
    even = set(got) == set(range(8)) and all(near(p, 1 / 8) for p in got.values())
    return Outcome(f"{skipped} refused and counted; all 8 rows are drawn as before: {even}", skipped == 2 and even)


def negative() -> Outcome:
    buffer, state = eight(2, [-3.0, 1.0])
    got = chances(buffer, state)
    return Outcome(f"-3 counts as its magnitude: drawn with {got.get(0, 0):.2g}", near(got.get(0, 0), 0.75))


def out_of_range() -> Outcome:
    buffer, state = eight(8, [1.0] * 8)
    index = fbuf.Index(jnp.full(8, 100, jnp.int32), jnp.ones(8, jnp.uint32))
    state = buffer.update_priority(state, pad(index, 1), np.full(8, 5.0, np.float32))
    got, skipped = chances(buffer, state), refused(buffer, state, "out_of_range")
    right = skipped >= 1 and all(near(p, 1 / 8) for p in got.values())
    return Outcome(f"refused and counted; the sum of 8 leaves of 1 is {1 / max(got.values()):.4g}", right)


def never_written() -> Outcome:
    buffer, state = eight(2, [1.0, 1.0])
    index = fbuf.Index(jnp.full(8, 5, jnp.int32), jnp.ones(8, jnp.uint32))
    after = buffer.update_priority(state, pad(index, 1), np.full(8, 5.0, np.float32))
    before, now = buffer.stats(state), buffer.stats(after)
    skipped = sum(int(now[name]) - int(before[name]) for name in now if name.startswith("refused_"))
    got = set(chances(buffer, after))
    return Outcome(f"refused ({skipped} counted); rows drawn: {sorted(got)}", got == {0, 1} and skipped >= 1)


def empty_sample() -> Outcome:
    buffer, state = eight(0)
    batch = buffer.peek(state, jax.random.key(KEY), 256)
    clean = not batch.mask.any() and not batch.weight.any() and not batch.probability.any()
    return Outcome(f"mask False, weight and probability 0, nothing NaN: {bool(clean)}", bool(clean))


def stale_windows(length: int = 16, window: int = 4) -> Outcome:
    """Draw, overwrite three rows, then hand in the priorities of the draw."""
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
        f"{broken} of {total} windows broken; {refused(buffer, state, 'stale')} stale updates refused", broken == 0
    )


def shrunk(odd: float) -> tuple[fbuf.Buffer, Any, np.ndarray]:
    """A buffer all of whose priorities went from about 1000 to about 0.01 (those of odd rows to `odd` of it), by row."""
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
    return Outcome(f"the sum is off by {error:.1e}", abs(error) < 1e-5)


def zero_drawn() -> Outcome:
    buffer, state, _ = shrunk(0.0)
    slot, probability, mask = drawn(buffer, state, 25_600)
    missed = int((~mask | (slot % 2 == 1) | (probability <= 0)).sum())
    return Outcome(f"{missed} of 25,600 draws", missed == 0)


def mixture() -> Outcome:
    """There is no mixer: half a batch from each of two buffers is two draws."""
    buffer = fbuf.prioritized(100)
    state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(100, dtype=jnp.int32))
    seen = np.concatenate([np.asarray(buffer.peek(state, jax.random.key(i), 128).data)[:64] for i in range(40)])
    distinct = len(set(seen.tolist()))
    return Outcome(f"half of each batch: {distinct} of 100 rows drawn, mean {seen.mean():.1f}", distinct == 100)


def reachable(capacity: int = 2**24) -> Outcome:
    buffer = fbuf.prioritized(capacity, alpha=1.0, stratified=False)
    state = buffer.init(jnp.int32(0))
    rows, extend = jnp.zeros(2**20, jnp.int32), jax.jit(buffer.extend, donate_argnums=0)
    for _ in range(capacity // 2**20):
        state = extend(state, rows)
    odd = drawn(buffer, state, 2**18)[0] % 2
    return Outcome(f"of 262,144 draws {odd.mean():.0%} fall on odd rows", abs(odd.mean() - 0.5) < 0.01)


def one_tiny_priority() -> Outcome:
    buffer = fbuf.prioritized(8, alpha=0.6, beta=0.4)
    state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(8, dtype=jnp.int32))
    state = update(buffer, state, [0], [0.0])
    state, batch = buffer.sample(state, jax.random.key(0), 256)
    weight = np.asarray(batch.weight)[np.asarray(batch.index.slot) > 0]
    text = f'the others\' weights: {weight.min():.2g} to {weight.max():.2g} (by the batch; normalize="buffer" gives theirs)'
    return Outcome(text, weight.min() > 0.5)


def alpha_zero() -> Outcome:
    buffer = fbuf.prioritized(8, alpha=0.0, eps=0.0)
    state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(8, dtype=jnp.int32))
    state = buffer.set(state, alpha=1.0)
    state = update(buffer, state, range(8), [3.0] + [1.0] * 7)
    got = chances(buffer, state)
    return Outcome(f"alpha 0, then 1: priority 3 beside seven of 1 is drawn with {got[0]:.2g}", near(got[0], 0.3))


def no_extension() -> Outcome:
    buffer, state = eight(8, [1.0, 2.0])
    right = len(chances(buffer, state)) > 1
    return Outcome(f"XLA alone, nothing compiled beforehand: draws by priority: {right}", right)
