#!/usr/bin/env bash
# With num_cpus > 1, SuperSuit's concat_vec_envs_v1 passes seed + i to worker i, and each worker seeds its environments
# with that seed + 0, 1, 2, ...: the seeds of neighbouring workers overlap. Eight environments of four workers are five
# different ones, and the copies start each of their episodes alike. num_cpus=1, and as many workers as environments, are right.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet supersuit==3.11.0 pettingzoo==1.27.0 gymnasium==1.4.0 pygame-ce==2.5.8 scipy==1.17.1 \
  numpy==2.4.6
cd "$work"
cat > program.py << 'EOF'
import importlib.metadata
import sys

import numpy as np
import supersuit
from pettingzoo.sisl import pursuit_v5

def different(workers):
    """Return how many of eight environments start differently, in the first episode and in the second."""
    env = supersuit.pettingzoo_env_to_vec_env_v1(pursuit_v5.parallel_env(n_pursuers=2, max_cycles=5))
    envs = supersuit.concat_vec_envs_v1(env, 8, num_cpus=workers)
    actions = np.random.default_rng(0).integers(5, size=(5, 16))  # two agents each
    starts = [envs.reset(seed=10)[0]]
    for action in actions:
        starts[1:] = [envs.step(action)[0]]
    envs.close()
    return [len(np.unique(start.reshape(8, -1), axis=0)) for start in starts]

if __name__ == "__main__":
    print(*(f"{name} {importlib.metadata.version(name)}" for name in ("supersuit", "pettingzoo")), sep=", ")
    print("expected: eight different environments, in the first episode and the second: [8, 8]")
    happened = {workers: different(workers) for workers in (1, 2, 4, 8)}
    for workers, counts in happened.items():
        print(f"happened: {counts} with num_cpus={workers}")
    sys.exit(0 if happened == {1: [8, 8], 2: [5, 5], 4: [5, 5], 8: [8, 8]} else "This is no longer so.")
EOF
"$work/venv/bin/python" -W ignore program.py
