"""Fail every system call of saves, loads, live stores, data sets and shards, one after another, and look at what is left.

`check_system_calls` runs cases in a process of its own, with `system_calls.c` preloaded. A case is a call, an error, and how it
fails: once, for ever, or by moving half of its bytes. Then the old or the new rows are there, whole; no lock or descriptor
is left; and the next success leaves no file behind.
"""

import ctypes
import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
import fbuf.sharded
from fbuf._formats.checkpoint import filesystem
from fbuf._formats.checkpoint.directory import Folder
from fbuf._host import codecs
from fbuf._host.columns import chunked_file
from fbuf._host.memory import file_arena
from fbuf._host.store import row_updates
from tests.support.paths import ROOT
from tests.support.processes import devices

ERRORS = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EACCES, errno.EMFILE, errno.EROFS, errno.EDQUOT, errno.ETIMEDOUT)
ONCE, EVER, HALF = range(3)
LENGTH = 24
ROW = {"t": np.int32(0), "obs": np.zeros(700, np.uint8)}


RANDOM = np.random.default_rng(0).integers(0, 256, (256, 700), np.uint8)


def observations(t: Any, noise: int = 0) -> Any:
    """Return the observations of rows, of which so many bytes cannot be compressed."""
    obs = np.repeat(t[:, None] % 251, 700, 1).astype(np.uint8)
    obs[:, :noise] = RANDOM[t % 256, :noise]
    return obs


def rows(first: int, count: int, noise: int = 0) -> dict[str, Any]:
    t = np.arange(first, first + count, dtype=np.int32)
    return {"t": t, "obs": observations(t, noise)}


def numbers(held: Any, noise: int = 0) -> list[int]:
    """Return the numbers of rows, whose other leaf must follow from them."""
    there = np.asarray(held.mask)
    t, obs = np.asarray(held.data["t"])[there], np.asarray(held.data["obs"])[there]
    assert (obs == observations(t, noise)).all(), "rows are torn"
    return t.tolist()


def check_error(error: BaseException | None, folder: str) -> None:
    """The error of a device is an OSError that names the path and says what to do."""
    if error is not None:
        assert isinstance(error, OSError), f"{type(error).__name__}: {error}"
        assert folder in str(error), f"no path in {type(error).__name__}: {error}"
        assert "Traceback" not in str(error) and len(str(error)) < 900, f"a wall of text: {error}"


class Checkpoint:
    """A save over none or one, waited for or not; or a load."""

    def __init__(self, before: int, wait: bool = True, load: bool = False, **options: Any):
        self.before, self.wait, self.load, self.options = before, wait, load, options

    def prepare(self, base: str) -> None:
        self.buffer = fbuf.Buffer(LENGTH, **self.options)
        state = self.buffer.init(ROW)
        self.states = [state := self.buffer.extend(state, rows(7 * i, 7)) for i in range(4)]
        for state in self.states[: self.before]:
            fbuf.save(f"{base}/saved", self.buffer, state)

    def act(self, folder: str) -> None:
        if self.load:
            assert self._loaded(folder) == self.before - 1, "another save was loaded"
        else:
            fbuf.save(f"{folder}/saved", self.buffer, self.states[self.before], wait=self.wait).result()

    def check(self, folder: str, error: BaseException | None) -> None:
        here = self._loaded(folder)
        new = self.before - self.load
        allowed = {new} if error is None or self.load else {new, new - 1}
        assert here in allowed, f"save {here} was loaded; expected {allowed}"
        fbuf.save(f"{folder}/saved", self.buffer, self.states[3])
        assert self._loaded(folder) == 3
        check_leftovers(f"{folder}/saved")

    def _loaded(self, folder: str) -> int:
        try:
            buffer, state = fbuf.load(f"{folder}/saved", self.buffer, example=ROW)
        except fbuf.CheckpointNotFound:
            return -1
        held = numbers(buffer.rows(state))
        newest = (held[-1] + 1) // 7
        assert held == list(range(7 * newest))[-LENGTH:]
        return newest - 1


