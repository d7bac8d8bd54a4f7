"""Catch: a game of pixels that Double DQN learns within a minute, to try a buffer.

    python -m fbuf.demo.catch --storage compressed      # JAX: the whole training is one jit
    python -m fbuf.demo.catch --learner torch           # a torch learner with batches of fbuf

A ball falls through 10 by 10 pixels, drifts to a side and bounces off the walls; the paddle at the bottom moves one pixel a
step. Catching the ball gives +1, missing it -1. One frame does not show the drift, so the network sees stacks of two.
Random play earns about -0.8 per game, perfect play 1. `train` is one `lax.scan`; one seed gives the same parameters, bit for
bit, with every storage.

Source: `catch` of bsuite (Osband et al. 2020); van Hasselt et al. 2016 (Double DQN); Schaul et al. 2016.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import fbuf

SIZE = 10  # pixels a side
ACTIONS = 3  # left, stay, right
STACK = 2

Params = list[dict[str, jax.Array]]


# ------------------------------------------------------------------------------------------- the game


class Game(NamedTuple):
    """One game, int32[] each; with `jax.vmap`, one per lane."""

    row: jax.Array  # of the ball, 0 at the top
    column: jax.Array
    drift: jax.Array  # -1, 0 or 1 columns a step
    paddle: jax.Array  # column


def reset(key: jax.Array) -> Game:
    """Return a ball at the top and a paddle anywhere."""
    ball, drift, paddle = jax.random.split(key, 3)
    draw = partial(jax.random.randint, shape=(), dtype=jnp.int32)
    return Game(
        jnp.int32(0),
        draw(ball, minval=0, maxval=SIZE),
        draw(drift, minval=-1, maxval=2),
        draw(paddle, minval=0, maxval=SIZE),
    )


def step(game: Game, action: jax.Array, key: jax.Array) -> tuple[Game, jax.Array, jax.Array]:
    """Advance one frame.

    Args:
      game: The current game.
      action: int32[], 0 left, 1 stay, 2 right.
      key: Of the next game, which begins where this one ends.
    Returns:
      The game, the reward float32[] and whether the ball was down, bool[].
    """
    paddle = jnp.clip(game.paddle + action - jnp.int32(1), 0, SIZE - 1)
    column = game.column + game.drift
    outside = (column < 0) | (column >= SIZE)
    drift = jnp.where(outside, -game.drift, game.drift)
    column = jnp.where(outside, game.column + drift, column)
    row = game.row + jnp.int32(1)
    down = row == SIZE - 1
    reward = jnp.where(down, jnp.where(column == paddle, jnp.float32(1), jnp.float32(-1)), jnp.float32(0))
    after = Game(row, column, drift, paddle)
    return jax.tree.map(partial(jnp.where, down), reset(key), after), reward, down


def draw(game: Game) -> jax.Array:
    """Return the observation: uint8[10, 10], ball and paddle white."""
    frame = jnp.zeros((SIZE, SIZE), jnp.uint8).at[game.row, game.column].set(255)
    return frame.at[SIZE - 1, game.paddle].set(255)


# ---------------------------------------------------------------------------------------- the network


def init_params(key: jax.Array) -> Params:
    """Return two layers, float32, drawn after He et al. 2015."""
    sizes = ((STACK * SIZE * SIZE, 128), (128, ACTIONS))
    keys = jax.random.split(key, len(sizes))
    return [
        {"kernel": jax.random.normal(k, s, jnp.float32) * (2 / s[0]) ** 0.5, "bias": jnp.zeros(s[1:], jnp.float32)}
        for k, s in zip(keys, sizes, strict=True)
    ]


def q_values(params: Params, stacks: jax.Array) -> jax.Array:
    """Return float32[B, 3], the value of each action; `stacks` uint8[B, 2, 10, 10]."""
    x = stacks.reshape(stacks.shape[0], -1).astype(jnp.float32) / 255
    x = jax.nn.relu(x @ params[0]["kernel"] + params[0]["bias"][None])
    return x @ params[1]["kernel"] + params[1]["bias"][None]


# --------------------------------------------------------------------------------------- the training


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of a training."""

    iterations: int = 8000  # in each, one step of every lane and one batch
    lanes: int = 16
    batch_size: int = 64
    learning_rate: float = 1e-3  # at first; it falls to 0 in a straight line
    target_period: int = 50  # iterations between copies of the parameters to the target network
    points: int = 40  # of the curve of returns


