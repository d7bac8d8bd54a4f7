"""Runs mutants: `python -m benchmarks.mutants [--check] [--ids R1,R2] [--group ring] [--tier likely|quick|more]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.mutants import _run
from benchmarks.mutants._catalogue import Mutant, Package, check, read

REPO = Path(__file__).resolve().parents[2]


def report(mutants: Iterable[Mutant], found: dict[str, dict[str, Any]]) -> tuple[list[str], float]:
    """Return lines that say which part of the mutants was killed, by group and tier, and that part."""
    counted = [m for m in mutants if m.id in found and not m.equivalent and found[m.id]["result"] != "timeout"]
    late = [m.id for m in mutants if m.id in found and found[m.id]["result"] == "timeout"]
    survivors = [m for m in counted if found[m.id]["result"] != "killed"]

    def share(some: list[Mutant], tiers: tuple[str, ...]) -> str:
        killed = sum(found[m.id]["result"] == "killed" and found[m.id]["tier"] in tiers for m in some)
        return f"{killed:4d} of {len(some):4d} {killed / max(len(some), 1):7.1%}"

    groups = Counter(m.group for m in counted)
    lines = [f"{'group':14} {'quick tier':>20} {'quick and more':>20}"]
    for group in [*groups, ""]:
        some = [m for m in counted if group in ("", m.group)]
        lines.append(f"{group or 'all':14} {share(some, ('quick',)):>20} {share(some, ('quick', 'more')):>20}")
    lines += [f"survived: {m.id} ({m.group}) {m.name}: {m.breaks}" for m in survivors]
    lines += [f"equivalent, not run: {m.id} {m.equivalent}" for m in mutants if m.equivalent]
    lines += [f"timed out, not counted: {', '.join(late)}"] if late else []
    return lines, 1 - len(survivors) / max(len(counted), 1)


def main(arguments: list[str] | None = None) -> int:
    """Run mutants and report; return 1 if the catalogue is wrong or fewer than `--fail-below` of them are killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only look whether every mutant can be planted")
    parser.add_argument("--ids", default="", help="only these, separated by commas")
    parser.add_argument("--group", default="", help="only these groups, separated by commas")
    parser.add_argument("--tier", default="quick", choices=_run.TIERS, help="the last tests to try on survivors")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the likely tests of a mutant")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="a line of JSON a mutant goes here")
    parser.add_argument("--resume", action="store_true", help="leave out mutants that --out has, and report them too")
    parser.add_argument("--fail-below", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args(arguments)

    everything = read()
    ids, groups = filter(None, options.ids.split(",")), filter(None, options.group.split(","))
    wanted = {*ids}, {*groups}
    mutants = [m for m in everything if not any(wanted) or m.id in wanted[0] or m.group in wanted[1]]
    wrong = check(mutants, Package(REPO / "fbuf"), _run.Tests(REPO).topics)
    print(*wrong, f"{len(mutants)} mutants, {len(wrong)} errors", sep="\n")
    if wrong or options.check:
        return bool(wrong)

    if not options.resume:
        options.out.unlink(missing_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    found = {record["id"]: record for record in map(json.loads, lines)}
    _run.warm(REPO)
    runner = _run.Runner(REPO, "fbuf", options.tier, options.jobs, options.timeout)

    def keep(record: dict[str, Any]) -> None:
        found[record["id"]] = record
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")

    if found.get("base", {}).get("tier") != options.tier:
        keep(runner.base())
    runner.known = found["base"]["failed"]
    for record in runner.run([m for m in mutants if m.id not in found and (m.id in wanted[0] or not m.equivalent)]):
        print(record["id"], record["result"], *record["by"], f"{record['seconds']} s", flush=True)
        keep(record)
    lines, rate = report(mutants, found)
    print(*lines, sep="\n")
    return rate < options.fail_below


if __name__ == "__main__":
    sys.exit(main())
