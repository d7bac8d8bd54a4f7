"""What do 50 million Atari frames take? Plays and stores frames for 30 minutes, saves every tenth, and is killed once.

Six games, four lanes each, by a random policy that often repeats its action. Each frame goes through DQN's preprocessing into
`Compressed` of a buffer with room for 50 million, with action, reward, flags and its own crc32. After each tenth of the time
the buffer is saved. A random moment after the fifth save, the process is killed (SIGKILL), and another loads the last save and
plays on. At the end a process loads the buffer, checks every byte, and compares 200,000 random frames with their checksums.

Measured: frames, memory of the process, files, seconds of saves and of loads. Extrapolated to 50 million: memory and files,
by a line through what was measured at the saves of the second half; minutes and loads, by the rate of the whole run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fbuf
from benchmarks import _atari
from benchmarks._harness import process_memory, row

CAPACITY = 50_000_000
MINUTES, SAVES = 30, 10
_GAMES, _EACH, _STEPS = _atari.GAMES, 4, 64  # lanes of a game; rows of a lane in a call
LANES = _EACH * len(_GAMES)
Record = dict[str, Any]


def buffer_of(capacity: int) -> fbuf.Buffer:
    """A buffer of single frames."""
    storage = fbuf.storages.Compressed(keys=("obs",))
    view = fbuf.views.Transition(n_step=3, stack=4, autoreset="same_step")
    return fbuf.Buffer(capacity // LANES * LANES, lanes=LANES, storage=storage, view=view)


def played(seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield rows `[_STEPS, LANES, ...]` without end."""
    from fbuf.demo._atari import VectorAtari

    rng = np.random.default_rng(seed)
    envs = [VectorAtari(game, _EACH, seed + i * _EACH) for i, game in enumerate(_GAMES)]
    obs = np.concatenate([env.reset() for env in envs])
    number = np.repeat([env.num_actions for env in envs], _EACH)
    action = np.zeros(LANES, np.int32)
    while True:
        rows = {
            "obs": np.empty((_STEPS, LANES, 84, 84), np.uint8),
            "action": np.empty((_STEPS, LANES), np.uint8),
            "reward": np.empty((_STEPS, LANES), np.float32),
            "terminated": np.empty((_STEPS, LANES), np.bool_),
            "truncated": np.empty((_STEPS, LANES), np.bool_),
        }
        for t in range(_STEPS):
            action = np.where(rng.random(LANES) < 0.4, rng.integers(number), action).astype(np.int32)
            parts = [env.step(action[i * _EACH : (i + 1) * _EACH]) for i, env in enumerate(envs)]
            rows["obs"][t], rows["action"][t] = obs, action
            obs, rows["reward"][t], rows["terminated"][t], rows["truncated"][t] = map(
                np.concatenate, zip(*parts, strict=True)
            )
        flat = rows["obs"].reshape(-1, 84 * 84)
        rows["crc"] = np.array([zlib.crc32(frame) for frame in flat], np.uint32).reshape(_STEPS, LANES)
        yield rows


def play(folder: str, capacity: int, seconds: float, first: int) -> None:
    """Play until the save number `SAVES`, from number `first`; print records."""
    path, loaded = Path(folder) / "buffer", 0.0
    rows = played(first)
    example = jax.tree.map(lambda x: x[0, 0], next(rows))
    begin = time.perf_counter()
    if path.exists():
        buffer, state = fbuf.load(path)
        loaded = time.perf_counter() - begin
    else:
        buffer = buffer_of(capacity)
        state = buffer.init(example)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    sample = jax.jit(lambda state, key: buffer.sample(state, key, 256), donate_argnums=0)
    say(kind="start", frames=int(buffer.size(state)), load=loaded)
    begin = said = time.perf_counter()
    for turn in range(first, SAVES):
        while time.perf_counter() - begin < seconds * (turn - first + 1) / SAVES:
            state = extend(state, next(rows))
            if time.perf_counter() - said > seconds / 1000:
                said = time.perf_counter()
                say(kind="play", frames=int(buffer.size(state)))
        reads = []
        for k in range(6):
            start = time.perf_counter()
            state, batch = sample(state, jax.random.key(k))
            jax.block_until_ready(batch)
            reads.append(time.perf_counter() - start)
        start = time.perf_counter()
        saving = fbuf.save(path, buffer, state, wait=False)
        blocked = time.perf_counter() - start
        done = saving.result()
        taken = time.perf_counter() - start
        memory, store = process_memory()["rss"], sum(store.nbytes for store in fbuf.stores())
        files = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        frames = int(buffer.size(state))
        record = {"frames": frames, "rss": memory, "store": store, "files": files, "written": done.bytes_written}
        say(kind="save", **record, save=taken, blocked=blocked, read=float(np.median(reads[1:])))


