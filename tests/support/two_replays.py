"""Two replays with one history, of which one writes each row, sets priorities and draws at once, compared bit for bit."""

import warnings

import jax
import numpy as np

import fbuf
from fbuf import samplers, storages, views
from fbuf._host_draws.deferred import Deferred
from tests.support.replay import counts
from tests.support.trees import same

ROW = {"obs": np.zeros((3, 4), np.uint8), "action": np.int32(0), "reward": np.float32(0), "done": np.bool_(False)}
ROW["last"] = np.zeros((3, 4), np.uint8)
ENDS = {"terminated": "done", "truncated": None}
STORAGES = {
    "device": storages.Device(),
    "host": storages.Host(keys=("obs",)),
    "compressed": storages.Compressed(keys=("obs",)),
    "deduplicated": storages.Deduplicated(keys=("obs",)),
}
SAMPLERS = {
    "uniform": samplers.Uniform(),
    "epoch": samplers.Epoch(),
    "whole": samplers.Epoch(drop_last=True),
    "consume": samplers.Consume(),
    "prioritized": samplers.Prioritized(),
    "held": samplers.Prioritized(largest="held", normalize="buffer", uniform=0.2),
    "distinct": samplers.Prioritized(replace=False),
    "ranked": samplers.Ranked(),
    "host priorities": samplers.Prioritized(on="host"),
}
VIEWS = {
    "row": views.Row(),
    "transition": views.Transition(**ENDS, n_step=3, autoreset="same_step"),
    "step": views.Transition(truncated="done", terminated=None, autoreset="same_step"),
    "reset step": views.Transition(**ENDS, autoreset="next_step"),
    "final": views.Transition(truncated="done", terminated=None, final_observation="last"),
    "sequence": views.Sequence(4, episode_end=("done",), autoreset="same_step"),
    "episode": views.Episode(6, episode_end=("done",), autoreset="same_step"),
}


def make_pair(storage="device", sampler="uniform", view="row", lanes=None, capacity=24):
    parts = {"storage": STORAGES[storage], "sampler": SAMPLERS[sampler], "view": VIEWS[view]}
    buffer = fbuf.Buffer(capacity, lanes=lanes, **parts)
    ours, theirs = (fbuf.Replay(buffer, ROW, seed=5, strict=False) for _ in range(2))
    theirs._engine.host, theirs._engine.deferred = None, Deferred()
    return ours, theirs


def rows_of(random, *lead):
    return {
        "obs": random.integers(0, 4, (*lead, 3, 4)).astype(np.uint8),
        "action": random.integers(0, 4, lead).astype(np.int32),
        "last": random.integers(0, 4, (*lead, 3, 4)).astype(np.uint8),
        "reward": random.random(lead).astype(np.float32),
        "done": random.random(lead) < 0.25,
    }


def compare(pair, steps, seed=0, sizes=(5,), begin=lambda replay: None):
    """Call the same methods on both, which `begin` prepares while they are empty; return how many updates were deferred."""
    warnings.filterwarnings("ignore", ".*has each at most once", RuntimeWarning)  # until the test ends
    ours, theirs = pair
    random, buffer, drawn, deferred = np.random.default_rng(seed), ours.buffer, None, 0
    lead, prioritized = () if buffer.lanes is None else (buffer.lanes,), buffer.sampler.prioritized

    def add(**options):
        row = rows_of(random, *lead)
        for replay in pair:
            replay.add(row, **options)
        assert theirs.state is not None  # writes the row

    for step in range(steps):
        size = sizes[step % len(sizes)]
        if step in (0, steps // 2):  # batches are now larger than the buffer
            for replay in pair:
                replay.clear()
                begin(replay)
            add()
            same(*(replay.sample(size, to="numpy") for replay in pair))
        for _ in range(int(random.integers(0, 4 if step % 3 else 14))):
            kind, options = random.integers(0, 10), {}
            if kind < 3 and step % 10 == 4:
                options["mask"] = random.random(lead) < 0.7
            if kind == 4 and prioritized:
                options["priority"] = (3 * random.random(lead)).astype(np.float32)  # the largest, at times
            add(**options)
        kind = random.integers(0, 14)
        if kind == 0:
            same(*(replay.rows().data for replay in pair))
        elif kind == 1:
            assert len(ours) == len(theirs) and counts(ours) == counts(theirs)
        elif kind == 2:
            same(*(jax.device_get(replay.sample(5)) for replay in pair))
        elif kind == 3:
            more = rows_of(random, 2, *lead)
            for replay in pair:
                replay.extend(more)
        elif kind < 8 and drawn is not None and prioritized:  # of rows that may be overwritten by now
            error = random.normal(size=drawn[0].mask.size).astype((np.float32, np.float64)[kind % 2])
            error[0] *= 1 if random.random() < 0.8 else np.inf
            for replay, batch in zip(pair, drawn, strict=True):
                replay.update_priority(batch.index, error)
            deferred += ours._engine.deferred.update is not None
            same(*(batch.index for batch in drawn))
        else:
            drawn = [replay.sample(size, to="numpy") for replay in pair]
            same(*map(read, drawn) if step % 2 else drawn)
        if step % 10 == 9 or step == steps - 1:
            same(*(leaves_of(replay.state) for replay in pair))
    return deferred


def read(batch):
    """Return what a batch has but its index, whose arrays are computed when they are first read."""
    return batch.data, batch.probability, batch.weight, batch.mask, batch.last


def leaves_of(state):
    """Return the leaves by path, but for those of a host store."""
    leaves = ((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state))
    return {name: leaf for name, leaf in leaves if not name.endswith((".id", ".version"))}
