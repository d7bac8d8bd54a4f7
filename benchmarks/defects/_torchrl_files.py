"""Run the cases of torchrl about compression, files and reported memory."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.defects import Outcome
from benchmarks.defects._torchrl import modules, rows


def _frames(number: int = 64, nested: bool = False) -> Any:
    torch, _, tensordict = modules(trees=False)
    frames = torch.zeros(number, 84, 84, dtype=torch.uint8)
    frames[torch.arange(number), torch.arange(number) % 84] = 200
    return tensordict({"next": tensordict({"obs": frames}, [number])} if nested else {"obs": frames}, [number])


def _stored(items: Any, capacity: int | None = None) -> Any:
    _, data, _ = modules(trees=False)
    buffer = data.ReplayBuffer(storage=data.CompressedListStorage(capacity or len(items)))
    buffer.extend(items)
    return buffer


def magic() -> Outcome:
    """Read the first bytes of a compressed leaf."""
    leaf = _stored(_frames(1)).storage._storage[0]["obs"]
    first = bytes(leaf[:4].tolist())
    zstd = first == b"\x28\xb5\x2f\xfd"
    return Outcome(f"documented as zstd; the first bytes are {first[:2].hex(' ')} ({'zstd' if zstd else 'zlib'})", zstd)


def nested() -> Outcome:
    flat, deep = (_stored(_frames(1024, nested=n)).storage.bytes() for n in (False, True))
    text = f"1,024 frames: {flat / 1e3:,.0f} kB, nested: {deep / 1e3:,.0f} kB (raw 7,225)"
    return Outcome(text, deep < 3600e3)


def size_is_a_number(few: int = 1_000, many: int = 30_000) -> Outcome:
    torch, _, tensordict = modules(trees=False)
    seconds = []
    for number in (few, many):
        buffer = _stored(tensordict({"obs": torch.zeros(number, 16, dtype=torch.uint8)}, [number]))
        times = []
        for _ in range(20):
            start = time.perf_counter()
            assert len(buffer) == number
            times.append(time.perf_counter() - start)
        seconds.append(float(np.median(times)))
    grown = seconds[1] / seconds[0]
    return Outcome(f"len takes {grown:.1f} times as long with {many // few} times the rows", grown < 5)


def few_files() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        _stored(_frames(64)).dumps(folder)
        files = [p for p in Path(folder).rglob("*") if p.is_file()]
        pickles = [p.name for p in files if p.suffix in (".pkl", ".t")]
    return Outcome(
        f"64 rows: {len(files)} files; pickles: {', '.join(pickles) or 'none'}",
        len(files) < 16 and not pickles,
    )


def nested_dump() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        try:
            _stored(_frames(4, nested=True)).dumps(folder)
        except Exception as error:
            return Outcome(f"{type(error).__name__}: {str(error)[:80]}", False)
    return Outcome("written", True)


def over_another() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        _stored(_frames(20)).dumps(folder)
        try:
            _stored(_frames(5)).dumps(folder)
            other = _stored(_frames(5))
            other.loads(folder)
            return Outcome(f"{len(other)} rows", len(other) == 5)
        except Exception as error:
            return Outcome(f"5 rows dumped over 20: {type(error).__name__}: {str(error)[:90]}", False)


def torn() -> Outcome:
    """Dump twice; the second dump ends after the storage, as if the process was killed there."""
    _, data, _ = modules(trees=False)

    def buffer() -> Any:
        return data.ReplayBuffer(storage=data.LazyTensorStorage(16))

    one, other = buffer(), buffer()
    with tempfile.TemporaryDirectory() as folder:
        one.extend(rows(0, 4))
        one.dumps(folder)
        one.extend(rows(4, 4))
        one.storage.dumps(Path(folder, "storage"))
        try:
            other.loads(folder)
        except Exception as error:
            return Outcome(f"an error: {type(error).__name__}", True)
        cursor, length = other.writer._cursor, len(other)
    return Outcome(
        f"ended after its storage, before its writer: loads {length} rows, and the next overwrites row {cursor}",
        cursor == length,
    )


def sparse() -> Outcome:
    torch, data, tensordict = modules(trees=False)
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100_000))
    buffer.extend(tensordict({"obs": torch.ones(1000, 100)}, [1000]))
    with tempfile.TemporaryDirectory() as folder:
        buffer.dumps(folder)
        taken = sum(p.stat().st_blocks * 512 for p in Path(folder).rglob("*") if p.is_file())
    return Outcome(f"1,000 of 100,000 rows: {taken / 1e6:.1f} MB on disk (400 kB of rows)", taken < 10e6)


def truth(number: int = 20_000) -> Outcome:
    from benchmarks._harness import measure_memory

    grown = measure_memory(fill, number)
    ratio = grown["rss"] / grown["result"]["nbytes"]
    size = grown["result"]["nbytes"] / number
    return Outcome(f"the process grows by {ratio:.2g} times bytes() ({size:.0f} bytes a row)", 0.7 < ratio < 1.5)


def fill(number: int) -> Any:
    """Fill a buffer for `measure_memory`: one frame and four numbers a row."""
    torch, _, tensordict = modules(trees=False)

    def items(count: int) -> Any:
        frames = torch.zeros(count, 84, 84, dtype=torch.uint8)
        frames[:, 10:50, 30:55] = torch.randint(256, (count, 40, 25), dtype=torch.uint8)
        leaves = {name: torch.zeros(count) for name in ("action", "reward", "done", "terminated")}
        return tensordict({"obs": frames, **leaves}, [count])

    warm = _stored(items(100))
    del warm
    yield
    buffer = _stored(items(1000), number)
    for _ in range(number // 1000 - 1):
        buffer.extend(items(1000))
    yield {"nbytes": buffer.storage.bytes()}