def check_leftovers(path: str) -> None:
    """A checkpoint's folder has the lock, at most two manifests, and the data files that these name."""
    folder, names = Folder(path, filesystem.DISK), set(os.listdir(path))
    generations = folder.generations()
    known = {entry.name for number in generations for entry in folder.manifest(number).files}
    known |= {filesystem.manifest_name(number) for number in generations} | {filesystem.LOCK}
    assert len(generations) <= 2 and names == known, f"left over: {sorted(names - known)}, {generations}"


class Live:
    """A `Replay` over a store in files: made, written, updated, flushed, closed; or resumed."""

    def __init__(self, storage: Callable[[str], Any], resume: bool = False, noise: int = 0):
        self.storage, self.resume, self.noise = storage, resume, noise

    def prepare(self, base: str) -> None:
        self.done: list[int] = []
        if self.resume:
            self._write(self._replay(base, False))

    def _replay(self, folder: str, resume: bool) -> Any:
        return fbuf.Replay(fbuf.Buffer(LENGTH, storage=self.storage(f"{folder}/store")), ROW, resume=resume)

    def act(self, folder: str) -> None:
        self.done = list(range(45)) if self.resume else []
        self.tried = len(self.done)
        self.flushed = list(self.done)
        replay = self._replay(folder, self.resume)
        try:
            self._write(replay)
        except OSError:
            self._look(replay)  # whole, whatever failed
            raise

    def _write(self, replay: Any) -> None:
        for count in (9, 20, 16):
            first, self.tried = self.tried if hasattr(self, "tried") else len(self.done), 0
            self.tried = first + count
            replay.extend(rows(first, count, self.noise))
            jax.block_until_ready(jax.tree.leaves(replay.state))
            self.done += range(first, first + count)
        last = replay.rows(last=3)
        for _ in range(3 if self.noise else 1):  # the log is rewritten
            replay.update_rows(last.index, {"obs": last.data["obs"]})
        replay.buffer.flush(replay.state)
        self.flushed = list(self.done)

    def _look(self, replay: Any) -> None:
        self._check(numbers(replay.rows(), self.noise), "held")

    def _check(self, held: list[int], what: str) -> None:
        needed = [t for t in self.done if t >= self.tried - LENGTH]
        assert held == sorted(set(held)) and set(held) <= set(range(self.tried)), f"{what} {held}"
        assert set(needed) <= set(held), f"{what} {held}; lost {sorted(set(needed) - set(held))}"

    def check(self, folder: str, error: BaseException | None) -> None:
        gc.collect()
        assert not fbuf.stores(), "a store is open"
        if os.path.exists(f"{folder}/store/manifest.json"):
            replay = self._replay(folder, True)
            self._check(numbers(replay.rows(), self.noise), "resumed")
        else:
            assert not self.done
            replay = self._replay(folder, False)
        self._write(replay)
        self._check(numbers(replay.rows(), self.noise), "continued")
        replay.buffer.flush(replay.state)
        names = sorted(os.listdir(f"{folder}/store"))
        assert not [n for n in names if n.endswith((".new", ".old"))], names


class DataSet:
    """A data set of three segments, written by a source or by `preprocess`."""

    def __init__(self, preprocess: bool = False):
        self.preprocess = preprocess

    def prepare(self, base: str) -> None:
        if self.preprocess:
            self._save(f"{base}/source")

    def _save(self, path: str) -> None:
        source = fbuf.interop.from_arrays(rows(0, 30), episode_end=())
        source.save(path, segment_rows=12)

    def act(self, folder: str) -> None:
        if self.preprocess:
            fbuf.datasets.preprocess(f"{folder}/source", _same, dest=f"{folder}/made", segment_rows=12)
        else:
            self._save(f"{folder}/made")

    def check(self, folder: str, error: BaseException | None) -> None:
        try:
            self._look(folder)
        except FileNotFoundError:
            assert error is not None, "it is not there"
            self.act(folder)
            self._look(folder)
        # The lock may stay, unlocked.
        names = {*os.listdir(f"{folder}/made"), *os.listdir(f"{folder}/made/pieces")} - {"lock"}
        assert names == {"dataset.json", "pieces", "0", "1", "2"}, names

    def _look(self, folder: str) -> None:
        buffer, state = fbuf.datasets.open(f"{folder}/made")
        assert numbers(buffer.rows(state)) == list(range(30))


