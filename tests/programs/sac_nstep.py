"""SAC with three-step returns on Pendulum, whose episodes are truncated and never terminate: updates in torch."""

import gymnasium
import numpy as np
import torch
from torch import nn

import fbuf


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def act(actor, obs):
    mean, log_std = actor(obs).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 1).exp())
    sample = normal.rsample()
    return 2 * sample.tanh(), (normal.log_prob(sample) - torch.log(1 - sample.tanh() ** 2 + 1e-6)).sum(-1)


def values(critics, obs, action):
    return [critic(torch.cat([obs, action / 2], -1))[:, 0] for critic in critics]


def main(steps: int = 1200, entropy: float = 0.05) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    envs = gymnasium.make_vec("Pendulum-v1", num_envs=8)
    buffer = fbuf.Buffer(50_000, view=fbuf.gymnasium.view(envs, n_step=3, gamma=0.97), lanes=8)
    replay = fbuf.Replay(buffer, fbuf.gymnasium.spec(envs))
    envs = fbuf.gymnasium.Recorder(envs, replay)
    actor, critics, targets = mlp(3, 2), *(nn.ModuleList([mlp(4, 1), mlp(4, 1)]) for _ in range(2))
    adam = torch.optim.Adam([*actor.parameters(), *critics.parameters()], lr=2e-3)
    (obs, _), rewards = envs.reset(seed=0), []
    for step in range(steps):
        obs, reward, *_ = envs.step(act(actor, torch.as_tensor(obs))[0].detach().numpy())
        rewards.append(reward.mean())
        if step < 50:
            continue
        data = replay.sample(256, to="torch").data
        with torch.no_grad():
            action, log_prob = act(actor, data["next_obs"])
            value = torch.min(*values(targets, data["next_obs"], action)) - entropy * log_prob
            wanted = data["reward"] / 8 + data["discount"] * value
        adam.zero_grad()
        action, log_prob = act(actor, data["obs"])
        (entropy * log_prob - torch.min(*values(critics, data["obs"], action))).mean().backward()
        critics.zero_grad()
        sum(((q - wanted) ** 2).mean() for q in values(critics, data["obs"], data["action"])).backward()
        adam.step()
        for target, critic in zip(targets.parameters(), critics.parameters(), strict=True):
            target.data.lerp_(critic.data, 0.01)
    print(f"reward: {np.mean(rewards[:200]):.2f} at first, {np.mean(rewards[-200:]):.2f} at last")
    assert np.mean(rewards[-200:]) > np.mean(rewards[:200]) / 2


if __name__ == "__main__":
    main()
