"""Run fbuf's cases about windows, episodes, hindsight, n-step returns and ragged rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks.defects import Outcome


def steps(lengths: list[int], flag: str = "terminated") -> dict[str, np.ndarray]:
    """Return rows of episodes of these lengths: `t` is the row number, `episode` the number of its episode."""
    episode = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    ends = np.zeros(len(episode), np.bool_)
    ends[np.cumsum(lengths) - 1] = True
    flags = {"terminated": np.zeros_like(ends), "truncated": np.zeros_like(ends)} | {flag: ends}
    return {"t": np.arange(len(episode), dtype=np.int32), "episode": episode, **flags}


def windows_of(rows: dict[str, np.ndarray], sampler: Any = None, storage: Any = None, **view: Any) -> Any:
    """Return a buffer of windows of 5 rows, and its state."""
    parts = {"storage": storage} if storage is not None else {}
    buffer = fbuf.Buffer(
        32,
        view=fbuf.views.Sequence(5, **view, autoreset="same_step"),
        sampler=sampler or fbuf.samplers.Uniform(),
        **parts,
    )
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    return buffer, buffer.extend(state, rows)


def truncated_only() -> Outcome:
    """Use episodes that only ever truncate."""
    buffer, state = windows_of(steps([8, 8, 8], "truncated"))
    _, batch = buffer.sample(state, jax.random.key(0), 256)
    crossed = int((np.ptp(np.asarray(batch.data["episode"]), axis=1) > 0).sum())
    return Outcome(f"{crossed} of 256 windows cross an end", crossed == 0)


def cut_windows() -> Outcome:
    """Draw windows that may be cut at both ends from episodes of which some are short."""
    buffer, state = windows_of(steps([3, 9, 2, 12]), boundary="mask", at=2)
    _, batch = buffer.sample(state, jax.random.key(0), 256)
    held = np.asarray(batch.data["mask"]).sum(axis=1)
    text = f"windows of {held.min()} to {held.max()} rows, always [256, {batch.data['mask'].shape[1]}] with a mask"
    return Outcome(text, held.min() >= 1)


def short_episodes() -> Outcome:
    """Draw windows of 5 without replacement from episodes of which some have fewer rows."""
    buffer, state = windows_of(steps([10, 3, 10, 3]), sampler=fbuf.samplers.Epoch())
    sizes = []
    for seed in range(3):
        state, batch = buffer.sample(state, jax.random.key(seed), 4)
        sizes.append(int(batch.mask.sum()))
    return Outcome(f"batches of 4 windows have {sizes} windows", sizes == [4, 4, 4])


def compressed_windows() -> Outcome:
    rows = steps([8, 8, 8]) | {"obs": np.repeat(np.arange(24, dtype=np.uint8), 1024).reshape(24, 1024)}
    buffer, state = windows_of(rows, storage=fbuf.storages.Compressed(keys=("obs",)))
    _, batch = buffer.sample(state, jax.random.key(0), 32)
    right = bool((np.asarray(batch.data["obs"][..., 0]) == np.asarray(batch.data["t"])).all())
    return Outcome(f"a batch {list(batch.data['obs'].shape)}; the frames are right: {right}", right)


def odd_leaves() -> Outcome:
    """Compress bfloat16 and a leaf without elements."""
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Compressed(keys=("half", "none")))
    rows = {"half": jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8), "none": jnp.zeros((8, 0), jnp.float32)}
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    got = buffer.rows(state).data
    right = got["half"].dtype == jnp.bfloat16 and bool((got["half"] == rows["half"]).all())
    return Outcome(
        f"bfloat16 is returned as stored: {right}; the empty leaf has the shape {list(got['none'].shape)}", right
    )


@dataclasses.dataclass(frozen=True)
class Upside:
    """A custom codec that reverses the bytes."""

    chunk: int = 1

    def encode(self, rows: np.ndarray) -> bytes:
        return rows.tobytes()[::-1]

    def decode(self, data: Any, out: np.ndarray) -> None:
        out[...] = np.frombuffer(bytes(data)[::-1], out.dtype).reshape(out.shape)


def hindsight() -> Outcome:
    """Relabel goals in a ring that has wrapped around."""
    view = fbuf.views.Hindsight(fbuf.views.Transition(autoreset="same_step"), _reward, fraction=0.5)
    buffer = fbuf.Buffer(20, view=view)
    state = buffer.init(_goal_rows(0, 1, one=True))
    for first, number in ((0, 13), (13, 13)):
        state = buffer.extend(state, _goal_rows(first, number))
    state, batch = buffer.sample(state, jax.random.key(0), 256)
    there, done = np.asarray(batch.mask), np.asarray(batch.data["relabelled"])
    obs = {name: np.asarray(leaf)[there & done] for name, leaf in batch.data["obs"].items()}
    other = int((obs["desired_goal"] // 7 != obs["position"] // 7).sum())
    halves = [float(half.mean()) for half in np.split(done, 2)]
    text = f"{other} of {int((there & done).sum())} goals are of another episode; "
    text += f"relabelled in the first half of a batch: {halves[0]:.0%}, in the second: {halves[1]:.0%}"
    return Outcome(text, other == 0 and all(0.2 < half < 0.7 for half in halves))


def _reward(achieved: Any, goal: Any) -> Any:
    return -(jnp.abs(achieved - goal) > 0.05).astype(jnp.float32)


def _goal_rows(first: int, number: int, one: bool = False) -> dict[str, Any]:
    """Return rows of episodes of 7 rows; the goal that a row achieved is its number."""
    t = np.arange(first, first + number, dtype=np.float32)
    obs = {"position": t, "achieved_goal": t, "desired_goal": np.full(number, 999, np.float32)}
    rows = {"obs": obs, "action": np.zeros(number, np.float32), "reward": np.full(number, -1, np.float32)}
    rows |= {"terminated": t % 7 == 6, "truncated": np.zeros(number, np.bool_)}
    return jax.tree.map(lambda x: x[0], rows) if one else rows


def one_step() -> Outcome:
    """Find the rows whose discount is 0 in n-step returns with n = 1."""
    buffer = fbuf.Buffer(16, view=fbuf.views.Transition(n_step=1, gamma=0.5, autoreset="same_step"))
    t = np.arange(8, dtype=np.float32)
    flags = {"terminated": t == 5, "truncated": np.zeros(8, np.bool_)}
    rows = {"obs": t, "action": t, "reward": np.ones(8, np.float32), **flags}
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    _, batch = buffer.sample(state, jax.random.key(0), 256)
    discount = dict(
        zip(np.asarray(batch.data["obs"]).tolist(), np.asarray(batch.data["discount"]).tolist(), strict=True)
    )
    stops = sorted(t for t, value in discount.items() if value == 0)
    text = f"rows {[int(t) for t in stops]} of 0 to 7 do not bootstrap (only 5 is terminal)"
    return Outcome(text, stops == [5.0] and 7.0 not in discount)


def ragged() -> Outcome:
    """Store rows of different shapes, of which some lack a leaf."""
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Ragged())
    state = buffer.init({"tokens": np.zeros(0, np.int32), "note": "", "t": 0})
    said = [{"tokens": np.arange(n, dtype=np.int32), "t": n} | ({"note": "x"} if n % 2 else {}) for n in range(1, 7)]
    state = buffer.extend(state, said)
    state, batch = buffer.sample(state, jax.random.key(0), 8)
    lengths = [len(x) for x in batch.lazy["tokens"]] == np.asarray(batch.data["t"]).tolist()
    notes = batch.lazy.get("note", "none")
    right = lengths and all((n == "x") == bool(t % 2) for n, t in zip(notes, np.asarray(batch.data["t"]), strict=True))
    return Outcome(f"lists of arrays, and a default where a row lacks a leaf: {right}", right)
