"""What does a data set of Atari frames cost: to make, to keep, to open, to draw from?

The files are those of the DQN replay data set, made of real games (`_atari`): dumps of single frames, actions, rewards, ends,
counters, as gzipped arrays. *Making* goes from those files to a data set that can be drawn from, one dump after another in one
process: ours compresses, torchrl's (`AtariDQNExperienceReplay`, its own function for a dump; the download around it needs an
external program) writes memory maps of the raw frames. Ours waits for the disk, about 30 ms a segment, and the data set's own
segments are 20 times as large. *Reading* is 256 stacks of four frames and the stacks after them, drawn at random: ours by a
jitted `sample`, whose time includes the draw, action, reward and flags; torchrl's as `sample` of its slice sampler, and as
`get` of the same number of rows, which leaves the draw out. All files are in the page cache; both sides give the same frames,
which is checked.

Bytes are of all files of the data set, against stacks with next stacks (8 frames a row), which is what a naive buffer holds;
torchrl's memory maps hold each frame once, raw. The estimate for 50 million frames takes the bytes a row of these frames.

The large data sets are many segments of a million rows: real frames of games in turn. *Opening* counts the files, reads the
index and makes the state, after everything was compiled once. In the largest the raw frames would take fifteen times this
machine's memory; what a batch takes there is compared with one from a fiftieth of it.

*Converting* is the CPU time to read an HDF5 file of vectors (17 observations, 6 actions), by `into` and `save`, against a bare
read of the same arrays by h5py, and against the loaders of d3rlpy and robomimic for files in their layouts. What a process
grows by is told.

Expected: making 3 times as fast as torchrl, 150 times smaller than stacks, opening 10^7 rows in a second, reading 3 times as
fast.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
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
    measure_memory,
    ratio,
    row,
    spread,
)
from fbuf import datasets, interop
from fbuf._formats import dataset

MAKE = "Seconds to make a data set of {} rows from the files: torchrl's over ours"
KEEP = "Bytes of stacks with next stacks over those of the data set, {} rows"
READ = "Seconds to read 256 stacks with next stacks of {} rows: torchrl's over ours"
OPEN = "Seconds to open a data set"
CONVERT = "CPU seconds to {} {} rows of vectors: the peer's over ours"
LARGE = "Seconds to read 256 stacks with next stacks of {} rows over the same of {}"
FRAME, STACKS = 84 * 84, 8 * 84 * 84
BATCH, MOST = 256, 50_000_000
VIEW = fbuf.views.Transition(stack=4, autoreset="same_step")


def _gz(path: Path, array: np.ndarray) -> None:
    data = io.BytesIO()
    np.save(data, array)
    path.write_bytes(gzip.compress(data.getvalue(), 6))


def write_files(folder: Path, game: str, rows: int, dumps: int) -> np.ndarray:
    """Pieces of `rows` rows as the agent's ring dumps them; the frames, in order."""
    frames, start = _atari.frames(game, rows * dumps)
    random = np.random.default_rng(0)
    action = random.integers(0, 6, len(frames), np.int32)
    reward = random.choice(np.array([0, 0, 0, 1, -1], np.float32), len(frames))
    terminal = np.append(start[1:], False).astype(np.uint8)
    folder.mkdir(parents=True)
    for number in range(dumps):
        at = np.arange(number * rows, (number + 1) * rows)
        at[-1] = max(number * rows - 1, 0)  # the ring's last place holds the row of the cycle before
        for name, array in (("observation", frames), ("action", action), ("reward", reward), ("terminal", terminal)):
            _gz(folder / f"$store$_{name}_ckpt.{number}.gz", array[at])
        _gz(folder / f"add_count_ckpt.{number}.gz", np.array((number + 1) * rows - 1))
        _gz(folder / f"invalid_range_ckpt.{number}.gz", np.array([rows - 2, rows - 1, 0, 1, 2]))
    return frames


