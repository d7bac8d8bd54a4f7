"""How much longer than `import jax` does `import fbuf` take?

Each import runs in a fresh process, since a module is imported once; the two take turns, so that what else the machine
does meets both. Expected: at most 1.15 times. `fbuf` imports jax, numpy and its own modules; zstandard, torch and every extra
are imported where they are used, and no backend starts. The import alone is timed, inside the process; how long Python
takes to start is in neither. The time from files already in the page cache is what a user meets from the second import on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks._harness import ratio, row, spread

QUESTION = "`import fbuf` in a fresh process: time over that of `import jax`"
_TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def seconds(module: str, cache: str) -> float:
    """Of one import, in a process of its own; bytecode is kept in `cache`, as an installed package has it."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", _TIMED.format(module)],
        env=environment | {"PYTHONPYCACHEPREFIX": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def main(quick: bool) -> list[dict[str, Any]]:
    """2 imports of each in turn if `quick`, else 21; the first of each, which compiles, is not counted."""
    modules, rounds = ["fbuf", "jax"], 2 if quick else 21
    taken: dict[str, list[float]] = {module: [] for module in modules}
    with tempfile.TemporaryDirectory() as cache:
        for number in range(rounds + 1):
            for module in modules if number % 2 else modules[::-1]:
                taken[module].append(seconds(module, cache))
    ours, theirs = taken["fbuf"][1:], taken["jax"][1:]
    return [
        row(
            QUESTION,
            "warm page cache",
            ours=spread(ours),
            peer=spread(theirs),
            ratio=ratio(ours, theirs),
            target="<= 1.15",
        )
    ]


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
