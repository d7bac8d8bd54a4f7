"""What does one batch of several buffers cost, beside batches of each of them?

A mixture with exact quotas draws and reads for each buffer its own quota, and puts the parts together as they are read: one
`sample` of 256 rows of two buffers in a donated, jitted step, against two of 128 rows, each of its own step. Expected: no more
than 1.15 times the time. Where quotas are traced (an annealed fraction, a source drawn for each row) a program has room for
256 rows of each buffer: that is measured beside it, against the same two batches, without a target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks._harness import interleave, ratio, row, spread

QUESTION = "A batch of 256 of two buffers, half of each: time of a mixture over that of a batch of 128 of each"
BATCH = 256
SMALL = {"obs": np.zeros(16, np.float32), "action": np.int32(0), "reward": np.float32(0)}
FRAMES = {"obs": np.zeros((4, 84, 84), np.uint8), "action": np.int32(0), "reward": np.float32(0)}


def cases(quick: bool) -> dict[str, tuple[dict[str, Any], dict[str, fbuf.Buffer]]]:
    """An example of a row, and the buffers, by what they are called in the report."""
    many, few = (20_000, 300) if quick else (1_000_000, 4000)
    compressed = fbuf.storages.Compressed(keys=("obs",))
    return {
        "76 bytes a row, uniform": (SMALL, {name: fbuf.Buffer(many) for name in "ab"}),
        "76 bytes a row, prioritized": (SMALL, {name: fbuf.prioritized(many) for name in "ab"}),
        "stacks of frames, uniform": (FRAMES, {name: fbuf.Buffer(few) for name in "ab"}),
        "stacks of frames, prioritized": (FRAMES, {name: fbuf.prioritized(few) for name in "ab"}),
        "stacks of frames, compressed": (FRAMES, {name: fbuf.Buffer(few, storage=compressed) for name in "ab"}),
    }


def filled(mixture: fbuf.Mixture, example: Any) -> Any:
    """A state whose buffers are full."""
    states, rng = {}, np.random.default_rng(0)
    for name, buffer in mixture.members:
        left, state = buffer.capacity, buffer.init(example)
        while left:
            number = min(left, 10_000)
            rows = {key: np.zeros((number, *np.shape(x)), np.asarray(x).dtype) for key, x in example.items()}
            rows["obs"] += rng.integers(0, 250, (number, *(1,) * np.ndim(example["obs"]))).astype(rows["obs"].dtype)
            state = buffer.extend(state, rows)
            left -= number
        states[name] = state
    return states


def stepping(sample: Callable[[Any, Any], Any], state: Any) -> Callable[[Any], Any]:
    """A call that draws a batch and carries the state."""
    held, step = [state], jax.jit(sample, donate_argnums=0)

    def call(key: Any) -> Any:
        held[0], batch = step(held[0], key)
        return batch

    return call


def compare(case: str, example: Any, buffers: dict[str, fbuf.Buffer], rounds: int) -> list[dict[str, Any]]:
    """The mixture in three ways, and its parts, in turn."""
    mixture = fbuf.Mixture(buffers)
    state = filled(mixture, example)
    keys, number = jax.random.split(jax.random.key(1), 64), [0]

    def key() -> Any:
        number[0] += 1
        return keys[number[0] % 64]

    def copy(state: Any) -> Any:
        return jax.tree.map(jnp.copy, state)

    def sampling(mixture: fbuf.Mixture, **settings: Any) -> Callable[[], Any]:
        call = stepping(lambda state, key: mixture.sample(state, key, BATCH, **settings), copy(state))
        return lambda: call(key())

    parts = [
        stepping(lambda state, key, buffer=buffer: buffer.sample(state, key, BATCH // 2), copy(state[name]))
        for name, buffer in mixture.members
    ]
    timings = interleave(
        {
            "exact": sampling(mixture),
            "traced": sampling(mixture, fractions={"a": jnp.float32(0.5)}),
            "at random": sampling(fbuf.Mixture(buffers, quota="random")),
            "parts": lambda: [part(key()) for part in parts],
        },
        rounds=rounds,
        calls=5,
    )
    return [
        row(
            QUESTION,
            f"{case}, {how}",
            ours=spread(timings[how]),
            peer=spread(timings["parts"]),
            ratio=ratio(timings[how], timings["parts"]),
            target="<= 1.15" if how == "exact" else None,
            note="" if how == "exact" else "reads have room for 256 rows of each",
            tags={"case": case, "quota": how},
        )
        for how in ("exact", "traced", "at random")
    ]


def main(quick: bool) -> list[dict[str, Any]]:
    """Small rows and frames, uniform, prioritized and compressed; a million small rows a buffer, or 20,000 if `quick`."""
    report = []
    for case, (example, buffers) in cases(quick).items():
        report += compare(case, example, buffers, 2 if quick else 31)
    return report


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
