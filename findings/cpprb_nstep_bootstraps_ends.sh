#!/usr/bin/env bash
# cpprb documents that Nstep replaces "done" with its n-step version, and that on_episode_end flushes the last steps. The sum over
# "done" stops one step early: a full window that ends in a terminal step is not done and bootstraps from the terminal state.
# The windows that on_episode_end flushes have a next observation of ones; where a limit ends the episode they are not done, as
# they should be, and bootstrap from it. Compute n-step rows in the program, and store them without Nstep.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet cpprb==11.0.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - << 'EOF'
import importlib.metadata
import sys

import cpprb
import numpy as np

EPISODES, LENGTH, N, GAMMA = 50, 20, 3, 0.9

def windows(terminal):
    """Return the n-step rows of episodes that end in a terminal step, or at a limit. Observations are numbers from 1000 on."""
    fields = {"obs": {}, "rew": {}, "next_obs": {}, "done": {}}
    replay = cpprb.ReplayBuffer(EPISODES * LENGTH, fields, Nstep={"size": N, "gamma": GAMMA, "rew": "rew", "next": "next_obs"})
    for episode in range(EPISODES):
        for step in range(LENGTH):
            obs = 1000.0 * (episode + 1) + step
            replay.add(obs=obs, rew=1.0, next_obs=obs + 1, done=float(terminal and step == LENGTH - 1))
        replay.on_episode_end()
    return {name: leaf.ravel() for name, leaf in replay.get_all_transitions().items()}

def wanted(obs, terminal):
    """Return the reward, the next observation and the flag of the window that starts at `obs`."""
    steps = min(N, LENGTH - int(obs % 1000))
    ends = terminal and obs % 1000 + steps == LENGTH
    return np.float32(sum(GAMMA**k for k in range(steps))), obs + steps, float(ends)

print(f"cpprb {importlib.metadata.version('cpprb')}, numpy {np.__version__}, windows of {N} steps, {EPISODES} episodes of {LENGTH}")
happened = {}
for name, terminal in {"a terminal step": True, "a limit": False}.items():
    rows = windows(terminal)
    reward, following, done = (np.array(leaf) for leaf in zip(*(wanted(obs, terminal) for obs in rows["obs"]), strict=True))
    assert np.allclose(rows["rew"], reward)
    bootstraps = rows["done"] == 0
    missed = int((bootstraps & (done == 1)).sum())
    strange = rows["next_obs"][bootstraps & (rows["next_obs"] != following)]
    happened[terminal] = missed, len(strange), set(strange.tolist())
    print(f"episodes that end in {name}, {len(rows['obs'])} windows")
    print("expected: 0 that end there and bootstrap, 0 that bootstrap from another observation than their last")
    print(f"happened: {missed} and {len(strange)}" + "".join(f", which is {obs:.0f}" for obs in happened[terminal][2]))
as_found = {True: (EPISODES, 0, set()), False: (0, (N - 1) * EPISODES, {1.0})}
sys.exit(0 if happened == as_found else "This is no longer so.")
EOF
