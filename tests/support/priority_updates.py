"""Two replays with one history, of which one sets new priorities at once, compared bit for bit."""

from typing import Any

import jax
import numpy as np

import fbuf
from fbuf import samplers
from tests.support.trees import same

EXAMPLE = {"x": np.zeros(2, np.float32), "n": np.int32(0)}
SAMPLERS = {
    "proportional": samplers.Prioritized(),
    "held": samplers.Prioritized(largest="held", normalize="buffer", uniform=0.2),
    "without replacement": samplers.Prioritized(replace=False),
    "ranked": samplers.Ranked(),
}


def rows(random: np.random.Generator, *axes: int) -> dict[str, np.ndarray]:
    return {"x": random.random((*axes, 2)).astype(np.float32), "n": np.asarray(random.integers(0, 99, axes), np.int32)}


def make(sampler: str = "proportional", capacity: int = 24, lanes: int | None = None, **settings: Any) -> fbuf.Replay:
    return fbuf.Replay(fbuf.Buffer(capacity, sampler=SAMPLERS[sampler], lanes=lanes), EXAMPLE, seed=5, **settings)


def compare(sampler: str, lanes: int | None, steps: int = 70) -> None:
    """Call the same methods on both. The second replay sets priorities, and reads rows, as other buffers do."""
    ours, theirs = pair = [make(sampler, lanes=lanes, strict=False) for _ in range(2)]
    assert ours._update is not None and ours._form == "drawn"
    theirs._update, theirs._form = None, "packed"
    random, axes, batch, kept = np.random.default_rng(0), () if lanes is None else (lanes,), None, 0
    for step in range(steps):
        if step == steps // 2:  # batches are now larger than the buffer
            row = rows(random, *axes)
            for replay in pair:
                replay.clear()
                replay.add(row)
            same(*(replay.sample(5, to="numpy") for replay in pair))
        kind = int(random.integers(0, 12))
        if kind < 4 or not len(ours):
            for _ in range(int(random.integers(1, 4 if step % 9 else 22))):
                row, mask = rows(random, *axes), random.random(axes) < 0.7 if kind == 0 else None
                for replay in pair:
                    replay.add(row, mask=mask)
        elif kind < 8:
            batch, other = (replay.sample(5, to="numpy") for replay in pair)
            same(batch, other)
        elif kind < 10 and batch is not None:  # of rows that may be overwritten by now
            error = random.normal(size=5)
            error[random.integers(0, 5)] *= 1 if random.random() < 0.8 else np.inf
            for replay in pair:
                replay.update_priority(batch.index, error if kind == 8 else error.astype(np.float32))
            kept += ours._update.packed is not None
        elif kind == 10:
            same(*(jax.device_get(replay.sample(3)) for replay in pair))
        else:
            more = rows(random, 2, *axes)
            for replay in pair:
                replay.extend(more)
        if step % 10 == 9:
            same(ours.state, theirs.state)
    assert kept > 1
