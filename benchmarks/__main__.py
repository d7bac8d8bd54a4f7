"""Runs the benchmarks: `python -m benchmarks [--quick] [--only NAME ...] [--json PATH] [--plot FOLDER] [--report FOLDER]`.

`--gpu` runs `bench_gpu` in place of all others: what an accelerator changes, from start to report in 450 seconds.
`--json` keeps what a report at that path says of benchmarks that are not run now. `--report FOLDER` is report.json, report.md
and pictures in one folder; `benchmarks/results` is the committed one, from which `python -m benchmarks.readme` writes the
README's tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import pkgutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks import _budget, _harness, _report
from benchmarks._budget import Progress

REPORT = 20  # seconds for pictures and the report


def names() -> list[str]:
    """The benchmarks there are: module `benchmarks.bench_x` is `x`; `gpu` has an option of its own."""
    found = (m.name for m in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(n.removeprefix("bench_") for n in found if n.startswith("bench_") and n != "bench_gpu")


def run(name: str, quick: bool) -> tuple[list[dict[str, Any]], bool]:
    """The rows of one benchmark, and whether it ran to its end; a failure is a row too."""
    try:
        return importlib.import_module(f"benchmarks.bench_{name}").main(quick), True
    except Exception as error:
        traceback.print_exc()
        failure = f"failed: {type(error).__name__}: {error}"
        return [_harness.row(f"bench_{name}", "failed", note=failure)], False


def _each(chosen: list[str], quick: bool) -> Iterator[Progress]:
    """One benchmark after another, in this process."""
    for name in chosen:
        start, elsewhere = time.monotonic(), _harness.work_elsewhere()
        print(f"\n== {name} ==", flush=True)
        rows, complete = run(name, quick)
        seconds = time.monotonic() - start
        yield Progress(name, rows, seconds, True, complete, {"elsewhere": elsewhere(), **_harness.environment()})


def _on_gpu(quick: bool) -> Iterator[Progress]:
    """The sections of `bench_gpu`, in a process of their own."""
    deadline = time.monotonic() - time.process_time()  # what starting Python took
    from benchmarks import bench_gpu

    deadline += bench_gpu.BUDGET - REPORT
    for progress in _budget.run("benchmarks.bench_gpu", bench_gpu.SECTIONS, quick, deadline):
        yield dataclasses.replace(progress, name=f"gpu: {progress.name}")


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if every benchmark ran to its end; missed targets are reported, not counted.

    A target missed on a loaded machine says nothing about the code, so it does not fail a build.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run, roughly")
    parser.add_argument("--only", action="append", metavar="NAME", choices=names(), default=None)
    parser.add_argument("--gpu", action="store_true", help="what an accelerator changes, in 450 seconds")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write rows and versions here, into the report there is"
    )
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw pictures (PNG) here")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="report.json, report.md and pictures, all here")
    options = parser.parse_args(arguments)
    path = options.report / "report.json" if options.report is not None else options.json
    report = _report.load(path) if path is not None else _report.empty()

    rows: list[dict[str, Any]] = []
    complete = True
    for progress in _on_gpu(options.quick) if options.gpu else _each(options.only or names(), options.quick):
        if progress.over:
            print(f"{_harness.table(progress.rows)}\n  ({progress.name}: {progress.seconds:.0f} s)", flush=True)
            rows += progress.rows
            complete &= progress.complete
        settings = {"quick": options.quick, "complete": progress.complete, "seconds": round(progress.seconds, 1)}
        report = _report.with_run(report, progress.name, {**settings, **progress.environment, "rows": progress.rows})
        if path is not None:  # after each: a later one may take an hour, or the machine
            _report.save(path, report)
    missed = [r for r in rows if r["met"] is False]
    absent = [r for r in rows if r["peer"] == "absent"]
    print(f"\n{len(rows)} rows, {len(missed)} below target, {len(absent)} without their peer")
    for folder in {options.report, options.plot} - {None}:
        pictures = _draw(folder, report)
        if folder == options.report:
            (folder / "report.md").write_text(_report.markdown(report, pictures))
    return 0 if complete else 1


def _draw(folder: Path, report: _report.Report) -> list[str]:
    """The pictures' names, none where matplotlib is missing: a report without pictures is one all the same."""
    try:
        from benchmarks import _plot
    except ImportError as error:
        print(f"no pictures: {error}")
        return []
    return _plot.draw(folder, report)


if __name__ == "__main__":
    sys.exit(main())
