"""DQN on Breakout in the form of cleanrl's dqn_atari.py, in which one line changes: the import of ReplayBuffer."""

import copy

import ale_py
import gymnasium as gym
import numpy as np
import torch

from fbuf.integrations.sb3 import CompressedReplayBuffer as ReplayBuffer

gym.register_envs(ale_py)


def make_env():
    env = gym.make("ALE/Breakout-v5", obs_type="grayscale", frameskip=4)
    small = gym.spaces.Box(0, 255, (84, 80), np.uint8)
    env = gym.wrappers.TransformObservation(env, lambda frame: frame[32:200:2, ::2], small)
    return gym.wrappers.FrameStackObservation(env, 4)


def network(actions):
    layers = torch.nn.Conv2d(4, 16, 8, 4), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 4, 2), torch.nn.ReLU()
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.LazyLinear(actions))


def main(steps=400, learning_starts=200, batch_size=32, gamma=0.99):
    torch.manual_seed(0)
    np.random.seed(0)
    envs = gym.vector.SyncVectorEnv([make_env], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    q = network(envs.single_action_space.n)
    obs, _ = envs.reset(seed=0)
    q(torch.as_tensor(obs) / 255)
    target = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), 1e-4)
    space = envs.single_observation_space, envs.single_action_space
    rb = ReplayBuffer(100_000, *space, "cpu", optimize_memory_usage=True, handle_timeout_termination=False)
    for step in range(steps):
        greedy = q(torch.as_tensor(obs) / 255).argmax(1).numpy()
        actions = greedy if np.random.random() > 0.1 else envs.action_space.sample()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        final = infos["final_obs"][0][None] if (terminations | truncations).any() else next_obs
        rb.add(obs, final, actions, rewards, terminations, [{}])
        obs = next_obs
        if step >= learning_starts and step % 4 == 0:
            data = rb.sample(batch_size)
            with torch.no_grad():
                best = target(data.next_observations / 255).max(1).values
                wanted = data.rewards.flatten() + gamma * best * (1 - data.dones.flatten())
            loss = torch.nn.functional.mse_loss(wanted, q(data.observations / 255).gather(1, data.actions).squeeze())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert torch.isfinite(loss) and rb.nbytes < steps * 4 * 84 * 80  # SB3's takes eight frames a step


if __name__ == "__main__":
    main()
