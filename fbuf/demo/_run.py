"""`run`: the demo's training loop over one storage, and its measurements."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from fbuf.demo import _compare_storages, _dqn
from fbuf.demo._atari import FRAME_SHAPE, VectorAtari


class Episode(NamedTuple):
    """A finished game."""

    end: int  # steps of its lane played until then
    score: float  # sum of rewards, not clipped


class Actor:
    """A policy in `E` games.

    Attributes:
      episodes: The games that have ended, in order.
      stacks: uint8[E, 4, 84, 84], the input of the next actions. Each step makes a new array, since JAX may still read the
        old.
      time: Steps played so far in each lane.
    """

    def __init__(self, env: VectorAtari, key: jax.Array) -> None:
        """Start the games.

        Args:
          env: `E` games; one step is one frame of each.
          key: Of all random choices; not shared.
        """
        self._env = env
        self._key = key
        self._act = jax.jit(_dqn.act)
        self._score = np.zeros(env.lanes, np.float64)
        self.episodes: list[Episode] = []
        self.time = 0
        self._obs = env.reset()
        self.stacks = np.pad(self._obs[:, None], ((0, 0), (_dqn.STACK - 1, 0), (0, 0), (0, 0)))  # zeros, then the frame

    def play(self, params: _dqn.Params, steps: int, epsilon: float) -> _dqn.Rows:
        """Play `steps` frames in every lane.

        Args:
          params: Current parameters of the network.
          steps: N >= 1.
          epsilon: Probability of a random action.
        Returns:
          Rows with leaves `[N, E, ...]`; rewards are clipped to their sign (Mnih et al. 2015).
        """
        rows = []
        for _ in range(steps):
            action = np.asarray(self._act(params, self.stacks, self._key, np.int32(self.time), np.float32(epsilon)))
            obs, reward, terminated, truncated = self._env.step(action)
            row = {"obs": self._obs, "action": action, "reward": np.sign(reward)}
            rows.append({**row, "terminated": terminated, "truncated": truncated})
            self.time += 1
            self._count(reward, terminated | truncated)
            kept = np.where((terminated | truncated)[:, None, None, None], np.uint8(0), self.stacks[:, 1:])
            self.stacks = np.concatenate([kept, obs[:, None]], axis=1)
            self._obs = obs
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _count(self, reward: npt.NDArray[np.float32], ended: npt.NDArray[np.bool_]) -> None:
        self._score += reward
        self.episodes += [Episode(self.time, float(score)) for score in self._score[ended]]
        self._score[ended] = 0


CAPACITY = 48_000  # rows at most: with the default number of steps the ring comes round
_PREFILL = 100  # steps of random play before the first gradient step


@dataclass(frozen=True)
class Settings:
    """The settings of a run, apart from the storage: equal settings train identically."""

    game: str
    seed: int
    steps: int

    @property
    def capacity(self) -> int:
        """Rows the replay holds: those of the whole run, or the newest `CAPACITY`."""
        rows = (_PREFILL + self.steps * _dqn.ROWS_PER_STEP) * _dqn.LANES
        return min(CAPACITY, rows)


@dataclass(frozen=True)
class Result:
    """The figures of a run."""

    storage: str
    settings: Settings
    steps_per_second: float  # training steps, with acting and emulators
    seconds: dict[str, float]  # wall time by part of the loop
    rows: int  # held at the end
    device_bytes: int  # replay, at the end
    host_bytes: int
    episodes: list[Episode]
    losses: npt.NDArray[np.float32]
    td_errors: npt.NDArray[np.float32]
    params: Any  # of the network at the end, numpy
    memory: list[tuple[int, int, int]]  # rows played, rows held, bytes (device + host)
    batch: Any  # a Sample of the end, numpy
    blocks: _compare_storages.Blocks | None  # of a storage that has a table of them
    newest: _dqn.Rows  # rows `[N, E, ...]` of the end


def raw_bytes_per_row() -> int:
    """Return the bytes of obs and next_obs as stacks of uint8 frames."""
    height, width = FRAME_SHAPE
    return 2 * _dqn.STACK * height * width


def epsilon(step: int, steps: int) -> float:
    """Return the probability of a random action: it decreases linearly over the first half of the run, then stays."""
    return 0.05 + 0.95 * max(0.0, 1.0 - 2.0 * step / steps)


def run(
    storage: str,
    settings: Settings,
    make_environment: Callable[[str, int, int], Any],
    progress: Callable[[int, dict[str, str]], None] = lambda step, shown: None,
) -> Result:
    """Train from the start.

    Args:
      storage: A name in `_dqn.STORAGES`.
      settings: The other settings.
      make_environment: `(game, lanes, seed) -> environment`.
      progress: Called after every step with the number of steps done and the texts of a progress bar.
    Returns:
      The figures. Equal settings give equal `losses`, `params` and `episodes`, bit for bit, for every storage.
    """
    env = make_environment(settings.game, _dqn.LANES, settings.seed)
    config = _dqn.Config(env.num_actions, beta_steps=settings.steps)
    learner_key, act_key, sample_key, look_key = jax.random.split(jax.random.key(settings.seed), 4)

    learner, actor = _dqn.init_learner(learner_key, config), Actor(env, act_key)

    # The first call of everything compiles; the clock starts after it.
    rows = actor.play(learner.params, _PREFILL, epsilon=1.0)
    storage_ = _compare_storages.fitted_storage(storage, rows, settings.capacity)
    buffer = _dqn.make_buffer(storage_, settings.capacity)
    growth = _compare_storages.TableGrowth(buffer)
    step: Any = _dqn.make_step(buffer, config)
    replay = buffer.init(_dqn.example_row())
    replay = jax.jit(buffer.extend, donate_argnums=0)(replay, rows)
    metrics, memory = [], list[tuple[int, int, int]]()
    clock, every = _Clock(), max(1, settings.steps // 20)
    for i in range(settings.steps):
        with clock("acting and emulators"):
            rows = actor.play(learner.params, _dqn.ROWS_PER_STEP, epsilon(i, settings.steps))
        if growth.is_due(replay):
            with clock("growing and compiling again"):
                buffer, replay = growth.grow(replay)
                larger: Any = _dqn.make_step(buffer, config)
                step = larger.lower(learner, replay, sample_key, rows).compile()
        with clock("training steps"):
            learner, replay, measured = step(learner, replay, sample_key, rows)
            metrics.append(jax.block_until_ready(measured))
        if i % every == 0 or i == settings.steps - 1:
            played = actor.time * _dqn.LANES
            size = int(buffer.size(replay))
            memory.append((played, size, sum(buffer.nbytes(replay).values())))
        if i == 0:
            clock = _Clock()
        progress(i + 1, _shown(actor, measured, memory[-1][2]))
    seconds, sizes = max(time.perf_counter() - clock.begin, 1e-9), buffer.nbytes(replay)
    peek = jax.jit(lambda replay, key: buffer.peek(replay, key, _dqn.BATCH_SIZE))
    batch = peek(replay, jax.random.fold_in(look_key, settings.steps))
    return Result(
        storage,
        settings,
        steps_per_second=(settings.steps - 1) / seconds if settings.steps > 1 else float("nan"),
        seconds=clock.parts,
        rows=int(buffer.size(replay)),
        device_bytes=sizes["device"],
        host_bytes=sizes["host"],
        episodes=actor.episodes,
        losses=np.asarray([m["loss"] for m in metrics], np.float32),
        td_errors=np.asarray([m["td_error"] for m in metrics], np.float32),
        params=jax.tree.map(np.asarray, learner.params),
        memory=memory,
        batch=jax.tree.map(np.asarray, batch),
        blocks=growth.blocks(replay),
        newest=_compare_storages.newest(buffer, replay, _compare_storages.ROWS),
    )


def _shown(actor: Actor, measured: dict[str, jax.Array], nbytes: int) -> dict[str, str]:
    scores = [episode.score for episode in actor.episodes[-20:]]
    return {
        "loss": f"{float(measured['loss']):.4f}",
        "score": f"{np.mean(scores):.1f}" if scores else "-",
        "replay": f"{nbytes / 1e6:.1f} MB",
    }


class _Clock:
    """Wall time by part of the loop: `with clock("acting"): ...`."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.begin = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - start
