"""How much memory does a process take, at its highest, to hold rows with every peer?

A fresh process each: the library is imported and warm, then a full buffer of rows is written and drawn from, and the highest
resident size of the process's life counts, less what it had before. Rows are frames of 84x84 random bytes with action, reward
and flag, the same for all, as each library keeps a row (Brax's queue as float32); nothing here compresses, and no library is
given next observations. Expected: at most 1.2 times the bytes of the rows, and less than any peer that makes copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks._harness import Absent, absent_row, measure_memory, row
from benchmarks.peers import FBUF, Library

QUESTION = "Peak of a process that fills a buffer with {} rows of 7,065 bytes: the peer's over ours"
OURS = "Peak of a process that fills a buffer with {} rows of 7,065 bytes, over the bytes of the rows"
ROW = 84 * 84 + 4 + 4 + 1


def fill(name: str, capacity: int, chunk: int = 500) -> Iterator[Any]:
    """For `measure_memory`: imports, writes a little, then holds a full buffer."""
    library = next(one for one in (FBUF, *peers.PEERS) if one.name == name)
    module = peers.load(library)
    if isinstance(module, Absent):
        raise ImportError(module.reason)
    example = {**peers.EXAMPLE, "obs": np.zeros((84, 84), np.uint8)}
    random = np.random.default_rng(0)

    def rows() -> peers.Rows:
        made = peers.rows(chunk)
        made["obs"] = random.integers(0, 255, (chunk, 84, 84), np.uint8)
        return made

    small = module.Uniform(2 * chunk, example)
    write = small.writer(rows())
    for _ in range(3):
        write()
    small.sampler(32)()
    del small, write
    yield
    buffer = module.Uniform(capacity, example)
    # Two, because a writer keeps its rows, and each compiles anew: bytes that repeat, which no library here looks for.
    writers = [buffer.writer(rows()) for _ in range(2)]
    for turn in range(capacity // chunk):
        writers[turn % 2]()
    yield {"drawn": buffer.sampler(32)() is not None}


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for 100,000 frames (`quick`: 2,000, beside which what JAX takes to compile is not small)."""
    return measure(2_000 if quick else 100_000, judged=not quick)


def measure(capacity: int, libraries: tuple[Library, ...] = peers.PEERS, judged: bool = False) -> list[dict[str, Any]]:
    """The rows for one capacity: ours over the bytes of the rows, then every peer's over ours."""
    raw = capacity * ROW
    ours = measure_memory(fill, FBUF.name, capacity)["peak"]
    report = [
        row(
            OURS.format(f"{capacity:,}"),
            FBUF.name,
            ours=ours / 1e6,
            peer=raw / 1e6,
            ratio=ours / raw,
            target="<= 1.2" if judged else None,
            note="MB; what JAX and the caches of its compiler take for these programs is part of it",
            tags={"library": FBUF.name, "size": capacity},
        )
    ]
    question = QUESTION.format(f"{capacity:,}")
    for library in libraries:
        tags = {"library": library.name, "size": capacity}
        module = peers.load(library)
        if isinstance(module, Absent):
            report.append(absent_row(question, library.name, module, tags=tags))
            continue
        try:
            theirs = measure_memory(fill, library.name, capacity)["peak"]
        except RuntimeError as error:  # the process ended: its last words
            report.append(row(question, library.name, note=str(error).splitlines()[-1][:200], tags=tags))
            continue
        report.append(
            row(question, library.name, ours=ours / 1e6, peer=theirs / 1e6, ratio=theirs / ours, note="MB", tags=tags)
        )
    return report


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
