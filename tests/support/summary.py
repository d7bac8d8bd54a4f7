"""A history of writes, draws and updates kept as lists beside a buffer, from which every number of its summary is computed."""

import functools
import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np

import fbuf
from fbuf._buffer.summary import collect
from fbuf._core.pytree import item_bytes
from fbuf.samplers import Consume, Epoch
from tests.support import combinations as parts

LANES, BATCH = parts.LANES, parts.BATCH
MANY = 1 << 14  # rows compared by default


@functools.cache
def history(storage, sampler, view, writer="Ring", steps=7):
    """Return a buffer, its state, every row ever written, `[E, ...]` each, and how often each (slot, generation) was drawn."""
    buffer = parts.make(storage, sampler, view, writer)
    told = SimpleNamespace(buffer=buffer, state=buffer.init(parts.EXAMPLE), rows=[], drawn=Counter())
    rng = np.random.default_rng(3)
    for i in range(steps):
        rows = parts.rows_of(rng, 5)
        told.rows += [{name: leaf[t] for name, leaf in rows.items()} for t in range(5)]
        told.state, batch = buffer.sample(buffer.extend(told.state, rows), jax.random.key(i), BATCH)
        slots = zip(batch.index.slot.tolist(), batch.index.generation.tolist(), batch.mask.tolist(), strict=True)
        told.drawn.update((slot, generation) for slot, generation, there in slots if there)
        if buffer.sampler.prioritized:
            error = rng.gamma(1.0, 1.0, BATCH).astype(np.float32)
            told.state = buffer.update_priority(told.state, batch.index, error)
    return told


def plain_quantiles(values, weights=None):
    pairs = sorted(zip(values, weights or [1] * len(values), strict=True))
    pairs = [(value, weight) for value, weight in pairs if weight > 0]
    total = math.fsum(weight for _, weight in pairs)
    out = {"mean": math.fsum(v * w for v, w in pairs) / total, "min": pairs[0][0], "max": pairs[-1][0]}
    for name, level in zip(("q05", "q25", "median", "q75", "q95"), (0.05, 0.25, 0.5, 0.75, 0.95), strict=True):
        upto = itertools.accumulate(weight for _, weight in pairs)
        out[name] = next(v for (v, _), so_far in zip(pairs, upto, strict=True) if so_far >= level * total * (1 - 1e-9))
    return out


def plain_episodes(rows, length, exact):
    """Lengths of whole episodes and the number of others, from all rows ever written."""
    lengths, cut = [], 0
    for lane in range(LANES):
        ends = [bool(row["terminated"][lane] or row["truncated"][lane]) for row in rows]
        first = max(0, len(ends) - length)
        known = exact or len(ends) < length
        begun = first == 0 and known or (first > 0 and ends[first - 1] and exact)
        current = 0
        for end in ends[first:]:
            current += 1
            if end:
                lengths += [current] if begun else []
                cut += not begun
                begun, current = True, 0
        cut += current > 0
    return sorted(lengths), cut