def check(folder: str, number: int) -> None:
    """Load the buffer, compare random frames with their checksums, and print a record."""
    begin = time.perf_counter()
    buffer, state = fbuf.load(Path(folder) / "buffer")
    loaded = time.perf_counter() - begin
    sample = jax.jit(lambda state, key: buffer.sample(state, key, 2048), donate_argnums=0)
    wrong = 0
    for turn in range(-(-number // 2048)):
        state, batch = sample(state, jax.random.key(turn))
        frames, crc = np.ascontiguousarray(batch.data["obs"][:, -1]), np.asarray(batch.data["crc"])
        wrong += sum(zlib.crc32(frame) != int(c) for frame, c in zip(frames, crc, strict=True))
    say(kind="check", frames=int(buffer.size(state)), load=loaded, checked=2048 * (turn + 1), wrong=wrong)


def say(**record: Any) -> None:
    """Print a record."""
    print(json.dumps(record), flush=True)


def child(call: str, *arguments: Any) -> subprocess.Popen[str]:
    """Start a function of this module in a process of its own."""
    code = f"from benchmarks import bench_long_run; bench_long_run.{call}{arguments!r}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def records(process: subprocess.Popen[str], killed: Callable[[], bool] = lambda: False) -> Iterator[Record]:
    """Yield what a process says until it ends, or `killed()`; it is killed then. Raises RuntimeError if it fails."""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield json.loads(line)
            if killed():
                return
        if process.wait():
            raise RuntimeError(f"the process ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


def run(folder: Path, capacity: int, seconds: float, checked: int, seed: int = 0) -> dict[str, list[Record]]:
    """Return the records by kind: `start`, `play`, `save`, `kill`, `check`."""
    found: dict[str, list[Record]] = {kind: [] for kind in ("start", "play", "save", "kill", "check")}
    wait, limit = random.Random(seed).uniform(0.1, 0.9) * seconds / SAVES, float("inf")

    def killed() -> bool:
        nonlocal limit
        if len(found["save"]) == SAVES // 2:
            limit = min(limit, time.perf_counter() + wait)
        return time.perf_counter() > limit

    for record in records(child("play", str(folder), capacity, seconds, 0), killed):
        found[record["kind"]].append(record)
    if len(found["save"]) == SAVES:
        raise RuntimeError("the process ended before it was killed; give it more seconds")
    killed_at = time.perf_counter()
    found["kill"].append({"frames": found["play"][-1]["frames"], "saves": len(found["save"])})
    for record in records(child("play", str(folder), capacity, seconds, len(found["save"]))):
        found[record["kind"]].append(record)
        if record["kind"] == "start":
            found["kill"][0]["away"] = time.perf_counter() - killed_at
    found["check"] += records(child("check", str(folder), checked))
    return found


def at_capacity(saves: list[Record], name: str) -> float:
    """Return the value at 50 million frames of a line through the second half of the saves."""
    half = saves[len(saves) // 2 :]
    slope, start = np.polyfit([s["frames"] for s in half], [s[name] for s in half], 1)
    return float(start + slope * CAPACITY)


def main(quick: bool) -> list[Record]:
    capacity, seconds, checked = (400_000, 5.0, 4_000) if quick else (CAPACITY, 60.0 * MINUTES, 200_000)
    folder = Path(tempfile.mkdtemp(prefix="fbuf-long-"))
    try:
        found = run(folder, capacity, seconds, checked)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    last, kill, final = found["save"][-1], found["kill"][0], found["check"][0]
    rate, times = last["frames"] / seconds, CAPACITY / last["frames"]
    question = f"Atari frames played and stored in {seconds / 60:g} minutes; peer: extrapolated to {CAPACITY:,}"

    def measured(case: str, value: float, at_end: float | None = None, note: str = "") -> Record:
        return row(question, case, ours=float(value), peer=None if quick else at_end, note=note)

    report = [
        measured("frames", last["frames"], CAPACITY, f"{len(_GAMES)} games, {LANES} lanes"),
        measured("frames a second", rate),
        measured("minutes", seconds / 60, CAPACITY / rate / 60),
    ]
    for case, name in (
        ("MB of the process", "rss"),
        ("MB of the compressed frames in it", "store"),
        ("MB of the checkpoint", "files"),
    ):
        report.append(measured(case, last[name] / 1e6, at_capacity(found["save"], name) / 1e6))
    for case, name, unit in (  # of the last save; they depend on what else the machine does more than on the frames
        ("MB that the last save wrote", "written", 1e6),
        ("seconds of the last save", "save", 1),
        ("seconds of it in which the loop waited", "blocked", 1),
        ("ms to read 256 transitions of stacks then", "read", 1e-3),
    ):
        report.append(measured(case, last[name] / unit))
    lost = kill["frames"] - found["start"][1]["frames"]
    return [
        *report,
        measured("seconds of a load, every byte checked", final["load"], final["load"] * times),
        measured("frames lost by SIGKILL", lost, note=f"after {kill['saves']} saves; down for {kill['away']:.1f} s"),
        measured("frames that differ from their checksum", final["wrong"], note=f"of {final['checked']:,} drawn"),
    ]
