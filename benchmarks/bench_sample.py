"""What does `sample` cost above the bare gather of the same rows?

A store of 1.3 GB, so that nearly every drawn row is a cache miss, read inside a scan. Both sides carry
the whole batch from step to step: a consumer that reads part of it lets XLA fuse the gather away. The
bare side is given the slots that ours will draw, but it reads the slots of another call than ours just
did, or it would find the rows in the cache. Expected: at most 1.15x for 256 frames of 84x84 bytes,
everything included (random numbers, weights, index, mask, counters, and the ordering of reads before
later writes).

The second case is frame stacks with 3-step returns against a gather of the same frames: at most 1.3x. Last the bytes
of a buffer of such transitions, against those of what a learner reads of it, stored: expected an eighth.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fbuf
from benchmarks._harness import interleave, ratio, row, spread

QUESTION = "Sample inside a scan from a cold store: time over that of a bare gather"
SHAPE = (84, 84)
Tree = Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A view, and which slots it reads for a drawn one."""

    name: str
    view: Any
    offsets: tuple[tuple[int, ...], ...]  # per observation leaf of the batch: rows relative to the drawn one
    steps: int  # in one scan, about 100 MB of batches
    target: str | None


ROW = Case("256 rows", fbuf.views.Row(), ((0,),), 64, "<= 1.15")
STACKED = Case(
    "256 stacks of 4 and their 3-step successors",
    fbuf.views.Transition(stack=4, n_step=3, autoreset="same_step"),
    ((-3, -2, -1, 0), (0, 1, 2, 3)),
    8,
    "<= 1.3",
)


def filled(case: Case, capacity: int) -> tuple[fbuf.Buffer, Any]:
    """A full buffer whose only episode never ends, so that every window is whole."""
    buffer = fbuf.Buffer(capacity, view=case.view)
    example = {"obs": np.zeros(SHAPE, np.uint8)}
    if case is not ROW:
        example |= {"action": np.int32(0), "reward": np.float32(0)}
        example |= {"terminated": np.bool_(False), "truncated": np.bool_(False)}
    size = min(capacity, 2_000)
    rows = {name: np.zeros((size, *np.shape(leaf)), leaf.dtype) for name, leaf in example.items()}
    rows["obs"] = np.random.default_rng(0).integers(0, 255, (size, *SHAPE), np.uint8)
    rows = jax.device_put(rows)
    state, extend = buffer.init(example), jax.jit(buffer.extend, donate_argnums=0)
    for _ in range(-(-capacity // size)):
        state = extend(state, rows)
    return buffer, jax.block_until_ready(state)


def ours(buffer: fbuf.Buffer, batch_size: int) -> Callable[..., Any]:
    """`(state, batch, keys) -> (state, batch, slots)`, a sample a key."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(state: Any, batch: Any, keys: jax.Array) -> Any:
        def step(carry: Any, key: jax.Array) -> Any:
            state, batch = buffer.sample(carry[0], key, batch_size)
            return (state, batch), batch.index.slot

        (state, batch), slots = lax.scan(step, (state, batch), keys)
        return state, batch, slots

    return run


@functools.partial(jax.jit, donate_argnums=1)
def bare(array: jax.Array, batch: list[jax.Array], slots: list[jax.Array]) -> list[jax.Array]:
    """The gather alone: slots int32[steps, ...] in bounds."""

    def step(_: Any, slots: Any) -> Any:
        return [array.at[s].get(mode="promise_in_bounds") for s in slots], None

    return lax.scan(step, batch, slots)[0]


def measure(case: Case, capacity: int, batch_size: int, rounds: int) -> dict[str, Any]:
    """The row of one case."""
    buffer, state = filled(case, capacity)
    calls, warmup = rounds + 2, 2
    keys = [jax.random.split(jax.random.key(i), case.steps) for i in range(calls)]
    batch = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(lambda s: buffer.peek(s, keys[0][0], batch_size), state)
    )
    run, held, slots = ours(buffer, batch_size), [state, batch], []
    del state, batch
    for key in keys:
        *held, drawn = run(*held, key)
        around = [(drawn[..., None] + np.asarray([[o]], np.int32)) % np.int32(capacity) for o in case.offsets]
        slots.append([a[..., 0] if case is ROW else a for a in around])
    stacks = [jnp.zeros((*s.shape[1:], *SHAPE), jnp.uint8) for s in slots[0]]
    _check(case, held, bare(held[0].rows["obs"], stacks, slots[-1]))
    turn = {"ours": 0, "bare": calls // 2}
    box = [[jnp.zeros((*s.shape[1:], *SHAPE), jnp.uint8) for s in slots[0]]]

    def sample() -> Any:
        nonlocal held
        *held, _ = run(*held, keys[turn["ours"] % calls])
        turn["ours"] += 1
        return held

    def gather() -> Any:
        box[0] = bare(held[0].rows["obs"], box[0], slots[turn["bare"] % calls])
        turn["bare"] += 1
        return box[0]

    timings = interleave({"ours": sample, "bare": gather}, rounds=rounds, warmup=warmup)
    mine, theirs = timings["ours"], timings["bare"]
    size = held[0].rows["obs"].nbytes / 1e9
    return row(
        QUESTION,
        f"{case.name}, {size:.2g} GB",
        ours=spread([t / case.steps for t in mine]),
        peer=spread([t / case.steps for t in theirs]),
        ratio=ratio(mine, theirs),
        target=case.target,
        note="peer: x.at[slots].get(mode='promise_in_bounds')",
    )


def _check(case: Case, held: list[Any], gathered: list[jax.Array]) -> None:
    """Both sides read the same bytes, or their times mean nothing."""
    data = held[1].data
    mine = [data["obs"]] if case is ROW else [data["obs"], data["next_obs"]]
    for a, b in zip(mine, gathered, strict=True):
        if not np.array_equal(a, b):
            raise AssertionError("bench_sample: the bare gather reads other rows than `sample` does")


def measure_bytes(capacity: int = 1_000) -> dict[str, Any]:
    """The row of what is stored, all of the state."""
    buffer, state = filled(STACKED, capacity)
    held, frame = buffer.nbytes(state)["device"], SHAPE[0] * SHAPE[1]
    raw = capacity * (8 * frame + 4 + 4 + 1 + 1)  # obs and next_obs of four frames, action, reward, two flags
    return row(
        "Bytes of 84x84 frames stored once, over those of stacks with next stacks",
        STACKED.name,
        ours=held / capacity,
        peer=raw / capacity,
        ratio=held / raw,
        target="<= 0.126",
        note="bytes a row, bookkeeping included",
    )


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for both cases, from a store of 1.3 GB (`quick`: 14 MB, which is not cold)."""
    capacity, rounds = (2_000, 2) if quick else (184_000, 31)
    return [*(measure(case, capacity, 256, rounds) for case in (ROW, STACKED)), measure_bytes()]


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