def _ours(files: Path, root: Path) -> tuple[fbuf.Buffer, Any]:
    return datasets.atari_dqn("Pong/1", root=root, source=files, workers=0)


def _torchrl(files: Path, root: Path, peer: Any) -> None:
    """What its constructor does with a dump once its files are there."""
    found = peer._list_runs(files / "dqn" / "Pong" / "1" / "replay_logs")
    for number in found:
        peer._preproc_run(root / "Pong" / "1" / str(number), found, number)


def folder_bytes(path: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def _game(game: str, rows: int, dumps: int, rounds: int, where: Path, peer: Any) -> list[dict[str, Any]]:
    """Rows of one game."""
    files, total = where / game, rows * dumps
    frames = write_files(files / "dqn" / "Pong" / "1" / "replay_logs", game, rows, dumps)
    mine, theirs = where / f"{game}-fbuf", where / f"{game}-torchrl"
    seconds: dict[str, list[float]] = {"ours": [], "torchrl": []}
    absent = isinstance(peer, Absent)
    for turn in range(rounds + 1):
        shutil.rmtree(mine, ignore_errors=True)
        shutil.rmtree(theirs, ignore_errors=True)
        begin = time.perf_counter()
        buffer, state = _ours(files, mine)
        middle = time.perf_counter()
        if not absent:
            _quietly(lambda: _torchrl(files, theirs, peer))
        if turn:  # the first compiles, and reads the files from the disk
            seconds["ours"].append(middle - begin)
            seconds["torchrl"].append(time.perf_counter() - middle)
    shutil.rmtree(files)
    held = folder_bytes(mine)
    report = [
        row(
            KEEP.format(f"{total:,}"),
            game,
            ours=f"{held / total:.1f} bytes a row",
            peer=f"{STACKS} bytes a row",
            ratio=STACKS * total / held,
            target=">= 150",
            note=f"50 million rows: {held / total * MOST / 1e9:.2f} GB",
        )
    ]
    question, case = MAKE.format(f"{total:,}"), game
    if absent:
        return [absent_row(question, case, peer, ">= 3.0"), *report]
    ours, its = seconds["ours"], seconds["torchrl"]
    speed = row(
        question,
        case,
        ours=spread([s / total for s in ours]),
        peer=spread([s / total for s in its]),
        ratio=ratio(its, ours),
        target=">= 3.0",
        note="seconds a row",
    )
    return [speed, *report, *_reads(game, total, buffer, state, theirs, frames, peer, 3 * rounds)]


def _sampler(buffer: fbuf.Buffer, state: Any) -> Callable[[], Any]:
    step, held, calls = jax.jit(fbuf.Buffer.sample, static_argnums=(0, 3), donate_argnums=1), [state], [0]

    def thunk() -> Any:
        calls[0] += 1
        held[0], batch = step(buffer, held[0], jax.random.key(calls[0]), BATCH)
        return batch

    return thunk


def _reads(
    game: str, total: int, buffer: fbuf.Buffer, state: Any, folder: Path, frames: np.ndarray, peer: Any, rounds: int
) -> list[dict[str, Any]]:
    """Rows of reading; `state` is used up."""
    thunk = _sampler(buffer, state)
    options = {"root": folder, "download": False, "batch_size": 4 * BATCH}
    slices = _quietly(lambda: peer("Pong/1", **options, slice_len=4))
    storage = slices._storage
    random = np.random.default_rng(0)

    import torch

    def get() -> Any:
        at = random.integers(4, total - 4, BATCH)
        return storage.get(torch.from_numpy((at[:, None] + np.arange(-3, 1)).reshape(-1)))

    batch = thunk()
    stacks = np.asarray(batch.data["obs"])  # [B, 84, 84, 4] or [B, 4, 84, 84]: compared by their bytes
    number = np.asarray(batch.index.slot)[3]
    newest = stacks[3, -1] if stacks.shape[1] == 4 else stacks[3, ..., -1]
    if not np.array_equal(newest, frames[number]):
        raise AssertionError("bench_datasets: fbuf reads other frames than were written")
    there = storage.get(torch.tensor([total // 3]))["observation"][0].numpy()
    if not np.array_equal(there, frames[total // 3]):
        raise AssertionError("bench_datasets: torchrl reads other frames than were written")

    timings = _quietly(
        lambda: interleave({"ours": thunk, "slices": lambda: slices.sample(), "get": get}, rounds=rounds, warmup=2)
    )
    ours = timings["ours"]
    return [
        row(
            READ.format(f"{total:,}"),
            f"{game}, {name}",
            ours=spread(ours),
            peer=spread(timings[key]),
            ratio=ratio(timings[key], ours),
            target=">= 3.0" if key == "slices" else None,
        )
        for key, name in (("slices", "its slice sampler"), ("get", "its storage alone"))
    ]


# ------------------------------------------------------------------------------------------- large


def write_piece(path: Path, rows: int, games: tuple[str, ...] = _atari.GAMES, each: int = 20_000) -> None:
    """Segment 0 of a data set: games in turn."""
    random, done, turn = np.random.default_rng(0), 0, 0
    schema = dataset.Schema(
        {
            "obs": ((84, 84), "uint8"),
            "action": ((), "int32"),
            "reward": ((), "float32"),
            "terminated": ((), "bool"),
            "truncated": ((), "bool"),
        }
    )
    with dataset.SegmentWriter(path, 0, schema) as segment:
        while done < rows:
            for frames, start in _atari.blocks(games[turn % len(games)], min(each, rows)):
                number = min(len(frames), rows - done)
                segment.append(
                    {
                        "obs": frames[:number],
                        "action": random.integers(0, 6, number, np.int32),
                        "reward": random.choice(np.array([0, 0, 0, 1], np.float32), number),
                        "terminated": np.append(start[1:number], False),
                        "truncated": np.zeros(number, bool),
                    }
                )
                done += number
            turn += 1
        segment.commit()


def many(path: Path, other: Path, segments: int) -> None:
    """A data set of so many copies of the segment at `path`, at `other`; copies on the disk, not links."""
    for number in range(segments):
        shutil.copytree(path / "pieces" / "0", other / "pieces" / str(number))
    dataset.finish(other, [dataset.SegmentRows(number) for number in range(segments)])


def opened(path: str, samples: int) -> Iterator[Any]:
    """What a process grows by that opens a data set and draws from it (for `measure_memory`)."""
    jax.block_until_ready(jax.random.key(0))
    yield None
    buffer, state = datasets.open(path, view=VIEW)
    thunk = _sampler(buffer, state)
    del state
    for _ in range(samples):
        jax.block_until_ready(thunk())
    yield {"rows": buffer.capacity, "bytes": folder_bytes(Path(path))}


def large(rows: int, sizes: tuple[int, int], rounds: int, where: Path) -> list[dict[str, Any]]:
    """Rows of data sets of `sizes` segments of `rows` rows."""
    first, report = where / "one", []
    write_piece(first, rows)
    folders = {number: where / f"of-{number}" for number in sizes}
    for number, folder in folders.items():
        many(first, folder, number)
    for view, name in ((None, "rows"), (VIEW, "transitions of stacks")):
        folder, seconds = folders[sizes[0]], []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            _, state = datasets.open(folder, view=view)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - begin)
            del state
        report.append(
            row(
                OPEN,
                f"{sizes[0] * rows:,} rows in {sizes[0]} segments, {name}",
                ours=spread(seconds[1:]),
                ratio=spread(seconds[1:], "").median,
                target="<= 1.0",
                note=f"the first time in a process, which compiles: {seconds[0]:.2f} s",
            )
        )
    dataset.finish(first, [dataset.SegmentRows(0)])
    samplers = {
        name: _sampler(*datasets.open(path, view=VIEW)) for name, path in (("few", first), ("most", folders[sizes[1]]))
    }
    timings = interleave(samplers, rounds=4 * rounds, warmup=3)
    total = sizes[1] * rows
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    grown = measure_memory(opened, str(folders[sizes[1]]), 50)
    report.append(
        row(
            LARGE.format(f"{total:,}", f"{rows:,}"),
            "under jit",
            ours=spread(timings["most"]),
            peer=spread(timings["few"]),
            ratio=ratio(timings["most"], timings["few"]),
            note=f"raw frames: {total * FRAME / 1e9:.0f} GB, memory of this machine: {memory / 1e9:.0f} GB; files: "
            f"{grown['result']['bytes'] / 1e9:.2f} GB; a process that opens it and draws 50 batches grows by "
            f"{grown['rss'] / 1e6:.0f} MB (compiled programs included)",
        )
    )
    return report


# --------------------------------------------------------------------------------------- vectors


def write_vectors(path: Path, layout: str, rows: int, each: int = 1000) -> list[str]:
    """An HDF5 file of vectors as D4RL, d3rlpy or robomimic write it; the names of its arrays that a loader reads."""
    import h5py

    random = np.random.default_rng(0)
    obs = random.standard_normal((rows + 1, 17), np.float32)
    data = {"observations": obs[:-1], "next_observations": obs[1:]}
    data |= {
        "actions": random.standard_normal((rows, 6), np.float32),
        "rewards": random.standard_normal(rows, np.float32),
    }
    end = np.arange(rows) % each == each - 1
    with h5py.File(path, "w") as file:
        if layout == "D4RL":
            for name, array in (data | {"terminals": 0 * end > 0, "timeouts": end}).items():
                file[name] = array
            return list(file)
        names = []
        for number, start in enumerate(range(0, rows, each)):
            part = {name: array[start : start + each] for name, array in data.items()}
            if layout == "d3rlpy":
                part = {f"{name}_{number}": array for name, array in part.items() if name != "next_observations"}
                part |= {
                    f"rewards_{number}": part[f"rewards_{number}"][:, None],
                    f"terminated_{number}": np.array(False),
                }
            else:
                keys = {"observations": "obs/flat", "next_observations": "next_obs/flat"}
                part = {f"data/demo_{number}/{keys.get(name, name)}": array for name, array in part.items()}
                part[f"data/demo_{number}/dones"] = end[start : start + each].astype(np.int64)
            for name, array in part.items():
                file[name] = array
            names += list(part)
            if layout == "robomimic":
                file[f"data/demo_{number}"].attrs["num_samples"] = len(part[names[-1]])
        if layout == "d3rlpy":
            columns = ["observations", "actions", "rewards", "terminated"]
            file["columns"] = np.array(columns, dtype=h5py.string_dtype())
            file["num_episodes"], file["version"] = number + 1, "2.1"
        else:
            file["data"].attrs["total"] = rows
            file["data"].attrs["env_args"] = json.dumps({"env_name": "", "type": 1, "env_kwargs": {}})
    return names


def _bare(path: Path, names: list[str]) -> None:
    import h5py

    with h5py.File(path) as file:
        held = [file[name][()] for name in names]
    assert held


def _loader(layout: str, path: Path) -> Callable[[], Any] | Absent | None:
    """What the library of a layout does to load a file of it."""
    if layout == "D4RL":
        return None
    peer = load_peer({"d3rlpy": "d3rlpy", "robomimic": "robomimic.utils.dataset"}[layout])
    if isinstance(peer, Absent):
        return peer
    if layout == "d3rlpy":

        def load() -> None:
            with path.open("rb") as file:
                peer.dataset.ReplayBuffer.load(file, peer.dataset.InfiniteBuffer())

        return load
    utils = load_peer("robomimic.utils.obs_utils")
    utils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": ["flat"]}})
    options = {"obs_keys": ("flat",), "dataset_keys": ("actions", "rewards", "dones"), "load_next_obs": True}
    return lambda: peer.SequenceDataset(hdf5_path=str(path), hdf5_cache_mode="low_dim", **options) and None


def converted(path: str, folder: str) -> Iterator[Any]:
    """What a process grows by that converts a file (for `measure_memory`); it has converted another one before."""
    source = interop.from_arrays({"a": np.arange(5)})
    source.save(Path(folder) / "first")
    yield None
    interop.from_file(path).save(Path(folder) / "second")
    yield {}


def vectors(rows: int, rounds: int, where: Path) -> list[dict[str, Any]]:
    """Rows of converting files of vectors."""
    where.mkdir()
    report = []
    for layout in ("D4RL", "d3rlpy", "robomimic"):
        path = where / f"{layout}.hdf5"
        names = write_vectors(path, layout, rows)
        options: dict[str, Any] = {"ends": "terminated"} if layout == "robomimic" else {}
        loader = _loader(layout, path)

        def save(path: Path = path, options: dict[str, Any] = options) -> None:
            shutil.rmtree(where / "set", ignore_errors=True)
            interop.from_file(path, **options).save(where / "set")

        thunks: dict[str, Callable[[], Any]] = {
            "into": lambda path=path, options=options: interop.from_file(path, **options).into()[1],
            "save": save,
            "bare": lambda path=path, names=names: _bare(path, names),
        }
        if callable(loader):
            thunks["loader"] = loader
        timings = _quietly(lambda thunks=thunks: interleave(thunks, rounds=rounds, warmup=2, clock=time.process_time))
        grown = measure_memory(converted, str(path), str(where)) if layout == "D4RL" else None
        for way, verb in (("into", "read"), ("save", "make a data set of")):
            question = CONVERT.format(verb, f"{rows:,}")
            target = ">= 0.5" if (layout, way) == ("D4RL", "into") else None
            note = f"grows by {grown['rss'] / 1e6:.0f} MB" if grown is not None and way == "save" else ""
            ours, bare = timings[way], timings["bare"]
            case = f"{layout}, a bare read by h5py"
            found = {"ours": spread(ours), "peer": spread(bare), "ratio": ratio(bare, ours)}
            report.append(row(question, case, **found, target=target, note=note))
            target = ">= 1.0" if way == "into" else None
            case = f"{layout}, its own loader"
            if isinstance(loader, Absent):
                report.append(absent_row(question, case, loader, target))
            elif loader is not None:
                theirs = timings["loader"]
                found |= {"peer": spread(theirs), "ratio": ratio(theirs, ours)}
                report.append(row(question, case, **found, target=target))
        path.unlink()
    return report


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for six games of two dumps of 50,000 rows (`quick`: one game, of 2,000), then for large data sets."""
    games = _atari.GAMES[:1] if quick else _atari.GAMES
    rows, rounds = (2_000, 1) if quick else (50_000, 3)
    module = load_peer("torchrl.data.datasets")
    peer = module if isinstance(module, Absent) else module.AtariDQNExperienceReplay
    report: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        for game in games:
            report += _game(game, rows, 2, rounds, where / "small", peer)
            shutil.rmtree(where / "small")
        report += vectors(10_000 if quick else 1_000_000, rounds, where / "vectors")
        report += large(*((2_000, (2, 4)) if quick else (1_000_000, (10, 50))), rounds, where / "large")
    total = f"{2 * rows:,}"
    for question, end, target in (
        (KEEP, "", ">= 150"),
        (MAKE, "", ">= 3.0"),
        (READ, ", its slice sampler", ">= 3.0"),
        (READ, ", its storage alone", None),
    ):
        asked = [r["ratio"] for r in report if r["question"] == question.format(total) and r["case"].endswith(end)]
        found = [r["median"] if isinstance(r, dict) else r for r in asked if r is not None]
        if found:
            mean = geometric_mean(found)
            report.append(row(question.format(total), f"geometric mean{end}", ratio=mean, target=target))
    return sorted(report, key=lambda r: r["question"])  # stable: one table after another


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
