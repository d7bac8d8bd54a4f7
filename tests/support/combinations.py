"""Storages, samplers, views and writers by name, and the batches of their combinations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Compressed, Deduplicated, Device, Host, Memmap, Ragged
from fbuf.views import Episode, Hindsight, Row, Sequence, Transition
from tests.support.disk import fresh, somewhere
from tests.support.trees import example_of, same


def missed(achieved, goal):
    return -(achieved != goal).astype(jnp.float32)


STORAGES = {
    "Device": Device(),
    "Device('tiles')": Device("tiles"),
    "Deduplicated": Deduplicated(keys=("obs",), blocks=512),
    "Compressed": Compressed(keys=("obs",)),
    "Compressed(path=...)": Compressed(keys=("obs",), path=somewhere("combinations")),
    "Host": Host(keys=("obs",)),
    "Memmap": Memmap(keys=("obs",)),
    "Ragged": Ragged(keys=(), maximum={"obs": (8, 8)}),
}
SAMPLERS = {
    "Uniform": Uniform(),
    "Uniform(over='episodes')": Uniform(over="episodes"),
    "Epoch": Epoch(),
    "Consume": Consume(2),
    "Prioritized": Prioritized(),
    "Prioritized(on='host')": Prioritized(on="host"),
    "Prioritized(replace=False)": Prioritized(replace=False, largest="held"),
    "Prioritized(uniform=...)": Prioritized(uniform=0.2, largest="held", normalize="buffer"),
    "Ranked": Ranked(uniform=0.2, largest="held"),
    "Staleness(version=...)": Staleness(6, version="action"),
    "Staleness": Staleness(4, unit=3),
}
VIEWS = {
    "Row": Row(),
    "Transition": Transition(n_step=2, stack=3, autoreset="same_step"),
    "Sequence('stop')": Sequence(4, stride=2, autoreset="same_step"),
    "Sequence('mask')": Sequence(4, burn_in=1, stride=2, boundary="mask", at=1, autoreset="same_step"),
    "Sequence('cross')": Sequence(4, boundary="cross", autoreset="same_step"),
    "Episode": Episode(6, autoreset="same_step"),
    "Hindsight": Hindsight(
        Transition(n_step=2, stack=3, autoreset="same_step"), missed, goal="goal", achieved="reached"
    ),
}
WRITERS = {"Ring": fbuf.writers.Ring(), "TopK": fbuf.writers.TopK("reward"), "Reservoir": fbuf.writers.Reservoir()}
REFUSED = {("Uniform(over='episodes')", "Sequence('cross')"): "its windows cross the ends of episodes"}
UNORDERED_STORAGES = (
    "Device",
    "Device('tiles')",
    "Deduplicated",
    "Compressed",
    "Host",
)  # for writers that replace any row
UNORDERED_WRITERS = [w for w in WRITERS if not WRITERS[w].streams]
UNORDERED = [s for s in SAMPLERS if SAMPLERS[s].by_episode is False and not getattr(SAMPLERS[s], "in_order", False)]
LANES, BATCH = 2, 6


def rows_of(rng, count, lanes=(LANES,), shades=4, size=8):
    shape = (count, *lanes)
    return {
        "obs": rng.integers(1, 1 + shades, (*shape, 1, 1), np.uint8) * np.ones((size, size), np.uint8),
        "action": rng.integers(0, 9, shape).astype(np.int32),
        "goal": rng.integers(0, 9, shape).astype(np.int32),
        "reached": rng.integers(0, 9, shape).astype(np.int32),
        "reward": rng.normal(size=shape).astype(np.float32),
        "terminated": rng.random(shape) < 0.15,
        "truncated": rng.random(shape) < 0.1,
    }


EXAMPLE = example_of(rows_of(np.random.default_rng(0), 1))


def make(storage, sampler, view, writer="Ring"):
    parts = {"storage": fresh(STORAGES[storage]), "sampler": SAMPLERS[sampler], "view": VIEWS[view]}
    ends = ("terminated", "truncated") if WRITERS[writer].streams else ()
    return fbuf.Buffer(40, lanes=LANES, writer=WRITERS[writer], episode_end=ends, **parts)


@functools.cache
def batches(storage, sampler, view, writer="Ring"):
    buffer = make(storage, sampler, view, writer)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, rows, key):
        state, batch = buffer.sample(buffer.extend(state, rows), key, BATCH)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.arange(1.0, BATCH + 1))
        data = {name: leaf for name, leaf in batch.data.items() if name != "obs_length"}  # of `Ragged`
        return state, (data, batch.mask, batch.index.slot, batch.probability, batch.weight)

    state, rng, out = buffer.init(EXAMPLE), np.random.default_rng(0), []
    for i in range(8):
        state, drawn = step(state, rows_of(rng, 5), jax.random.key(i))
        out.append(jax.device_get(drawn))
    stats = jax.device_get(buffer.stats(state))
    assert not any(stats[name] for name in stats if name.startswith(("refused", "expired", "retired")))
    return out


def check_storages_agree(storages, *combination):
    reference = batches("Device", *combination)
    assert sum(int(mask.sum()) for _, mask, *_ in reference) > 2 * BATCH
    for storage in storages:
        same(reference, batches(storage, *combination), storage)


SOME = [("Epoch", "Sequence('mask')")]
