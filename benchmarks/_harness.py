"""Measuring: interleaved timings, ratios with spread, growth, process memory, and rows to report.

Only ratios taken in one process, call by call in turn, are compared with a target: on a shared
machine two runs a minute apart differ by more than the effects looked for, and the best of each
side was rejected because it hides what a user meets. Memory is the exception: it is measured in a
fresh process each, because an allocator never gives back all that an earlier benchmark took.

A benchmark is a module `bench_*.py` with `main(quick: bool) -> list[dict]`, built from `row`:

    peer = load_peer("flashbax")
    if isinstance(peer, Absent):
        return [absent_row(QUESTION, "10^6 rows", peer)]
    timings = interleave({"fbuf": ours, "flashbax": theirs}, rounds=15)
    ours, theirs = timings["fbuf"], timings["flashbax"]
    return [row(QUESTION, "10^6 rows", ours=spread(ours), peer=spread(theirs),
                ratio=ratio(theirs, ours), target=">= 1.0")]
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import math
import operator
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

# ------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles, all in `unit`."""

    median: float
    low: float
    high: float
    unit: str = "s"

    def __str__(self) -> str:
        if self.unit == "s":
            return f"{_seconds(self.median)} [{_seconds(self.low)}, {_seconds(self.high)}]"
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}] {self.unit}".rstrip()


