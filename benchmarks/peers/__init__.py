"""The libraries that fbuf is measured against, each driven through its best public API.

A library is a module here with a class `Uniform(capacity, example)` and, if it has priorities, `Prioritized(...)`; both are
`Driver`s. The module imports its library, so one that is not installed, or does not load, fails right there, and `load` says
why instead of leaving it out. What a figure includes differs between libraries (some jit, some cannot); `Library` says it, and
every report repeats it.

A row is 25 bytes: `obs` float32[4], `action` int32, `reward` float32, `terminated` bool. It is handed over in the form that the
library takes (device arrays, tensors, numpy arrays, objects), made beforehand; a batch is what the library gives.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks._harness import Absent

Rows = dict[str, np.ndarray]
Thunk = Callable[[], Any]
EXAMPLE: Rows = {
    "obs": np.zeros(4, np.float32),
    "action": np.int32(0),
    "reward": np.float32(0),
    "terminated": np.bool_(False),
}
ALPHA, BETA = 0.6, 0.4


class Driver(Protocol):
    """A buffer of one library. Its thunks return when what they did is done."""

    def writer(self, rows: Rows) -> Thunk:
        """Writes `rows`, leaves [N, ...], at each call; with N = 1 by the library's verb for one row, if it has one."""

    def sampler(self, batch_size: int) -> Thunk:
        """Draws a batch at each call."""

    def stepper(self, batch_size: int) -> Thunk:
        """Draws a batch with importance weights and sets new priorities, |reward - 1|, at each call."""


@dataclasses.dataclass(frozen=True)
class Library:
    """What is known of a library without importing it."""

    name: str
    module: str  # of this package
    distributions: tuple[str, ...]  # whose versions belong beside its figures
    includes: str  # what its time is the time of
    row_bytes: int  # about, for one of 25 bytes
    largest: int = 10**7  # rows it is asked to hold
    why_largest: str = ""
    on_device: bool = False


FBUF = Library(
    "fbuf",
    "_fbuf",
    ("fbuf", "jax"),
    "one jitted call with the state donated; key split, weights, mask and counters in it; "
    "a step is one jitted call of `sample` and `update_priority`",
    35,
    on_device=True,
)
PEERS = (
    Library(
        "flashbax",
        "_flashbax",
        ("flashbax",),
        "item buffers; one jitted call with the state donated, key split in it; a step is two, which is faster (in one, XLA "
        "copies the tree), and adds weights to its probabilities",
        45,
        on_device=True,
    ),
    Library(
        "torchrl",
        "_torchrl",
        ("torchrl", "tensordict", "torch"),
        "`ReplayBuffer` over `LazyTensorStorage`; a step is `sample` (with weights) and `update_priority`, two calls",
        45,
    ),
    Library(
        "cpprb",
        "_cpprb",
        ("cpprb",),
        "numpy arrays; a step is `sample` (with weights) and `update_priorities`, two calls",
        45,
    ),
    Library(
        "brax",
        "_brax",
        ("brax",),
        "`UniformSamplingQueue`; one jitted call with the state donated; no priorities; every leaf as float32",
        56,
        on_device=True,
    ),
    Library(
        "dopamine",
        "_dopamine",
        ("dopamine-rl",),
        "`ReplayBuffer(compress=False)`, one Python object a row; it makes transitions as they are added, and takes rows one "
        "by one; a step computes weights from its probabilities",
        1500,
        10**5,
        "a Python object and about 10 us a row",
    ),
    Library(
        "NumPy list",
        "_list",
        ("numpy",),
        "a Python list of rows, `np.stack` of those drawn; a step draws from a cumulative sum of all priorities",
        500,
        10**6,
        "a Python object a row",
    ),
)


def load(library: Library) -> Any | Absent:
    """The module that drives a library, or why there is none."""
    try:
        return importlib.import_module(f"benchmarks.peers.{library.module}")
    except Exception as error:  # a library built against another version fails with anything
        return Absent(library.name, f"{type(error).__name__}: {error}".split("\n")[0][:200])


def rows(number: int, seed: int = 0) -> Rows:
    """`number` random rows, leaves [N, ...]; an episode ends every 100 or so."""
    random = np.random.default_rng(seed)
    return {
        "obs": random.random((number, 4), np.float32),
        "action": random.integers(0, 6, number, np.int32),
        "reward": random.random(number, np.float32),
        "terminated": random.random(number) < 0.01,
    }


def fill(driver: Driver, capacity: int, chunk: int = 100_000) -> None:
    """Writes until the buffer is full: what is timed then overwrites, and every page is there."""
    chunk = min(chunk, capacity)
    write = driver.writer(rows(chunk))
    for _ in range(-(-capacity // chunk)):
        write()


def too_large(library: Library, capacity: int) -> str | None:
    """Why a library is not asked to hold so many rows, or None."""
    if capacity > library.largest:
        return f"not run: {library.why_largest}"
    needed, free = capacity * library.row_bytes, free_bytes(library.on_device)
    if needed > free // 2:
        where = "the device" if library.on_device else "memory"
        return f"not run: it needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of {where} are free"
    return None


def free_bytes(on_device: bool) -> int:
    """Bytes free on the accelerator, if there is one and it is asked for; else in this machine's memory."""
    if on_device:
        import jax

        known = jax.devices()[0].memory_stats() or {}
        if "bytes_limit" in known:
            return known["bytes_limit"] - known.get("bytes_in_use", 0)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62
