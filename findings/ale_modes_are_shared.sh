#!/usr/bin/env bash
# All AtariVectorEnv of ale-py write their autoreset mode into one dict, the metadata of gymnasium.vector.VectorEnv
# itself. The environments opened last decide what metadata["autoreset_mode"] says of all, and of every VectorEnv class
# without metadata. Wrappers of Gymnasium read the mode there: RecordEpisodeStatistics around the training environments
# counts reset steps if environments for evaluation were opened. Set envs.metadata to a dict before wrapping.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet ale-py==0.12.1 gymnasium==1.4.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - << 'EOF'
import importlib.metadata
import sys

import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

def opened(mode):
    return AtariVectorEnv("pong", num_envs=1, max_num_frames_per_episode=80, autoreset_mode=mode)

def lengths(evaluation, own_metadata=False):
    """Return the mode that is read, and the lengths of four episodes by the wrapper and by the flags."""
    envs = opened("NextStep")
    others = opened("SameStep") if evaluation else None
    if own_metadata:
        envs.metadata = {"autoreset_mode": envs.autoreset_mode}
    envs = RecordEpisodeStatistics(envs)
    envs.reset(seed=0)
    counted, steps = [], 0
    while len(counted) < 4:
        _, _, terminated, truncated, _ = envs.step(np.zeros(1, np.int64))
        steps += 1
        if terminated[0] or truncated[0]:
            counted.append(steps)
            steps = -1  # the next step resets
    return envs.metadata["autoreset_mode"].value, [int(n) for n in envs.length_queue], counted

class Custom(gymnasium.vector.VectorEnv):
    """Environments without metadata."""

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("ale-py", "gymnasium")), sep=", ")
alone = lengths(evaluation=False)
print("expected: mode and lengths of episodes by the wrapper and by the flags:", *alone)
happened = lengths(evaluation=True)
print("happened:", *happened, "(with environments of mode SameStep opened)")
other = Custom().metadata.get("autoreset_mode")
print(f"happened: mode of a class without metadata: {other}")
mended = lengths(evaluation=True, own_metadata=True)
print("happened:", *mended, "(with metadata set)")
right, wrong = [20] * 4, [20, 21, 21, 21]
as_found = alone == mended == ("NextStep", right, right) and happened == ("SameStep", wrong, right)
sys.exit(0 if as_found and other.value == "SameStep" else "This is no longer so.")
EOF
