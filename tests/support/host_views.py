"""One history of rows, added to a `Replay` and, each by one jitted call, to a state; batches are compared bit for bit."""

import functools

import jax
import numpy as np

import fbuf
from fbuf.views import Episode, Sequence, Transition
from tests.support.trees import same
from tests.support.two_replays import leaves_of

SAME, NEXT = {"autoreset": "same_step"}, {"autoreset": "next_step"}
ENDS = {"episode_end": ("terminated", "truncated")}
UNIFORM = fbuf.samplers.Uniform()
SAMPLERS = {
    "seen": fbuf.samplers.Prioritized(),
    "independent": fbuf.samplers.Prioritized(normalize=None, stratified=False),
    "buffer": fbuf.samplers.Prioritized(alpha=1.0, normalize="buffer"),
}
DEVICE = fbuf.storages.Device()
STORAGES = {
    "host": fbuf.storages.Host(),
    "some on the host": fbuf.storages.Host(keys=("obs/a", "reward"), slack=0),
    "compressed": fbuf.storages.Compressed(keys=("obs", "last", "action"), cache=1 << 20),
    "files": fbuf.storages.Memmap(),
}
VIEWS = {
    "n": Transition(n_step=3, **SAME),
    "n, reset rows": Transition(n_step=2, **NEXT),
    "n, final": Transition(n_step=2, final_observation="last"),
    "stack": Transition(stack=3, **SAME),
    "stack, n, repeat": Transition(stack=3, n_step=2, pad="repeat", **NEXT),
    "stack, n, final": Transition(stack=2, stack_keys=("obs/a",), n_step=4, final_observation="last"),
    "stack, final": Transition(stack=2, stack_keys=("obs/a",), final_observation="last"),
    "stop": Sequence(4, **SAME),
    "stop, learns": Sequence(2, burn_in=1, **NEXT),
    "stop, bootstrap": Sequence(4, burn_in=1, bootstrap=1, stride=2, **NEXT),
    "stop, stride": Sequence(4, stride=3, dilation=2, **SAME),
    "stop, one": Sequence(1, **NEXT),
    "cross": Sequence(4, burn_in=1, bootstrap=1, boundary="cross", stride=2, **SAME),
    "cross, learns": Sequence(3, burn_in=1, bootstrap=1, dilation=2, boundary="cross", **NEXT),
    "rows only": Sequence(4, episode_end=()),
    "mask": Sequence(4, boundary="mask", **SAME),
    "mask, resets": Sequence(4, boundary="mask", at=2, stride=2, **NEXT),
    "mask, learns": Sequence(4, boundary="mask", at=1, burn_in=1, bootstrap=1, dilation=2, **NEXT),
    "mask, strided": Sequence(6, boundary="mask", burn_in=2, bootstrap=1, stride=2, **SAME),
    "mask, last": Sequence(3, boundary="mask", at=2, stride=2, bootstrap=1, **SAME),
    "episode": Episode(5, **SAME),
    "episode, cut": Episode(3, longer="cut", **NEXT),
}


def row_of(random, lead, dtype=np.float32):
    """Return one row for each of the lanes `lead`."""

    def observation():
        return {"a": random.random((*lead, 2)).astype(np.float32), "b": np.asarray(random.random(lead), np.float16)}

    return {
        "obs": observation(),
        "last": observation(),
        "action": np.asarray(random.integers(0, 9, lead), np.int32),
        "reward": np.asarray(random.normal(size=lead), dtype),
        "terminated": np.asarray(random.random(lead) < 0.12),
        "truncated": np.asarray(random.random(lead) < 0.12),
    }


def compare(view, lanes, length=17, steps=70, size=9, seed=0, row_of=row_of, sampler=UNIFORM, storage=DEVICE):
    """Compare batches after every few rows, some of them masked, and cuts; return the share that was drawn in NumPy.

    With priorities set those of every second batch; then compare the states.
    """
    buffer = fbuf.Buffer(length * (lanes or 1), view=view, lanes=lanes, sampler=sampler, storage=storage)
    random, lead = np.random.default_rng(seed), () if lanes is None else (lanes,)
    example = jax.tree.map(np.zeros_like, row_of(random, ()))
    replay = fbuf.Replay(buffer, example, seed=seed, strict=False)  # `drop_last` masks whole batches
    state, key = buffer.init(example), jax.random.key(seed)
    add, draw = jax.jit(buffer.add), jax.jit(functools.partial(buffer.sample, batch_size=size))
    update = jax.jit(buffer.update_priority)
    drawn, real = list[bool](), replay._engine.host.draw

    def counted(*args):
        drawn.append((batch := real(*args)) is not None)
        return batch

    replay._engine.host.draw = counted
    for step in range(steps):
        for _ in range(int(random.integers(1, 4 if step % 9 else 14))):
            row, mask = row_of(random, lead), random.random(lead) < 0.8 if step % 10 == 5 else np.ones(lead, bool)
            replay.add(row, mask=None if mask.all() else mask)
            state = add(state, row, mask=mask)
        if step % 17 == 11:
            cut = random.random(lead) < 0.7
            replay.cut(cut)
            state = buffer.cut(state, cut)
        if not buffer.can_sample(state):
            continue
        key, now = jax.random.split(key)
        state, expected = draw(state, now)
        batch = replay.sample(size, to="numpy")
        same(batch, jax.device_get(expected))
        if sampler.prioritized and step % 2:
            error = random.normal(size=size).astype(np.float32) * 3
            replay.update_priority(batch.index, error)
            state = update(state, expected.index, error)
    same(*(leaves_of(each) for each in (replay.state, state)))
    return np.mean(drawn)
