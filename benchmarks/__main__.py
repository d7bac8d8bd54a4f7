"""Runs the benchmarks: `python -m benchmarks [--quick] [--only NAME ...] [--json PATH]`."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks import _harness


def names() -> list[str]:
    """The benchmarks there are: module `benchmarks.bench_x` is `x`."""
    found = (m.name for m in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name.removeprefix("bench_") for name in found if name.startswith("bench_"))


def run(name: str, quick: bool) -> tuple[list[dict[str, Any]], bool]:
    """The rows of one benchmark, and whether it ran to its end; a failure is a row too."""
    try:
        return importlib.import_module(f"benchmarks.bench_{name}").main(quick), True
    except Exception as error:
        traceback.print_exc()
        failure = f"failed: {type(error).__name__}: {error}"
        return [_harness.row(f"bench_{name}", "failed", note=failure)], False


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if every benchmark ran to its end; missed targets are reported, not counted.

    A target missed on a loaded machine says nothing about the code, so it does not fail a build.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run, roughly")
    parser.add_argument("--only", action="append", metavar="NAME", choices=names(), default=None)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write rows and versions here")
    options = parser.parse_args(arguments)

    rows: list[dict[str, Any]] = []
    complete = True
    for name in options.only or names():
        start = time.perf_counter()
        print(f"\n== {name} ==", flush=True)
        new, ran = run(name, options.quick)
        rows += [{"benchmark": name, **r} for r in new]
        complete &= ran
        print(_harness.table(new))
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    missed = [r for r in rows if r["met"] is False]
    absent = [r for r in rows if r["peer"] == "absent"]
    print(f"\n{len(rows)} rows, {len(missed)} below target, {len(absent)} without their peer")
    if options.json is not None:
        report = {"quick": options.quick, "rows": rows, **_harness.environment()}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
