"""Runs mutants: `python -m benchmarks.mutants [--check | --report] [--ids R1,R2] [--group ring] [--tier likely|quick|more]`.

The results are lines of JSON in `benchmarks/results/mutants.jsonl`. Each names the test that killed the mutant, whose file the
next run tries first. `--resume` leaves out mutants whose code has not changed since their result. Exits with 1 if tests
kill fewer mutants than `TARGETS`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.mutants import _run
from benchmarks.mutants._catalogue import Mutant, Package, check, read

REPO = Path(__file__).resolve().parents[2]
TARGETS = {("quick",): 0.90, ("quick", "more"): 0.97}  # the part that the tests of these tiers are to kill
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


def report(mutants: Sequence[Mutant], found: Records, package: Package) -> tuple[list[str], bool]:
    """Return lines that say which part of the mutants was killed, by module and tier, and whether that is enough.

    Mutants that ran out of time or were not run count as not killed.
    """
    counted = [m for m in mutants if not m.equivalent]
    modules = {m.id: str(package.find(m).path.relative_to(package.folder)) for m in counted}

    def killed(some: list[Mutant], tiers: tuple[str, ...]) -> int:
        results = [found.get(m.id, {"result": "not run"}) for m in some]
        return sum(r["result"] == "killed" and r["tier"] in tiers for r in results)

    lines = [f"{'module':44} {'quick tier':>20} {'quick and more':>20}"]
    for module in [*sorted(set(modules.values())), ""]:
        some = [m for m in counted if module in ("", modules[m.id])]
        shares = [f"{n:4d} of {len(some):4d} {n / max(len(some), 1):7.1%}" for n in (killed(some, t) for t in TARGETS)]
        lines.append(f"{module or 'all':44} {shares[0]:>20} {shares[1]:>20}")
    for m in counted:
        result = found.get(m.id, {"result": "not run", "tier": "any"})
        if result["result"] != "killed":
            lines.append(f"{result['result']}, {result['tier']} tests: {m.id} ({modules[m.id]}) {m.name}: {m.breaks}")
    lines += [f"equivalent, not run: {m.id} {m.equivalent}" for m in mutants if m.equivalent]
    return lines, all(killed(counted, tiers) >= target * len(counted) for tiers, target in TARGETS.items())


def main(arguments: list[str] | None = None) -> int:
    """Run mutants and report; return 1 if the catalogue is wrong or too few of them are killed."""
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
    options = parser.parse_args(arguments)

    everything, package = read(), Package(REPO / "fbuf")
    ids, groups = ({*filter(None, text.split(","))} for text in (options.ids, options.group))
    if unknown := (ids - {m.id for m in everything}) | (groups - {m.group for m in everything}):
        parser.error(f"there are no mutants {', '.join(sorted(unknown))}")
    mutants = [m for m in everything if not ids | groups or m.id in ids or m.group in groups]
    wrong = check(mutants, package, _run.Tests(REPO).topics)
    print(*wrong, f"{len(mutants)} mutants, {len(wrong)} errors", sep="\n")
    if wrong or options.check:
        return bool(wrong)

    found = load(options.out)
    if not options.report:
        tiers = _run.TIERS[_run.TIERS.index(options.tier) :]
        done = {
            m.id
            for m in (mutants if options.resume else [])
            if m.id in found
            and found[m.id]["digest"] == package.digest(m)
            and (found[m.id]["result"] == "killed" or found[m.id]["tier"] in tiers)
        }
        _run.warm(REPO)
        runner = _run.Runner(REPO, "fbuf", options.tier, options.jobs, options.timeout)
        runner.killers = {id: record["by"][0] for id, record in found.items() if record["by"]}
        killers: dict[str, list[str]] = {}
        for record in runner.run([m for m in mutants if m.id not in done and (m.id in ids or not m.equivalent)]):
            print(record["id"], record["result"], *record["by"], f"{record['seconds']} s", flush=True)
            found[record["id"]] = record
            killers.setdefault("".join(record["by"]), []).append(record["id"])
            save(options.out, found, everything)
        for test in runner.failing([test for test in killers if test.startswith("tests/")]):
            print(f"{test} fails without a mutant too; this result is void: {', '.join(killers.get(test, []))}")
            found = {id: record for id, record in found.items() if id not in killers.get(test, [])}
        save(options.out, found, everything)
    lines, enough = report(mutants, found, package)
    print(*lines, sep="\n")
    return not enough


if __name__ == "__main__":
    sys.exit(main())
