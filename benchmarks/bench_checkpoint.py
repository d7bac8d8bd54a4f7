"""What does it cost to save a replay buffer, to save it again, and to load it, in seconds, bytes and memory?

10^6 real frames in `Compressed`, with action, reward, flag and priorities: about 100 MB, of 7 GB raw. A save is timed beside
writing the same bytes to one file with fsync, a load that checks every byte beside reading the same files (from the disk, and
from the page cache), call by call in turn. The second save comes after 1 % new rows. Memory is what a fresh process holds at
its highest, beside what it held before the save, or holds after the load.

Then the same rows, fewer of them, in torchrl's `dumps` (tensors, memory maps, compressed list) and flashbax's Vault, neither of
which waits for the disk, checks what it reads or saves twice for less; ours waits and checks.

Expected: a save takes at most 1.35 times what writing the bytes does, a load that checks at most 2 times what reading them
does; a second save 5 % of the bytes and 8 % of the time, and so does a loop that does not wait for it; peaks of 10 % of the
data. A second save compares the arrays of the device, 20 MB, and waits for the disk four times: a row has these alone.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fbuf
from benchmarks import _atari
from benchmarks._harness import (
    Absent,
    absent_row,
    interleave,
    load_peer,
    measure_memory,
    process_memory,
    ratio,
    row,
    spread,
)

SAVE = "Seconds to save {} frames with priorities, over writing the same bytes with fsync"
AGAIN = "Second save after 1% new rows over the first, {} frames"
LOAD = "Seconds to load {} frames, every byte checked, over reading the files"
PEAK = "Peak of memory beside the buffer over bytes of the checkpoint, {} frames"
PEER = "{}, {} frames: the peer's over ours"
LANES, BATCH = 8, 250  # rows of a call, a lane
_GAMES = _atari.GAMES
_EACH = 20_000  # frames of a game before the next


def buffer_of(count: int, storage: Any = None) -> fbuf.Buffer:
    """Room for `count` frames."""
    storage = fbuf.storages.Compressed(keys=("obs",)) if storage is None else storage
    return fbuf.Buffer(capacity=count, lanes=LANES, storage=storage, sampler=fbuf.samplers.Prioritized())


def rows_of(count: int, games: tuple[str, ...] = _GAMES) -> Iterator[dict[str, np.ndarray]]:
    """Rows `[BATCH, LANES, ...]` of games in turn, as often as it takes; what compresses them sees no game twice at once."""
    random, done, turn = np.random.default_rng(0), 0, 0
    while count - done >= LANES:
        for frames, start in _atari.blocks(games[turn % len(games)], min(_EACH, count)):
            number = min(len(frames), count - done) // LANES
            if number:
                yield {
                    "obs": frames[: number * LANES].reshape(LANES, number, 84, 84).swapaxes(0, 1),
                    "action": random.integers(0, 6, (number, LANES), np.int32),
                    "reward": random.normal(size=(number, LANES)).astype(np.float32),
                    "terminated": start[: number * LANES].reshape(LANES, number).T,
                }
            done += number * LANES
            if number < BATCH:
                break
        turn += 1


@functools.cache
def _extend(buffer: fbuf.Buffer) -> Callable[..., Any]:
    return jax.jit(buffer.extend, donate_argnums=0)


def filled(buffer: fbuf.Buffer, count: int, games: tuple[str, ...] = _GAMES, state: Any = None) -> Any:
    """A state with `count` rows, or so many more."""
    example = {"obs": np.zeros((84, 84), np.uint8), "action": np.int32(0), "reward": np.float32(0), "terminated": False}
    state = buffer.init(example) if state is None else state
    for rows in rows_of(count, games):
        state = _extend(buffer)(state, rows)
    return jax.block_until_ready(state)


def folder_bytes(path: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def written(path: Path, pieces: list[np.ndarray]) -> None:
    """The same bytes, as one file, on the disk."""
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    try:
        for piece in pieces:
            os.write(fd, memoryview(piece))
        os.fsync(fd)
    finally:
        os.close(fd)


def least(where: Path, arrays: list[np.ndarray]) -> Callable[[int], None]:
    """What saving again cannot do without, given the bytes to write: arrays read and compared, and four fsyncs in a row."""
    old, buffer = where / "old", bytearray(1 << 19)
    written(old, arrays)

    def run(size: int) -> None:
        for name in ("data", "manifest"):
            (where / name).unlink(missing_ok=True)
        with old.open("rb", buffering=0) as file:
            for array in arrays:
                for at in range(0, len(array), len(buffer)):
                    part = memoryview(array)[at : at + len(buffer)]
                    if file.readinto(memoryview(buffer)[: len(part)]) != len(part) or not buffer.startswith(part):
                        raise RuntimeError("the arrays are not those written")
        folder = os.open(where, os.O_RDONLY)
        try:
            for name, number in (("data", size), ("manifest.new", 1 << 15)):
                written(where / name, [np.zeros(number, np.uint8)])
            os.fsync(folder)
            (where / "manifest.new").rename(where / "manifest")
            os.fsync(folder)
        finally:
            os.close(folder)

    return run


def contents(path: Path) -> list[np.ndarray]:
    """The files, read."""
    return [np.fromfile(file, np.uint8) for file in sorted(path.rglob("*")) if file.is_file()]


def times(count: int, games: tuple[str, ...], rounds: int, where: Path, judged: bool) -> list[dict[str, Any]]:
    """Rows of seconds, and of bytes of a second save."""
    buffer = buffer_of(count)
    held = [filled(buffer, count, games)]
    for store in fbuf.stores():
        store.repack()
    ours, raw, label = where / "ours", where / "raw", f"{count:,}"
    fbuf.save(ours, buffer, held[0])
    first = folder_bytes(ours)
    pieces = [piece[at : at + (1 << 18)] for piece in contents(ours) for at in range(0, len(piece), 1 << 18)]

    def save() -> None:
        shutil.rmtree(ours, ignore_errors=True)
        begin = time.perf_counter()
        fbuf.save(ours, buffer, held[0])
        seconds["save"].append(time.perf_counter() - begin)

    def write() -> None:
        raw.unlink(missing_ok=True)
        begin = time.perf_counter()
        written(raw, pieces)
        seconds["write"].append(time.perf_counter() - begin)

    seconds: dict[str, list[float]] = {"save": [], "write": []}
    interleave({"save": save, "write": write}, rounds=rounds, warmup=1)
    seconds = {name: some[-rounds:] for name, some in seconds.items()}
    raw.unlink()
    shown = ratio(seconds["save"], seconds["write"])
    note = f"{first / 1e6:.0f} MB, {first / count:.0f} bytes a row"
    report = [
        row(
            SAVE.format(label),
            "Compressed",
            ours=spread(seconds["save"]),
            peer=spread(seconds["write"]),
            ratio=shown,
            target="<= 1.35" if judged else None,
            note=note,
        )
    ]

    shutil.rmtree(ours)
    fbuf.save(ours, buffer, held[0])
    (where / "least").mkdir()
    arrays = [np.array(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(held[0])]
    bound, compared = least(where / "least", arrays), sum(array.nbytes for array in arrays)
    again, wrote, floor = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        held[0] = filled(buffer, count // 100, games, held[0])
        begin = time.perf_counter()
        done = fbuf.save(ours, buffer, held[0]).result()
        middle = time.perf_counter()
        bound(done.bytes_written)
        floor.append(time.perf_counter() - middle)
        again.append(middle - begin)
        wrote.append(float(done.bytes_written))
    shutil.rmtree(where / "least")
    lost = list[float]()
    for _ in range(rounds):
        held[0] = filled(buffer, count // 100, games, held[0])
        begin = time.perf_counter()
        saving = fbuf.save(ours, buffer, held[0], wait=False)
        lost.append(time.perf_counter() - begin)
        saving.result()
    for store in fbuf.stores():
        store.repack()  # else chunks change in the background
    fbuf.save(ours, buffer, held[0])
    begin = time.perf_counter()
    nothing = fbuf.save(ours, buffer, held[0]).result()
    idle = time.perf_counter() - begin
    mean = float(np.median(seconds["save"]))
    report += [
        row(
            AGAIN.format(label),
            "bytes written",
            ours=spread(wrote, "bytes"),
            peer=float(first),
            ratio=float(np.median(wrote)) / first,
            target="<= 0.05" if judged else None,
        ),
        row(
            AGAIN.format(label),
            "seconds",
            ours=spread(again),
            peer=spread(seconds["save"]),
            ratio=float(np.median(again)) / mean,
            target="<= 0.08" if judged else None,
            note=f"when nothing is new {idle * 1e3:.0f} ms and {nothing.bytes_written:,} bytes",
        ),
        row(
            AGAIN.format(label),
            "seconds of the least it takes",
            ours=spread(floor),
            peer=spread(seconds["save"]),
            ratio=float(np.median(floor)) / mean,
            note=f"{compared / 1e6:.0f} MB read and compared, the new bytes written, 4 fsyncs in a row",
        ),
        row(
            AGAIN.format(label),
            "seconds until wait=False returns",
            ours=spread(lost),
            peer=spread(seconds["save"]),
            ratio=float(np.median(lost)) / mean,
            target="<= 0.08" if judged else None,
        ),
    ]
    held.clear()
    gc.collect()
    return report + loads(ours, label, rounds, judged)


def loads(path: Path, label: str, rounds: int, judged: bool) -> list[dict[str, Any]]:
    """Rows of a load: from the disk, as after a crash, and from the page cache, where checksums take as long as reading."""
    report = []
    for case, cold in (("from the disk", True), ("from the page cache", False)):

        def ready(cold: bool = cold) -> None:
            for file in path.rglob("*") if cold else ():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        seconds: dict[str, list[float]] = {"load": [], "read": []}
        for turn in range(rounds + 1):
            sides = [("load", lambda: fbuf.load(path)), ("read", lambda: contents(path))]
            for name, function in sides[:: 1 if turn % 2 else -1]:
                ready()
                begin = time.perf_counter()
                made = function()
                seconds[name].append(time.perf_counter() - begin)
                del made
                gc.collect()
        mine, theirs = seconds["load"][1:], seconds["read"][1:]
        target = "<= 2" if judged else None
        report.append(
            row(
                LOAD.format(label),
                case,
                ours=spread(mine),
                peer=spread(theirs),
                ratio=ratio(mine, theirs),
                target=target,
            )
        )
    return report


# ------------------------------------------------------------------------------------------------------------- memory


def _lowest() -> None:
    """What the process holds now is the most it has held."""
    process_memory()  # gives freed heap back
    Path("/proc/self/clear_refs").write_text("5")


def saving(path: str, count: int, games: list[str]) -> Iterator[Any]:
    """For `measure_memory`: a buffer, then a save of it."""
    buffer = buffer_of(count)
    small = buffer_of(4000)
    fbuf.save(f"{path}/warm", small, filled(small, 4000, tuple(games)))
    state = filled(buffer, count, tuple(games))
    for store in fbuf.stores():
        store.repack()
    _lowest()
    yield
    fbuf.save(f"{path}/ours", buffer, state)
    yield folder_bytes(Path(path) / "ours")


def loading(path: str) -> Iterator[Any]:
    """For `measure_memory`: a buffer that is loaded."""
    fbuf.load(f"{path}/warm")
    gc.collect()
    _lowest()
    yield
    loaded = fbuf.load(f"{path}/ours")
    yield loaded is not None


def memory(count: int, games: tuple[str, ...], where: Path, judged: bool) -> list[dict[str, Any]]:
    """Rows of peaks."""
    label, target = f"{count:,}", "<= 0.1" if judged else None
    saved = measure_memory(saving, str(where), count, list(games), environment={"MALLOC_ARENA_MAX": "1"})
    total = saved["result"]
    report = [
        row(PEAK.format(label), "save", ours=saved["peak"], peer=total, ratio=saved["peak"] / total, target=target)
    ]
    loaded = measure_memory(loading, str(where), environment={"MALLOC_ARENA_MAX": "1"})
    extra = max(loaded["peak"] - loaded["rss"], 0)
    note = f"the buffer takes {loaded['rss'] / 1e6:.0f} MB"
    report.append(
        row(PEAK.format(label), "load", ours=extra, peer=total, ratio=extra / total, target=target, note=note)
    )
    return report


# -------------------------------------------------------------------------------------------------------------- peers


Dump = tuple[Callable[[], Any], Callable[[], Any]]
"""What saves to a path that is not there, and what loads from it."""


def torchrl_dumps(kind: str, rows: Mapping[str, np.ndarray], path: Path) -> Dump:
    """torchrl's `ReplayBuffer.dumps` and `loads`."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import CompressedListStorage, LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

    number = len(rows["obs"])
    makers = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage, "compressed list": CompressedListStorage}

    def made() -> Any:
        return TensorDictReplayBuffer(storage=makers[kind](number), batch_size=32)

    def tensors(some: slice) -> Any:
        return TensorDict(
            {name: torch.from_numpy(np.array(x[some])) for name, x in rows.items()}, [len(rows["obs"][some])]
        )

    buffer = made()
    for at in range(0, number, 1000):
        buffer.extend(tensors(slice(at, at + 1000)))

    def load() -> Any:
        fresh = made()
        fresh.extend(tensors(slice(0, 2)))  # memory maps are laid out by the first rows
        fresh.loads(path)
        if len(fresh) != number:
            raise RuntimeError(f"{len(fresh)} of {number} rows came back")
        return fresh

    return lambda: buffer.dumps(path), load


