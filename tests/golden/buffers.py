"""Writes whole small buffers as checkpoints: `python -m tests.golden.buffers tests/golden/buffers-v1`.

Run once for each version of the format, by the release that first writes it; what it wrote then is never written again. What
is in them is worked out from numbers, so that a test needs nothing else to know it.
"""

import functools
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Compressed, Deduplicated, Device, Host, Memmap, Ragged
from fbuf.views import Row, Sequence, Transition

LANES, STEPS, ENDS = 2, 11, ("terminated", "truncated")
BUFFER = functools.partial(fbuf.Buffer, 16, lanes=LANES)
HELD, STACKS = Prioritized(largest="held", normalize="buffer"), Transition(n_step=2, stack=2, autoreset="same_step")
OBS, PLAIN = ("obs",), Transition(autoreset="same_step")
BUFFERS = {
    "device": BUFFER(sampler=HELD, view=STACKS),
    "ranked": BUFFER(storage=Device(), sampler=Ranked(), view=Row(), episode_end=ENDS),
    "compressed": BUFFER(storage=Compressed(keys=OBS), sampler=Uniform(), view=PLAIN),
    "deduplicated": BUFFER(storage=Deduplicated(keys=OBS, blocks=512), sampler=Epoch()),
    "host": BUFFER(storage=Host(keys=OBS), sampler=Prioritized(on="host"), prefetch=1, batch_size=4),
    "memmap": BUFFER(storage=Memmap(), sampler=Consume(2)),
    "episodes": BUFFER(sampler=Uniform(over="episodes"), view=Sequence(3, autoreset="same_step")),
    "staleness": BUFFER(sampler=Staleness(5, version="action")),
    "ragged": BUFFER(storage=Ragged(maximum={"obs": (8, 8)})),
}


def rows(first, number):
    """Rows `[number, 2, ...]` of steps from `first` on."""
    step = np.arange(first, first + number)[:, None] * LANES + np.arange(LANES)
    return {
        "obs": (step[..., None, None] % 5 * np.eye(8)).astype(np.uint8),
        "action": (step // 3).astype(np.int32),
        "reward": (step * 0.5).astype(np.float32),
        "terminated": step % 7 == 6,
        "truncated": step % 11 == 10,
    }


def example():
    return {name: leaf[0, 0] for name, leaf in rows(0, 1).items()}


def state_of(buffer):
    """Eleven steps of which eight a lane stay, two draws, and priorities where there are some."""
    state = buffer.init(example())
    for first in (0, 4):
        state = buffer.extend(state, rows(first, 4))
        state, batch = buffer.sample(state, jax.random.key(first), 4)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.arange(1.0, 5.0))
    return buffer.extend(state, rows(8, STEPS - 8))


def main(folder):
    for name, buffer in BUFFERS.items():
        fbuf.save(folder / name, buffer, state_of(buffer), extra={"step": 7, "key": jax.random.key(3)})
    replay = fbuf.Replay(BUFFERS["compressed"], example(), seed=5)
    replay.extend(rows(0, STEPS))
    replay.save(folder / "replay")
    for lock in folder.glob("*/lock"):
        lock.unlink()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    main(target)