def interleave(
    thunks: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 15,
    warmup: int = 2,
    calls: int | Mapping[str, int] = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of each thunk, measured in turn.

    Every round calls each thunk `calls` times and waits for what it returned; every second round
    goes through them backwards, so that none always runs behind the same other one.

    Args:
      thunks: Name to function without arguments. A returned pytree of JAX arrays is waited for.
      rounds: Measurements of each.
      warmup: Calls of each beforehand, not measured (compilation, first touch of memory).
      calls: Calls in one measurement, for what takes less than about 100 us; or of each thunk (`enough_calls`).
      clock: `time.process_time` measures the CPU time of all threads, which other processes disturb less.
    Returns:
      The seconds of each round, in the order of the rounds, so that `ratio` can pair them.
    """
    for thunk in thunks.values():
        for _ in range(warmup):
            _wait(thunk())
    seconds: dict[str, list[float]] = {name: [] for name in thunks}
    often = calls if isinstance(calls, Mapping) else dict.fromkeys(thunks, calls)
    order = list(thunks.items())
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, thunk in order:
                start = clock()
                for _ in range(often[name]):
                    result = thunk()
                _wait(result)
                seconds[name].append((clock() - start) / often[name])
                result = None  # freed outside the measurement of the next one
            order.reverse()
    finally:
        if collecting:
            gc.enable()
    return seconds


def enough_calls(thunks: Mapping[str, Callable[[], Any]], seconds: float = 2e-3, most: int = 100) -> dict[str, int]:
    """How many calls of each thunk take about `seconds`, at least one: for sides that differ by orders of magnitude."""
    calls = {}
    for name, thunk in thunks.items():
        _wait(thunk())  # compilation
        start = time.perf_counter()
        _wait(thunk())
        taken = time.perf_counter() - start
        calls[name] = max(1, min(most, round(seconds / max(taken, 1e-9))))
    return calls


def spread(values: Sequence[float], unit: str = "s") -> Spread:
    """Median and quartiles of `values`."""
    low, median, high = (float(q) for q in np.quantile(np.asarray(values), (0.25, 0.5, 0.75)))
    return Spread(median, low, high, unit)


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Spread of the ratios round by round: what disturbs both sides of a round cancels."""
    if len(numerator) != len(denominator):
        raise ValueError(
            f"ratio: {len(numerator)} and {len(denominator)} rounds; expected as many of both. "
            "Take both from one call of interleave."
        )
    return spread(np.asarray(numerator) / np.asarray(denominator), "x")


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean of ratios: 2x and 0.5x make 1x."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def exponent(timings: Mapping[float, Sequence[float]]) -> Spread:
    """How cost grows with size: `b` of the least-squares fit cost = a size^b, 0 being flat.

    Args:
      timings: Size to its costs by round (from `interleave`, all sizes in turn), or to one cost.
    Returns:
      Median and quartiles of the exponents fitted to each round.
    """
    sizes = np.log(np.asarray(list(timings), np.float64))
    costs = np.log(np.asarray([np.atleast_1d(c) for c in timings.values()], np.float64))
    sizes = sizes - sizes.mean()
    return spread((sizes @ (costs - costs.mean(axis=0))) / (sizes @ sizes), "")


def _wait(result: Any) -> None:
    # torch and numpy results are ready when returned; so a benchmark without JAX need not load it.
    if "jax" in sys.modules:
        sys.modules["jax"].block_until_ready(result)


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


# ------------------------------------------------------------------------------------- memory


def process_memory() -> dict[str, int]:
    """Bytes that this process holds now: `rss`, `pss` (shared pages by their share), `private`.

    Freed heap is given back to the system first, so that what the allocator merely keeps is not
    counted. Linux only: OSError elsewhere.
    """
    gc.collect()
    _trim_heap()
    text = Path("/proc/self/smaps_rollup").read_text()
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    return {
        "rss": kib["Rss"] * 1024,
        "pss": kib["Pss"] * 1024,
        "private": (kib["Private_Clean"] + kib["Private_Dirty"]) * 1024,
    }


def _trim_heap() -> None:
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc; musl has none and needs none
    if trim is not None:
        trim(0)


def measure_memory(
    function: Callable[..., Iterator[Any]],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    timeout: float = 1200,
) -> dict[str, Any]:
    """Runs a generator in a fresh process and reports by how much its memory grew.

    The generator yields twice: first (anything) when all is imported and warm, which is the
    baseline; then its result, while what it built is still referenced, which is when memory is
    measured.

        def fill(rows):
            import fbuf
            yield
            store = ...
            yield {"nbytes": store.nbytes}

        grown = measure_memory(fill, 200_000)
        grown["result"]["nbytes"] / grown["rss"]

    Args:
      function: Generator function at the top level of an importable module.
      *args: Its arguments; JSON values.
      environment: Variables set on top of this process's, such as MALLOC_ARENA_MAX.
      timeout: Seconds.
    Returns:
      `rss`, `pss`, `private`: growth in bytes from the first to the second yield; `peak`: growth
      to the highest RSS of the process's life, in bytes; `result`: the second yield, as JSON
      brings it back.
    Raises:
      RuntimeError: the process failed; its standard error is in the message.
    """
    module = function.__module__
    if module == "__main__":  # run by python -m: the name it can be imported under
        module = sys.modules["__main__"].__spec__.name
    call = json.dumps([module, function.__qualname__, args])
    # Where this process finds its modules, the fresh one does too.
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks import _harness; _harness._measured()"],
        input=call,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"measure_memory: {module}:{function.__qualname__} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    # The function may print; the report is the last line.
    return json.loads(done.stdout.rstrip().rsplit("\n", 1)[-1])


def _measured() -> None:
    """The fresh process's side of `measure_memory`: call on stdin, report on stdout, both JSON."""
    module, name, args = json.loads(sys.stdin.read())
    function = operator.attrgetter(name)(importlib.import_module(module))
    generator = function(*args)
    next(generator)
    before = process_memory()
    result = next(generator)
    after = process_memory()
    peak = int(re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[0])
    report = {name: after[name] - before[name] for name in before}
    report |= {"peak": peak * 1024 - before["rss"], "result": result}
    print("\n" + json.dumps(report))


# -------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Absent:
    """A peer that is not here, and why."""

    name: str
    reason: str


def load_peer(name: str) -> ModuleType | Absent:
    """Imports a peer, or says why it cannot be: a row then reports it instead of leaving it out."""
    if name == "ray":  # read when it is imported: it binds to the loopback interface
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if name.partition(".")[0] == "torchrl":  # its extension can only be put in place before any of it is imported
        with contextlib.suppress(ImportError):
            importlib.import_module("benchmarks.peers._torchrl_tree").ensure()
    try:
        return importlib.import_module(name)
    # Not ImportError alone: a library built against another version fails with anything.
    except Exception as error:
        return Absent(name, f"{type(error).__name__}: {error}")


def row(
    question: str,
    case: str,
    *,
    ours: Spread | float | str | None = None,
    peer: Spread | float | str | None = None,
    ratio: Spread | float | None = None,
    target: str | None = None,
    note: str = "",
    tags: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One line of the report.

    Args:
      question: What is asked, the same for all rows of a table.
      case: Which sizes, which game, which peer.
      ours: fbuf's figure.
      peer: The named peer's.
      ratio: What the target is about, in the direction that the target needs.
      target: A bound on the ratio, as `">= 1.0"` or `"< 0.05"`; None where there is none.
      note: Anything that a reader must know.
      tags: JSON values that say the case in parts, `{"library": "flashbax", "size": 10_000}`: what pictures are drawn from.
    Returns:
      The arguments as JSON values, and `met`: whether the ratio's median meets the target, or None.
    Raises:
      ValueError: a target that is not a comparison with a number.
    """
    met = None
    if target is not None:
        holds, bound = _bound(target)
        if ratio is not None:
            met = bool(holds(ratio.median if isinstance(ratio, Spread) else ratio, bound))
    return {
        "question": question,
        "case": case,
        "ours": _plain(ours),
        "peer": _plain(peer),
        "ratio": _plain(ratio),
        "target": target,
        "met": met,
        "note": note,
        **({"tags": dict(tags)} if tags else {}),
    }


def absent_row(
    question: str, case: str, peer: Absent, target: str | None = None, tags: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The row of a comparison whose peer cannot be loaded."""
    return row(question, case, target=target, peer="absent", note=f"{peer.name}: {peer.reason}", tags=tags)


_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def _bound(target: str) -> tuple[Callable[[float, float], bool], float]:
    match = re.fullmatch(r"\s*(>=|<=|>|<)\s*([-+.\deE]+)x?\s*", target)
    if match is None:
        raise ValueError(
            f'row: target is {target!r}; expected a comparison with a number. Pass for example target=">= 1.0".'
        )
    return _COMPARISONS[match[1]], float(match[2])


def _plain(figure: Spread | float | str | None) -> Any:
    if isinstance(figure, Spread):
        return asdict(figure)
    return figure if figure is None or isinstance(figure, str) else float(figure)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, a heading for every question."""
    lines: list[str] = []
    for question in dict.fromkeys(r["question"] for r in rows):
        lines += ["", question]
        cells = [("case", "ours", "peer", "ratio", "target", "met")]
        notes = [""]
        for r in rows:
            if r["question"] == question:
                met = {None: "", True: "yes", False: "NO"}[r["met"]]
                figures = [figure_text(r[k]) for k in ("ours", "peer", "ratio")]
                cells.append((r["case"], *figures, r["target"] or "", met))
                notes.append(r["note"])
        widths = [max(len(c[i]) for c in cells) for i in range(6)]
        for cell, note in zip(cells, notes, strict=True):
            line = "  ".join(c.ljust(w) for c, w in zip(cell, widths, strict=True))
            lines.append(f"  {line}  {note}".rstrip())
    return "\n".join(lines)


def figure_text(figure: Any) -> str:
    """A figure of a row, as a cell of a table."""
    if isinstance(figure, Mapping):
        return str(Spread(**figure))
    if isinstance(figure, float):
        return f"{figure:,.0f}" if abs(figure) >= 1e4 else f"{figure:.4g}"
    return figure or ""


# ------------------------------------------------------------------------------- environment

_PACKAGES = (
    "fbuf jax jaxlib numpy zstandard torch torchrl tensordict flashbax cpprb brax dopamine-rl ale-py gymnasium optax"
).split()


def environment(devices: bool = True) -> dict[str, Any]:
    """Versions and machine, as they belong beside every figure; without the devices, no backend starts."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    jax = sys.modules.get("jax") if devices else None  # not loaded for this: asking for devices starts a backend
    return {
        "versions": versions,
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "devices": [d.device_kind for d in jax.devices()] if jax is not None else [],
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


_descendants: dict[int, float] = {}  # CPU seconds by process, as `count_descendants` found them


def work_elsewhere() -> Callable[[], float | None]:
    """Return a function that returns the share of all cores' time that unrelated processes took since.

    Ratios of sides that use threads in different ways (torch's pool, XLA's) depend on it, so reports show it. It is None
    where the system does not tell (no Linux).
    """

    def busy() -> tuple[float, float, float]:
        ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        own = sum(os.times()[:4]) + sum(_descendants.values())  # with the children that have ended
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), own, time.perf_counter()

    try:
        begin = busy()
    except (OSError, ValueError, IndexError):
        return lambda: None

    def share() -> float:
        all_, own, elapsed = (now - then for now, then in zip(busy(), begin, strict=True))
        return round(min(max((all_ - own) / (max(elapsed, 1e-9) * (os.cpu_count() or 1)), 0.0), 1.0), 3)

    return share


def count_descendants() -> None:
    """Count the CPU time of descendants as this process's own. Call it before they end, and again for later ones.

    Children are left out: the system counts them once they end, but not all processes that they started.
    """
    parents, seconds = dict[int, int](), dict[int, float]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(stat.parent.name)
        parents[pid], seconds[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    below = {pid for pid, parent in parents.items() if parent == os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        _descendants.update((pid, seconds[pid]) for pid in below)


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return match[1] if match else platform.processor()
