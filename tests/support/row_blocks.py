"""Two replays with one history, of which one writes each added row at once, compared bit for bit."""

import jax
import numpy as np

import fbuf
from fbuf import samplers, storages, views

ROW = {"obs": np.zeros((3, 4), np.uint8), "action": np.int32(0), "reward": np.float32(0), "done": np.bool_(False)}
STORAGES = {
    "device": storages.Device(),
    "host": storages.Host(keys=("obs",)),
    "compressed": storages.Compressed(keys=("obs",)),
    "deduplicated": storages.Deduplicated(keys=("obs",)),
}
SAMPLERS = {
    "uniform": samplers.Uniform(),
    "epoch": samplers.Epoch(),
    "consume": samplers.Consume(),
    "prioritized": samplers.Prioritized(),
    "ranked": samplers.Ranked(),
    "host priorities": samplers.Prioritized(on="host"),
}
VIEWS = {
    "row": views.Row(),
    "transition": views.Transition(terminated="done", truncated=None, n_step=3, autoreset="same_step"),
    "sequence": views.Sequence(4, episode_end=("done",), autoreset="same_step"),
    "episode": views.Episode(6, episode_end=("done",), autoreset="same_step"),
}


def make_pair(storage, sampler, view, lanes=None, **settings):
    buffer = fbuf.Buffer(
        24, storage=STORAGES[storage], sampler=SAMPLERS[sampler], view=VIEWS[view], lanes=lanes, **settings
    )
    return [fbuf.Replay(buffer, ROW, seed=5, strict=False) for _ in range(2)]


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def same_state(pair):
    """Compare all leaves that do not name a store."""
    leaves = [jax.tree_util.tree_leaves_with_path(replay.state) for replay in pair]
    for (path, one), (_, other) in zip(*leaves, strict=True):
        if not jax.tree_util.keystr(path).endswith((".id", ".version")):
            np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(path))


def compare(pair, steps, seed=0):
    """Call the same methods on both. The second replay writes every row at once."""
    random, lanes = np.random.default_rng(seed), pair[0].buffer.lanes
    lead = () if lanes is None else (lanes,)
    batch = None
    for _ in range(steps):
        for _ in range(int(random.integers(1, 14))):
            row = {
                "obs": random.integers(0, 4, (*lead, 3, 4)).astype(np.uint8),
                "action": random.integers(0, 4, lead).astype(np.int32),
                "reward": random.random(lead).astype(np.float32),
                "done": random.random(lead) < 0.25,
            }
            kind = random.integers(0, 10)
            options = {}
            if kind == 0:
                options["mask"] = random.random(lead) < 0.7
            if kind == 1 and pair[0].buffer.sampler.prioritized:
                options["priority"] = random.random(lead).astype(np.float32)
            for replay in pair:
                replay.add(row, **options)
            assert pair[1].state is not None  # writes the row
        kind = random.integers(0, 8)
        assert len(pair[0]) == len(pair[1])
        if kind == 0:
            same(pair[0].rows().data, pair[1].rows().data)
        elif kind == 1:
            assert pair[0].stats() == pair[1].stats()
        elif kind == 2 and batch is not None and pair[0].buffer.sampler.prioritized:
            error = random.random(5).astype(np.float32)  # of rows that may be overwritten by now
            for replay in pair:
                replay.update_priority(batch.index, error)
        else:
            batch, other = (replay.sample(5, to="numpy") for replay in pair)
            same(batch, other)
        same_state(pair)
