#!/usr/bin/env bash
# gymnasium-robotics documents that compute_reward(achieved_goal, desired_goal, info) is the reward of the step, so that hindsight
# replay can compute it for stored steps. That of FrankaKitchen counts the tasks that are open in the running episode, whichever
# step is asked about: after a task is done, the step that did it is worth 0, and after a reset each later step is worth 1.
# info["episode_task_completions"] is one list for all steps; the reset empties those that are stored. Copy infos, and compute
# rewards from the goals and info["tasks_to_complete"] of the step before, as below.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet gymnasium-robotics==1.4.2 gymnasium==1.4.0 mujoco==3.3.7 numpy==2.4.6 pettingzoo==1.27.0 \
    jinja2==3.1.6 imageio==2.38.1 packaging==26.4 setuptools==82.0.1
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import copy
import importlib.metadata
import sys

import gymnasium
import gymnasium_robotics
import numpy as np
from gymnasium_robotics.envs.franka_kitchen.kitchen_env import BONUS_THRESH, OBS_ELEMENT_GOALS, OBS_ELEMENT_INDICES

STEPS, OPENS = 10, 4
gymnasium.register_envs(gymnasium_robotics)
env = gymnasium.make("FrankaKitchen-v1", tasks_to_complete=["microwave", "light switch"])
kitchen = env.unwrapped

def computed(obs, info):
    return kitchen.compute_reward(obs["achieved_goal"], obs["desired_goal"], info)

def counted(obs, open_tasks):
    """Return the number of open tasks whose goal is achieved."""
    gaps = (np.linalg.norm(obs["achieved_goal"][task] - obs["desired_goal"][task]) for task in open_tasks)
    return float(sum(gap < BONUS_THRESH for gap in gaps))

_, info = env.reset(seed=0)
rows, at_once = [], []
for step in range(STEPS):
    before = list(info["tasks_to_complete"])
    if step == OPENS:  # the microwave is opened
        qpos = kitchen.data.qpos.copy()
        qpos[OBS_ELEMENT_INDICES["microwave"]] = OBS_ELEMENT_GOALS["microwave"]
        kitchen.robot_env.set_state(qpos, kitchen.data.qvel.copy())
    obs, reward, _, _, info = env.step(np.zeros(env.action_space.shape))
    rows.append((obs, reward, info, copy.deepcopy(info), before))
    at_once.append(computed(obs, info))
env.reset(seed=1)
rewards = [reward for _, reward, *_ in rows]
later = [computed(obs, info) for obs, _, info, *_ in rows]
done = [len(copied["episode_task_completions"]) for *_, copied, _ in rows]
stored = [len(info["episode_task_completions"]) for _, _, info, *_ in rows]
mended = [counted(obs, before) for obs, *_, before in rows]
versions = (f"{name} {importlib.metadata.version(name)}" for name in ("gymnasium-robotics", "gymnasium", "mujoco"))
print(*versions, sep=", ")
print(f"FrankaKitchen-v1, {STEPS} steps, the microwave is opened in step {OPENS}; rewards {rewards}")
print(f"expected: these rewards from compute_reward after each step, and after the next reset; tasks done {done} in the infos")
print(f"happened: {at_once},")
print(f"          {later}; tasks done {stored}")
print(f"from the goals and the tasks that were open before: {mended}")
opened = [float(step == OPENS) for step in range(STEPS)]
as_found = not any(at_once) and later == [float(step >= OPENS) for step in range(STEPS)] and not any(stored)
sys.exit(0 if as_found and rewards == mended == opened and done == [int(x) for x in later] else "This is no longer so.")
EOF
