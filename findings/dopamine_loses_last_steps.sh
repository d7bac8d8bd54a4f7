#!/usr/bin/env bash
# dopamine's TransitionAccumulator makes no element that starts at the last step of an episode, and marks the one that ends
# there as terminal. With update_horizon=1, as in its DQN, the reward of the last step is in no element: a task that is
# rewarded at its end has no rewards in the replay memory. With n = 3 one of three elements that should contain it does
# not, and is terminal. (google/dopamine#228, open, reports the flags.) Add one step more to an episode, with the final
# observation and reward 0, and set is_terminal there only.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 flax==0.12.8 orbax-checkpoint==0.12.8 numpy==2.4.6 absl-py==2.5.1 gin-config==0.5.0 \
  python-snappy==0.7.3
"$work/venv/bin/pip" install --quiet --no-deps dopamine-rl==4.1.2
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import numpy as np
from dopamine.jax.replay_memory.accumulator import TransitionAccumulator
from dopamine.jax.replay_memory.elements import TransitionElement

STEPS = 6

def elements(n, more):
    """Start, reward and terminal of the elements of an episode that is rewarded at its end."""
    accumulator = TransitionAccumulator(stack_size=1, update_horizon=n, gamma=1.0)
    steps = [[np.full(1, step), 0, float(step == STEPS - 1), step == STEPS - 1] for step in range(STEPS)]
    if more:
        steps[-1][-1] = False
        steps.append([np.full(1, STEPS), 0, 0.0, True])
    rows = [row for step in steps for row in accumulator.accumulate(TransitionElement(*step, episode_end=step[-1]))]
    return [(row.state.item(), row.reward, row.is_terminal) for row in rows]

print(f"dopamine-rl {importlib.metadata.version('dopamine-rl')}")
print(f"an episode of {STEPS} steps with a reward of 1 in the last: the elements' first step, return, terminal")
same = True
for n in (1, 3):
    expected = [(step, float(step + n >= STEPS), step + n >= STEPS) for step in range(STEPS)]
    happened = elements(n, more=False)
    print(f"n = {n}")
    print(f"expected: {expected}")
    print(f"happened: {happened}")
    lost = STEPS - n - 1  # the element that is terminal too early
    same = same and happened == expected[:lost] + [(lost, 0.0, True)] + expected[lost + 1 : -1]
    right = elements(n, more=True) == expected
    print(f"with one step more: as expected: {right}")
    same = same and right
sys.exit(0 if same else "This is no longer so.")
EOF
