"""What does it cost to keep the highest of all rows, beside torchrl's TensorDictMaxValueWriter?

Both get the same thousand rows a call, of a rank and sixteen numbers, into a full buffer: rows that are all higher than those
held, the dearest there is; rows as high as those held; and rows of which none is higher. torchrl's writer is a heap in
Python that looks at each row; ours is `writers.TopK` in one donated, jitted `extend`. Both must hold the same ranks afterwards.
Expected: 20 times as fast or more. What a ring takes for the same rows, and the growth with the capacity, are asked of ours
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks._harness import Absent, absent_row, exponent, interleave, load_peer, ratio, row, spread

EXTEND = "The highest of all rows, 1,000 rows a call: time of torchrl's TensorDictMaxValueWriter over ours"
RING = "extend of 1,000 rows: time of `TopK` over that of `Ring`"
GROWTH = "The highest of all rows, {:,} to {:,} held: growth exponent"

ROWS, WIDTH = 1000, 16
CALLS = 8  # in one measurement of either: one of ours may take less than 100 us
TOPK = fbuf.writers.TopK("rank")
CASES = ("all are higher", "as high as those held", "none is higher")


def ranks(case: str, capacity: int, calls: int) -> Iterator[np.ndarray]:
    """float32[ROWS] for each call, the first of which fill the buffer."""
    rng = np.random.default_rng(0)
    for _ in range(-(-capacity // ROWS)):
        yield rng.random(ROWS, np.float32)
    for call in range(calls):
        if case == "all are higher":  # and different, up to the 2^24 whole numbers that float32 has
            yield (1 + ROWS * call + rng.permutation(ROWS)).astype(np.float32)
        elif case == "as high as those held":
            yield rng.random(ROWS, np.float32)
        else:
            yield -1 - rng.random(ROWS, np.float32)


def ours(
    case: str, capacity: int, calls: int, writer: Any = TOPK
) -> tuple[Callable[[], Any], Callable[[], np.ndarray]]:
    """A thunk of one call, and what ranks are held."""
    buffer = fbuf.Buffer(capacity, writer=writer)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    given, obs = ranks(case, capacity, calls), jnp.zeros((ROWS, WIDTH), jnp.float32)
    state = [buffer.init({"rank": jnp.float32(0), "obs": jnp.zeros(WIDTH, jnp.float32)})]
    batches = [{"rank": jnp.asarray(rank), "obs": obs} for rank in given]
    for batch in batches[:-calls]:
        state[0] = extend(state[0], batch)
    left = iter(batches[-calls:])

    def thunk() -> Any:
        state[0] = extend(state[0], next(left))
        return state[0].token

    return thunk, lambda: np.sort(np.asarray(buffer.rows(state[0]).data["rank"]))


def theirs(case: str, capacity: int, calls: int) -> tuple[Callable[[], Any], Callable[[], np.ndarray]]:
    """The same of torchrl's."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer

    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), writer=TensorDictMaxValueWriter(rank_key="rank"), batch_size=4
    )
    given, obs = ranks(case, capacity, calls), torch.zeros(ROWS, WIDTH)
    batches = [TensorDict({"rank": torch.from_numpy(rank)[:, None], "obs": obs}, [ROWS]) for rank in given]
    for batch in batches[:-calls]:
        replay.extend(batch)
    left = iter(batches[-calls:])
    return lambda: replay.extend(next(left)), lambda: np.sort(replay[:]["rank"].numpy().reshape(-1))


def compare(capacity: int, rounds: int) -> list[dict[str, Any]]:
    """Ours and theirs in turn, and a look at what both hold."""
    peer, report, warmup = load_peer("torchrl"), [], 2
    for case in CASES:
        name = f"{capacity:,} held, {case}"
        if isinstance(peer, Absent):
            report.append(absent_row(EXTEND, name, peer, ">= 20"))
            continue
        (one, ranks_of_one), (two, ranks_of_two) = (f(case, capacity, rounds * CALLS + warmup) for f in (ours, theirs))
        timings = interleave({"fbuf": one, "torchrl": two}, rounds=rounds, warmup=warmup, calls=CALLS)
        if not np.array_equal(ranks_of_one(), ranks_of_two()):
            raise AssertionError(f"{name}: the two hold different ranks")
        times = ratio(timings["torchrl"], timings["fbuf"])
        report.append(
            row(
                EXTEND,
                name,
                ours=spread(timings["fbuf"]),
                peer=spread(timings["torchrl"]),
                ratio=times,
                target=">= 20",
                tags={"library": "torchrl", "size": capacity, "case": case},
            )
        )
    return report


def over_ring(capacity: int, rounds: int) -> list[dict[str, Any]]:
    """How much of a call a ring takes, too."""
    report = []
    for case in CASES:
        writers = {"top": TOPK, "ring": fbuf.writers.Ring()}
        thunks = {name: ours(case, capacity, rounds * CALLS + 2, writer)[0] for name, writer in writers.items()}
        timings = interleave(thunks, rounds=rounds, calls=CALLS)
        times = spread(timings["top"]), spread(timings["ring"])
        shares = ratio(timings["top"], timings["ring"])
        report.append(row(RING, f"{capacity:,} held, {case}", ours=times[0], peer=times[1], ratio=shares))
    return report


def growth(sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """How the time of a call grows with the capacity where all rows are kept."""
    thunks = {size: ours(CASES[0], size, rounds * CALLS + 2)[0] for size in sizes}
    timings = interleave({str(size): thunk for size, thunk in thunks.items()}, rounds=rounds, calls=CALLS)
    return [
        row(
            GROWTH.format(sizes[0], sizes[-1]),
            f"N={ROWS:,}, {CASES[0]}",
            ours=spread(timings[str(sizes[-1])]),
            ratio=exponent({size: timings[str(size)] for size in sizes}),
            target="<= 0.3",
        )
    ]


def main(quick: bool) -> list[dict[str, Any]]:
    """1,000 and 100,000 rows held; growth up to 10^6; 1,000 and 10^4 if `quick`."""
    if quick:
        return compare(1000, 2) + over_ring(1000, 2) + growth((10**3, 10**4), 2)
    return compare(1000, 21) + compare(100_000, 21) + over_ring(1000, 21) + growth((10**3, 10**4, 10**5, 10**6), 21)


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
