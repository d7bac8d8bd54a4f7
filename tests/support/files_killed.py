"""Kill a process at every disk call of a save: `python -m tests.support.files_killed PATH`, which forks without JAX.

Prints counts of what loads afterwards as a line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import types
from pathlib import Path

if __name__ == "__main__":  # without JAX, which `fbuf` imports: forks are light, and it has threads
    sys.modules["fbuf"] = types.ModuleType("fbuf")
    sys.modules["fbuf"].__path__ = [str(Path(__file__).resolve().parents[2] / "fbuf")]

from fbuf._formats import checkpoint
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
    except checkpoint.CheckpointNotFound:
        return None


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
            with checkpoint.read(path) as saved:
                named = {"lock", f"manifest-{saved.generation:012d}.json", *(f.name for f in saved.manifest.files)}
            assert load(path) == 7 and set(os.listdir(path)) == named
    return seen


if __name__ == "__main__":
    print(json.dumps(at_calls(sys.argv[1])))
