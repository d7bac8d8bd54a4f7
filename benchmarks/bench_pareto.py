"""What a setting of the host store buys and costs: bytes, reads and writes side by side, and as a picture.

Frames of some games, read as 256 pairs of 4-stacks. Ours by the store's own calls (under jit a read takes about 0.4 ms more);
torchrl's through its ReplayBuffer with CompressedListStorage; raw is a numpy ring of single frames. Ratios are
geometric means over the games against raw stacks (bytes) and against torchrl's default (times): larger is better in all
three. No target: `compression` and `host_store` have those.

With matplotlib installed the same is drawn: reads over bytes, the size of a dot is the speed of writes. The picture goes to
`FBUF_PARETO` or to the temporary folder, and its path is a note of the first row.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _atari
from benchmarks._harness import Absent, geometric_mean, interleave, load_peer, ratio, row, spread
from benchmarks.bench_compression import (
    CODECS,
    STACK,
    WRITTEN,
    Given,
    Run,
    Side,
    numpy_store,
    run_of,
    tensordict_of,
    torchrl,
)
from fbuf._host.store.store import Store
from fbuf.storages import Codec, Zstd

QUESTION = "Settings side by side, {} frames: bytes of raw stacks over its own; reads and writes as fast as torchrl's"
RAW_BYTES = 2 * STACK * 84 * 84

SETTINGS: dict[str, tuple[Codec | None, bool]] = {  # and whether chunks were compressed again
    "raw": (None, False),
    "Zstd(chunk=4)": (Zstd(chunk=4), False),
    "Zstd()": (Zstd(), False),
    "Zstd(chunk=16)": (Zstd(chunk=16), False),
    "Zstd(chunk=4), again": (Zstd(chunk=4), True),
    "Zstd(), again": (Zstd(), True),
    "Zstd(chunk=16), again": (Zstd(chunk=16), True),
    "Zstd(level=9)": (Zstd(level=9), False),
    "Zstd(chunk=1)": (Zstd(chunk=1), False),
    "Zstd(dictionary=0)": (Zstd(dictionary=0), False),
}


def measure(run: Run, peer: Any, rounds: int) -> dict[str, dict[str, Any]]:
    """Bytes a transition, and seconds by round, of every setting."""
    sides: dict[str, Side] = {}
    stores: dict[str, Store] = {}
    for label, (codec, _) in SETTINGS.items():
        sides[label], stores[label] = numpy_store(run, codec)
    if not isinstance(peer, Absent):
        sides |= {f"torchrl, {label}": torchrl(peer, codec, len(run.frames)) for label, codec in CODECS.items()}
    written: dict[str, list[float]] = {label: [] for label in sides}
    for first in range(0, len(run.frames), WRITTEN):
        at = np.arange(first, min(first + WRITTEN, len(run.frames)))
        items = None if isinstance(peer, Absent) else tensordict_of(run, at)
        given = Given(at, run.frames[at][:, None], None, None, items)
        thunks: dict[str, Callable[[], Any]] = {n: functools.partial(s.write, given) for n, s in sides.items()}
        for label, seconds in interleave(thunks, rounds=1, warmup=0).items():
            written[label] += seconds
    for label, (_, again) in SETTINGS.items():
        if again:
            stores[label].repack()
    reads = interleave({label: side.read for label, side in sides.items()}, rounds=rounds)
    return {
        label: {
            "bytes": side.nbytes() / len(run.frames),
            "write": written[label][:-1] or written[label],
            "read": reads[label],
        }
        for label, side in sides.items()
    }


def draw(points: dict[str, tuple[float, float, float]]) -> str:
    """A picture of (bytes, read, write) ratios by setting; returns where it is, or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"not drawn: {error}"
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for label, (size, read, write) in points.items():
        colour = "tab:red" if label.startswith("torchrl") else "0.4" if label == "raw" else "tab:blue"
        axes.scatter(size, read, s=8 * max(write, 0.5), color=colour, alpha=0.6, edgecolors="none")
        axes.annotate(label, (size, read), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes than raw stacks (obs and next_obs)")
    axes.set_ylabel(
        "reads: times as fast as torchrl's CompressedListStorage" if len(points) > len(SETTINGS) else "reads a second"
    )
    axes.set_title("256 pairs of 4-stacks; the area of a dot is the speed of writes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(0.12)
    path = Path(os.environ.get("FBUF_PARETO") or Path(tempfile.gettempdir()) / "fbuf-pareto.png")
    figure.savefig(path, dpi=150)
    return f"drawn in {path}"


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for three games at 20,000 frames; `quick`: one at 2,000."""
    games = ("Breakout",) if quick else ("Breakout", "MsPacman", "SpaceInvaders")
    count = 2_000 if quick else 20_000
    peer = load_peer("torchrl.data")
    found = [measure(run_of(*_atari.frames(game, count)), peer, 2 if quick else 25) for game in games]
    base = "raw" if isinstance(peer, Absent) else "torchrl, zlib, its default"
    question, report, points = QUESTION.format(f"{count:,}"), [], {}
    for label in found[0]:
        size = geometric_mean([RAW_BYTES / f[label]["bytes"] for f in found])
        read = geometric_mean([ratio(f[base]["read"], f[label]["read"]).median for f in found])
        write = geometric_mean([ratio(f[base]["write"], f[label]["write"]).median for f in found])
        points[label] = (size, read, write)
        note = f"read {read:.2f}x, write {write:.2f}x; a read of {games[0]} {spread(found[0][label]['read'])}"
        report.append(row(question, label, ours=RAW_BYTES / size, peer=RAW_BYTES, ratio=size, note=note))
    report[0]["note"] += "; " + draw(points)
    return report


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
