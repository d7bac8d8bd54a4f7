"""How small, and how fast, are real Atari frames in `Compressed` against torchrl's CompressedListStorage?

One lane of frames of six games, read as stacks of 4 and their successors. torchrl holds one TensorDict an
item with the flat keys `obs` and `next_obs` (nested ones it would keep uncompressed), with its default
codec and with zstandard at level 3; its bytes are its own `.bytes()`, which counts payload alone and is
generous to it, ours are `nbytes` of the host part, index, dictionaries, contexts and all. Both are
checked to give the same stacks.

Expected, as geometric means over the games against its default codec (zstandard is shown beside it, and is
1.5x smaller and 2x faster than that): 20x fewer bytes (`host_store` asks for more, of longer runs), writes (1,024 at a
time; smaller ones gain less) 30x as fast where single frames are handed in and 15x where stacks are, reads (256 drawn
pairs) 5.5x as fast (8x if all but zstd and the copies into the batch were free), and the slowest of a hundred 6x; all
timed as a user has them, `extend` and `sample` under jit against ReplayBuffer's. (Of a write's time 0.3 ms is dispatch
whatever its size: JAX calls programs with an effect from Python, about 10 us an array of the state.) Chunks are read as
they are after `repack`, which a store does by itself once about 38,000 are there. At 20,000 frames 400x fewer bytes than
raw stacks, 200x in every game.

The first run plays the games (3,000 frames/s; 1.2 million frames in all) and keeps them, see `_atari`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import fbuf
from benchmarks import _atari
from benchmarks._harness import (
    Absent,
    absent_row,
    geometric_mean,
    interleave,
    load_peer,
    ratio,
    row,
    spread,
)
from fbuf._host.store.store import Column, Store

RAW = "Bytes of raw obs and next_obs stacks over ours on the host, {} frames"
BYTES = "Bytes of torchrl's payload over ours on the host, {} transitions"
WRITE = "Write of 1,024: time of torchrl's over ours"
STACKS = "Write of 1,024 that come as stacks: time of torchrl's over ours"
READ = "Read of 256 pairs of stacks: time of torchrl's over ours"
TAIL = "Read of 256 pairs of stacks, 99th percentile: time of torchrl's over ours"
CALLBACK = "What jit, callback and draw cost: time of our jitted verb over the store's own numpy call"

STACK, BATCH = 4, 256
CODECS = {"zlib, its default": "default", "zstandard 3": "zstd"}  # targets are for the default; both are shown
WRITTEN = 1024  # rows a write: a buffer is filled in large pieces, and a call costs 0.3 ms whatever its size
GROUP = 3  # writes made before they are timed: their stacks are 175 MB

# ----------------------------------------------------------------------------------------- frames


@dataclasses.dataclass(frozen=True)
class Run:
    """Frames of one game, and where its episodes begin and end."""

    frames: np.ndarray  # uint8[T, 84, 84]
    begin: np.ndarray  # int64[T], the first frame of the same episode
    end: np.ndarray  # bool[T], the last frame of its episode, or of the run

    def stacks(self, at: np.ndarray) -> np.ndarray:
        """uint8[N, 4, 84, 84], zeros before an episode's first frame."""
        frame = at[:, None] + np.arange(1 - STACK, 1)
        there = frame >= self.begin[at][:, None]
        return self.frames[np.where(there, frame, 0)] * there[:, :, None, None].astype(np.uint8)

    def pairs(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """obs and next_obs; the last stack of an episode is its own successor."""
        return self.stacks(at), self.stacks(at + ~self.end[at])

    def rows(self, at: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of the buffer."""
        n = len(at)
        return {
            "obs": self.frames[at],
            "action": np.zeros(n, np.int32),
            "reward": np.zeros(n, np.float32),
            "terminated": self.end[at],
            "truncated": np.zeros(n, np.bool_),
        }


def run_of(frames: np.ndarray, starts: np.ndarray) -> Run:
    """A run of frames of which `starts` begin an episode."""
    index = np.arange(len(frames))
    begin = np.maximum.accumulate(np.where(starts, index, 0))
    return Run(frames, begin, np.append(starts[1:], True))


EXAMPLE = {
    "obs": np.zeros((84, 84), np.uint8),
    "action": np.int32(0),
    "reward": np.float32(0),
    "terminated": np.bool_(False),
    "truncated": np.bool_(False),
}


def buffer_of(capacity: int) -> fbuf.Buffer:
    """The buffer that is measured."""
    return fbuf.Buffer(
        capacity=capacity,
        storage=fbuf.storages.Compressed(keys=("obs",)),
        view=fbuf.views.Transition(stack=STACK, autoreset="same_step"),
    )


def stacked_buffer_of(capacity: int) -> fbuf.Buffer:
    """The one for rows whose observations come as stacks."""
    return fbuf.Buffer(
        capacity=capacity,
        storage=fbuf.storages.Compressed(keys=("obs",)),
        view=fbuf.views.Transition(autoreset="same_step"),
    )


# ------------------------------------------------------------------------------------------ sides


@dataclasses.dataclass(frozen=True)
class Given:
    """A batch as each side takes it, made before it is timed."""

    at: np.ndarray  # which frames
    frames: np.ndarray  # uint8[N, 1, 84, 84]
    rows: Any  # JAX arrays, as an environment inside jit gives them
    stacked: Any  # the same with stacks in place of frames
    items: Any  # TensorDict, None without torchrl


@dataclasses.dataclass
class Side:
    """One store."""

    write: Callable[[Given], Any]
    read: Callable[[], Any]
    drawn: Callable[[], tuple[Any, Any, Any]]  # a read with what it drew: indices, obs, next_obs
    nbytes: Callable[[], int]


def ours(run: Run, stacked: bool = False) -> tuple[Side, Callable[[], Any]]:
    """`extend` and `sample` as a user calls them, under jit; and the state."""
    buffer = (stacked_buffer_of if stacked else buffer_of)(len(run.frames))
    extend = jax.jit(buffer.extend, donate_argnums=0)

    @functools.partial(jax.jit, donate_argnums=0)
    def sample(state: Any, key: Any) -> Any:
        key, draw = jax.random.split(key)
        return *buffer.sample(state, draw, BATCH), key

    example = EXAMPLE | {"obs": np.zeros((STACK, 84, 84), np.uint8)} if stacked else EXAMPLE
    held, key = [buffer.init(example)], [jax.random.key(0)]

    def write(given: Given) -> Any:
        held[0] = extend(held[0], given.stacked if stacked else given.rows)
        return held[0]

    def read() -> Any:
        held[0], batch, key[0] = sample(held[0], key[0])
        return batch

    def drawn() -> tuple[Any, Any, Any]:
        batch = read()
        return np.asarray(batch.index.slot), batch.data["obs"], batch.data["next_obs"]

    return Side(write, read, drawn, lambda: buffer.nbytes(held[0])["host"]), lambda: held[0]


def numpy_store(run: Run, codec: fbuf.storages.Codec | None) -> tuple[Side, Store]:
    """The same store by its own calls, without jit and callbacks."""
    store = Store((Column("obs", (84, 84), np.dtype(np.uint8), codec),), lanes=1, length=len(run.frames), slack=0)
    tickets = np.zeros(len(run.frames), np.uint64)
    random = np.random.default_rng(0)

    def write(given: Given) -> None:
        tickets[given.at] = store.write([given.frames], None)[:, 0]

    def read() -> Any:
        at = random.integers(0, len(tickets), BATCH)
        requests: list[Any] = []
        for last in (at, at + ~run.end[at]):
            frame = last[:, None] + np.arange(1 - STACK, 1)
            wanted = np.where(frame >= run.begin[last][:, None], tickets[frame], np.uint64(0))
            requests.append((0, wanted, np.empty((BATCH, STACK, 84, 84), np.uint8)))
        store.read(requests)
        return at, requests[0][2], requests[1][2]

    return Side(write, read, read, lambda: store.nbytes), store


def torchrl(peer: Any, codec: str, capacity: int) -> Side:
    """ReplayBuffer over CompressedListStorage."""
    import torch
    import zstandard

    options: dict[str, Any] = {}
    if codec == "zstd":
        packer, unpacker = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()

        def unpack(packed: Any, metadata: Any) -> Any:
            raw = bytearray(unpacker.decompress(packed.numpy()))
            return torch.frombuffer(raw, dtype=metadata["dtype"]).reshape(metadata["shape"])

        options = {
            "compression_fn": lambda x: torch.frombuffer(bytearray(packer.compress(x.numpy())), dtype=torch.uint8),
            "decompression_fn": unpack,
        }
    storage = peer.CompressedListStorage(capacity, **options)
    replay = peer.ReplayBuffer(storage=storage, batch_size=BATCH)

    def drawn() -> tuple[Any, Any, Any]:
        batch, info = replay.sample(return_info=True)
        return np.asarray(info["index"]), batch["obs"].numpy(), batch["next_obs"].numpy()

    return Side(lambda given: replay.extend(given.items), replay.sample, drawn, storage.bytes)


def tensordict_of(run: Run, at: np.ndarray) -> Any:
    """Transitions as torchrl takes them."""
    import torch
    from tensordict import TensorDict

    obs, next_obs = (torch.from_numpy(x) for x in run.pairs(at))
    return TensorDict({"obs": obs, "next_obs": next_obs}, batch_size=[len(at)])


# ---------------------------------------------------------------------------------------- measuring


def measure(run: Run, peer: Any, rounds: int) -> dict[str, Any]:
    """One game: bytes, and seconds by round, of every side.

    Args:
      run: Its frames.
      peer: torchrl.data, or `Absent`.
      rounds: Reads of each.
    """
    mine, state = ours(run)
    plain, store = numpy_store(run, fbuf.storages.Zstd())
    sides = {"ours": mine, "stacked": ours(run, stacked=True)[0], "store": plain}
    if not isinstance(peer, Absent):
        sides |= {label: torchrl(peer, codec, len(run.frames)) for label, codec in CODECS.items()}

    def given(at: np.ndarray) -> Given:
        items = None if isinstance(peer, Absent) else tensordict_of(run, at)
        rows = run.rows(at)
        stacked = rows | {"obs": run.stacks(at)}
        rows, stacked = jax.block_until_ready(jax.device_put((rows, stacked)))
        return Given(at, run.frames[at][:, None], rows, stacked, items)

    written: dict[str, list[float]] = {name: [] for name in sides}
    rows = min(WRITTEN, len(run.frames) // 3)
    whole = np.arange(len(run.frames) // rows * rows).reshape(-1, rows)
    for first in range(0, len(whole), GROUP):
        group = [given(at) for at in whole[first : first + GROUP]]
        writers = {name: functools.partial(_write_next, side, iter(group)) for name, side in sides.items()}
        warmup = 1 if first == 0 else 0  # compiles
        for name, seconds in interleave(writers, rounds=len(group) - warmup, warmup=warmup).items():
            written[name] += seconds
    rest = np.arange(whole.size, len(run.frames))
    if len(rest):
        last = given(rest)
        for side in sides.values():
            side.write(last)
    _check(run, sides)
    written_bytes = {name: side.nbytes() for name, side in sides.items()}
    for open_store in (store, *fbuf.stores()):  # as they are read once there are some more
        open_store.repack()
    return {
        "bytes": written_bytes,
        "device": sum(x.nbytes for x in jax.tree.leaves(state())),
        "write": written,
        "read": interleave({name: side.read for name, side in sides.items()}, rounds=rounds),
    }


def _write_next(side: Side, group: Iterator[Given]) -> Any:
    return side.write(next(group))


def _check(run: Run, sides: dict[str, Side]) -> None:
    """Every side gives back the pairs that went in, or its figures mean nothing."""
    for name, side in sides.items():
        at, *pair = side.drawn()
        for given, true in zip(pair, run.pairs(at), strict=True):
            if not np.array_equal(given, true):
                raise AssertionError(f"bench_compression: {name} gives other stacks than went in")


def torchrl_payload(run: Run, peer: Any) -> float:
    """Bytes of a transition in torchrl's storage with its default codec."""
    side = torchrl(peer, "default", len(run.frames))
    for first in range(0, len(run.frames), WRITTEN):
        at = np.arange(first, min(first + WRITTEN, len(run.frames)))
        side.write(Given(at, run.frames[:0], None, None, tensordict_of(run, at)))
    return side.nbytes() / len(run.frames)


# ---------------------------------------------------------------------------------------- reporting


def compare(games: Sequence[str], count: int, rounds: int, peer: Any, judged: bool) -> list[dict[str, Any]]:
    """Rows for all games and their means.

    Args:
      games: Names.
      count: Frames of each.
      rounds: Reads of each side.
      peer: torchrl.data, or `Absent`.
      judged: Whether `count` is what the targets for bytes are about.
    """
    found = {game: measure(run_of(*_atari.frames(game, count)), peer, rounds) for game in games}
    raw = 2 * STACK * 84 * 84 * count
    small = "" if judged else "; the target is for 20,000 frames of six games"
    report: list[dict[str, Any]] = []

    def of(game: str) -> Any:
        return SimpleNamespace(**found[game])

    def mean(question: str, case: str, ratios: list[float], target: str | None, note: str = "") -> None:
        ends = f"{min(ratios):.3g} to {max(ratios):.3g} over {len(ratios)} games"
        report.append(
            row(question, f"geometric mean{case}", ratio=geometric_mean(ratios), target=target, note=ends + note)
        )

    question, ratios = RAW.format(f"{count:,}"), []
    for game in games:
        size = of(game).bytes["ours"]
        ratios.append(raw / size)
        note = f"bytes; {size / count:.0f} a frame, {of(game).device / count:.0f} on the device{small}"
        report.append(
            row(question, game, ours=size, peer=raw, ratio=ratios[-1], target=">= 200" if judged else None, note=note)
        )
    mean(question, "", ratios, ">= 400" if judged else None, small)

    if isinstance(peer, Absent):
        report += [absent_row(q, "all", peer) for q in (BYTES.format(f"{count:,}"), WRITE, STACKS, READ, TAIL)]
    for label in () if isinstance(peer, Absent) else CODECS:
        question, ratios = BYTES.format(f"{count:,}"), []
        for game in games:
            size, theirs = of(game).bytes["ours"], of(game).bytes[label]
            ratios.append(theirs / size)
            report.append(row(question, f"{game}, {label}", ours=size, peer=theirs, ratio=ratios[-1], note="bytes"))
        default = CODECS[label] == "default"
        mean(question, f", {label}", ratios, ">= 20" if judged and default else None, small)
        for kind, side, question, target in (
            ("write", "ours", WRITE, ">= 30"),
            ("write", "stacked", STACKS, ">= 15"),
            ("read", "ours", READ, ">= 5.5"),
        ):
            ratios = []
            for game in games:
                mine, theirs = found[game][kind][side], found[game][kind][label]
                shown = ratio(theirs, mine)
                ratios.append(shown.median)
                note = f"{sum(theirs) / sum(mine):.3g}x in total"
                report.append(
                    row(question, f"{game}, {label}", ours=spread(mine), peer=spread(theirs), ratio=shown, note=note)
                )
            mean(question, f", {label}", ratios, target if default else None)
        ratios = []
        for game in games:
            mine, theirs = (float(np.quantile(found[game]["read"][side], 0.99)) * 1e3 for side in ("ours", label))
            ratios.append(theirs / mine)
            report.append(row(TAIL, f"{game}, {label}", ours=mine, peer=theirs, ratio=ratios[-1], note="ms"))
        mean(TAIL, f", {label}", ratios, ">= 6" if judged and default else None)
    for kind in ("write", "read"):
        ratios = []
        for game in games:
            mine, store = found[game][kind]["ours"], found[game][kind]["store"]
            ratios.append(ratio(mine, store).median)
            shown = ratio(mine, store)
            report.append(row(CALLBACK, f"{game}, {kind}", ours=spread(mine), peer=spread(store), ratio=shown))
        mean(CALLBACK, f", {kind}", ratios, None)
    order = list(dict.fromkeys(r["question"] for r in report))
    return sorted(report, key=lambda r: order.index(r["question"]))


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for six games at 20,000 frames; `quick`: one at 4,000."""
    peer = load_peer("torchrl.data")
    games = ("Breakout",) if quick else _atari.GAMES
    return compare(games, 4_000 if quick else 20_000, 2 if quick else 100, peer, judged=not quick)


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
