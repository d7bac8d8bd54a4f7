"""How small are long runs of real frames on the host, and does their cost grow with their number?

200,000 frames of six games in the store of `Compressed`, one lane, of which stacks of 4 and next stacks are views. What is
counted is what the process grows by (index, dictionaries, contexts and all), before closed chunks were compressed again and
after; against the raw stacks, and against the payload alone of torchrl's CompressedListStorage with its default codec, from
the first 20,000 transitions of the same run (a payload of each does not depend on how many there are).

Expected, as geometric means over the games: 750x fewer bytes than raw stacks after, 550x before, 380x and 280x in every game;
33x fewer than torchrl after. A run in which the game changes every 16,000 frames keeps 0.8 of the ratio that its games have
on their own. What is not frames (index, objects, unused ends of segments) takes 3 bytes a frame at most. Writes of 1,024 and
reads of 256 pairs take the same time with 3 million frames as with 100,000, within 20%. 6,000 frames take 200x fewer
bytes than raw stacks in every game.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import _atari
from benchmarks._harness import Absent, absent_row, geometric_mean, interleave, load_peer, measure_memory, row, spread
from benchmarks.bench_compression import STACK, run_of, torchrl_payload
from fbuf._host.codecs import Zstd
from fbuf._host.columns import recompress
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.store.store import Column, Store

RAW = "Bytes of raw obs and next_obs stacks over what the process grew by, {} frames, {}"
PEER = "Bytes of torchrl's payload over what the process grew by, a transition, {} frames, compressed again"
DRIFT = "A run in which the game changes every {} frames: mean ratio of its games alone over its own"
INDEX = "Bytes a frame without chunks, dictionaries and contexts, {} frames"
GROWTH = "Time with {} frames over that with {}"

TIMES = {False: "as written", True: "compressed again"}
TARGETS = {False: (">= 550", ">= 280"), True: (">= 750", ">= 380")}


def fill(game: str, count: int, again: bool) -> Iterator[Any]:
    """For `measure_memory`: a store of `count` frames of a game, read once, perhaps compressed again."""

    def fed(number: int) -> Store:
        store = store_of(number)
        for frames, _ in _atari.blocks(game, number):
            tickets = store.write([frames[:, None]], None)
        if again:
            store.repack()
        store.read([(0, tickets[-32:], np.empty((len(tickets[-32:]), 1, 84, 84), np.uint8))])
        return store

    start = recompress.start
    recompress.start = start if again else lambda store: threading.current_thread()  # no thread
    try:
        fed(min(count, 2 * _atari.BLOCK)).close()  # everything imported
        yield
        store = fed(count)
        yield {"host": store.nbytes} | store.stats()
    finally:
        recompress.start = start


def grown(game: str, count: int, again: bool) -> dict[str, Any]:
    """By how much a process grows that takes these frames in, and what the store says."""
    list(_atari.blocks(game, count))  # plays what is missing here, not in the process that is measured
    # One arena: how many glibc opens depends on which threads ran, not on the store.
    return measure_memory(fill, game, count, again, environment={"MALLOC_ARENA_MAX": "1"})


def sizes(games: Sequence[str], count: int, judged: bool) -> list[dict[str, Any]]:
    """Rows of bytes."""
    report: list[dict[str, Any]] = []
    frame = 2 * STACK * 84 * 84
    taken: dict[str, float] = {}
    for again in (False, True):
        question, ratios = RAW.format(f"{count:,}", TIMES[again]), []
        mean_target, each_target = TARGETS[again] if judged else (None, None)
        for game in games:
            found = grown(game, count, again)
            each = found["rss"] / count
            taken[game] = each
            ratios.append(frame / each)
            note = f"bytes a frame; the store says {found['result']['host'] / count:.1f}"
            report.append(row(question, game, ours=each, peer=frame, ratio=ratios[-1], target=each_target, note=note))
        report.append(row(question, "geometric mean", ratio=geometric_mean(ratios), target=mean_target))
    peer = load_peer("torchrl.data")
    question, ratios = PEER.format(f"{count:,}"), []
    if isinstance(peer, Absent):
        return [*report, absent_row(question, "all", peer)]
    for game in games:
        theirs = torchrl_payload(run_of(*_atari.frames(game, min(count, 20_000))), peer)
        ratios.append(theirs / taken[game])
        report.append(row(question, game, ours=taken[game], peer=theirs, ratio=ratios[-1], note="bytes a transition"))
    target = ">= 33" if judged else None
    return [*report, row(question, "geometric mean", ratio=geometric_mean(ratios), target=target)]


def small(games: Sequence[str], count: int, judged: bool) -> list[dict[str, Any]]:
    """Rows of bytes of short runs, where contexts and dictionaries weigh most, as written."""
    question, frame = RAW.format(f"{count:,}", TIMES[False]), 2 * STACK * 84 * 84
    report = []
    for game in games:
        found = grown(game, count, again=False)
        each, host = found["rss"] / count, found["result"]["host"] / count
        note = f"bytes a frame; the store says {host:.1f}"
        target = ">= 200" if judged else None
        report.append(row(question, game, ours=each, peer=frame, ratio=frame / each, target=target, note=note))
    return report


# ------------------------------------------------------------------------------------------------- the store alone


def store_of(length: int, codec: Zstd | None = None) -> Store:
    """One lane of frames."""
    return Store((Column("obs", (84, 84), np.dtype(np.uint8), codec or Zstd()),), lanes=1, length=length, slack=0)


def index(game: str, count: int) -> dict[str, Any]:
    """What is neither a chunk nor a dictionary nor a context; and how long compressing again takes, without a pause."""
    store = store_of(count)
    store._thread = threading.current_thread()  # none of its own
    for frames, _ in _atari.blocks(game, count):
        store.write([frames[:, None]], None)
    begin = time.perf_counter()
    store.repack()
    again = (time.perf_counter() - begin) / count * 1e6
    part = store._parts[0]
    assert isinstance(part, ChunkedColumn)
    books = {
        id(d): d.nbytes for d in (*part.table.values(), part.coder.current, part.packer and part.packer.latest) if d
    }
    other = sum(books.values()) + part.coder.nbytes + part.open.nbytes
    each = (store.nbytes - store.stats()["payload_bytes"] - other) / count
    note = f"bytes; chunks {store.stats()['payload_bytes'] / count:.1f}, the rest {other / count:.1f}; again {again:.1f} us"
    return row(INDEX.format(f"{count:,}"), game, ours=each, ratio=each, target="<= 3", note=note)


def drift(games: Sequence[str], count: int, each: int, judged: bool) -> list[dict[str, Any]]:
    """Rows of a run whose game changes, against each game on its own."""

    def nbytes(sequence: Sequence[str], number: int) -> tuple[float, float]:
        store = store_of(number * len(sequence))
        runs = {game: _atari.frames(game, number * sequence.count(game))[0] for game in set(sequence)}
        at = dict.fromkeys(runs, 0)
        for game in sequence:
            for first in range(at[game], at[game] + number, 1_000):
                store.write([runs[game][first : min(first + 1_000, at[game] + number), None]], None)
            at[game] += number
        before = store.nbytes
        store.repack()
        return before / number / len(sequence), store.nbytes / number / len(sequence)

    turns = max(count // each // len(games), 1)
    mixed = nbytes(list(itertools.chain.from_iterable([games] * turns)), each)
    alone = [nbytes([game], each * turns) for game in games]
    report = []
    for i, label in enumerate(TIMES.values()):
        own = sum(a[i] for a in alone) / len(alone)
        shown = own / mixed[i]
        note = f"bytes a frame; {' '.join(games)} in turn"
        report.append(
            row(
                DRIFT.format(f"{each:,}"),
                label,
                ours=mixed[i],
                peer=own,
                ratio=shown,
                target=">= 0.8" if judged else None,
                note=note,
            )
        )
    return report


def growth(game: str, few: int, many: int, rounds: int, judged: bool) -> list[dict[str, Any]]:
    """Rows of writes and reads in a small store and a large one, in turn."""
    run = run_of(*_atari.frames(game, min(few, 20_000)))
    stores, tickets = {n: store_of(n) for n in (few, many)}, dict[int, np.ndarray]()
    for n, store in stores.items():
        parts = []
        for first in range(0, n, 1_000):
            at = first % len(run.frames)
            parts.append(store.write([run.frames[at : at + 1_000, None]], None)[:, 0])
        tickets[n] = np.concatenate(parts)
        store.repack()
    random = np.random.default_rng(0)

    def write(n: int) -> None:
        new = stores[n].write([run.frames[:1_024, None]], None)[:, 0]
        tickets[n] = np.concatenate([tickets[n][1_024:], new]) if n == few else tickets[n]

    def read(n: int) -> None:
        own = tickets[n][len(tickets[n]) // 4 :]  # what the writes did not overwrite
        at = random.integers(STACK, len(own) - 1, 256)
        for last in (at, at + 1):
            wanted = own[last[:, None] + np.arange(1 - STACK, 1)]
            if not stores[n].read([(0, wanted, np.empty((256, STACK, 84, 84), np.uint8))]).all():
                raise AssertionError("bench_host_store: rows are missing")

    report = []
    for name, function in (("write of 1,024", write), ("read of 256 pairs", read)):
        seconds = interleave({str(n): functools.partial(function, n) for n in stores}, rounds=rounds)
        small, large = (seconds[str(n)] for n in stores)
        shown = float(np.median(large) / np.median(small))
        report.append(
            row(
                GROWTH.format(f"{many:,}", f"{few:,}"),
                name,
                ours=spread(large),
                peer=spread(small),
                ratio=shown,
                target="<= 1.2" if judged else None,
            )
        )
    return report


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for six games at 200,000 frames; `quick`: one at 4,000."""
    games = ("Breakout",) if quick else _atari.GAMES
    count = 4_000 if quick else 200_000
    report = sizes(games, count, judged=not quick)
    report += small(games, 2_000 if quick else 6_000, judged=not quick)
    report += [index(game, count) for game in games]
    changing = ("Breakout", "Pong") if quick else ("Pong", "MsPacman", "Breakout")
    report += drift(changing, count, 2_000 if quick else 16_000, judged=not quick)
    few, many = (4_000, 20_000) if quick else (100_000, 3_000_000)
    return report + growth("Breakout", few, many, 2 if quick else 25, judged=not quick)


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
