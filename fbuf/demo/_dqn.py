"""Double DQN as one training step: write rows, sample, learn and update priorities in a single donated `jit`.

Everything is a pure function of two pytrees, the `Learner` and the replay state; benchmarks time this step.

Source: Mnih et al. 2015 (network, preprocessing, clipped rewards); van Hasselt et al. 2016 (double
Q-learning); Schaul et al. 2016 (priorities); Hessel et al. 2018 (n-step returns, Adam's epsilon).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import fbuf
from fbuf._interfaces.storage import Storage
from fbuf.demo import catch
from fbuf.demo._atari import FRAME_SHAPE

LANES = 8
STACK = 4
ROWS_PER_STEP = 4  # a lane: one gradient step for every 4 actions in each game
BATCH_SIZE = 32

# One entry a storage; `--storage` reads its choices from here.
STORAGES: dict[str, Callable[[], Storage]] = {
    "device": fbuf.storages.Device,
    "host": lambda: fbuf.storages.Host(keys=("obs",)),
    "compressed": lambda: fbuf.storages.Compressed(keys=("obs",)),
    "deduplicated": lambda: fbuf.storages.Deduplicated(keys=("obs",)),
}

Params = dict[str, dict[str, jax.Array]]
Rows = dict[str, Any]
Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class Config:
    """The constants of a compiled step."""

    num_actions: int
    learning_rate: float = 2.5e-4
    target_period: int = 200  # steps between copies of the parameters to the target network
    max_gradient: float = 10.0  # global norm
    beta_steps: int = 2_500  # steps over which the importance weights' exponent rises from 0.4 to 1


class Learner(NamedTuple):
    """The mutable state of the agent."""

    params: Params
    target: Params
    optimizer: Any  # optax's state
    steps: jax.Array  # int32[], gradient steps taken


def make_buffer(storage: Storage, capacity: int, lanes: int = LANES) -> fbuf.Buffer:
    """Return the demo's buffer: prioritized 3-step transitions of 4-frame stacks, each frame stored once."""
    return fbuf.Buffer(
        capacity=capacity,
        storage=storage,
        sampler=fbuf.samplers.Prioritized(alpha=0.6, beta=0.4),
        view=fbuf.views.Transition(n_step=3, gamma=0.99, stack=STACK, autoreset="same_step"),
        lanes=lanes,
    )


def example_row() -> Rows:
    """Return one row of one lane, as shapes."""
    return catch.example_row(*FRAME_SHAPE)


# ------------------------------------------------------------------------------------- network

# Name: shape of the kernel (height, width, in, out), or (in, out); stride. The 3136 are 7 x 7 x 64.
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], int]] = {
    "conv1": ((8, 8, STACK, 32), 4),
    "conv2": ((4, 4, 32, 64), 2),
    "conv3": ((3, 3, 64, 64), 1),
}
_HIDDEN: tuple[int, ...] = (3136, 512)


def init_params(key: jax.Array, num_actions: int) -> Params:
    """Return the Nature network: float32 kernels drawn uniformly after He et al. 2015, biases 0."""
    shapes = {name: shape for name, (shape, _) in CONVOLUTIONS.items()}
    shapes |= {"hidden": _HIDDEN, "out": (_HIDDEN[1], num_actions)}
    params = {}
    for name, part in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        shape = shapes[name]
        bound = (6.0 / math.prod(shape[:-1])) ** 0.5
        # Q-values near 0 at first: the first targets are then the rewards, not the network's noise.
        bound = 0.1 * bound if name == "out" else bound
        kernel = jax.random.uniform(part, shape, jnp.float32, -bound, bound)
        params[name] = {"kernel": kernel, "bias": jnp.zeros(shape[-1:], jnp.float32)}
    return params


