"""SAC with three-step returns on Pendulum, whose episodes are truncated and never terminate: updates in torch."""

import copy

import gymnasium
import numpy as np
import torch
from torch import nn

import fbuf

LANES, ENTROPY = 8, 0.05


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def act(actor, obs):
    mean, log_std = actor(obs).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 1).exp())
    before = normal.rsample()
    action = torch.tanh(before)
    return action, (normal.log_prob(before) - torch.log(1 - action**2 + 1e-6)).sum(-1)


def main(steps: int = 1500) -> float:
    torch.manual_seed(0)
    envs = gymnasium.make_vec("Pendulum-v1", num_envs=LANES)
    envs = gymnasium.wrappers.vector.RescaleAction(envs, -1.0, 1.0)
    buffer = fbuf.uniform(50_000, view=fbuf.gymnasium.view(envs, n_step=3, gamma=0.97), lanes=LANES)
    replay = fbuf.Replay(buffer, fbuf.gymnasium.spec(envs))
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=LANES)
    recorder = fbuf.gymnasium.Recorder(envs, replay)

    actor, critics = mlp(3, 2), nn.ModuleList([mlp(4, 1), mlp(4, 1)])
    targets = copy.deepcopy(critics).requires_grad_(False)
    actor_adam, critic_adam = (torch.optim.Adam(net.parameters(), lr=2e-3) for net in (actor, critics))
    obs, _ = recorder.reset(seed=0)
    for step in range(steps):
        with torch.no_grad():
            action = act(actor, torch.as_tensor(obs))[0].numpy()
        obs, *_ = recorder.step(action)
        if step < 50:
            continue
        data = replay.sample(256, to="torch").data
        with torch.no_grad():
            following, log_prob = act(actor, data["next_obs"])
            inputs = torch.cat([data["next_obs"], following], -1)
            value = torch.min(targets[0](inputs), targets[1](inputs))[:, 0] - ENTROPY * log_prob
            wanted = data["reward"] / 8 + data["discount"] * value
        inputs = torch.cat([data["obs"], data["action"]], -1)
        critic_adam.zero_grad()
        sum(nn.functional.mse_loss(critic(inputs)[:, 0], wanted) for critic in critics).backward()
        critic_adam.step()
        action, log_prob = act(actor, data["obs"])
        inputs = torch.cat([data["obs"], action], -1)
        actor_adam.zero_grad()
        (ENTROPY * log_prob - torch.min(critics[0](inputs), critics[1](inputs))[:, 0]).mean().backward()
        actor_adam.step()
        for target, source in zip(targets.parameters(), critics.parameters(), strict=True):
            target.lerp_(source, 0.01)
    return float(np.mean(envs.return_queue))


if __name__ == "__main__":
    print(f"mean return of the last {LANES} episodes: {main():.0f}; at random about -1200")
