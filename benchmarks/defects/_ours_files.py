"""Run fbuf's cases about files, compression and reported memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks.defects import Outcome

EXAMPLE = {"t": np.int32(0)}


def rows(first: int, number: int) -> dict[str, np.ndarray]:
    return {"t": np.arange(first, first + number, dtype=np.int32)}


def held(buffer: fbuf.Buffer, state: Any) -> list[int]:
    """Return the rows, oldest first."""
    found = buffer.rows(state)
    return np.asarray(found.data["t"])[np.asarray(found.mask)].tolist()


def _through_files(path: str, *lots: tuple[int, int]) -> list[int]:
    """Write each lot of rows to files with a new state that resumes them, and return the rows."""
    buffer = fbuf.Buffer(16, storage=fbuf.storages.Memmap(path))
    for turn, (first, number) in enumerate(lots):
        state = buffer.resume(EXAMPLE) if turn else buffer.init(EXAMPLE)
        state = jax.block_until_ready(buffer.extend(state, rows(first, number)))
        del state
    state = buffer.resume(EXAMPLE)
    return held(buffer, state)


def a_ring_at_once() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        full = _through_files(f"{folder}/one", (0, 16))
        more = _through_files(f"{folder}/two", (0, 11), (11, 21))
    right = full == list(range(16)) and more == list(range(16, 32))
    return Outcome(f"16 rows at once: {len(full)} written; 11, then 21 more: rows {more[0]} to {more[-1]}", right)


def reopened() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        got = _through_files(f"{folder}/one", (0, 10), (10, 10), (20, 3))
    return Outcome(f"opened twice: rows {got[0]} to {got[-1]}, in order", got == list(range(7, 23)))


def in_a_running_loop() -> Outcome:
    async def notebook(path: str) -> list[int]:
        return _through_files(path, (0, 5))

    with tempfile.TemporaryDirectory() as folder:
        got = asyncio.run(notebook(f"{folder}/one"))
    return Outcome(f"{len(got)} rows written and read", got == list(range(5)))


_WRITES_FOR_EVER = """
import sys, jax, numpy as np, fbuf
from benchmarks.defects._ours_files import EXAMPLE, rows
buffer = fbuf.Buffer(4096, storage=fbuf.storages.Compressed(path=sys.argv[1]))
state, t = buffer.init(EXAMPLE), 0
while True:
    state = jax.block_until_ready(buffer.extend(state, rows(t, 16)))
    t += 16
    print(t, flush=True)
"""


def torn() -> Outcome:
    """Kill a process that writes, then resume its files."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        command = [sys.executable, "-c", _WRITES_FOR_EVER, f"{folder}/one"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            for _ in range(30):
                known = int(process.stdout.readline())
            process.kill()
            known = max([known, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
        buffer = fbuf.Buffer(4096, storage=fbuf.storages.Compressed(path=f"{folder}/one"))
        got = held(buffer, buffer.resume(EXAMPLE))
    right = got == list(range(got[0], got[-1] + 1)) and got[-1] >= known - 1
    return Outcome(
        f"killed after row {known - 1} was written: rows {got[0]} to {got[-1]}, none missing: {right}", right
    )


def magic() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        state = _frames(fbuf.storages.Compressed(keys=("next/obs",), path=f"{folder}/one"), nested=True)[1]
        data = b"".join(p.read_bytes() for p in Path(folder, "one").iterdir() if p.is_file())
        del state
    found = data.count(b"\x28\xb5\x2f\xfd")
    return Outcome(f"{found} zstd frames in the file", found > 0)


def nested() -> Outcome:
    buffer, state = _frames(fbuf.storages.Compressed(keys=("next/obs",)), nested=True, number=1024)
    size, raw = buffer.nbytes(state)["host"], 1024 * 7056
    text = f"1,024 nested frames: {size / 1e3:,.0f} kB in all (raw {raw / 1e3:,.0f})"
    return Outcome(text, size < raw / 2)


def _frames(storage: Any, nested: bool = False, number: int = 64) -> tuple[fbuf.Buffer, Any]:
    frames = np.zeros((number, 84, 84), np.uint8)
    frames[np.arange(number), np.arange(number) % 84] = 200
    leaves = {"next": {"obs": frames}} if nested else {"obs": frames}
    buffer = fbuf.Buffer(number, storage=storage)
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], leaves)), leaves)
    return buffer, jax.block_until_ready(state)


