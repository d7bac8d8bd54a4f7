#!/usr/bin/env bash
# ViZDoom's environments for Gymnasium treat a timeout as a truncation, as their default says, and as a termination too: both flags
# are True, and learners and buffers that look at `terminated` first, as they should, do not bootstrap. The observation of the
# last step is made of zeros, so that changing the flag makes them bootstrap from a black screen. End episodes before the
# timeout, with gymnasium's TimeLimit: it truncates with the real observation. (`episode_timeout` counts tics, TimeLimit steps.)
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet vizdoom==1.3.2 gymnasium==1.4.0 numpy==2.4.6 pygame-ce==2.5.8
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys
from collections import Counter

import gymnasium
from gymnasium.wrappers import TimeLimit
from vizdoom import gymnasium_wrapper  # registers the environments

TICS, SKIP, EPISODES = 300, 4, 20  # the timeout of the scenario; an action is repeated for 4 tics

def ends(env):
    """Count the ends of episodes without an action, by their flags and whether the last screen is black."""
    seen = Counter()
    for seed in range(EPISODES):
        env.reset(seed=seed)
        terminated = truncated = False
        while not (terminated or truncated):
            obs, _, terminated, truncated, _ = env.step(0)
        seen[terminated, truncated, not obs["screen"].any()] += 1
    return seen

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("vizdoom", "gymnasium")), sep=", ")
assert gymnasium_wrapper
whole = ends(gymnasium.make("VizdoomBasic-v1", frame_skip=SKIP, treat_episode_timeout_as_truncation=True))
early = ends(TimeLimit(gymnasium.make("VizdoomBasic-v1", frame_skip=SKIP), TICS // SKIP - 1))
print(f"{EPISODES} episodes in which nothing is done until {TICS} tics have passed")
print(f"expected: {EPISODES} end with terminated=False, truncated=True, and what was seen last")
for (terminated, truncated, black), number in whole.items():
    print(f"happened: {number} with {terminated=}, {truncated=}" + ", and a black screen" * black)
print(f"with TimeLimit one step before: {early[False, True, False]} as expected")
as_found = whole == {(True, True, True): EPISODES} and early == {(False, True, False): EPISODES}
sys.exit(0 if as_found else "This is no longer so.")
EOF
