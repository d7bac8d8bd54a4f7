#!/usr/bin/env bash
# torchrl's MultiStepTransform and MultiStep leave done flags as they are, and shift all else. A window of n steps that
# reaches the end of an episode gets the terminal state as next observation, and terminated=False, unless it starts at the
# last step. The losses read that flag, so the n - 1 steps before each terminal one bootstrap from a state that has no
# future. Take the flags of the row that is steps_to_next_obs - 1 rows ahead.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 torchrl==0.14.1 tensordict==0.14.3 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import logging
import sys

import tensordict
import torch
import torchrl

logging.disable(logging.INFO)
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, OneHot, ReplayBuffer
from torchrl.data.postprocs import MultiStep
from torchrl.envs import MultiStepTransform
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, ValueEstimators

N, GAMMA, VALUE = 3, 0.5, 800.0

def steps(count):
    """Return episodes of five steps with a reward of 1 a step, of which the last is terminal."""
    time = torch.arange(count)[:, None] % 5
    ends = time == 4
    after = {"observation": time + 1.0, "reward": torch.ones(count, 1), "done": ends, "terminated": ends}
    after["truncated"] = torch.zeros_like(ends)
    action = torch.nn.functional.one_hot(torch.zeros(count, dtype=torch.long), 2)
    return TensorDict({"observation": time.float(), "action": action, "next": TensorDict(after, [count])}, [count])

class Constant(torch.nn.Module):
    """A network to which every state is worth VALUE."""

    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor([VALUE, 0.0]))

    def forward(self, observation):
        return self.value.expand(*observation.shape[:-1], 2)

def targets(rows):
    """Return DQN's targets of an episode, and its next observations and flags."""
    loss = DQNLoss(QValueActor(Constant(), spec=OneHot(2), in_keys=["observation"]), action_space="one_hot")
    loss.make_value_estimator(ValueEstimators.TD0, gamma=GAMMA)
    value = loss.value_estimator.value_estimate(rows, target_params=loss.target_value_network_params)
    return value.ravel().tolist(), *(rows["next", name].ravel().tolist() for name in ("observation", "terminated"))

print(f"torchrl {torchrl.__version__}, torch {torch.__version__}, tensordict {tensordict.__version__}")
buffer = ReplayBuffer(storage=LazyTensorStorage(20), transform=MultiStepTransform(n_steps=N, gamma=GAMMA))
buffer.extend(steps(20))
happened = {"MultiStepTransform": targets(buffer[:5]), "MultiStep": targets(MultiStep(GAMMA, N)(steps(20))[:5])}
expected = [101.75, 101.75, 1.75, 1.5, 1.0]
print(f"targets of the five steps of an episode, of {N} steps each, where every state is worth {VALUE}")
print(f"expected: {expected}")
for name, (values, observations, flags) in happened.items():
    print(f"happened: {values} ({name}; next observations {observations}, terminated {flags})")
wrong = [101.75, 101.75, 101.75, 201.5, 1.0], [3.0, 4.0, 5.0, 5.0, 5.0], [False] * 4 + [True]
sys.exit(0 if all(found == wrong for found in happened.values()) else "This is no longer so.")
EOF
