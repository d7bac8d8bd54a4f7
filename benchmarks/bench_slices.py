"""What does a batch of slices cost, and what does adding to a buffer of slices?

10^6 rows of one float32[8] leaf and two flags, in episodes of 200 rows on average; a draw is 256 slices of 16 rows. The peers:

* flashbax's trajectory buffer, which knows no episodes: its windows run across resets. Expected: level with it.
* torchrl's `SliceSampler` over a `LazyTensorStorage`, which finds the episodes again at every sample unless `cache_values` is
  on and nothing was written since. It draws over episodes; ours is measured over windows and over episodes. Expected: 5x its
  cached speed and 15x its uncached.

All sides are one call from Python, as a training loop without a jitted step makes it: ours (which hands a new state back,
and is donated the old one) and flashbax's jitted. Such a call is mostly dispatch (a jitted function that makes 256 random
words is shown beside them), so ours and flashbax's are also measured where they are meant to run, in a scan; torchrl's
cannot be. Adding is measured in a scan, a row at a time in a full ring.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fbuf
from benchmarks._harness import Absent, absent_row, exponent, interleave, load_peer, ratio, row, spread

DRAW = "256 slices of 16 rows of {} held, one call: time of the peer's over ours"
SCAN = "256 slices of 16 rows of {} held, ours in a scan: time of the peer's over ours"
ADD = "Adding a row inside a scan, ring full: growth exponent (its size) from {} to {} rows"
LENGTH, BATCH, WIDTH, EPISODE = 16, 256, 8, 200
STEPS = 64  # draws of a scan


def rows_of(count: int) -> dict[str, np.ndarray]:
    """Episodes of random length."""
    rng = np.random.default_rng(0)
    return {
        "obs": rng.normal(size=(count, WIDTH)).astype(np.float32),
        "terminated": rng.random(count) < 1 / EPISODE,
        "truncated": np.zeros(count, bool),
    }


def filled(rows: dict[str, np.ndarray], over: str) -> tuple[fbuf.Buffer, Any]:
    """Our buffer with all rows in it."""
    view = fbuf.views.Sequence(LENGTH, autoreset="same_step")
    buffer = fbuf.Buffer(len(rows["obs"]), view=view, sampler=fbuf.samplers.Uniform(over))
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    return buffer, jax.jit(buffer.extend, donate_argnums=0)(state, rows)


def drawn_in_scan(sample: Any, state: Any) -> Any:
    """A thunk that draws `STEPS` batches, one after another; `sample(state, key) -> (state, data)`."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(state: Any, data: Any, keys: jax.Array) -> Any:
        return lax.scan(lambda carry, key: (sample(carry[0], key), None), (state, data), keys)[0]

    keys = jax.random.split(jax.random.key(0), STEPS)
    shapes = jax.eval_shape(sample, state, keys[0])[1]
    held = [state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)]

    def thunk() -> Any:
        held[:] = run(*held, keys)
        return held[1]

    return thunk


def ours_in_scan(rows: dict[str, np.ndarray]) -> Any:
    """Ours, over windows."""
    buffer, state = filled(rows, "anchors")

    def sample(state: Any, key: jax.Array) -> Any:
        state, batch = buffer.sample(state, key, BATCH)
        return state, batch.data

    return drawn_in_scan(sample, state)


def ours(rows: dict[str, np.ndarray], over: str) -> Any:
    """A thunk that draws a batch."""
    buffer, state = filled(rows, over)
    held, turn = [state], iter(range(10**9))
    sample = jax.jit(functools.partial(buffer.sample, batch_size=BATCH), donate_argnums=0)
    keys = list(jax.random.split(jax.random.key(0), 64))

    def thunk() -> Any:
        held[0], batch = sample(held[0], keys[next(turn) % 64])
        return batch.data

    data = thunk()
    assert data["obs"].shape == (BATCH, LENGTH, WIDTH) and not data["terminated"][:, :-1].any()
    return thunk


