"""Runs mutants: `python -m benchmarks.mutants [--check | --report] [--ids R1,R2] [--group ring] [--tier likely|quick|more]`.

The results are lines of JSON in `benchmarks/results/mutants.jsonl`. Each names the test that killed the mutant, which the next
run tries first. `--resume` leaves out mutants whose code has not changed since their result.
"""

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
RESULTS = REPO / "benchmarks" / "results" / "mutants.jsonl"
Records = dict[str, dict[str, Any]]


def load(path: Path) -> Records:
    """Return the last result of each mutant."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["id"]: record for record in map(json.loads, lines)}


def save(path: Path, records: Records, mutants: Iterable[Mutant]) -> None:
    """Write the results of a catalogue's mutants, in its order."""
    known = [records[mutant.id] for mutant in mutants if mutant.id in records]
    path.write_text("".join(json.dumps(record) + "\n" for record in known))


def report(mutants: Iterable[Mutant], found: Records) -> tuple[list[str], float]:
    """Return lines that say which part of the mutants was killed, by group and tier, and that part."""
    counted = [m for m in mutants if m.id in found and not m.equivalent and found[m.id]["result"] != "timeout"]
    late = [m.id for m in mutants if m.id in found and found[m.id]["result"] == "timeout"]
    missing = [m.id for m in mutants if m.id not in found and not m.equivalent]
    survivors = [m for m in counted if found[m.id]["result"] != "killed"]

    def share(some: list[Mutant], tiers: tuple[str, ...]) -> str:
        killed = sum(found[m.id]["result"] == "killed" and found[m.id]["tier"] in tiers for m in some)
        return f"{killed:4d} of {len(some):4d} {killed / max(len(some), 1):7.1%}"

    groups = Counter(m.group for m in counted)
    lines = [f"{'group':14} {'quick tier':>20} {'quick and more':>20}"]
    for group in [*groups, ""]:
        some = [m for m in counted if group in ("", m.group)]
        lines.append(f"{group or 'all':14} {share(some, ('quick',)):>20} {share(some, ('quick', 'more')):>20}")
    lines += [f"survived {found[m.id]['tier']} tests: {m.id} ({m.group}) {m.name}: {m.breaks}" for m in survivors]
    lines += [f"equivalent, not run: {m.id} {m.equivalent}" for m in mutants if m.equivalent]
    lines += [f"timed out, not counted: {', '.join(late)}"] if late else []
    lines += [f"not run: {', '.join(missing)}"] if missing else []
    return lines, 1 - len(survivors) / max(len(counted), 1)


def main(arguments: list[str] | None = None) -> int:
    """Run mutants and report; return 1 if the catalogue is wrong or fewer than `--fail-below` of them are killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only look whether every mutant can be planted")
    parser.add_argument("--report", action="store_true", help="only print what the recorded results say")
    parser.add_argument("--ids", default="", help="only these, separated by commas")
    parser.add_argument("--group", default="", help="only these groups, separated by commas")
    parser.add_argument("--tier", default="quick", choices=_run.TIERS, help="the last tests to try on survivors")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the likely tests of a mutant")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results, a line of JSON a mutant")
    parser.add_argument("--resume", action="store_true", help="leave out mutants that --out has with the same code")
    parser.add_argument("--fail-below", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args(arguments)

    everything, package = read(), Package(REPO / "fbuf")
    ids, groups = filter(None, options.ids.split(",")), filter(None, options.group.split(","))
    wanted = {*ids}, {*groups}
    mutants = [m for m in everything if not any(wanted) or m.id in wanted[0] or m.group in wanted[1]]
    wrong = check(mutants, package, _run.Tests(REPO).topics)
    print(*wrong, f"{len(mutants)} mutants, {len(wrong)} errors", sep="\n")
    if wrong or options.check:
        return bool(wrong)

    found = load(options.out)
    if not options.report:
        _run.warm(REPO)
        runner = _run.Runner(REPO, "fbuf", options.tier, options.jobs, options.timeout)
        runner.killers = {id: record["by"][0] for id, record in found.items() if record["by"]}
        runner.known = runner.base()
        tiers = _run.TIERS[_run.TIERS.index(options.tier) :]
        done = {
            m.id
            for m in (mutants if options.resume else [])
            if m.id in found
            and found[m.id]["digest"] == package.digest(m)
            and (found[m.id]["result"] == "killed" or found[m.id]["tier"] in tiers)
        }
        for record in runner.run([m for m in mutants if m.id not in done and (m.id in wanted[0] or not m.equivalent)]):
            print(record["id"], record["result"], *record["by"], f"{record['seconds']} s", flush=True)
            found[record["id"]] = record
            save(options.out, found, everything)
    lines, rate = report(mutants, found)
    print(*lines, sep="\n")
    return rate < options.fail_below


if __name__ == "__main__":
    sys.exit(main())
