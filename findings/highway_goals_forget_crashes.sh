#!/usr/bin/env bash
# HighwayEnv documents for parking-v0 that compute_reward(achieved_goal, desired_goal, info) is the reward of the step, so that
# hindsight replay can compute it for other goals. It leaves out collision_reward, although info["crashed"] says so: a relabelled
# crash has the reward of the same pose without one, and 0, the best one, if that pose is the goal. Subclass ParkingEnv, as below,
# and let the replay buffer pass infos (stable-baselines3: copy_info_dict=True, which passes many at once).
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet highway-env==1.12.1 gymnasium==1.4.0 numpy==2.4.6 pygame-ce==2.5.8 matplotlib==3.11.2 \
    pandas==3.1.1
cd "$work"
SDL_VIDEODRIVER=dummy "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import gymnasium
import highway_env
from highway_env.envs.parking_env import ParkingEnv

EPISODES = 20

class CrashesCount(ParkingEnv):
    """Compute the reward with that of a collision, which step adds where it calls without infos."""

    def compute_reward(self, achieved_goal, desired_goal, info, p=0.5):
        collision = self.config["collision_reward"] if info.get("crashed") else 0
        return super().compute_reward(achieved_goal, desired_goal, info, p) + collision

def played(env):
    """Return the number of steps, of those whose computed reward is another one, and what random episodes say of crashes."""
    env.action_space.seed(0)
    steps, others, crashes = 0, 0, []
    for episode in range(EPISODES):
        env.reset(seed=episode)
        ended = False
        while not ended:
            obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
            ended = terminated or truncated
            computed, at_goal = (
                float(env.unwrapped.compute_reward(obs["achieved_goal"], goal, info))
                for goal in (obs["desired_goal"], obs["achieved_goal"])
            )
            steps += 1
            others += computed != reward
            if info["crashed"]:
                crashes.append((round(computed - reward, 6), at_goal))
    return steps, others, crashes

print(f"highway-env {importlib.metadata.version('highway-env')}, gymnasium {gymnasium.__version__}")
steps, others, crashes = played(gymnasium.make("parking-v0"))
print(f"parking-v0, {steps:,} random steps, {len(crashes)} of them crashes, with a collision_reward of -5")
print("expected: 0 steps whose computed reward is another one; a crash at the goal pays -5")
print(f"happened: {others} steps, by {max(gap for gap, _ in crashes):.0f} each; a crash at the goal pays {max(at for _, at in crashes) + 0.0:.0f}")
*_, changed, mended = played(CrashesCount())
print(f"subclass: {changed} steps; a crash at the goal pays {max(at for _, at in mended):.0f}")
as_found = others == len(crashes) > 0 and {gap for gap, _ in crashes} == {5.0} and not any(at for _, at in crashes)
right = changed == 0 and {at for _, at in mended} == {-5.0}
sys.exit(0 if as_found and right else "This is no longer so.")
EOF
