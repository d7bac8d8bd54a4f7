"""A torch learner with compressed frames: actors number their frames with int64 ids, which batches return exactly."""

import numpy as np
import torch

import fbuf

SIZE, FIRST = 32, 2**40  # pixels a side; the id of the first frame


def frame(position):
    """Return an image with a bright bar at `position`."""
    image = np.random.default_rng(position).integers(0, 30, (SIZE, SIZE), np.uint8)
    image[:, position : position + 4] = 255
    return image


def episode(first, rng):
    """Return 20 rows: the bar moves by the action; the reward is 1 where it reaches the right side."""
    actions, position, rows = rng.integers(0, 2, 20), 10, []
    for step, action in enumerate(actions):
        row = {"obs": frame(position), "action": np.int32(action), "id": np.int64(FIRST + first + step)}
        position = min(max(position + (6 if action else -6), 0), SIZE - 4)
        rows.append(row | {"reward": float(position == SIZE - 4), "terminated": False, "truncated": step == 19})
    return rows


def main(steps=100):
    example = {"obs": np.zeros((SIZE, SIZE), np.uint8), "action": np.int32(0), "id": np.int64(0)}
    example |= {"reward": np.float32(0), "terminated": False, "truncated": False}
    storage = fbuf.storages.Compressed(keys=("obs", "id"))  # `id` keeps 64 bits: it is named, and np.int64
    view = fbuf.views.Transition(gamma=0.9, autoreset="same_step")
    replay = fbuf.Replay(fbuf.Buffer(2000, storage=storage, view=view), example, seed=0)
    rng, seen = np.random.default_rng(0), {}
    for first in range(0, 600, 20):
        for row in episode(first, rng):
            replay.add(row)
            seen[int(row["id"])] = row["obs"]

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIZE * SIZE, 64), torch.nn.ReLU())
    network.append(torch.nn.Linear(64, 2))
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(steps):
        data = replay.sample(64, to="torch").data
        with torch.no_grad():
            wanted = data["reward"] + data["discount"] * network(data["next_obs"] / 255).max(1).values
        loss = torch.nn.functional.mse_loss(network(data["obs"] / 255)[range(64), data["action"].long()], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert data["id"].dtype == torch.int64
    assert all((obs == seen[i]).all() for i, obs in zip(data["id"].tolist(), data["obs"].numpy(), strict=True))
    assert (network(data["obs"] / 255).argmax(1) == 1).float().mean() > 0.8  # it learned to move to the right


if __name__ == "__main__":
    main()
