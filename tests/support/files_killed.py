"""Saves in processes that are killed: `python -m tests.support.files_killed MODE PATH N SEED`, which forks without JAX.

`random`: N children save one generation after another and are killed at a random time; the last finished save, or the
one after, must load. `calls`: one child is killed at every disk call of a save. Prints counts as a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import types
from pathlib import Path

if __name__ == "__main__":  # without JAX, which `fbuf` imports: forks are light, and it has threads
    sys.modules["fbuf"] = types.ModuleType("fbuf")
    sys.modules["fbuf"].__path__ = [str(Path(__file__).resolve().parents[2] / "fbuf")]

from fbuf import _files
from tests.support.files import Faulty, load, save


def forked(work: object) -> int:
    """Run `work` in a child process."""
    child = os.fork()
    if child:
        return child
    try:
        work()  # type: ignore[operator]
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def found(path: str) -> int | None:
    try:
        return load(path)
    except _files.CheckpointNotFound:
        return None


def at_random(path: str, count: int, seed: int) -> dict[str, int]:
    """Kill at random times, some of them in the first save of a folder."""
    chance = random.Random(seed)
    seen = {"kills": 0, "old": 0, "new": 0, "none": 0, "left behind": 0}
    last: int | None = None
    for trial in range(count):
        if trial % 4 == 0:
            shutil.rmtree(path, ignore_errors=True)
            last = None
        read, write = os.pipe()
        begin = 0 if last is None else last + 1

        def work(write: int = write, begin: int = begin) -> None:
            for k in range(begin, begin + 100):
                save(path, k, sync=False)
                os.write(write, bytes([k]))

        child = forked(work)
        os.close(write)
        time.sleep(chance.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"seed {seed}, kill {trial}: the child failed before it was killed"
        done = os.read(read, 1000)
        os.close(read)
        ended = done[-1] if done else last
        now = found(path)
        following = 0 if ended is None else ended + 1
        assert now in (ended, following), f"seed {seed}, kill {trial}: loaded {now}; expected {ended} or {following}"
        seen["kills"] += 1
        seen["none" if now is None else "old" if now == ended else "new"] += 1
        names = set(os.listdir(path)) if os.path.isdir(path) else set()
        seen["left behind"] += any(
            n.endswith(".new") or n > f"data-{(now or -1) + 1:012d}" for n in names if n[0] in "dm"
        )
        last = now
        if trial % 5 == 4:  # the next save works and cleans up
            last = 0 if now is None else now + 1
            save(path, last, keep=1, sync=False)
            assert load(path) == last and not [n for n in os.listdir(path) if n.endswith(".new")]
    return seen


def at_calls(path: str) -> dict[str, int]:
    """Kill at every call of a first save, and of a third, which removes files."""
    seen = {"kills": 0, "old": 0, "new": 0, "none": 0}
    for before in (None, 2):
        base = f"{path}-base"
        shutil.rmtree(base, ignore_errors=True)
        if before is not None:
            for k in range(1, before + 1):
                save(base, k, sync=False)
        for at in range(1000):
            shutil.rmtree(path, ignore_errors=True)
            if before is not None:
                shutil.copytree(base, path)

            def work(at: int = at, k: int = (before or 0) + 1) -> None:
                save(path, k, Faulty(at=at, act=lambda: os.kill(os.getpid(), signal.SIGKILL)))

            _, status = os.waitpid(forked(work), 0)
            now = found(path)
            if not os.WIFSIGNALED(status):
                assert status == 0 and now == (before or 0) + 1
                break
            assert now in (before, (before or 0) + 1)
            seen["kills"] += 1
            seen["none" if now is None else "old" if now == before else "new"] += 1
            save(path, 7, keep=1, sync=False)
            with _files.read(path) as saved:
                named = {"lock", f"manifest-{saved.generation:012d}.json", *(f.name for f in saved.manifest.files)}
            assert load(path) == 7 and set(os.listdir(path)) == named
    return seen


if __name__ == "__main__":
    mode, path, count, seed = sys.argv[1:]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    print(json.dumps(at_calls(path) if mode == "calls" else at_random(path, int(count), int(seed))))
