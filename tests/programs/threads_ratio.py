"""Q-learning with actors in threads: each row is drawn eight times on average, however fast the threads are."""

import threading

import numpy as np

import fbuf

CELLS, BATCH, RATIO, LONGEST = 10, 64, 8, 60
EXAMPLE = {"obs": np.int32(0), "action": np.int32(0), "reward": np.float32(0), "terminated": False, "truncated": False}


def walk(values, rng):
    """Walk from the first cell to the last, mostly as `values` say: rows of one shape, and which of them exist."""
    rows = {name: np.zeros(LONGEST, np.asarray(leaf).dtype) for name, leaf in EXAMPLE.items()}
    cell = 0
    for t in range(LONGEST):
        action = rng.integers(2) if rng.random() < 0.3 else values[cell].argmax()
        rows["obs"][t], rows["action"][t] = cell, action
        cell = max(cell + 2 * action - 1, 0)
        if cell == CELLS - 1:
            rows["reward"][t], rows["terminated"][t] = 1, True
            return rows, np.arange(LONGEST) <= t
    rows["truncated"][-1] = True
    return rows, np.ones(LONGEST, bool)


def act(replay, values, seed):
    rng = np.random.default_rng(seed)
    try:
        while True:
            rows, mask = walk(values, rng)
            replay.extend(rows, mask=mask)  # waits while the learner is behind
    except fbuf.ReplayClosed:
        pass


def main(steps=400):
    buffer = fbuf.Buffer(2000, view=fbuf.views.Transition(gamma=0.9, autoreset="same_step"))
    limit = fbuf.limits.samples_per_insert(RATIO, min_size=200, rows=LONGEST, draws=BATCH)
    values = np.random.default_rng(0).normal(0, 0.01, (CELLS, 2))
    with fbuf.Replay(buffer, EXAMPLE, limit=limit) as replay:
        actors = [threading.Thread(target=act, args=(replay, values, seed)) for seed in range(2)]
        for actor in actors:
            actor.start()
        for _, batch in zip(range(steps), replay.batches(BATCH, to="numpy"), strict=False):
            data = batch.data
            wanted = data["reward"] + data["discount"] * values[data["next_obs"]].max(-1)
            np.add.at(values, (data["obs"], data["action"]), 0.02 * (wanted - values[data["obs"], data["action"]]))
    for actor in actors:
        actor.join()
    stats = replay.stats()
    assert abs(stats["limit_surplus"] - RATIO * 200) <= RATIO * LONGEST + BATCH, stats
    assert (values[:-1].argmax(-1) == 1).all(), values
    return values


if __name__ == "__main__":
    print(main().round(2))
