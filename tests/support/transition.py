"""Episodes through a plain n-step accumulator, and the same episodes through a buffer with `Transition`.

The accumulator is a deque of steps, as most libraries keep one. An environment may give the last observation of an episode
beside the last row ("final"), not at all ("none"), or in a row of its own after the end ("next_step").
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import jax
import numpy as np

import fbuf
from fbuf.views import Transition

CASES = [(1, None, "zero"), (3, 4, "zero"), (5, 2, "repeat")]  # n_step, stack, pad
LAYOUTS = ["final", "none", "next_step"]


class Step(NamedTuple):
    obs: np.ndarray  # stack
    action: int
    reward: float
    next_obs: np.ndarray
    terminated: bool
    ended: bool
    number: int  # within the episode


class Emitted(NamedTuple):
    obs: np.ndarray
    reward: float
    discount: float
    next_obs: np.ndarray
    frames: int  # frames of this episode before the anchor's own


class Episode(NamedTuple):
    frames: np.ndarray  # [T + 1, 3], the last one is seen after the last action
    actions: np.ndarray  # [T], a number no other step has
    rewards: np.ndarray  # [T]
    end: str  # "terminated", "truncated", or "open": still running


def play(rng: np.random.Generator, steps: int) -> list[Episode]:
    """Episodes of 1 to 9 steps, `steps` in all; the last one is still running."""
    episodes, total = [], 0
    while total < steps:
        length = min(int(rng.integers(1, 10)), steps - total)
        episodes.append(
            Episode(
                rng.integers(1, 256, (length + 1, 3)).astype(np.uint8),
                np.arange(total, total + length, dtype=np.int32),
                rng.normal(size=length).astype(np.float32),
                str(rng.choice(["terminated", "truncated"])),
            )
        )
        total += length
    return [*episodes[:-1], episodes[-1]._replace(end="open")]


def accumulate(episode: Episode, n: int, gamma: float, stack: int, pad: str) -> dict[int, Emitted]:
    """What a frame-stack wrapper and an n-step deque make of an episode, by action."""
    emitted: dict[int, Emitted] = {}
    waiting: collections.deque[Step] = collections.deque()

    def emit() -> None:
        first, last = waiting[0], waiting[-1]
        total = sum(gamma**i * step.reward for i, step in enumerate(waiting))
        discount = 0.0 if last.terminated else gamma ** len(waiting)
        emitted[first.action] = Emitted(first.obs, total, discount, last.next_obs, first.number)
        waiting.popleft()

    first = episode.frames[0]
    frames = collections.deque([np.zeros_like(first) if pad == "zero" else first] * (stack - 1) + [first], maxlen=stack)
    for t, action in enumerate(episode.actions):
        obs = np.stack(frames)
        frames.append(episode.frames[t + 1])
        ended = t + 1 == len(episode.actions) and episode.end != "open"
        terminated = ended and episode.end == "terminated"
        reward = float(episode.rewards[t])
        waiting.append(Step(obs, int(action), reward, np.stack(frames), terminated, ended, t))
        if len(waiting) == n:
            emit()
        while ended and waiting:
            emit()
    return emitted


def store(episodes: list[Episode], layout: str) -> dict[str, np.ndarray]:
    """Rows in arrival order, as an environment of this kind would give them."""
    rows: list[dict[str, Any]] = []
    for episode in episodes:
        for t, action in enumerate(episode.actions):
            last = t + 1 == len(episode.actions) and episode.end != "open"
            rows.append(
                {
                    "obs": episode.frames[t],
                    "final": episode.frames[t + 1] if last else np.full(3, 77, np.uint8),
                    "action": action,
                    "reward": episode.rewards[t],
                    "terminated": last and episode.end == "terminated",
                    "truncated": last and episode.end == "truncated",
                }
            )
        if layout == "next_step" and episode.end != "open":
            ignored = {"action": np.int32(-1), "reward": np.float32(99), "final": rows[-1]["final"]}
            flags = {"terminated": False, "truncated": False}
            rows.append({"obs": episode.frames[-1], **ignored, **flags})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def check_accumulated(layout: str, n: int, stack: int | None, pad: str) -> None:
    """Compare every transition of 150 steps with what the accumulator emits, as the ring turns."""
    gamma, capacity, piece = 0.9, 48, 7
    episodes = play(np.random.default_rng([n, len(layout)]), 150)
    view = Transition(
        n_step=n,
        gamma=gamma,
        stack=stack,
        pad=pad,
        final_observation="final" if layout == "final" else None,
        autoreset="next_step" if layout == "next_step" else "same_step",
    )
    rows = store(episodes, layout)
    expected: dict[int, Emitted] = {}
    for episode in episodes:
        made = accumulate(episode, n, gamma, stack or 1, pad)
        if layout == "none" and episode.end == "truncated":
            # all that is known: an episode cut off one step earlier
            known = len(episode.actions) - 1
            shorter = Episode(
                episode.frames[: known + 1],
                episode.actions[:known],
                episode.rewards[:known],
                "truncated",
            )
            made = accumulate(shorter, n, gamma, stack or 1, pad)
        expected |= made

    buffer = fbuf.Buffer(capacity=capacity, view=view)
    state = buffer.init({k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in rows.items()})
    place = {int(action): i for i, action in enumerate(rows["action"])}
    seen = 0
    for begin in range(0, len(rows["action"]) - piece + 1, piece):
        new = {k: x[begin : begin + piece] for k, x in rows.items()}
        state = buffer.extend(state, new)
        arrived = begin + piece
        batch = jax.device_get(buffer.peek(state, jax.random.key(begin), 2048))
        got = {int(action): i for i, action in enumerate(batch.data["action"])} if batch.mask[0] else {}
        oldest = arrived - capacity
        behind = (stack or 1) - 1
        can = {action for action, one in expected.items() if place[action] - min(one.frames, behind) >= oldest}
        settled = {action for action in can if place[action] + n < arrived}
        assert settled <= set(got) <= can  # later ones depend on whether their episode's end came
        for action, i in got.items():
            one = expected[action]
            next_obs = one.next_obs
            if one.discount == 0 and layout != "final":  # the last stack before the end
                next_obs = stack_before_end(episodes, action, stack or 1, pad)
            cut = slice(None) if stack is not None else -1
            np.testing.assert_array_equal(batch.data["obs"][i], one.obs[cut])
            np.testing.assert_array_equal(batch.data["next_obs"][i], next_obs[cut])
            np.testing.assert_allclose(batch.data["reward"][i], one.reward, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(batch.data["discount"][i], one.discount, rtol=1e-6)
        seen += len(got)
    assert seen > 300


def stack_before_end(episodes: list[Episode], action: int, stack: int, pad: str) -> np.ndarray:
    """The stack of the last row of the episode in which `action` was taken."""
    episode = next(e for e in episodes if action in e.actions)
    last = int(episode.actions[-1])
    return accumulate(episode, 1, 1.0, stack, pad)[last].obs