def few_files() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        _, state = _frames(fbuf.storages.Compressed(path=f"{folder}/one"))
        files = [p for p in Path(folder, "one").rglob("*") if p.is_file()]
        pickles = [p.name for p in files if p.suffix in (".pkl", ".pickle", ".pt", ".t")]
        del state
    return Outcome(f"64 rows: {len(files)} files; pickles: {len(pickles) or 'none'}", len(files) < 16 and not pickles)


def over_another() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        storage = fbuf.storages.Compressed(path=f"{folder}/one")
        state = _frames(storage)[1]
        del state
        try:
            _frames(storage, number=5)
            return Outcome("the rows were overwritten", False)
        except (FileExistsError, ValueError) as error:
            said = type(error).__name__
        buffer = fbuf.Buffer(64, storage=storage)
        state = buffer.resume({"obs": np.zeros((84, 84), np.uint8)})
        count = int(buffer.size(state))
        del state
    return Outcome(f"{said}; the folder still has {count} rows", count == 64)


def sparse() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        buffer = fbuf.Buffer(100_000, storage=fbuf.storages.Memmap(f"{folder}/one"))
        example = {"obs": np.zeros(100, np.float32)}
        state = buffer.extend(buffer.init(example), {"obs": np.ones((1000, 100), np.float32)})
        jax.block_until_ready(state)
        taken = sum(p.stat().st_blocks * 512 for p in Path(folder, "one").rglob("*") if p.is_file())
        del state
    return Outcome(f"1,000 of 100,000 rows: {taken / 1e6:.1f} MB on disk (400 kB of rows)", taken < 10e6)


def size_is_a_number(few: int = 1_000, many: int = 30_000) -> Outcome:
    """Time `size` with few and with many compressed rows."""
    seconds = []
    for number in (few, many):
        buffer = fbuf.Buffer(number, storage=fbuf.storages.Compressed(keys=("obs",), stacks=False))
        state = buffer.init({"obs": np.zeros(16, np.uint8)})
        state = jax.block_until_ready(buffer.extend(state, {"obs": np.zeros((number, 16), np.uint8)}))
        buffer.size(state)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            assert int(buffer.size(state)) == number
            times.append(time.perf_counter() - start)
        seconds.append(float(np.median(times)))
        del state
    grown = seconds[1] / seconds[0]
    return Outcome(f"size takes {grown:.1f} times as long with {many // few} times the rows", grown < 5)


def truth(number: int = 20_000) -> Outcome:
    """Compare `nbytes` with the growth of the process."""
    from benchmarks._harness import measure_memory

    grown = measure_memory(fill, number)
    ratio = grown["rss"] / grown["result"]["nbytes"]
    size = grown["result"]["nbytes"] / number
    return Outcome(f"the process grows by {ratio:.2f} times nbytes ({size:.0f} bytes a row)", 0.7 < ratio < 1.5)


def fill(number: int) -> Any:
    """Fill a buffer for `measure_memory`: one frame and four numbers a row."""
    buffer = fbuf.Buffer(number, storage=fbuf.storages.Compressed(keys=("obs",)))
    extend, random = jax.jit(buffer.extend, donate_argnums=0), np.random.default_rng(0)

    def lot(count: int = 1000) -> dict[str, np.ndarray]:
        frames = np.zeros((count, 84, 84), np.uint8)
        frames[:, 10:50, 30:55] = random.integers(0, 256, (count, 40, 25), np.uint8)
        return {
            "obs": frames,
            **{name: np.zeros(count, np.float32) for name in ("action", "reward", "done", "terminated")},
        }

    example = jax.tree.map(lambda x: x[0], lot())
    warm = jax.block_until_ready(extend(buffer.init(example), lot()))
    del warm
    yield
    state = buffer.init(example)
    for _ in range(number // 1000):
        state = jax.block_until_ready(extend(state, lot()))
    yield {"nbytes": sum(buffer.nbytes(state).values())}


def codec() -> Outcome:
    """Use a custom codec."""
    from benchmarks.defects._ours_rows import Upside

    buffer = fbuf.Buffer(8, storage=fbuf.storages.Compressed(keys=("obs",), codec=Upside()))
    rows = {"obs": jnp.arange(64, dtype=jnp.uint8).reshape(8, 8)}
    state = buffer.extend(buffer.init({"obs": rows["obs"][0]}), rows)
    same = bool((buffer.rows(state).data["obs"] == rows["obs"]).all())
    return Outcome(f"encode(rows) and decode(data, out) are called; rows are returned as stored: {same}", same)
