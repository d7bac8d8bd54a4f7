#!/usr/bin/env bash
# robosuite's tasks end at their horizon alone, and GymWrapper reports it as terminated=True, truncated=False: returns end where the
# task goes on, of an arm that would hold the cube as well. Its reset(seed=...) seeds numpy.random, from which the placements are
# no longer drawn: the start is another one each time. Make the environment with ignore_done=True and a seed, and wrap
# GymWrapper in gymnasium's TimeLimit.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet mujoco==3.3.7 numpy==2.4.6 numba==0.68.1 scipy==1.17.1 pillow==12.2.0 termcolor==3.3.0 \
    h5py==3.16.0 gymnasium==1.4.0 tqdm==4.70.1 opencv-python-headless==4.11.0.86
"$work/venv/bin/pip" install --quiet --no-deps robosuite==1.5.2
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import logging
import sys

import numpy as np
import robosuite
from gymnasium.wrappers import TimeLimit
from robosuite.wrappers import GymWrapper

LIMIT, SEED = 25, 7
logging.getLogger("robosuite_logs").setLevel(logging.ERROR)

def made(**options):
    blind = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False}
    return GymWrapper(robosuite.make("Lift", robots="Panda", horizon=LIMIT, **blind, **options))

def last_flags(env):
    """Return the flags of the step that ends an episode in which the arm does not move, and its number."""
    env.reset()
    for step in range(1, LIMIT + 1):
        *_, terminated, truncated, _ = env.step(np.zeros(env.action_space.shape))
        if terminated or truncated:
            return step, bool(terminated), bool(truncated)

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("robosuite", "mujoco", "gymnasium")), sep=", ")
flags = last_flags(made())
other = last_flags(TimeLimit(made(ignore_done=True), LIMIT))
print(f"Lift with a horizon of {LIMIT}, step {flags[0]}; expected: terminated=False, truncated=True")
print(f"happened: terminated={flags[1]}, truncated={flags[2]}")
print(f"with ignore_done=True and TimeLimit: terminated={other[1]}, truncated={other[2]}")

env = made()
starts = {env.reset(seed=SEED)[0].tobytes() for _ in range(5)}
seeded = {made(seed=SEED).reset()[0].tobytes() for _ in range(2)}
print("first observations of five reset(seed=7); expected: 1")
print(f"happened: {len(starts)}; of two environments made with seed=7: {len(seeded)}")
as_found = flags == (LIMIT, True, False) and other == (LIMIT, False, True) and len(starts) == 5 and len(seeded) == 1
sys.exit(0 if as_found else "This is no longer so.")
EOF