def make_buffer(storage: Any = None, config: Config = Config(), capacity: int = 16_384) -> fbuf.Buffer:
    """Return a buffer of prioritized 3-step transitions of stacks of two frames."""
    return fbuf.Buffer(
        capacity,
        storage=fbuf.storages.Device() if storage is None else storage,
        sampler=fbuf.samplers.Prioritized(alpha=0.6, beta=0.4),
        view=fbuf.views.Transition(n_step=3, gamma=0.97, stack=STACK, autoreset="same_step"),
        lanes=config.lanes,
    )


def example_row(height: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return one row of one lane, as shapes."""
    scalars = {"action": jnp.int32, "reward": jnp.float32, "terminated": jnp.bool_, "truncated": jnp.bool_}
    obs = jax.ShapeDtypeStruct((height, width), jnp.uint8)
    return {"obs": obs} | {name: jax.ShapeDtypeStruct((), dtype) for name, dtype in scalars.items()}


EXAMPLE = example_row(SIZE, SIZE)


class Actors(NamedTuple):
    """The games of all lanes."""

    games: Game  # [E]
    stacks: jax.Array  # uint8[E, 2, 10, 10]; before an episode's first frame, zeros, as the view pads


def first_actors(key: jax.Array, lanes: int) -> Actors:
    """Return `lanes` games at their first frame."""
    games = jax.vmap(reset)(jax.random.split(key, lanes))
    return Actors(games, _first_stacks(jax.vmap(draw)(games)))


def _first_stacks(frames: jax.Array) -> jax.Array:
    return jnp.stack([jnp.zeros_like(frames), frames], axis=1)


def play(actors: Actors, action: jax.Array, key: jax.Array) -> tuple[Actors, dict[str, jax.Array]]:
    """Step every lane by `action` int32[E]; return the actors and their rows `[E, ...]`."""
    seen = actors.stacks[:, -1]
    games, reward, down = jax.vmap(step)(actors.games, action, jax.random.split(key, action.shape[0]))
    frames = jax.vmap(draw)(games)
    stacks = jnp.where(down[:, None, None, None], _first_stacks(frames), jnp.stack([seen, frames], axis=1))
    rows = {"obs": seen, "action": action, "reward": reward, "terminated": down, "truncated": jnp.zeros_like(down)}
    return Actors(games, stacks), rows


def explore(q: jax.Array, key: jax.Array, epsilon: jax.Array) -> jax.Array:
    """Return int32[E], the best action, or any action with probability epsilon."""
    which, choose = jax.random.split(key)
    anything = jax.random.randint(choose, q.shape[:1], 0, q.shape[-1], jnp.int32)
    greedy = jnp.argmax(q, axis=-1).astype(jnp.int32)
    return jnp.where(jax.random.uniform(which, q.shape[:1], jnp.float32) < epsilon, anything, greedy)


def epsilon_at(progress: Any) -> Any:
    """Return epsilon: from 1 to 0.05 in the first half."""
    return jnp.maximum(jnp.float32(1) - jnp.float32(1.9) * progress, jnp.float32(0.05))


def double_dqn(q_values: Callable[..., jax.Array], params: Any, target: Any, batch: fbuf.Sample) -> Any:
    """Return `((loss, (TD errors float32[B], mean Q-value)), gradient)` of Double DQN."""
    data = batch.data
    best = jnp.argmax(q_values(params, data["next_obs"]), axis=-1)[:, None]
    bootstrap = jnp.take_along_axis(q_values(target, data["next_obs"]), best, axis=-1)[:, 0]
    wanted = data["reward"] + data["discount"] * bootstrap

    def loss_of(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        q = jnp.take_along_axis(q_values(params, data["obs"]), data["action"][:, None], axis=-1)[:, 0]
        td_error = wanted - q
        return jnp.mean(batch.weight * optax.huber_loss(td_error)), (td_error, jnp.mean(q))

    return jax.value_and_grad(loss_of, has_aux=True)(params)


class Result(NamedTuple):
    """The result of a training."""

    params: Any
    curve: np.ndarray[Any, Any]  # float32[points], mean return of the games that ended in each part of the training
    final: float  # mean return of 1,000 games played greedily
    seconds: float
    stats: dict[str, float]  # of the buffer


def train(buffer: fbuf.Buffer, seed: int = 0, config: Config = Config()) -> Result:
    """Learn to catch: play, write, sample, learn and update priorities in one `lax.scan` of one jit.

    Args:
      buffer: From `make_buffer`, or any storage and sampler.
      seed: Of games, network and draws.
      config: The settings.
    """
    optimizer = optax.adam(optax.linear_schedule(config.learning_rate, 0, config.iterations))
    prioritized = buffer.sampler.prioritized

    def iteration(carry: Any, number: jax.Array) -> Any:
        actors, params, target, state, replay, key = carry
        key, choose, games, draws = jax.random.split(key, 4)
        progress = number.astype(jnp.float32) / jnp.float32(config.iterations)
        action = explore(q_values(params, actors.stacks), choose, epsilon_at(progress))
        actors, rows = play(actors, action, games)
        replay = buffer.add(replay, rows)
        replay, batch = buffer.sample(replay, draws, config.batch_size)
        (_, (td_error, _)), gradient = double_dqn(q_values, params, target, batch)
        if prioritized:
            replay = buffer.update_priority(replay, batch.index, td_error)
        update, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, update)
        renew = number % jnp.int32(config.target_period) == 0
        target = jax.tree.map(lambda new, old: jnp.where(renew, new, old), params, target)
        ended = jnp.sum(rows["terminated"], dtype=jnp.float32)
        return (actors, params, target, state, replay, key), (jnp.sum(rows["reward"]), ended)

    @partial(jax.jit, donate_argnums=0)
    def run(replay: fbuf.BufferState, key: jax.Array) -> Any:
        key, network, games = jax.random.split(key, 3)
        params = init_params(network)
        carry = (first_actors(games, config.lanes), params, params, optimizer.init(params), replay, key)
        carry, (rewards, ended) = lax.scan(iteration, carry, jnp.arange(config.iterations, dtype=jnp.int32))
        return carry[1], carry[4], _curve(config, rewards, ended)

    begun = time.perf_counter()
    params, replay, curve = jax.block_until_ready(run(buffer.init(EXAMPLE), jax.random.key(seed)))
    seconds = time.perf_counter() - begun
    stats = {name: np.asarray(value).item() for name, value in buffer.stats(replay).items()}
    return Result(params, np.asarray(curve), evaluate(partial(_greedy, params)), seconds, stats)


def _curve(config: Config, rewards: Any, ended: Any) -> Any:
    """Return the mean return of the games that ended in each part of the training."""
    total, games = (values.reshape(config.points, -1).sum(axis=1) for values in (rewards, ended))
    return total / games.clip(1)


def _greedy(params: Params, stacks: jax.Array) -> jax.Array:
    return jnp.argmax(_q_values(params, stacks), axis=-1).astype(jnp.int32)


_q_values = jax.jit(q_values)
_play = jax.jit(play)


def evaluate(policy: Callable[[jax.Array], Any], seed: int = 1, games: int = 1000) -> float:
    """Return the mean return of `games` games, one per lane, by `policy(stacks) -> int32[games]`."""
    key = jax.random.key(seed)
    actors = first_actors(key, games)
    total = 0.0
    for number in range(SIZE - 1):
        actors, rows = _play(actors, jnp.asarray(policy(actors.stacks)), jax.random.fold_in(key, number))
        total += float(jnp.sum(rows["reward"]))
    return total / games


# -------------------------------------------------------------------------------------------- in torch


def train_torch(buffer: fbuf.Buffer, seed: int = 0, config: Config = Config()) -> Result:
    """Train a torch learner: games in JAX, rows in fbuf, batches by DLPack without a copy. See `train`."""
    import torch

    import fbuf.torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # a network this small gains nothing by more, which would fight with XLA's for the cores
    key = jax.random.key(seed)
    key, games = jax.random.split(key)
    actors = first_actors(games, config.lanes)
    replay = fbuf.Replay(buffer, EXAMPLE, seed=seed, strict=False)  # the first batches are empty: their weights are 0

    def network() -> Any:
        return torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(STACK * SIZE * SIZE, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, ACTIONS),
        )

    online, target = network(), network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, config.iterations)

    def q_of(model: Any, stacks: Any) -> Any:
        return model(stacks.float() / 255)

    rewards, ended = np.zeros(config.iterations, np.float32), np.zeros(config.iterations, np.float32)
    begun = time.perf_counter()
    for number in range(config.iterations):
        key, choose, games = jax.random.split(key, 3)
        with torch.no_grad():
            q = fbuf.torch.from_torch(q_of(online, fbuf.torch.to_torch(actors.stacks)))
        action = _explore(q, choose, epsilon_at(np.float32(number / config.iterations)))
        actors, rows = _play(actors, action, games)
        replay.add(rows)
        batch = replay.sample(config.batch_size, to="torch")
        data = batch.data
        with torch.no_grad():
            best = q_of(online, data["next_obs"]).argmax(dim=1, keepdim=True)
            wanted = data["reward"] + data["discount"] * q_of(target, data["next_obs"]).gather(1, best)[:, 0]
        q = q_of(online, data["obs"]).gather(1, data["action"][:, None].long())[:, 0]
        loss = torch.nn.functional.huber_loss(q, wanted, reduction="none")
        optimizer.zero_grad()
        (batch.weight * loss).mean().backward()
        optimizer.step()
        schedule.step()
        if buffer.sampler.prioritized:
            replay.update_priority(batch.index, (wanted - q).detach())
        if number % config.target_period == 0:
            target.load_state_dict(online.state_dict())
        rewards[number], ended[number] = np.sum(rows["reward"]), np.sum(rows["terminated"])
    seconds = time.perf_counter() - begun

    def policy(stacks: jax.Array) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            return q_of(online, fbuf.torch.to_torch(stacks)).argmax(dim=1).int().numpy()

    return Result(online.state_dict(), _curve(config, rewards, ended), evaluate(policy), seconds, replay.stats())


_explore = jax.jit(explore)


# ----------------------------------------------------------------------------------------- the command

STORAGES: dict[str, Callable[[], Any]] = {
    "device": fbuf.storages.Device,
    "compressed": lambda: fbuf.storages.Compressed(keys=("obs",)),
    "host": lambda: fbuf.storages.Host(keys=("obs",)),
}


def plot(curves: dict[str, np.ndarray[Any, Any]], config: Config, out: Path) -> None:
    """Plot the curves of returns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot((np.arange(len(curve)) + 1) * config.iterations / len(curve), curve, label=name)
    axes.axhline(1, color="0.6", linewidth=1, linestyle="--")
    axes.set(xlabel="iterations", ylabel="mean return of a game", title="Catch, Double DQN", ylim=(-1.05, 1.1))
    axes.legend(loc="lower right")
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fbuf.demo.catch`."""
    parser = argparse.ArgumentParser(prog="python -m fbuf.demo.catch", description="Double DQN learns to catch a ball.")
    parser.add_argument("--storage", choices=STORAGES, default="device", help="where frames are (default: %(default)s)")
    parser.add_argument("--learner", choices=("jax", "torch"), default="jax", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a picture of the returns, .png")
    options = parser.parse_args(argv)
    config = Config()
    learner = train if options.learner == "jax" else train_torch
    result = learner(make_buffer(STORAGES[options.storage](), config), options.seed, config)
    for number, value in enumerate(result.curve):
        if number % (config.points // 10 or 1) == 0:
            print(f"{number * config.iterations // config.points:6,d}  {value:6.2f}  {'#' * round((value + 1) * 20)}")
    print(f"greedy  {result.final:6.2f}  of 1,000 games; {result.seconds:.0f} s, {options.learner}, {options.storage}")
    if options.out:
        plot({f"{options.learner}, {options.storage}": result.curve}, config, options.out)
        print(f"picture: {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
