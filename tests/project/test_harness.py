"""The benchmarks' instruments: reports, tables of defects and mutants are what happened, judged by their targets."""

import json
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from benchmarks import __main__ as runner
from benchmarks import _budget, _harness, accelerators, readme
from benchmarks._harness import Spread
from benchmarks.defects import Defect, Outcome, _table
from tests.support import sections
from tests.support.refusals import raises


def test_calls_are_interleaved_in_both_directions():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = _harness.interleave(functions, rounds=4, warmup=1, calls=2)
    assert "".join(calls) == "abc" + "aabbcc" + "ccbbaa" + "aabbcc" + "ccbbaa"
    assert {name: len(seconds) for name, seconds in timings.items()} == dict.fromkeys("abc", 4)
    assert all(s >= 0 for seconds in timings.values() for s in seconds)


def test_ratio_is_paired_by_round():
    # Noise that triples a whole round moves both medians but not the ratio.
    noise = np.array([1.0, 3.0, 1.0, 3.0])
    assert _harness.ratio(list(2 * noise), list(noise)) == Spread(2.0, 2.0, 2.0, "x")
    raises(ValueError, "3 and 2 rounds; expected as many of both", _harness.ratio, [1.0] * 3, [1.0] * 2)


def test_a_row_is_judged_by_its_target():
    cases = [
        (1.0, ">= 1.0", True),
        (0.99, ">= 1.0", False),
        (Spread(0.049, 0.0, 0.1, ""), "< 0.05", True),
        (0.05, "< 0.05", False),
        (1.15, "<= 1.15x", True),
        (401, "> 4e2", True),
        (float("nan"), ">= 1.0", False),
        (None, ">= 1.0", None),
        (1.0, None, None),
    ]
    for ratio, target, met in cases:
        assert _harness.row("q", "c", ratio=ratio, target=target)["met"] is met, (ratio, target)
    words = "target is 'about 1'; expected a comparison"
    raises(ValueError, words, _harness.row, "q", "c", ratio=1.0, target="about 1")


def test_runner_reports_a_failed_benchmark_and_goes_on(monkeypatch, tmp_path, capsys):
    row = {"ours": Spread(1e-3, 9e-4, 2e-3), "peer": 2.0, "ratio": 0.5, "target": ">= 1.0"}
    good, bad = mock.Mock(), mock.Mock()
    good.main.side_effect = lambda quick: [_harness.row("Faster?", "1 row", **row)] if quick else []
    bad.main.side_effect = RuntimeError("boom")
    monkeypatch.setitem(sys.modules, "benchmarks.bench_good", good)
    monkeypatch.setitem(sys.modules, "benchmarks.bench_bad", bad)
    monkeypatch.setattr(runner, "names", lambda: ["bad", "good"])
    path = tmp_path / "report.json"
    assert runner.main(["--quick", "--json", str(path)]) == 1
    assert runner.main(["--quick", "--only", "good"]) == 0
    report = json.loads(path.read_text())
    (bad,), (good,) = (report["benchmarks"][name]["rows"] for name in ("bad", "good"))
    assert bad["note"] == "failed: RuntimeError: boom" and good["met"] is False
    assert good["ours"] == {"median": 1e-3, "low": 9e-4, "high": 2e-3, "unit": "s"}
    run = report["benchmarks"]["good"]
    assert run["quick"] and run["complete"] and not report["benchmarks"]["bad"]["complete"]
    assert run["versions"]["jax"] and run["machine"]["cores"] >= 1 and 0 <= run["elsewhere"] <= 1
    assert "1 ms [900 us, 2 ms]" in capsys.readouterr().out


def test_the_readme_says_what_the_committed_report_does():
    assert readme.main(["--check"]) == 0


def test_the_table_says_what_happened(tmp_path: Path) -> None:
    right, broken = mock.Mock(return_value=Outcome("as it should", True)), ArithmeticError("of the peer")
    said = [Outcome("a | b", False), Outcome("it works", True), ImportError("undefined symbol: x"), broken]
    rows = [Defect(f"row {n}", "jax", "be right", mock.Mock(side_effect=[x]), right) for n, x in enumerate(said)]
    table = _table.run(rows, say=lambda line: None)
    _table.save(tmp_path / "table.json", table)
    text = _table.markdown(_table.load(tmp_path / "table.json"))
    lines = [line for line in text.splitlines() if line.startswith("| row")]
    assert "jax ❌ a \\| b" in lines[0]
    assert "jax ✅ (not shown with this version) it works" in lines[1]
    assert "jax – could not be run: undefined symbol: x" in lines[2]
    assert "jax ❌ ArithmeticError: of the peer" in lines[3]
    assert all("✅ as it should" in line for line in lines)
    absent = Defect("row", "no-such-library", "be right", mock.Mock(side_effect=broken), right)
    table = _table.run([absent], say=lambda line: None)
    assert table["rows"][0]["theirs"] == {"said": "absent: not installed", "right": None}


@pytest.mark.more
def test_a_section_that_fails_crashes_or_hangs_ends_alone(monkeypatch):
    monkeypatch.setattr(_budget, "START", 5)
    told = list(_budget.run("tests.support.sections", sections.SECTIONS, True, time.monotonic() + 60))
    last = {progress.name: progress for progress in told if progress.over}
    assert list(last) == list(sections.SECTIONS)
    cases = {name: [row["case"] for row in progress.rows] for name, progress in last.items()}
    assert cases.pop("measured") == ["first", "second"] and cases.pop("long") == ["not run"]
    assert set(map(tuple, cases.values())) == {("first", "failed")}
    notes = {name: progress.rows[-1]["note"] for name, progress in last.items()}
    assert notes["fails"] == "failed: ArithmeticError: of the section"
    assert notes["crashes"] == "failed: its process ended with 3"
    assert notes["hangs"] == "failed: it took too long and was ended"
    assert notes["long"].startswith("not run: expected to take 1000000 s")
    assert [name for name, progress in last.items() if progress.complete] == ["measured"]
    assert [len(p.rows) for p in told if p.name == "measured"] == [1, 2, 2]  # each row as soon as it is known
    assert all(progress.environment["versions"]["jax"] for progress in told)


def test_no_section_starts_after_the_deadline():
    (only,) = _budget.run("no module", {"measured": sections.SECTIONS["measured"]}, True, time.monotonic() + 5)
    assert [row["case"] for row in only.rows] == ["not run"]  # a worker takes longer than that to start


def test_the_page_of_accelerators_lists_every_step_as_it_was_compiled():
    found = accelerators.load()
    assert tuple(found) == accelerators.STEPS
    assert {step: accelerators.faults(step, entry.ours) for step, entry in found.items()} == dict.fromkeys(found, [])
    page = accelerators.PAGE.read_text()
    assert page == accelerators.page(found)
    assert page.split("\n")[2].startswith("Nothing here ran on a device")
