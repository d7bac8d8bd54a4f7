"""A whole learner in plain torch on top of fbuf: Double DQN with prioritized 3-step replay on gymnasium's CartPole.

Nothing here but the replay is JAX, and nothing needs to know: rows go in as tensors, batches come out as tensors (the same
memory), TD errors go back as a tensor. The true final observation of an episode cut off by the time limit is stored beside its
last row, so that its return is bootstrapped and not taken for a failure.

Source: van Hasselt et al. 2016 (double Q-learning); Schaul et al. 2016 (priorities); Lillicrap et al. 2016 (slow targets).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch

import fbuf

ENVIRONMENT, LONGEST = "CartPole-v1", 500  # steps an episode at most, each a reward of 1


@dataclass(frozen=True)
class Settings:
    """What decides the run: equal settings, equal training (on one machine)."""

    steps: int = 32_000  # of the environment, all lanes together
    seed: int = 0
    lanes: int = 2
    batch_size: int = 64
    capacity: int = 32_000
    n_step: int = 3
    gamma: float = 0.99
    first_update: int = 1_000  # steps of random play before it
    learning_rate: float = 1e-3
    tau: float = 0.01  # of the target network, an update
    epsilon: tuple[float, float] = (1.0, 0.05)  # first, and from a quarter of the steps on


@dataclass
class Result:
    """A finished run."""

    returns: list[tuple[int, float]] = field(default_factory=list)  # (step at which it ended, return) of every episode
    losses: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)  # returns of greedy episodes, at the end
    stats: dict[str, float] = field(default_factory=dict)  # of the replay


class Lanes:
    """Some environments side by side, each reset as soon as its episode ends."""

    def __init__(self, number: int, seed: int) -> None:
        self._environments = [gymnasium.make(ENVIRONMENT) for _ in range(number)]
        self.obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self._environments)])
        self._returns = np.zeros(number)

    def step(self, actions: list[int]) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Plays one step in each.

        Returns:
          A row for every lane, leaves `[E, ...]`, and the returns of the episodes that ended.
        """
        results = [env.step(action) for env, action in zip(self._environments, actions, strict=True)]
        after, reward, terminated, truncated, _ = (np.asarray(column) for column in zip(*results, strict=True))
        row = {
            "obs": torch.from_numpy(self.obs.astype(np.float32)),
            "action": torch.tensor(actions, dtype=torch.int32),
            "reward": torch.from_numpy(reward.astype(np.float32)),
            "terminated": torch.from_numpy(terminated),
            "truncated": torch.from_numpy(truncated),
            "final_obs": torch.from_numpy(after.astype(np.float32)),
        }
        self._returns += reward
        ended = np.flatnonzero(terminated | truncated)
        finished = self._returns[ended].tolist()
        self._returns[ended] = 0.0
        self.obs = after
        for i in ended:
            self.obs[i] = self._environments[i].reset()[0]
        return row, finished


def network(width: int = 128) -> torch.nn.Module:
    """Observations `[B, 4]` to the value of both actions."""
    nn = torch.nn
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def make_replay(settings: Settings) -> fbuf.Replay:
    """An empty replay of CartPole's rows."""
    view = fbuf.views.Transition(settings.n_step, settings.gamma, final_observation="final_obs")
    buffer = fbuf.prioritized(settings.capacity, view=view, lanes=settings.lanes, batch_size=settings.batch_size)
    obs, flag = torch.zeros(4), torch.tensor(False)
    row = {"obs": obs, "action": torch.tensor(0, dtype=torch.int32), "reward": torch.tensor(0.0)}
    return fbuf.Replay(buffer, row | {"terminated": flag, "truncated": flag, "final_obs": obs}, seed=settings.seed)


def td_errors(online: Any, target: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """r + discount * Q'(s', argmax Q(s', .)) - Q(s, a), `[B]`. `discount` is gamma^m, or 0 after a failure."""
    with torch.no_grad():
        best = online(data["next_obs"]).argmax(1, keepdim=True)
        value = target(data["next_obs"]).gather(1, best).squeeze(1)
    chosen = online(data["obs"]).gather(1, data["action"].long().unsqueeze(1)).squeeze(1)
    return data["reward"] + data["discount"] * value - chosen


def train(
    settings: Settings, progress: Callable[[int, Result], None] = lambda step, result: None
) -> tuple[torch.nn.Module, Result]:
    """Trains from nothing.

    Args:
      settings: What decides the run.
      progress: Called after every step of the lanes with the number of steps played.
    Returns:
      The network, and what happened.
    """
    torch.manual_seed(settings.seed)
    rng = np.random.default_rng(settings.seed)
    online = network()
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), settings.learning_rate)
    lanes, replay, result = Lanes(settings.lanes, settings.seed), make_replay(settings), Result()

    for played in range(settings.lanes, settings.steps + 1, settings.lanes):
        share = min(1.0, 4 * played / settings.steps)
        epsilon = settings.epsilon[0] + share * (settings.epsilon[1] - settings.epsilon[0])
        with torch.no_grad():
            greedy = online(torch.from_numpy(lanes.obs)).argmax(1).numpy()
        random = rng.integers(0, 2, settings.lanes)
        actions = np.where(rng.random(settings.lanes) < epsilon, random, greedy)
        row, finished = lanes.step(actions.tolist())
        replay.add(row)  # tensors, as they are
        result.returns += [(played, total) for total in finished]

        if played >= settings.first_update:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * (1 - played / (settings.steps + 1))
            batch = replay.sample(beta=0.4 + 0.6 * played / settings.steps, to="torch")  # tensors, without a copy
            errors = td_errors(online, target, batch.data)
            loss = (
                batch.weight * torch.nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
            ).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(online.parameters(), 10.0)
            optimizer.step()
            replay.update_priority(batch.index, errors.detach())
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.lerp_(fast, settings.tau)
            result.losses.append(loss.item())
        progress(played, result)
    result.stats = replay.stats()
    return online, result


def evaluate(online: torch.nn.Module, episodes: int, seed: int) -> list[float]:
    """Returns of greedy episodes."""
    lanes, returns = Lanes(episodes, seed), [-1.0] * episodes
    totals = np.zeros(episodes)
    while min(returns) < 0:
        with torch.no_grad():
            actions = online(torch.from_numpy(lanes.obs)).argmax(1).tolist()
        row, _ = lanes.step(actions)
        totals += row["reward"].numpy()
        for i in torch.nonzero(row["terminated"] | row["truncated"]).flatten().tolist():
            returns[i], totals[i] = totals[i] if returns[i] < 0 else returns[i], 0.0
    return returns
