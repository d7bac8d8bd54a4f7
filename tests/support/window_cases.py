"""Buffers of windows, written in random parts with random cuts, compared with `tests/support/windows.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fbuf
from fbuf._indexing import anchors
from fbuf.views import Sequence
from tests.support import uniformity
from tests.support import windows as oracle
from tests.support.windows import ENDS, Episode, Lane

LANES, LENGTH, WRITES, ROWS, DRAWS = 2, 23, 24, 3, 256
ROW = {"number": np.int32(0), "id": np.int32(0), "terminated": np.bool_(False), "truncated": np.bool_(False)}


def random_view(rng):
    """Return any setting of windows of at most seven rows; half of them promise that every step is reached."""
    length = int(rng.integers(1, 8))
    bootstrap = int(rng.integers(length)) if rng.random() < 0.5 else 0
    burn_in = int(rng.integers(length - bootstrap)) if rng.random() < 0.5 else 0
    boundary = str(rng.choice(["stop", "stop", "mask", "mask", "cross"]))
    within = rng.random() < 0.5
    return Sequence(
        length,
        burn_in=burn_in,
        bootstrap=bootstrap,
        stride=int(rng.integers(1, length - burn_in - bootstrap + 1)) if within else int(rng.integers(1, length + 2)),
        dilation=1 if within else int(rng.integers(1, 4)),
        boundary=boundary,
        at=int(rng.choice([0, length - 1, rng.integers(length)])) if boundary == "mask" else 0,
        autoreset=str(rng.choice(["same_step", "next_step"])),
        episode="id" if rng.random() < 0.3 else None,
    )


def random_episodes(rng, view):
    """Return episodes of about as many rows as a lane receives; some as long as windows, or one row longer or shorter."""
    hows = [how for how in ENDS if how != "running" and (how != "id" or view.episode)]
    made, span = [], (view.length - 1) * view.dilation + 1
    while sum(episode.steps for episode in made) < WRITES * ROWS * 0.6:
        steps = int(rng.choice([rng.integers(1, 16), span, max(1, span - 1), span + 1]))
        made.append(Episode(steps, str(rng.choice(hows))))
    return [*made, Episode(int(rng.integers(1, 9)), "running")] if rng.random() < 0.7 else made


@functools.cache
def program(view, storage=None):
    """Return the buffer, and one compiled function that writes, cuts and draws."""
    settings = {} if storage is None else {"storage": storage}
    sampler = fbuf.samplers.Prioritized(alpha=1.0, eps=0.0, stratified=False)
    buffer = fbuf.Buffer(LANES * LENGTH, lanes=LANES, view=view, sampler=sampler, **settings)

    def write(state, step):
        rows, mask, cut = step
        state = buffer.extend(state, rows, mask=mask, priority=rows["number"].astype(jnp.float32) + 1)
        return buffer.cut(state, cut), None

    @jax.jit
    def run(state, steps, key):
        state = lax.scan(write, state, steps)[0]
        batch = buffer.peek(state, key, DRAWS)
        return state, batch, buffer.priorities(state, batch.index)

    return buffer, run


def parts(rng, lanes):
    """Return rows `[WRITES, ROWS, E]`, their mask, and cuts after each write; cut rows end a write."""
    shape = (WRITES, ROWS, LANES)
    rows = {name: np.zeros(shape, np.asarray(leaf).dtype) for name, leaf in ROW.items()}
    mask, cut = np.zeros(shape, bool), np.zeros((WRITES, LANES), bool)
    arrived = []
    for e, lane in enumerate(lanes):
        number, values, rate = 0, lane.rows, rng.choice([0.4, 0.9, 1.0])
        for w in range(WRITES):
            for n in range(ROWS):
                if number < len(lane) and not cut[w, e] and rng.random() < rate:
                    for name in rows:
                        rows[name][w, n, e] = values[name][number]
                    mask[w, n, e] = True
                    cut[w, e] = lane.cut_after[number]
                    number += 1
        arrived.append(number)
    return (rows, mask, cut), arrived


def check(view, seed, storage=None):
    """Compare anchors, windows, masks, priorities and the count of rows that are not learnt."""
    rng = np.random.default_rng(seed)
    buffer, run = program(view, storage)
    episodes = [random_episodes(rng, view) for _ in range(LANES)]
    next_step = view.autoreset == "next_step"
    lanes = [Lane(each, next_step) for each in episodes]
    steps, arrived = parts(rng, lanes)
    lanes = [lane.until(count) for lane, count in zip(lanes, arrived, strict=True)]
    state, *drawn = run(buffer.init(ROW), steps, jax.random.key(seed))
    batch, priority, opened, count = jax.device_get((*drawn, state.anchors.flags, state.anchors.count))
    expected, missed = {}, 0
    for e, lane in enumerate(lanes):
        oldest = max(0, len(lane) - LENGTH)
        expected |= {w.anchor % LENGTH * LANES + e: w for w in oracle.windows(view, lane, oldest)}
        missed += len(oracle.unlearnt(view, lane, oldest))
    assert set(np.flatnonzero(opened & anchors.ANCHOR).tolist()) == set(expected)
    assert int(count.sum()) == len(expected)
    assert buffer.summary(state, compare=0).unlearnt == missed
    assert batch.mask.all() == bool(expected)
    for i in range(DRAWS if expected else 0):
        window = expected[int(batch.index.slot[i])]
        data = {name: leaf[i].tolist() for name, leaf in batch.data.items()}
        assert data["mask"] == [row is not None for row in window.rows]
        assert data["number"] == [row or 0 for row in window.rows]
        assert (data["is_first"], data["learning_mask"]) == (list(window.first), list(window.learnt))
        assert priority[i] == window.by + 1
    return expected, missed


def check_chances(view, sampler):
    """Draw many windows: only those of the oracle, as often as their priorities say."""
    rng = np.random.default_rng(7)
    number, next_step = 400, view.autoreset == "next_step"
    episodes = [episode for _ in range(20) for episode in random_episodes(rng, view)]
    lane = Lane([episode for episode in episodes if episode.how not in ("cut", "running")], next_step).until(600)
    buffer = fbuf.Buffer(number, view=view, sampler=sampler)
    given = rng.uniform(0.1, 3, 600).astype(np.float32)
    prioritized = {"priority": given} if sampler.prioritized else {}
    state = buffer.extend(buffer.init(ROW), lane.rows, **prioritized)
    expected = np.zeros(number)
    for window in oracle.windows(view, lane, 200):
        expected[window.anchor % number] = given[window.by] if sampler.prioritized else 1
    slots = np.asarray(buffer.peek(state, jax.random.key(0), uniformity.DRAWS).index.slot)
    assert abs(uniformity.chi_square_z(np.bincount(slots, minlength=number), expected / expected.sum())) < 4