def check(told, summary, compare=MANY):
    buffer, state = told.buffer, told.state
    stats = {name: np.asarray(value).item() for name, value in buffer.stats(state).items()}
    assert summary.stats == stats and summary.buffer == repr(buffer)
    assert (summary.size, summary.anchors) == (stats["size"], stats["anchors"])
    assert summary.capacity == buffer.capacity and summary.fill == summary.size / 40
    assert summary.refused == {n: stats[n] for n in fbuf._buffer.state.COUNTERS if stats[n]}
    assert summary.nbytes == buffer.nbytes(state)
    assert summary.to_dict() == json.loads(json.dumps(summary.to_dict()))

    rows = buffer.rows(state)
    there = np.asarray(rows.mask)
    assert summary.size == there.sum()
    if buffer.writer.streams:
        held = min(len(told.rows), buffer.geometry.length)
        ages = [age for age in range(held) for _ in range(LANES)]
        close(summary.ages, plain_quantiles(ages))
    if not isinstance(buffer.storage, fbuf.storages.Ragged):
        data = {name: np.asarray(leaf)[there] for name, leaf in rows.data.items()}
        number = min(summary.size, -(-compare // LANES) * LANES) if compare else 0
        data = {name: leaf[len(leaf) - number :] for name, leaf in data.items()}
        assert summary.compared == number
        for name, leaf in data.items():
            assert summary.leaves[name].distinct == (len({row.tobytes() for row in leaf}) if number else None)
            assert summary.leaves[name].raw == summary.size * item_bytes(parts.EXAMPLE[name])
        if number:
            whole = {tuple(leaf[i].tobytes() for leaf in data.values()) for i in range(number)}
            assert summary.distinct == len(whole) and summary.duplicates == 1 - len(whole) / number
    if buffer.writer.streams:
        exact = state.anchors is not None
        lengths, cut = plain_episodes(told.rows, buffer.geometry.length, exact)
        assert (summary.episodes.number, summary.episodes.cut) == (len(lengths), cut)
        close(summary.episodes.lengths, plain_quantiles([float(n) for n in lengths]) if lengths else None)
    else:
        assert summary.episodes is None


def close(found, expected, rtol=1e-5):
    if expected is None:
        assert found is None
        return
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=rtol, err_msg=name)


def check_chances(told):
    buffer, state = told.buffer, told.state
    seen, summary = collect.seen(buffer, state, MANY), buffer.summary(state)
    slot = slots_of(buffer, state)
    chance = np.zeros(buffer.capacity)
    anchor = seen.anchor
    each = np.full(anchor.shape, 1 / max(anchor.sum(), 1)) if seen.uniform else seen.probability
    chance[slot[anchor]] = each[anchor]
    assert abs(chance.sum() - 1) < 1e-5
    is_exact = not isinstance(buffer.sampler, (Epoch, Consume)) and getattr(buffer.sampler, "replace", True)
    for i in range(4):
        batch = buffer.peek(state, jax.random.key(100 + i), BATCH)
        mask, drawn = np.asarray(batch.mask), np.asarray(batch.index.slot)
        assert (chance[drawn[mask]] > 0).all() or isinstance(buffer.sampler, Epoch)
        if is_exact:
            np.testing.assert_allclose(chance[drawn[mask]], np.asarray(batch.probability)[mask], rtol=1e-5)
    some = chance[chance > 0]
    np.testing.assert_allclose(summary.effective_size, 1 / math.fsum(p * p for p in some), rtol=1e-5)
    likeliest = sorted(chance[slot[anchor]].tolist())[-math.ceil(0.01 * anchor.sum()) :]
    np.testing.assert_allclose(summary.likeliest, sum(likeliest), rtol=1e-5)
    ages, chances = seen.age[anchor].tolist(), chance[slot[anchor]].tolist()
    np.testing.assert_allclose(summary.drawn_ages.mean, np.average(ages, weights=chances), rtol=1e-5)


def slots_of(buffer, state):
    """int[L, E], slots in order of arrival; C where none."""
    slot = np.asarray(buffer.rows(state).index.slot)
    return slot.reshape(buffer.geometry.length, buffer.geometry.lanes)


def check_draws(told):
    seen, summary = collect.seen(told.buffer, told.state, MANY), told.buffer.summary(told.state)
    if not isinstance(told.buffer.sampler, (Consume, Epoch)):
        assert summary.draws is None and seen.draws is None
        return
    index = told.buffer.rows(told.state).index
    names = list(zip(np.ravel(index.slot).tolist(), np.ravel(index.generation).tolist(), strict=True))
    drawn = np.array([told.drawn[name] for name in names]).reshape(seen.anchor.shape)
    if isinstance(told.buffer.sampler, Epoch):
        left = int(told.buffer.stats(told.state)["epoch_left"])
        assert ((seen.draws <= drawn) | ~seen.anchor).all() and set(np.unique(seen.draws)) <= {0, 1}
        waits = (seen.probability > 0) & seen.anchor
        over = bool((waits == seen.anchor).all())  # all that were left have closed unnoticed: the next epoch begins
        assert not left or waits.sum() <= left or over
    else:
        assert (seen.draws == drawn)[seen.anchor].all()
    assert summary.draws is not None and summary.draws.max == seen.draws[seen.anchor].max()


def check_all(storage, sampler, view):
    told = history(storage, sampler, view)
    check(told, told.buffer.summary(told.state))
    check_chances(told)
    check_draws(told)


def check_unordered(storage, writer):
    """Rows in no order have ages, counted in rows that were kept, and no episodes."""
    told = history(storage, "Prioritized", "Row", writer)
    summary = told.buffer.summary(told.state)
    check(told, summary)
    check_chances(told)
    assert summary.episodes is None and summary.ages is not None and summary.ages.min == 0
    number = np.asarray(told.state.scatter.number[:, 0])
    assert summary.ages.max == number.max() - number[number > 0].min()
