"""The program of a worker process: makes what `_worker` needs importable without importing JAX, and starts it.

`import fbuf.datasets...` runs `fbuf/__init__.py`, and that imports JAX: a second and 200 MB in each worker, for nothing. So
the packages on the way are put in place as empty modules with a path; what is below them is found as usual. A process of
`multiprocessing` was rejected because it imports the user's program again, which without a guard starts another one, or
forks a process that has threads of JAX.
"""

from __future__ import annotations

import json
import os
import sys
import types

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def prepare() -> None:
    """Makes modules below `fbuf.datasets` importable by themselves."""
    for name, folder in (("fbuf", ROOT), ("fbuf.datasets", os.path.join(ROOT, "datasets"))):
        module = types.ModuleType(name)
        module.__path__ = [folder]
        sys.modules[name] = module


def main() -> None:
    """Takes the search path from the first line of standard input, then jobs from the others."""
    sys.path[:] = json.loads(sys.stdin.buffer.readline())
    prepare()
    from fbuf.datasets._worker import serve

    serve(int(sys.argv[1]))


if __name__ == "__main__":
    main()