def _same(row: Any) -> Any:
    return row


class Sharded(Checkpoint):
    """A second save of a buffer over two devices."""

    def prepare(self, base: str) -> None:
        mesh = jax.make_mesh((2,), ("data",))
        whole = fbuf.sharded.Sharded(fbuf.Buffer(48, lanes=2), mesh, "data")
        self.buffer = whole
        state = whole.init(ROW)
        pairs = [{n: np.stack([x, x], 1) for n, x in rows(7 * i, 7).items()} for i in range(4)]
        self.states = [state := whole.extend(state, pair) for pair in pairs]
        for state in self.states[: self.before]:
            fbuf.save(f"{base}/saved", whole, state)

    def _loaded(self, folder: str) -> int:
        try:
            buffer, state = fbuf.load(f"{folder}/saved")
        except fbuf.CheckpointNotFound:
            return -1
        held = numbers(buffer.rows(state))
        assert len(held) % 2 == 0
        newest = (max(held) + 1) // 7
        assert sorted(held) == sorted(list(range(7 * newest))[-LENGTH:] * 2)
        return newest - 1


class RayShard:
    """A shard of a `RayReplay` that saves with every write, in this process."""

    def prepare(self, base: str) -> None:
        from fbuf.ray._blocks import pack

        self.pack = pack
        os.mkdir(f"{base}/shards")
        self._write(self._shard(base), 0)

    def _shard(self, folder: str) -> Any:
        from fbuf.ray._shard import Shard

        return Shard(fbuf.Buffer(LENGTH), ROW, path=f"{folder}/shards/0", save_every=1)

    def _write(self, shard: Any, number: int) -> Any:
        leaves = jax.tree.leaves(rows(7 * number, 7))
        places, block = self.pack((leaves, None, None))
        try:
            return shard.extend(1, number + 1, number + 1, None, places, block)
        finally:
            shard.close()

    def act(self, folder: str) -> None:
        self._write(self._shard(folder), 1)

    def check(self, folder: str, error: BaseException | None) -> None:
        shard = self._shard(folder)
        held = numbers(shard._replay.rows())
        whole = list(range(14)), list(range(7))
        assert held in whole[: 1 if error is None else 2], held
        self._write(shard, len(held) // 7)
        shard = self._shard(folder)
        assert len(shard._replay) == len(held) + 7
        shard.close()
        check_leftovers(f"{folder}/shards/0")


PRIORITIZED = {"sampler": fbuf.samplers.Prioritized()}
COMPRESSED = {"storage": fbuf.storages.Compressed(keys=("obs",))}


def encoded(path: str) -> Any:
    return fbuf.storages.Compressed(path=path, keys=("t", "obs"), codec=codecs.Zstd(chunk=4))


TARGETS: dict[str, Any] = {
    "save": Checkpoint(0),
    "second save": Checkpoint(1, **PRIORITIZED),
    "third save": Checkpoint(2, **COMPRESSED),
    "wait=False": Checkpoint(1, wait=False),
    "load": Checkpoint(2, load=True),
    "load compressed": Checkpoint(1, load=True, **COMPRESSED),
    "memmap": Live(lambda path: fbuf.storages.Memmap(path)),
    "memmap resumed": Live(lambda path: fbuf.storages.Memmap(path), resume=True),
    "compressed": Live(lambda path: fbuf.storages.Compressed(path=path)),
    "compressed resumed": Live(lambda path: fbuf.storages.Compressed(path=path), resume=True),
    "segments resumed": Live(encoded, resume=True, noise=150),
    "incompressible": Live(encoded, noise=700),
    "data set": DataSet(),
    "preprocess": DataSet(preprocess=True),
    "sharded": Sharded(1),
    "ray": RayShard(),
}


def cases(calls: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of the call, the error, and how it fails. Python repeats calls for as long as they fail with EINTR."""
    for call in range(1, calls + 1):
        yield from ((call, error, ONCE) for error in ERRORS)
        yield from ((call, error, EVER) for error in ERRORS if error != errno.EINTR)
        yield call, errno.EIO, HALF


def main(name: str, part: int, parts: int) -> None:
    """Run some cases of a target and print a line of JSON: how many there are, ran and failed a call, and what was wrong."""
    library, target = ctypes.CDLL(os.environ["LD_PRELOAD"]), TARGETS[name]
    file_arena.FileArena.small, row_updates._LEAST = 4096, 1500
    codecs.PROBE_BYTES = chunked_file.PROBE_BYTES = 4096
    library.faults_last.restype = ctypes.c_char_p
    top = tempfile.mkdtemp(prefix="fbuf-calls-")
    base, folder = f"{top}/base", f"{top}/here"
    os.mkdir(base)
    wrong: list[str] = []
    try:
        target.prepare(base)
        gc.collect()

        def one(call: int, error: int, how: int) -> tuple[int, int]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(base, folder)
            before = len(os.listdir("/proc/self/fd"))
            raised: BaseException | None = None
            library.faults_arm(folder.encode(), call, error, how)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    target.act(folder)
                except Exception as e:
                    raised = e.with_traceback(None)
                finally:
                    library.faults_disarm()
            hits, calls, last = library.faults_hits(), library.faults_count(), library.faults_last().decode()
            when = ("once", "for ever", "half")[how]
            where = f"{name}: call {call} ({last.replace(folder, '')}), {errno.errorcode.get(error)}, {when}"
            try:
                check_error(raised, folder)
                for warning in said:
                    check_error(OSError(str(warning.message)), folder)
                raised = None if raised is None else OSError(str(raised))  # without what it refers to
                target.check(folder, raised)
                gc.collect()
                after = len(os.listdir("/proc/self/fd"))
                assert after <= before, f"{after - before} descriptors are open"
            except Exception as e:
                wrong.append(f"{where}: {type(e).__name__}: {e!s:.600} (raised {raised!r:.300})")
                raised = None
                e.__traceback__ = None
                gc.collect()
                for handle in fbuf.stores():
                    handle.close()
            return hits, calls

        one(0, 0, ONCE)
        _, calls = one(0, 0, ONCE)
        gc.collect()
        gc.freeze()  # a collection then takes no time
        every = list(cases(calls))
        mine = every[part::parts]
        hits = sum(one(*case)[0] > 0 for case in mine)
        found = {"calls": calls, "cases": len(every), "ran": len(mine), "failed": hits, "wrong": wrong}
        print(json.dumps({"target": name, **found}), flush=True)
    finally:
        vars(target).clear()  # states of earlier targets keep stores open
        gc.unfreeze()
        gc.collect()
        shutil.rmtree(top, ignore_errors=True)


def check_system_calls(part: int, parts: int, folder: Path, targets: tuple[str, ...] = tuple(TARGETS)) -> int:
    """Run each `parts`-th case of all targets in a process of its own; return how many failed a call."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler, and a loader that preloads")
    library, source = folder / "system_calls.so", Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    env = {**os.environ, **devices(2), "JAX_PLATFORMS": "cpu", "LD_PRELOAD": str(library), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "tests.support.system_calls", str(part), str(parts), *targets]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["target"] for line in found] == list(targets), done.stdout[-2000:] + done.stderr[-4000:]
    assert not (wrong := [text for line in found for text in line["wrong"]]), "\n".join(wrong)
    assert all(line["failed"] for line in found)
    return sum(line["failed"] for line in found)


if __name__ == "__main__":
    warnings.simplefilter("error")
    for which in sys.argv[3:] or TARGETS:
        main(which, int(sys.argv[1]), int(sys.argv[2]))
