"""Train in a process that is killed at any moment, and continue from its last checkpoint in the next one.

`Replay.load` cuts the running episode, so no transition leads from a state of one process to a state of another.
"""

import subprocess
import sys
import tempfile

import numpy as np

import fbuf


class Corridor:
    """Episodes of up to ten steps; an observation is a number of the episode and the step."""

    def reset(self):
        self.obs = np.float32([np.random.default_rng().integers(2**20), 0])
        return self.obs

    def step(self, action):
        self.obs = self.obs + np.float32([0, 1])
        return self.obs, 1.0, np.random.default_rng().random() < 0.1, self.obs[1] == 10


def train(folder):
    row = {"obs": np.zeros(2, np.float32), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
    try:
        replay, extra = fbuf.Replay.load(folder, extra=True)
    except fbuf.CheckpointNotFound:
        view = fbuf.views.Transition(n_step=3, autoreset="same_step")
        replay, extra = fbuf.Replay(fbuf.prioritized(10_000, view=view), row), {"step": 0}
    env, step = Corridor(), int(extra["step"])
    obs = env.reset()
    while True:
        next_obs, reward, terminated, truncated = env.step(action=0)
        replay.add({"obs": obs, "action": 0, "reward": reward, "terminated": terminated, "truncated": truncated})
        obs, step = env.reset() if terminated or truncated else next_obs, step + 1
        if step % 33 == 0:
            replay.save(folder, extra={"step": step})
            print("saved", flush=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            with subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True) as process:
                lines = [process.stdout.readline() for _ in range(3)]
                process.kill()
            assert lines == ["saved\n"] * 3
        replay, extra = fbuf.Replay.load(folder, extra=True)
    data = replay.sample(1024, to="numpy").data
    ahead = data["next_obs"] - data["obs"]
    assert len(replay) == extra["step"] >= 297 and (ahead[:, 0] == 0).all() and set(ahead[:, 1]) <= {0, 1, 2, 3}


if __name__ == "__main__":
    train(sys.argv[1])
