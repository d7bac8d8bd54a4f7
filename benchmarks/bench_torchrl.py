"""What does a compressed storage cost and save in torchrl?

The same transitions of 4-stacks of Breakout (`pixels` and `("next", "pixels")`) go through torchrl's `ReplayBuffer` with
`CompressedStorage`, `CompressedListStorage` (its codec and level by default) and `LazyMemmapStorage`, 200 rows a call. Bytes
are those that each storage counts of itself. Times are CPU times of all threads, interleaved in one process.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks._harness import Absent, absent_row, interleave, load_peer, ratio, row, spread
from benchmarks.bench_sb3 import transitions

GAME = "Breakout"
LOT, BATCH, SLICE = 200, 256, 16


def rows_of(number: int) -> Iterator[Any]:
    """Yield tensordicts of `LOT` transitions of one environment."""
    import torch
    from tensordict import TensorDict

    steps = transitions(GAME)
    for _ in range(number // LOT):
        first, following, action, reward, done, _ = zip(*itertools.islice(steps, LOT), strict=True)
        named = {"pixels": first, "action": action, ("next", "pixels"): following}
        named |= {("next", "reward"): np.float32(reward), ("next", "done"): done}
        leaves = {name: torch.from_numpy(np.stack(leaf)) for name, leaf in named.items()}
        for name in ("pixels", ("next", "pixels")):
            leaves[name] = leaves[name][:, 0]
        yield TensorDict(batch_size=[LOT]).update(leaves)


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for 20,000 transitions (`quick`: 1,000)."""
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = load_peer("torchrl")
        if isinstance(library, Absent):
            return [absent_row("Storages of torchrl", GAME, library)]
        import torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # CPU time counts threads that spin
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _compare(1_000 if quick else 20_000, folder, judged=not quick)
    finally:
        torch.set_num_threads(threads)


def _compare(number: int, folder: str, judged: bool) -> list[dict[str, Any]]:
    from torchrl.data import CompressedListStorage, LazyMemmapStorage, ReplayBuffer, SliceSampler

    from fbuf.integrations.torchrl import CompressedStorage

    storages = {
        "fbuf": CompressedStorage(number),
        "list": CompressedListStorage(number),
        "memmap": LazyMemmapStorage(number, scratch_dir=folder),
    }
    buffers = {name: ReplayBuffer(storage=storage, batch_size=BATCH) for name, storage in storages.items()}
    seconds: dict[str, list[float]] = {name: [] for name in buffers}
    for lot in rows_of(number):
        for name, buffer in buffers.items():
            begin = time.process_time()
            buffer.extend(lot)
            seconds[name].append((time.process_time() - begin) / LOT)
    case, report = f"{GAME}, {number:,} rows", []
    ours, theirs = storages["fbuf"].nbytes / number, storages["list"].bytes() / number
    report.append(
        row(
            "Bytes a row in torchrl: `CompressedListStorage` over ours",
            case,
            ours=ours,
            peer=theirs,
            ratio=theirs / ours,
            target=">= 20" if judged else None,
        )
    )

    def compare(question: str, peer: str, times: dict[str, list[float]], target: str) -> None:
        report.append(
            row(
                question,
                case,
                ours=spread(times["fbuf"]),
                peer=spread(times[peer]),
                ratio=ratio(times[peer], times["fbuf"]),
                target=target if judged else None,
            )
        )

    compare("torchrl's extend(200), CPU time a row: `CompressedListStorage` over ours", "list", seconds, ">= 5")
    sampled = interleave({n: b.sample for n, b in buffers.items()}, rounds=15, clock=time.process_time)
    compare(f"torchrl's sample({BATCH}), CPU time: `CompressedListStorage` over ours", "list", sampled, ">= 4")
    compare(f"torchrl's sample({BATCH}), CPU time: `LazyMemmapStorage` over ours", "memmap", sampled, ">= 1")
    batch = buffers["fbuf"].sample().select("pixels", ("next", "pixels"))
    copied = interleave({"fbuf": buffers["fbuf"].sample, "copy": batch.clone}, rounds=15, clock=time.process_time)
    times = spread(copied["fbuf"]), spread(copied["copy"])
    question = f"torchrl's sample({BATCH}), CPU time: ours over a copy of the batch"
    report.append(row(question, case, ours=times[0], peer=times[1], ratio=ratio(copied["fbuf"], copied["copy"])))
    sliced = {}
    for name in ("fbuf", "memmap"):
        sampler = SliceSampler(slice_len=SLICE, end_key=("next", "done"), strict_length=False)
        sliced[name] = ReplayBuffer(storage=storages[name], sampler=sampler, batch_size=BATCH).sample
    compare(
        f"torchrl's SliceSampler, {BATCH} rows in slices of {SLICE}, CPU time: `LazyMemmapStorage` over ours",
        "memmap",
        interleave(sliced, rounds=15, clock=time.process_time),
        ">= 2",
    )
    return report


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