def flashbax_vault(rows: Mapping[str, np.ndarray], path: Path) -> Dump:
    """flashbax's `Vault`: rows, no priorities."""
    import flashbax
    import jax.numpy as jnp
    from flashbax.vault import Vault

    number = len(rows["obs"])
    buffer = flashbax.make_trajectory_buffer(  # one place more: of a full buffer a Vault writes nothing
        add_batch_size=1,
        sample_batch_size=1,
        sample_sequence_length=1,
        period=1,
        min_length_time_axis=1,
        max_length_time_axis=number + 1,
    )
    state = buffer.init({name: jnp.asarray(x[0]) for name, x in rows.items()})
    state = jax.jit(buffer.add, donate_argnums=0)(state, {name: x[None] for name, x in rows.items()})

    def save() -> None:
        Vault("rows", state.experience, rel_dir=str(path), vault_uid="0").write(state)

    def load() -> Any:
        found = Vault("rows", rel_dir=str(path), vault_uid="0").read()
        if int(found.current_index) % (number + 1) == 0 and found.experience["obs"].shape[1] != number:
            raise RuntimeError("rows are missing")
        return found

    return save, load


def fbuf_dump(storage: Any, rows: Mapping[str, np.ndarray], path: Path) -> Dump:
    """`save` and `load`."""
    number = len(rows["obs"])
    buffer = buffer_of(number, storage)
    state = buffer.init({name: x[0] for name, x in rows.items()})
    for at in range(0, number // LANES, BATCH):
        piece = {n: x.reshape(LANES, -1, *x.shape[1:])[:, at : at + BATCH].swapaxes(0, 1) for n, x in rows.items()}
        state = _extend(buffer)(state, piece)
    jax.block_until_ready(state)
    return lambda: fbuf.save(path, buffer, state), lambda: fbuf.load(path)


def peers(count: int, game: str, rounds: int, where: Path) -> list[dict[str, Any]]:
    """Rows of every peer's seconds and bytes beside ours."""
    frames, start = _atari.frames(game, count)
    random = np.random.default_rng(0)
    rows = {
        "obs": frames,
        "action": random.integers(0, 6, count, np.int32),
        "reward": random.normal(size=count).astype(np.float32),
        "terminated": np.asarray(start),
    }
    makers: dict[str, Callable[[Path], Dump]] = {
        "fbuf Compressed": lambda path: fbuf_dump(fbuf.storages.Compressed(keys=("obs",)), rows, path),
        "fbuf Device": lambda path: fbuf_dump(fbuf.storages.Device(), rows, path),
    }
    absent: dict[str, Absent] = {}
    torchrl, vault = load_peer("torchrl"), load_peer("flashbax.vault")
    for kind in ("tensor", "memmap", "compressed list"):
        if isinstance(torchrl, Absent):
            absent[f"torchrl {kind}"] = torchrl
        else:
            makers[f"torchrl {kind}"] = lambda path, kind=kind: torchrl_dumps(kind, rows, path)
    if isinstance(vault, Absent):
        absent["flashbax Vault"] = vault
    else:
        makers["flashbax Vault"] = lambda path: flashbax_vault(rows, path)

    found: dict[str, tuple[list[float], list[float], int]] = {}
    dumps: dict[str, Dump] = {}
    paths = {name: where / name.replace(" ", "-") for name in makers}
    for name, make in makers.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                save, load = dumps[name] = make(paths[name])
                begin = time.perf_counter()
                save()
                middle = time.perf_counter()
                load()
                first = [middle - begin], [time.perf_counter() - middle]
        except Exception as error:  # whatever a peer raises is what there is to say of it
            absent[name] = Absent(name, f"{type(error).__name__}: {error}"[:200])
            dumps.pop(name, None)
            continue
        slow = first[0][0] > 10  # once is enough
        found[name] = *(first if slow else ([], [])), folder_bytes(paths[name])
        if slow:
            dumps.pop(name)
    for _ in range(rounds):
        for name, (save, load) in dumps.items():
            shutil.rmtree(paths[name], ignore_errors=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                begin = time.perf_counter()
                save()
                middle = time.perf_counter()
                kept = load()
                found[name][0].append(middle - begin)
                found[name][1].append(time.perf_counter() - middle)
            del kept
            gc.collect()
    report = []
    own = found["fbuf Compressed"]
    label = f"{count:,}"
    for at, what in ((0, "Seconds to save"), (1, "Seconds to load"), (2, "Bytes")):
        question = PEER.format(what, label)
        for name in (*makers, *absent):
            if name in absent:
                if at == 0:
                    report.append(absent_row(question, name, absent[name]))
                continue
            if name == "fbuf Compressed":
                continue
            if at == 2:
                report.append(
                    row(
                        question,
                        name,
                        ours=float(own[2]),
                        peer=float(found[name][2]),
                        ratio=found[name][2] / own[2],
                        target=">= 1",
                    )
                )
            else:
                theirs, mine = found[name][at], own[at]
                target = None if name.startswith("fbuf") else ">= 1"
                shown = float(np.median(theirs) / np.median(mine))
                report.append(row(question, name, ours=spread(mine), peer=spread(theirs), ratio=shown, target=target))
    return report


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for a million frames of six games (`quick`: 8,000 of one) and 10,000 (1,000) beside the peers."""
    count, games, rounds = (8_000, ("Breakout",), 1) if quick else (1_000_000, _GAMES, 7)
    with tempfile.TemporaryDirectory(prefix="fbuf-checkpoint-") as folder:
        where = Path(folder)
        report = times(count, games, rounds, where, judged=not quick)
        shutil.rmtree(where / "ours")
        report += memory(count, games, where, judged=not quick)
        return report + peers(1_000 if quick else 10_000, "Breakout", 1 if quick else 3, where)


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
