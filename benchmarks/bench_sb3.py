"""What does a compressed replay buffer cost and save in Stable-Baselines3?

The same transitions of 4-stacks go through SB3's `ReplayBuffer` and `CompressedReplayBuffer`. Memory: the highest resident
size of a fresh process, two laps included; SB3's grows by the row, so it is measured at an eighth of the rows. Times are CPU
times of all threads, interleaved in one process. Episodes are whole games; their last frame is shown twice, which stands for
the terminal observation.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import _atari
from benchmarks._harness import Absent, absent_row, interleave, load_peer, measure_memory, ratio, row, spread

GAMES = ("Breakout", "MsPacman")
STACK = 4
CASE = "{}, {:,} rows"


def transitions(game: str) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of `add`, of one environment that is played as they are asked for."""
    stack = np.zeros((1, STACK, 84, 84), np.uint8)
    rng, nothing = np.random.default_rng(0), [dict[str, Any]()]
    last = None
    for frame, start in _atari.play(game, 0):
        if last is not None:
            following = np.concatenate([stack[:, 1:], (last if start else frame)[None, None]], axis=1)
            yield stack, following, rng.integers(0, 4, 1), np.ones(1), np.array([start]), nothing
            stack = following
        if start:
            stack = np.zeros_like(stack)
            stack[:, -1] = frame
        last = frame


def buffer_of(compressed: bool, size: int) -> Any:
    """Return an empty buffer, SB3's or ours."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    from fbuf.integrations.sb3 import CompressedReplayBuffer

    made = CompressedReplayBuffer if compressed else ReplayBuffer
    return made(size, spaces.Box(0, 255, (STACK, 84, 84), np.uint8), spaces.Discrete(4), "cpu")


def fill(compressed: bool, game: str, size: int, count: int) -> Iterator[Any]:
    """For `measure_memory`: a buffer of `size` rows to which `count` are added, and some drawn."""
    steps = transitions(game)
    warm = buffer_of(compressed, 64)
    for _ in range(64):
        warm.add(*next(steps))
    warm.sample(32)
    del warm
    yield
    buffer = buffer_of(compressed, size)
    for number in range(count):
        buffer.add(*next(steps))
        if number % 500 == 32:
            buffer.sample(32)
    result = {"nbytes": int(buffer.nbytes) if compressed else 0}
    yield result


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for 50,000 transitions of two games (`quick`: 2,000 of one)."""
    library = load_peer("stable_baselines3")
    if isinstance(library, Absent):
        return [absent_row("Replay in Stable-Baselines3", "Breakout", library)]
    import torch

    report, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # CPU time counts threads that spin
    try:
        for game in GAMES[: 1 if quick else None]:
            rows = 2_000 if quick else 50_000
            report += memory(game, rows, judged=not quick) + speed(game, rows, judged=not quick)
        return report + [training(200 if quick else 3_000, judged=not quick)]
    finally:
        torch.set_num_threads(threads)


def memory(game: str, rows: int, judged: bool) -> list[dict[str, Any]]:
    """Bytes a row at the peak of two laps, and at the end."""
    ours = measure_memory(fill, True, game, rows, 2 * rows)
    small = rows // 8
    theirs = measure_memory(fill, False, game, small, small)["peak"] / small
    peak = ours["peak"] / rows
    return [
        row(
            "Bytes a row in SB3, at the peak of a process that writes two laps",
            CASE.format(game, rows),
            ours=peak,
            peer=theirs,
            ratio=peak,
            target="<= 900" if judged else None,
            note=f"after the laps {ours['rss'] / rows:.0f}, of which `nbytes` {ours['result']['nbytes'] / rows:.0f}",
        )
    ]


def speed(game: str, rows: int, judged: bool) -> list[dict[str, Any]]:
    """Times of `add` and `sample`, and sizes of pickles, against SB3's buffer."""
    steps = list(itertools.islice(transitions(game), rows))
    buffers = {name: buffer_of(name == "fbuf", rows) for name in ("fbuf", "SB3")}
    seconds: dict[str, list[float]] = {name: [] for name in buffers}
    lot = max(rows // 20, 1)
    for start in range(0, rows, lot):  # in turn, into empty buffers
        for name, buffer in buffers.items():
            begin = time.process_time()
            for step in steps[start : start + lot]:
                buffer.add(*step)
            seconds[name].append((time.process_time() - begin) / len(steps[start : start + lot]))
    del steps
    case, report = CASE.format(game, rows), []
    report.append(
        row(
            "SB3's add, CPU time: ours over SB3's",
            case,
            ours=spread(seconds["fbuf"]),
            peer=spread(seconds["SB3"]),
            ratio=sum(seconds["fbuf"]) / sum(seconds["SB3"]),
            target="<= 1.0" if judged else None,
            note="background recompression included",
        )
    )
    for size, target in ((32, "<= 3"), (256, None)):
        thunks = {name: lambda buffer=buffer, size=size: buffer.sample(size)[1] for name, buffer in buffers.items()}
        times = interleave(thunks, rounds=25, calls=20 if size == 32 else 4, clock=time.process_time)
        report.append(
            row(
                f"SB3's sample({size}), CPU time: ours over SB3's",
                case,
                ours=spread(times["fbuf"]),
                peer=spread(times["SB3"]),
                ratio=ratio(times["fbuf"], times["SB3"]),
                target=target if judged else None,
            )
        )
    ours, theirs = (len(pickle.dumps(buffers[name], pickle.HIGHEST_PROTOCOL)) for name in ("fbuf", "SB3"))
    report.append(
        row(
            "Pickle of SB3's buffer: SB3's bytes over ours",
            case,
            ours=ours / 1e6,
            peer=theirs / 1e6,
            ratio=theirs / ours,
            target=">= 100" if judged else None,
            note="MB",
        )
    )
    return report


def training(steps: int, judged: bool) -> dict[str, Any]:
    """Time a whole run of DQN."""
    import ale_py
    import gymnasium as gym
    from stable_baselines3 import DQN
    from stable_baselines3.common.buffers import ReplayBuffer

    from fbuf.integrations.sb3 import CompressedReplayBuffer

    gym.register_envs(ale_py)
    image = gym.spaces.Box(0, 255, (84, 80), np.uint8)

    def learn(made: Any) -> None:
        env = gym.make("ALE/Breakout-v5", obs_type="grayscale", frameskip=4)
        env = gym.wrappers.TransformObservation(env, lambda frame: frame[32:200:2, ::2], image)
        env = gym.wrappers.FrameStackObservation(env, STACK)
        settings = {"buffer_size": 10_000, "learning_starts": steps // 3, "seed": 0, "device": "cpu"}
        DQN("CnnPolicy", env, replay_buffer_class=made, **settings).learn(steps)
        env.close()

    runs: dict[str, Any] = {"fbuf": lambda: learn(CompressedReplayBuffer), "SB3": lambda: learn(ReplayBuffer)}
    times = interleave(runs, rounds=5 if judged else 2, warmup=0, clock=time.process_time)
    return row(
        "A whole run of SB3's DQN, CPU time: ours over SB3's",
        f"Breakout, {steps:,} steps",
        ours=spread(times["fbuf"]),
        peer=spread(times["SB3"]),
        ratio=ratio(times["fbuf"], times["SB3"]),
        target="<= 1.03" if judged else None,
        note="environment included; one thread of torch",
    )


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
