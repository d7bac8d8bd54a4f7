"""A process that reads or fetches one file, to be killed or measured: `python -m tests.fetcher fetch|stream SOURCE NAME ...`.

Without JAX, so that it starts quickly and its memory is that of what is tested. `fetch SOURCE NAME PATH`: to the disk. `stream
SOURCE NAME ROWS`: all rows of a uint8[n, 84, 84] file, ROWS at a time; prints a line of JSON with how many there were, what was
refused, and by how much the process grew, in KiB.
"""

from __future__ import annotations

import json
import resource
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    for package in ("fbuf", "fbuf.datasets"):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(Path(__file__).resolve().parent.parent / package.replace(".", "/"))]

from fbuf.datasets._source import FileCorrupted, Retry, connect, fetch, rows


def main(what: str, address: str, name: str, last: str) -> None:
    """See above."""
    source = connect(address, retry=Retry(attempts=3, first=0.01, timeout=20))
    (entry,) = source.files(name)
    if what == "fetch":
        fetch(source, entry, last)
        return
    with open("/proc/self/clear_refs", "w") as file:  # the peak counts from here on
        file.write("5")
    before, count, refused = _peak(), 0, ""
    try:
        with rows(source, entry, item=(84, 84), dtype="uint8") as stream:
            for block in stream.blocks(int(last)):
                count += len(block)
    except FileCorrupted as error:
        refused = str(error)
    print(json.dumps({"rows": count, "refused": refused, "grew": _peak() - before}))


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(*sys.argv[1:])
