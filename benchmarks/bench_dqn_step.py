"""The DQN step, the demo's whole training step on real frames, with each storage in one process.

Every storage carries a learner and a replay of its own through the same rows and keys, so that all draw the same batches
and a round compares like with like; what the step does besides replay (network, gradient, optimizer) is the same code.
The peer is fbuf itself with the frames on the device, the fastest there is; other libraries have no such step to time.

With `prefetch=1` a thread of the store decodes while the step goes on. A measurement is of a few steps and ends when that
thread is idle, so that no work of one storage falls into the time of another; what it does after the last of them counts as
if it had not overlapped.

`device, empty callback` is the step of `Device` with a callback that does nothing. A call of a program that has a callback
returns only when the program is done, so Python cannot prepare the next step meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import _atari
from benchmarks._harness import Absent, absent_row, interleave, load_peer, ratio, row, spread
from benchmarks.bench_deduplicated import lots, write_all

QUESTION = "DQN step (32 rows written, 32 transitions of 4-frame stacks learnt from), real frames"
TARGETS = {"compressed": "<= 1.12", "compressed, prefetch=1": "<= 1.10", "memmap": "<= 1.2", "deduplicated": "<= 1.05"}
"""Against `Device`."""
NAMES = (
    "host",
    "compressed",
    "deduplicated",
    "compressed, prefetch=1",
    "memmap",
    "device, empty callback",
    "none",
)
"""What `Device` is compared with; "none" is the step without replay."""
CALLS = 4  # steps a measurement
GAME = "Breakout"
ACTIONS = 4


def main(quick: bool) -> list[dict[str, Any]]:
    """Seconds a step with each storage against `Device`, and without any replay."""
    return measure(*((4_000, 2) if quick else (40_000, 60)), NAMES)


def measure(held: int, rounds: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of some of `NAMES`, at a number of rows held."""
    for peer in map(load_peer, ("optax", "ale_py")):
        if isinstance(peer, Absent):
            return [
                absent_row(QUESTION, f"{name}, {GAME}", peer, target)
                for name, target in TARGETS.items()
                if name in names
            ]
    import fbuf
    from fbuf.demo import _dqn

    rows = lane_rows(held // _dqn.LANES, _dqn.LANES)
    config = _dqn.Config(ACTIONS)
    storages = {name: make() for name, make in _dqn.STORAGES.items()}
    storages["memmap"] = fbuf.storages.Memmap(keys=("obs",))  # its pages are warm
    steps = {"device": _stepper(storages["device"], held, rows, config)}
    for name in names:
        if name == "none":
            steps[name] = _without_replay(held, rows, config)
        elif name == "deduplicated":
            steps[name] = _stepper(_fitted(rows, held), held, rows, config)
        elif name == "device, empty callback":
            steps[name] = _stepper(storages["device"], held, rows, config, change=_with_callback)
        else:
            storage, _, ahead = name.partition(", prefetch=")
            steps[name] = _stepper(storages[storage], held, rows, config, prefetch=int(ahead or 0))
    timings = interleave(steps, rounds=rounds, warmup=min(rounds - 1, 3), calls=min(rounds - 1, CALLS))

    case = f"{GAME}, {held:,} rows"
    device = timings["device"]
    report = []
    for name, seconds in timings.items():
        if name == "device":
            continue
        report.append(
            row(
                QUESTION,
                f"{name} / device, {case}" if name != "none" else f"fixed batch / device, {case}",
                ours=spread(seconds),
                peer=spread(device),
                ratio=ratio(seconds, device),
                target=TARGETS.get(name),
                note="the same step without extend, sample, update_priority" if name == "none" else "",
            )
        )
    return report


def lane_rows(steps: int, lanes: int) -> dict[str, np.ndarray]:
    """Rows of real play, leaves `[steps, lanes, ...]`: frames and ends are the game's, actions and rewards are drawn.

    Frames alone decide what compression costs; drawn rewards give every run the same spread of priorities.
    """
    rng = np.random.default_rng(0)
    frames, starts = zip(*(_atari.frames(GAME, steps + 1, seed=lane) for lane in range(lanes)), strict=True)
    return {
        "obs": np.stack([f[:steps] for f in frames], axis=1),
        "action": rng.integers(0, ACTIONS, (steps, lanes), dtype=np.int32),
        "reward": (rng.random((steps, lanes)) < 0.05).astype(np.float32),
        "terminated": np.stack([s[1:] for s in starts], axis=1),
        "truncated": np.zeros((steps, lanes), np.bool_),
    }


class _Idle:
    """Ready when a step is done and the store reads nothing ahead any more."""

    def __init__(self, store: Any, token: Any):
        self._store, self._token = store, token

    def block_until_ready(self) -> None:
        self._token.block_until_ready()
        for request in list(self._store._ahead._requests.values()):
            request.wait()


def _with_callback(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step with a callback that does nothing."""
    from jax.experimental.buffer_callback import buffer_callback

    def fill(context: Any, out: Any, steps: Any) -> None:
        np.asarray(out)[...] = np.asarray(steps)

    def with_callback(learner: Any, *args: Any) -> Any:
        steps = buffer_callback(fill, jax.ShapeDtypeStruct((), np.int32))(learner.steps)
        return step(learner._replace(steps=steps), *args)

    return jax.jit(with_callback, donate_argnums=(0, 1))


def _stepper(
    storage: Any,
    held: int,
    rows: dict[str, np.ndarray],
    config: Any,
    prefetch: int = 0,
    change: Callable[..., Any] = lambda step: step,
) -> Callable[[], Any]:
    """A thunk that takes one step on a full replay and carries what comes of it."""
    from fbuf._bridge.lifetime import find, join_id
    from fbuf.demo import _dqn

    buffer = _dqn.make_buffer(storage, held)
    buffer = dataclasses.replace(buffer, prefetch=prefetch, batch_size=_dqn.BATCH_SIZE)
    buffer, replay = _filled(buffer, rows)
    store = find(join_id(np.asarray(replay.rows.id))) if prefetch else None
    learner = _dqn.init_learner(jax.random.key(0), config)
    step, slabs, key = change(_dqn.make_step(buffer, config)), _slabs(rows), jax.random.key(1)

    def take() -> Any:
        nonlocal learner, replay
        learner, replay, metrics = step(learner, replay, key, next(slabs))
        return metrics, learner.steps, replay.token, _Idle(store, replay.token) if store else None

    return take


def _without_replay(held: int, rows: dict[str, np.ndarray], config: Any) -> Callable[[], Any]:
    import fbuf
    from fbuf.demo import _dqn

    buffer, replay = _filled(_dqn.make_buffer(fbuf.storages.Device(), held), rows)
    batch = jax.jit(lambda replay: buffer.peek(replay, jax.random.key(2), _dqn.BATCH_SIZE))(replay)
    learner = _dqn.init_learner(jax.random.key(0), config)
    learn = jax.jit(lambda learner, batch: _dqn.learn(config, learner, batch), donate_argnums=0)

    def take() -> Any:
        nonlocal learner
        learner, _, metrics = learn(learner, batch)
        return metrics, learner.steps

    return take


def _fitted(rows: dict[str, np.ndarray], held: int) -> Any:
    """`Deduplicated` with block and places chosen from a tenth of the rows."""
    import fbuf

    steps, lanes = rows["action"].shape
    first = {name: x[: steps // 10] for name, x in rows.items()}
    return fbuf.storages.Deduplicated(keys=("obs",)).fit(first, capacity=held, lanes=lanes)


def _filled(buffer: Any, rows: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """Buffer and replay after all rows, written as a run writes them, a few at a time; a table that fills is grown."""
    from fbuf.demo import _dqn

    buffer, replay, _ = write_all(buffer, buffer.init(_dqn.example_row()), lots(rows, 100))
    return buffer, replay


def _slabs(rows: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Four rows a lane after four, for ever."""
    from fbuf.demo import _dqn

    count = len(rows["action"]) // _dqn.ROWS_PER_STEP
    while True:
        for i in range(count):
            slab = slice(i * _dqn.ROWS_PER_STEP, (i + 1) * _dqn.ROWS_PER_STEP)
            yield {name: x[slab] for name, x in rows.items()}
