"""Runs tests on mutants: each in a fork of this process, which has imported what is slow to import but not the package.

Of each tier the likely tests run first, beginning with the file that killed the mutant in the last run, then the rest.

A mutated copy of the package stands first on the path, beside links to the rest of the repository. The forks share one
cache of compiled programs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutants._catalogue import Mutant, Package

TIERS = ("likely", "quick", "more")
WARM = ("jax", "jax.numpy", "numpy", "zstandard", "ml_dtypes", "chex", "hypothesis", "hypothesis.strategies", "torch")
_MOST_MEMORY = 8 << 30  # bytes of a process
_SLOWER = 8  # a whole tier's time limit, in those of the likely tests
_HANGS = 150  # seconds of one test, more than any waits for a thread


class Tests:
    """The test files of a repository by tier: those that may have cases of it."""

    def __init__(self, repo: Path) -> None:
        files = sorted((repo / "tests").rglob("test_*.py"))
        # Not imported: the forks import the tests of their own folders.
        tier_of = runpy.run_path(str(repo / "tests" / "support" / "tiers.py"))["of_file"]
        lowest = {str(path.relative_to(repo)): tier_of(path) for path in files}
        self.tiers = {
            "quick": [name for name, tier in lowest.items() if tier == "quick"],
            "more": [name for name, tier in lowest.items() if tier != "exhaustive"],
        }
        self.topics = {path.stem.removeprefix("test_") for path in files}

    def likely(self, tier: str, topics: Sequence[str]) -> list[str]:
        """Return the files of a tier named `test_<topic>.py`, or where there are none `test_<topic>*.py`, in this order."""
        found: dict[str, None] = {}
        for topic in topics:
            exact = [f for f in self.tiers[tier] if Path(f).stem == f"test_{topic}"]
            begun = [f for f in self.tiers[tier] if Path(f).stem.startswith(f"test_{topic}")]
            found |= dict.fromkeys(exact or begun)
        return list(found)


@dataclass
class Stage:
    """Some tests to run on one mutant (None: on the package as it is), for at most `limit` seconds."""

    mutant: Mutant | None
    tier: str
    tests: list[str]
    limit: float


class Runner:
    """Runs mutants of `repo/package`; `killers` are the tests that killed a mutant in the last run, by its id."""

    def __init__(self, repo: Path, package: str, tier: str, jobs: int, timeout: float) -> None:
        repo = repo.resolve()
        self.repo, self.package, self.tier, self.jobs, self.timeout = repo, package, tier, jobs, timeout
        self.sources, self.tests = Package(repo / package), Tests(repo)
        self.killers: dict[str, str] = {}
        self._running: dict[int, tuple[Stage, Path, float, list[Stage]]] = {}

    def stages(self, mutant: Mutant) -> list[Stage]:
        """Return what is run on a mutant until something fails."""
        stages = []
        killer = self.killers.get(mutant.id, "").partition("::")[0]
        for tier in ("quick",) if self.tier == "quick" else ("quick", "more"):
            files = self.tests.tiers[tier]
            likely = list(dict.fromkeys([f for f in files if f == killer] + self.tests.likely(tier, mutant.tests)))
            rest = [f for f in files if f not in likely] if self.tier != "likely" else []
            stages += [Stage(mutant, tier, likely, self.timeout)] if likely else []
            stages += [Stage(mutant, tier, rest, _SLOWER * self.timeout)] if rest else []
        return stages

    def failing(self, tests: Sequence[str]) -> list[str]:
        """Run some tests without a mutant and return those that fail: they say nothing of mutants."""
        stage = Stage(None, "", sorted(tests), _SLOWER * self.timeout)
        found = next(self._finish([[stage]]))[1] if tests else {"result": "survived", "failed": []}
        if found["result"] == "timeout":
            raise RuntimeError(f"without a mutant these tests take more than {stage.limit:.0f} s: {stage.tests}")
        return found["failed"]

    def run(self, mutants: Sequence[Mutant]) -> Iterator[dict[str, Any]]:
        """Yield what became of each mutant, as they end."""
        for stage, found in self._finish([self.stages(mutant) for mutant in mutants]):
            mutant = stage.mutant
            assert mutant is not None
            yield {
                "id": mutant.id,
                "digest": self.sources.digest(mutant),
                "result": found["result"],
                "tier": stage.tier if found["result"] == "killed" else self.tier,
                "by": found["failed"][:1],
                "seconds": found["seconds"],
            }

    def _finish(self, queue: list[list[Stage]]) -> Iterator[tuple[Stage, dict[str, Any]]]:
        """Run the stages of each entry in turn, several entries at once; yield the stage that ended each."""
        with tempfile.TemporaryDirectory(prefix="mutants-") as work:
            try:
                while queue or self._running:
                    while queue and len(self._running) < self.jobs:
                        self._start(Path(work), queue.pop(0))
                    for pid in list(self._running):
                        ended = self._look(pid)
                        if ended is None:
                            continue
                        stage, rest, found = ended
                        if found["result"] != "killed" and rest:
                            queue.insert(0, rest)
                        else:
                            yield stage, found
                    time.sleep(0.05)
            finally:
                for pid in list(self._running):
                    _kill(pid)
                    os.waitpid(pid, 0)
                self._running.clear()

    def _start(self, work: Path, stages: list[Stage]) -> None:
        stage, *rest = stages
        folder = Path(tempfile.mkdtemp(prefix=f"{stage.mutant.id if stage.mutant else 'base'}-", dir=work))
        self._copy(folder / "repo", stage.mutant)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                self._child(folder, stage)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)
        with contextlib.suppress(OSError):  # the fork does so too; either may be first
            os.setpgid(pid, pid)
        self._running[pid] = stage, folder, time.monotonic(), rest

    def _copy(self, target: Path, mutant: Mutant | None) -> None:
        target.mkdir()
        shutil.copytree(self.repo / self.package, target / self.package, ignore=shutil.ignore_patterns("__pycache__"))
        for entry in self.repo.iterdir():
            if entry.name not in (self.package, ".git"):
                (target / entry.name).symlink_to(entry)
        if mutant is not None:
            path, text = self.sources.mutated(mutant)
            (target / self.package / path).write_text(text)

    def _look(self, pid: int) -> tuple[Stage, list[Stage], dict[str, Any]] | None:
        """Return what a fork found if it has ended or its time is up."""
        stage, folder, start, rest = self._running[pid]
        late = time.monotonic() - start > stage.limit
        if late:
            _kill(pid)
        ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
        if not ended:
            return None
        del self._running[pid]
        _kill(pid)  # what it started and left
        found: dict[str, Any] = {"failed": [], "result": "timeout" if late else "killed"}
        if (folder / "found.json").exists():
            found = json.loads((folder / "found.json").read_text())
        elif not late and os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
            found["failed"] = [f"the process died: {signal.Signals(os.WTERMSIG(status)).name}"]
        elif not late and os.WEXITSTATUS(status) == 1:
            found["failed"] = [(folder / "test").read_text()]  # which hung
        elif not late:
            found["result"] = "broken"
        if found["result"] == "broken":
            log = (folder / "log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"pytest did not run on {stage.mutant.id if stage.mutant else 'the package'}:\n{log}")
        shutil.rmtree(folder, ignore_errors=True)
        return stage, rest, found | {"seconds": round(time.monotonic() - start, 1)}

    def _child(self, folder: Path, stage: Stage) -> None:
        os.setpgid(0, 0)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        repo = folder / "repo"
        os.chdir(repo)
        here = {str(self.repo), "", os.getcwd()}
        sys.path[:] = [str(repo), *(p for p in sys.path if p not in here)]
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in here]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(repo), *paths])
        os.environ.pop("PYTEST_ADDOPTS", None)
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))  # a mutant may allocate without end
        import pytest

        with contextlib.suppress(ImportError, AttributeError):
            import hypothesis.internal.conjecture.engine as engine

            engine.MAX_SHRINKS = 0  # an example that fails is enough
        seen = _Seen(folder / "test")
        options = ["-q", "-n0", "-p", "no:cacheprovider", "--tb=short"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins were imported before the fork
        options += ["-x", "-o", f"faulthandler_timeout={_HANGS}"] if stage.mutant is not None else []
        options += ["--tier", stage.tier or "all"]
        code = int(pytest.main([*options, *stage.tests], plugins=[seen]))
        result = {0: "survived", 5: "survived", 1: "killed", 2: "killed"}.get(code, "broken")
        if result == "killed" and not seen.failed:
            result = "broken"
        module = sys.modules.get(self.package)
        if module is not None and not str(module.__file__).startswith(os.getcwd()):
            print(f"{self.package} was imported from {module.__file__}", flush=True)
            result = "broken"
        (folder / "found.tmp").write_text(json.dumps({"result": result, "failed": seen.failed}))
        (folder / "found.tmp").rename(folder / "found.json")
        os._exit(0)


class _Seen:
    """Remembers which tests failed, and writes down which one runs."""

    def __init__(self, running: Path) -> None:
        self.failed: list[str] = []
        self.running = running

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.write_text(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


def _kill(pid: int) -> None:
    """End a fork and what it started, which are one process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def warm(repo: Path, modules: Sequence[str] = WARM) -> None:
    """Import what forks share, with the settings that the tests' conftest makes before it imports JAX."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(repo / ".jax_cache" / "mutants"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
