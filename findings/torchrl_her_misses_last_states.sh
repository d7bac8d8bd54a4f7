#!/usr/bin/env bash
# torchrl's HERReplayBuffer takes goals from the achieved goals before steps, not after them, from the step itself on. The
# state that ends an episode is never a goal, "final" names the one before it, and no last step is relabelled with what it
# achieved. In a full buffer, rows behind the last end get goals of the episode before. Rewards are those of Gymnasium's
# goal environments, which compare the goal achieved after the step.
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

import torch
import torchrl
from tensordict import TensorDict

logging.disable(logging.INFO)
from torchrl.data import HERReplayBuffer, LazyTensorStorage

LENGTH, CAPACITY = 5, 97

def step(number):
    """Return a step of an episode that visits 10 e, 10 e + 1, ..., 10 e + 5."""
    episode, time = divmod(number, LENGTH)
    place, goal = torch.tensor([10.0 * episode + time]), torch.tensor([-1.0])
    after = {"achieved_goal": place + 1, "desired_goal": goal, "reward": torch.zeros(1)}
    after |= {"done": torch.tensor([time == LENGTH - 1]), "terminated": torch.tensor([False])}
    return TensorDict({"achieved_goal": place, "desired_goal": goal, "next": TensorDict(after)})

def reward(rows):
    return (rows["next", "achieved_goal"] == rows["desired_goal"]).float()

def relabelled(strategy):
    """Return the places of goals in their episodes, the rewarded share of all and of last steps, and of foreign goals."""
    torch.manual_seed(0)
    storage = LazyTensorStorage(CAPACITY)
    buffer = HERReplayBuffer(reward_fn=reward, strategy=strategy, her_ratio=1.0, storage=storage, batch_size=5000)
    for number in range(2 * CAPACITY + 1):  # whole episodes, of which the newest continues at the first slot
        buffer.add(step(number))
    rows = buffer.sample()
    place, goal = rows["achieved_goal"].ravel(), rows["desired_goal"].ravel()
    last, foreign, paid = place % 10 == LENGTH - 1, place // 10 != goal // 10, reward(rows)
    return (goal % 10).unique().int().tolist(), *(x.float().mean().item() for x in (paid, paid[last], foreign))

print(f"torchrl {torchrl.__version__}, torch {torch.__version__}")
print(f"goals for the steps of episodes that visit 0 to {LENGTH}; the buffer is full")
expected = {"future": ([1, 2, 3, 4, 5], 0.457, 1.0, 0.0), "final": ([5], 0.2, 1.0, 0.0)}
happened = {strategy: relabelled(strategy) for strategy in expected}
for strategy in expected:
    for kind, (places, paid, last, foreign) in {"expected": expected[strategy], "happened": happened[strategy]}.items():
        shares = f"rewarded {paid:.0%}, of last steps {last:.0%}, goals of other episodes {foreign:.0%}"
        print(f"{strategy}: {kind}: goals {places}, {shares}")
future, final = happened.values()
as_found = future[0] == [0, 1, 2, 3, 4] and final[0] == [4] and future[1] < 0.35 and future[2] == final[2] == 0
sys.exit(0 if as_found and final[3] > 0.02 else "This is no longer so.")
EOF