def flashbax(rows: dict[str, np.ndarray], scan: bool = False) -> Any:
    """The same of flashbax's trajectory buffer."""
    peer: Any = load_peer("flashbax")
    if isinstance(peer, Absent):
        return peer
    count = len(rows["obs"])
    buffer = peer.make_trajectory_buffer(
        max_length_time_axis=count,
        min_length_time_axis=LENGTH,
        sample_batch_size=BATCH,
        add_batch_size=1,
        sample_sequence_length=LENGTH,
        period=1,
    )
    state = buffer.init(jax.tree.map(lambda x: jnp.asarray(x[0]), rows))
    add = jax.jit(buffer.add, donate_argnums=0)
    for at in range(0, count, count // 10):
        state = add(state, jax.tree.map(lambda x, at=at: jnp.asarray(x[None, at : at + count // 10]), rows))
    if scan:
        return drawn_in_scan(lambda state, key: (state, buffer.sample(state, key).experience), state)
    sample, turn = jax.jit(buffer.sample), iter(range(10**9))
    keys = list(jax.random.split(jax.random.key(0), 64))

    def thunk() -> Any:
        return sample(state, keys[next(turn) % 64]).experience

    assert thunk()["obs"].shape == (BATCH, LENGTH, WIDTH)
    return thunk


def torchrl(rows: dict[str, np.ndarray], cached: bool) -> Any:
    """The same of torchrl's slice sampler."""
    peer: Any = load_peer("torchrl")
    if isinstance(peer, Absent):
        return peer
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SliceSampler

    count = len(rows["obs"])
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(count),
        sampler=SliceSampler(
            slice_len=LENGTH, end_key="done", truncated_key=None, cache_values=cached, strict_length=True
        ),
        batch_size=BATCH * LENGTH,
    )
    leaves = {name: torch.from_numpy(x) for name, x in rows.items()}
    leaves["done"] = (leaves["terminated"] | leaves["truncated"])[:, None]
    buffer.extend(TensorDict(leaves, batch_size=[count]))
    assert buffer.sample()["obs"].shape == (BATCH * LENGTH, WIDTH)
    return buffer.sample


def measure_draw(count: int, rounds: int) -> list[dict[str, Any]]:
    """Rows for all peers."""
    rows, question = rows_of(count), DRAW.format(f"{count:,}")
    cases = (
        ("flashbax's trajectory buffer", lambda: flashbax(rows), "anchors", ">= 1.0"),
        ("torchrl's SliceSampler, cached", lambda: torchrl(rows, True), "anchors", ">= 5"),
        ("torchrl's SliceSampler, not cached", lambda: torchrl(rows, False), "anchors", ">= 15"),
    )
    report, thunks = [], {"anchors": ours(rows, "anchors"), "episodes": ours(rows, "episodes")}
    peers = {}
    for case, make, _, target in cases:
        peer = make()
        if isinstance(peer, Absent):
            report.append(absent_row(question, case, peer, target))
        else:
            peers[case] = peer
    bits, key = jax.jit(functools.partial(jax.random.bits, shape=(BATCH,))), jax.random.key(0)
    thunks |= {"bits": lambda: bits(key)}
    timings = interleave({**thunks, **peers}, rounds=rounds, calls=2)
    for case, _, over, target in cases:
        if case in peers:
            mine, theirs = timings[over], timings[case]
            again = ratio(theirs, timings["episodes"]).median
            note = f"ours over episodes: {again:.3g}x; 256 random words: {spread(timings['bits'])}"
            report.append(
                row(
                    question,
                    case,
                    ours=spread(mine),
                    peer=spread(theirs),
                    ratio=ratio(theirs, mine),
                    target=target,
                    note=note,
                )
            )
    return report + measure_scan(rows, {case: timings[case] for case, *_ in cases[1:] if case in peers}, rounds)


def measure_scan(rows: dict[str, np.ndarray], calls: dict[str, list[float]], rounds: int) -> list[dict[str, Any]]:
    """Rows for ours in a scan, against flashbax's there and what was measured of the others' `calls`."""
    question, peer = SCAN.format(f"{len(rows['obs']):,}"), flashbax(rows, scan=True)
    timings = interleave(
        {"ours": ours_in_scan(rows)} | ({} if isinstance(peer, Absent) else {"peer": peer}), rounds=rounds
    )
    mine, report = [t / STEPS for t in timings["ours"]], []
    if isinstance(peer, Absent):
        report.append(absent_row(question, "flashbax's trajectory buffer, in a scan too", peer, ">= 1.0"))
    else:
        theirs = [t / STEPS for t in timings["peer"]]
        report.append(
            row(
                question,
                "flashbax's trajectory buffer, in a scan too",
                ours=spread(mine),
                peer=spread(theirs),
                ratio=ratio(theirs, mine),
                target=">= 1.0",
            )
        )
    for case, theirs in calls.items():
        shown = spread(mine), spread(theirs)
        report.append(
            row(question, f"{case}, one call", ours=shown[0], peer=shown[1], ratio=shown[1].median / shown[0].median)
        )
    return report


def measure_add(view: Any, counts: tuple[int, ...], rounds: int, steps: int = 256) -> dict[str, Any]:
    """The row of one view."""
    thunks = {}
    rows = jax.device_put(rows_of(steps))
    for count in counts:
        buffer = fbuf.Buffer(count, view=view)
        state = buffer.init(jax.tree.map(lambda x: x[0], rows))
        fill = jax.jit(buffer.extend, donate_argnums=0)
        for _ in range(2):
            state = fill(state, rows_of(count))

        @functools.partial(jax.jit, donate_argnums=0)
        def run(state: Any, rows: Any, buffer: fbuf.Buffer = buffer) -> Any:
            return lax.scan(lambda state, one: (buffer.add(state, one), None), state, rows)[0]

        held = [state]

        def thunk(held: list[Any] = held, run: Any = run) -> Any:
            held[0] = run(held[0], rows)
            return held[0]

        thunks[str(count)] = thunk
    timings = interleave(thunks, rounds=rounds)
    seconds: dict[float, list[float]] = {n: [t / steps for t in timings[str(n)]] for n in counts}
    slope = exponent(seconds)
    return row(
        ADD.format(f"{counts[0]:,}", f"{counts[-1]:,}"),
        repr(view),
        ours=spread(seconds[counts[-1]]),
        ratio=abs(slope.median),
        target="<= 0.05",
        note=f"exponent {slope}; a row at {counts[-1]:,}, at {counts[0]:,}: {spread(seconds[counts[0]])}",
    )


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows at 10^6 rows, 10^4 when `quick`."""
    count, rounds = (10_000, 2) if quick else (1_000_000, 21)
    counts = (10_000, 20_000) if quick else (10_000, 100_000, 1_000_000)
    views = (
        fbuf.views.Sequence(LENGTH, autoreset="same_step"),
        fbuf.views.Sequence(LENGTH, boundary="mask", autoreset="same_step"),
        fbuf.views.Episode(1000, autoreset="same_step"),
    )
    report = measure_draw(count, rounds)
    return report + [measure_add(view, counts, rounds) for view in views]


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
