#!/usr/bin/env bash
# DI-engine's nstep_reward_enhancer, the middleware of its n-step examples, sums rewards and nothing else. Targets bootstrap from
# `next_obs`, which stays the observation of the next step, with gamma^n; windows stop before the terminal step, whose reward
# they lack, and are not terminal; the window of the terminal step goes on into the next episode, or the next environment. In
# get_nstep_return_data, which other pipelines call, the discounts of the last n windows of an unfinished trajectory have an
# exponent that is too small by one. Sum rewards in the program, or call it for finished episodes.
#
# Needs Python 3.11.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==1.26.4 DI-toolkit==0.3.0 DI-treetensor==0.5.0 easydict==1.14 \
    hickle==5.0.3 gym==0.25.1 gymnasium==1.4.0 pyyaml==6.0.4 mpire==2.10.2 pynng==0.9.0 redis==8.1.0 trueskill==0.4.5 \
    tensorboardX==2.6.5 enum-tools==0.13.0 cloudpickle==3.1.3 tabulate==0.10.0 click==8.5.1 requests==2.34.2 flask==3.1.3 \
    einops==0.8.2 responses==0.26.3 URLObject==3.0.0 wandb==0.19.0
"$work/venv/bin/pip" install --quiet --no-deps DI-engine==0.5.3
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys
from types import SimpleNamespace

import torch
import treetensor.torch as ttorch
from ding.framework.middleware.functional import TransitionList
from ding.framework.middleware.functional.enhancer import nstep_reward_enhancer
from ding.rl_utils import get_nstep_return_data
from easydict import EasyDict

ENVS, EPISODES, LENGTH, N, GAMMA = 2, 20, 10, 3, 0.9
STEPS = EPISODES * LENGTH

def transition(env, step):
    """Return a step; rewards and states are numbers of their own, states of another episode begin elsewhere."""
    state = 1000.0 * env + step + step // LENGTH
    return dict(
        obs=torch.tensor([state]),
        next_obs=torch.tensor([state + 1]),
        action=torch.tensor([0]),
        reward=torch.tensor([1.0 + 1000 * env + step]),
        done=torch.tensor(step % LENGTH == LENGTH - 1),
    )

def wanted(env, step, last):
    """Return the rewards, the state to bootstrap from, whether it is terminal, and its discount."""
    end = min(step // LENGTH * LENGTH + LENGTH - 1, step + N - 1, last)
    rewards = [transition(env, i)["reward"].item() for i in range(step, end + 1)]
    final = transition(env, end)
    padded = rewards + [0.0] * (N - len(rewards))
    return padded, final["next_obs"].item(), final["done"].item(), GAMMA ** len(rewards)

print(f"DI-engine {importlib.metadata.version('DI-engine')}, torch {torch.__version__}, {N}-step returns")
collected = TransitionList(ENVS)
for env in range(ENVS):
    for step in range(STEPS):
        collected.append(env, ttorch.as_tensor(transition(env, step)))
ctx = SimpleNamespace(trajectories=collected.to_trajectories()[0])
nstep_reward_enhancer(EasyDict(policy=dict(nstep=N, discount_factor=GAMMA)))(ctx)
rewards = ends = states = 0
for number, row in enumerate(ctx.trajectories):
    want, state, done, discount = wanted(*divmod(number, STEPS), STEPS - 1)
    rewards += row.reward.tolist() != want
    ends += bool(row.done) != done
    states += not done and row.next_obs.item() != state
print(f"nstep_reward_enhancer, {len(ctx.trajectories)} steps of {ENVS} environments, episodes of {LENGTH}")
print("expected: 0 windows with rewards of other steps, 0 that end an episode and are not terminal, 0 with another next state")
print(f"happened: {rewards}, {ends} and {states}")

first = [{**transition(0, step), "done": False} for step in range(LENGTH - 2)]  # the episode goes on
late = [row["value_gamma"] for row in get_nstep_return_data(first, N, gamma=GAMMA)][-N:]
right = [wanted(0, step, LENGTH - 3)[3] for step in range(LENGTH - 2 - N, LENGTH - 2)]
print(f"get_nstep_return_data, the last {N} windows of a trajectory that goes on, with {N} to 1 rewards")
print(f"expected: discounts {[round(x, 3) for x in right]}")
print(f"happened: discounts {[round(x, 3) for x in late]}")
per_episode = ENVS * EPISODES
nothing_ends = ends == (N - 1) * per_episode and states == (LENGTH - N) * per_episode
as_found = nothing_ends and rewards >= N * per_episode - ENVS and late == [GAMMA**k for k in reversed(range(N))]
sys.exit(0 if as_found else "This is no longer so.")
EOF
