#!/usr/bin/env bash
# NLE returns the same arrays from every step and writes the next observation into them. The usual loop, which stores the
# observation before and after a step once the step is done, stores the one after it twice. Its limit, 5000 steps by default, ends
# the game: it is terminated=True, truncated=False, and the last observation is that of a game that was quit. reset(seed=...)
# seeds nothing. Copy observations before the next step, as below; let gymnasium's TimeLimit end episodes; call seed().
#
# Needs Python 3.11.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet nle==1.3.0 gymnasium==1.2.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import gymnasium
import nle  # noqa: F401
import numpy as np
from nle import nethack

STEPS, LIMIT, SEED = 200, 50, 7

def equal_rows(env, kept):
    """Return the number of rows of the usual loop whose two maps are equal, and of steps whose maps were equal."""
    env.unwrapped.seed(core=SEED, disp=SEED)
    env.action_space.seed(SEED)
    obs = kept(env.reset()[0])
    glyphs, rows, steps = np.zeros((2, STEPS, *env.observation_space["glyphs"].shape), np.int16), 0, 0
    for step in range(STEPS):
        before = obs["glyphs"].copy()
        following, _, terminated, truncated, _ = env.step(env.action_space.sample())
        following = kept(following)
        glyphs[:, step] = obs["glyphs"], following["glyphs"]  # what a buffer that copies has
        steps += np.array_equal(before, following["glyphs"])
        obs = kept(env.reset()[0]) if terminated or truncated else following
    return sum(np.array_equal(*row) for row in glyphs.swapaxes(0, 1)), steps

def at_limit(limited):
    """Return the flags of the step at the limit, and whether the game is over in its observation."""
    env = limited()
    env.reset()
    search = env.unwrapped.actions.index(nethack.Command.SEARCH)
    for step in range(1, LIMIT + 1):
        obs, _, terminated, truncated, _ = env.step(search)
        if terminated or truncated:
            return step, bool(terminated), bool(truncated), not obs["blstats"].any()

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("nle", "gymnasium")), sep=", ")
make = lambda **limit: gymnasium.make("NetHackScore-v0", **limit)
rows, steps = equal_rows(make(), lambda obs: obs)
copied, _ = equal_rows(make(), lambda obs: {name: leaf.copy() for name, leaf in obs.items()})
print(f"{STEPS} random steps, {steps} of which leave the map as it is")
print(f"expected: {steps} rows whose map before the step equals that after it")
print(f"happened: {rows}; with copies {copied}")

flags = at_limit(lambda: nle.env.tasks.NetHackScore(max_episode_steps=LIMIT))
other = at_limit(lambda: make(max_episode_steps=LIMIT))
print(f"a limit of {LIMIT} steps: expected: terminated=False, truncated=True, of a game that goes on")
print("happened: step {}, terminated={}, truncated={}, all statistics 0: {}".format(*flags))
print("TimeLimit: step {}, terminated={}, truncated={}, all statistics 0: {}".format(*other))

env = make()
starts = {env.reset(seed=SEED)[0]["glyphs"].tobytes() for _ in range(4)}
print(f"first maps of four reset(seed={SEED}): expected: 1; happened: {len(starts)}")
as_found = rows == STEPS > steps == copied and flags == (LIMIT, True, False, True) and len(starts) > 1
sys.exit(0 if as_found and other == (LIMIT, False, True, False) else "This is no longer so.")
EOF