def q_values(params: Params, stacks: jax.Array) -> jax.Array:
    """Return the value of every action.

    Args:
      params: From `init_params`.
      stacks: uint8[B, 4, 84, 84], oldest frame first.
    Returns:
      float32[B, num_actions].
    """
    # Channels last is what XLA convolves fastest on CPU.
    x = jnp.moveaxis(stacks, 1, -1).astype(jnp.float32) / 255.0
    for name, (_, stride) in CONVOLUTIONS.items():
        layer = params[name]
        x = lax.conv_general_dilated(
            x, layer["kernel"], (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["bias"].reshape(1, 1, 1, -1))
    x = x.reshape(x.shape[0], -1)
    x = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
    return x @ params["out"]["kernel"] + params["out"]["bias"][None]


# -------------------------------------------------------------------------------------- acting


def act(params: Params, stacks: jax.Array, key: jax.Array, time: jax.Array, epsilon: jax.Array) -> jax.Array:
    """Return epsilon-greedy actions int32[E] for `stacks` uint8[E, 4, 84, 84], drawn by `key` and `time`."""
    return catch.explore(q_values(params, stacks), jax.random.fold_in(key, time), epsilon)


# ------------------------------------------------------------------------------------ learning


def _optimizer(config: Config) -> Any:
    return optax.chain(optax.clip_by_global_norm(config.max_gradient), optax.adam(config.learning_rate, eps=1.5e-4))


def init_learner(key: jax.Array, config: Config) -> Learner:
    """Return new parameters; the target network starts as a copy, since both are donated."""
    # Compiled as one: one by one the draws would take seconds to compile.
    params = jax.jit(init_params, static_argnums=1)(key, config.num_actions)
    target = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
    return Learner(params, target, _optimizer(config).init(params), jnp.zeros((), jnp.int32))


def learn(config: Config, learner: Learner, batch: fbuf.Sample) -> tuple[Learner, jax.Array, Metrics]:
    """Take one gradient step on one batch.

    Args:
      config: The same for every call.
      learner: Before the step.
      batch: Of `make_buffer`'s view, `[B]`. Masked rows have weight 0.
    Returns:
      learner: After the step.
      td_error: float32[B], for `update_priority`.
      metrics: Scalars: `loss`, `td_error` (mean magnitude), `q` (mean of the chosen actions).
    """
    steps = learner.steps + jnp.int32(1)
    (loss, (td_error, q)), gradient = catch.double_dqn(q_values, learner.params, learner.target, batch)
    update, optimizer = _optimizer(config).update(gradient, learner.optimizer, learner.params)
    params = optax.apply_updates(learner.params, update)
    renew = steps % jnp.int32(config.target_period) == jnp.int32(0)
    target = jax.tree.map(lambda new, old: jnp.where(renew, new, old), params, learner.target)
    metrics = {"loss": loss, "td_error": jnp.mean(jnp.abs(td_error)), "q": q}
    return Learner(params, target, optimizer, steps), td_error, metrics


def make_step(
    buffer: fbuf.Buffer, config: Config
) -> Callable[[Learner, fbuf.BufferState, jax.Array, Rows], tuple[Learner, fbuf.BufferState, Metrics]]:
    """Return the whole training step, "the DQN step" of the benchmarks.

    Args:
      buffer: From `make_buffer`.
      config: Of the learner.
    Returns:
      `step(learner, replay, key, rows) -> (learner, replay, metrics)`, jitted; learner and replay are donated. `key` may
      be the same in every step. `rows` has leaves `[4, lanes, ...]` (another number of rows compiles again).
    """

    def step(
        learner: Learner, replay: fbuf.BufferState, key: jax.Array, rows: Rows
    ) -> tuple[Learner, fbuf.BufferState, Metrics]:
        replay = buffer.extend(replay, rows)
        progress = learner.steps.astype(jnp.float32) / jnp.float32(config.beta_steps)
        beta = jnp.float32(0.4) + jnp.float32(0.6) * jnp.minimum(progress, jnp.float32(1))
        key = jax.random.fold_in(key, learner.steps)
        replay, batch = buffer.sample(replay, key, BATCH_SIZE, beta=beta)
        learner, td_error, metrics = learn(config, learner, batch)
        replay = buffer.update_priority(replay, batch.index, td_error)
        return learner, replay, metrics

    return jax.jit(step, donate_argnums=(0, 1))
