"""The benchmarks' instruments: reports, tables of defects and mutants are what happened, judged by their targets."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as runner
from benchmarks import _figures, _harness, _report, readme
from benchmarks._harness import Absent, Spread, absent_row, row
from benchmarks._lines import Line
from benchmarks.defects import Defect, Outcome, _table
from benchmarks.defects.__main__ import main
from benchmarks.defects._rows import ROWS


def test_calls_are_interleaved_in_both_directions():
    calls = []
    timings = _harness.interleave(
        {name: lambda name=name: calls.append(name) for name in "abc"}, rounds=4, warmup=1, calls=2
    )
    assert "".join(calls) == "abc" + "aabbcc" + "ccbbaa" + "aabbcc" + "ccbbaa"
    assert {name: len(seconds) for name, seconds in timings.items()} == dict.fromkeys("abc", 4)
    assert all(s >= 0 for seconds in timings.values() for s in seconds)


def test_ratio_is_paired_by_round():
    # Noise that triples a whole round moves both medians but not the ratio.
    noise = np.array([1.0, 3.0, 1.0, 3.0])
    assert _harness.ratio(list(2 * noise), list(noise)) == Spread(2.0, 2.0, 2.0, "x")
    with pytest.raises(ValueError, match="3 and 2 rounds; expected as many of both"):
        _harness.ratio([1.0] * 3, [1.0] * 2)


def test_spread_is_median_and_quartiles():
    assert _harness.spread([4.0, 0.0, 1.0, 3.0, 2.0], "MB") == Spread(2.0, 1.0, 3.0, "MB")
    assert _harness.geometric_mean([2.0, 0.5, 8.0]) == pytest.approx(2.0)


def test_exponent_is_that_of_the_growth():
    sizes = (10.0, 1e3, 1e5)
    for power in (0.0, 0.5):
        grown = _harness.exponent({n: [3 * n**power, 7 * n**power] for n in sizes})
        assert grown.median == pytest.approx(power, abs=1e-12)


def held(mebibytes, fail=False):
    waste = np.ones(mebibytes << 20, np.uint8)  # freed before the baseline
    del waste
    yield
    if fail:
        raise ArithmeticError("of the child")
    array = np.ones(mebibytes << 20, np.uint8)
    print("noise on standard output")
    yield {"nbytes": array.nbytes}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_measure_memory_counts_what_is_held():
    report = _harness.measure_memory(held, 64)
    assert report["result"] == {"nbytes": 64 << 20}
    for kind in ("rss", "pss", "private", "peak"):
        assert report[kind] == pytest.approx(64 << 20, rel=0.1), kind


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_measure_memory_shows_the_childs_error():
    pytest.raises(RuntimeError, _harness.measure_memory, held, 1, True).match("ArithmeticError: of the child")


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
    with pytest.raises(ValueError, match=r"target is 'about 1'; expected a comparison"):
        _harness.row("q", "c", ratio=1.0, target="about 1")


def test_absent_peer_is_reported():
    peer = _harness.load_peer("no_such_library_anywhere")
    assert isinstance(peer, Absent) and "ModuleNotFoundError" in peer.reason
    row = _harness.absent_row("q", "c", peer, target=">= 1.0")
    assert row["met"] is None and row["peer"] == "absent"
    assert "no_such_library_anywhere: ModuleNotFoundError" in _harness.table([row])
    assert _harness.load_peer("json") is json


def test_runner_reports_a_failed_benchmark_and_goes_on(monkeypatch, tmp_path, capsys):
    class Good:
        @staticmethod
        def main(quick):
            assert quick
            return [
                _harness.row("Faster?", "1 row", ours=Spread(1e-3, 9e-4, 2e-3), peer=2.0,
                             ratio=0.5, target=">= 1.0")
            ]  # fmt: skip

    class Bad:
        @staticmethod
        def main(quick):
            raise RuntimeError("boom")

    monkeypatch.setitem(sys.modules, "benchmarks.bench_good", Good)
    monkeypatch.setitem(sys.modules, "benchmarks.bench_bad", Bad)
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


MACHINE = {"devices": ["cpu"], "cores": 2, "processor": "A processor", "memory": 2**34, "system": "Linux"}


def run_of(*rows, quick=False, elsewhere=0.02):
    versions = {"python": "3.11", "jax": "0.10", "cpprb": None}
    settings = {"quick": quick, "complete": True, "seconds": 3.0, "elsewhere": elsewhere}
    return {**settings, "versions": versions, "machine": MACHINE, "time": "2026-11-22T01:02:03Z", "rows": list(rows)}


def report_of(**runs):
    report = _report.empty()
    for name, run in runs.items():
        report = _report.with_run(report, name, run)
    return report


def test_one_run_replaces_its_own_and_no_other(tmp_path):
    path = tmp_path / "folder" / "report.json"
    one, two = run_of(row("q", "a", ratio=1.0)), run_of(row("q", "b", ratio=2.0))
    _report.save(path, _report.with_run(_report.load(path), "b", one))
    _report.save(path, _report.with_run(_report.load(path), "a", one))
    _report.save(path, _report.with_run(_report.load(path), "b", two))
    found = _report.load(path)["benchmarks"]
    assert list(found) == ["a", "b"] and found["a"] == one and found["b"] == two


def test_another_file_is_no_report(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"rows": []}))
    pytest.raises(ValueError, lambda: _report.load(tmp_path / "x.json")).match("no report of format 2. Remove it")


def test_markdown_says_how_it_was_run():
    rows = (
        row("How | fast?", "1 row", ours=Spread(1e-3, 9e-4, 2e-3), peer=2.0, ratio=0.5, target=">= 1.0", note="a\nb"),
        absent_row("How | fast?", "2 rows", Absent("peer", "undefined symbol"), target=">= 1.0"),
    )
    text = _report.markdown(report_of(extend=run_of(*rows, quick=True, elsewhere=0.4)), ["a.png"])
    assert "## extend\n\nDoes a donated write" in text and "![a.png](a.png)" in text
    assert "*Run: quick sizes, 2026-11-22, 3 s, **other processes took 40% of the cores**; on 2 cores of A proc" in text
    assert "16 GiB, JAX on cpu; python 3.11, jax 0.10; not installed: cpprb.*" in text
    assert "| 1 row | 1 ms [900 us, 2 ms] | 2 | 0.5 | >= 1.0 | **no** | a b |" in text
    assert "| 2 rows |  | absent |  | >= 1.0 |  | peer: undefined symbol |" in text


def test_a_line_without_its_row_says_why():
    line = Line("b", r"Bytes, (?P<frames>[\d,]+) frames", r"mean$", "bytes of {frames}", "raw", "{ratio}x", r"G")
    gone = absent_row("Bytes, 1 frames", "all", Absent("peer", "no such module"))
    said = [_figures._cells(line, report)[2] for report in (report_of(), report_of(b=run_of(gone)))]
    assert said == ["not in this report", "absent: peer: no such module"]


def test_marked_parts_are_replaced():
    text = "before <!-- a -->\nold\n<!-- /a --> between <!-- b --><!-- /b --> after"
    assert readme.rewritten(text, {"a": "1", "b": "2"}) == (
        "before <!-- a -->\n1\n<!-- /a --> between <!-- b -->\n2\n<!-- /b --> after"
    )
    once = readme.rewritten(text, {"a": "<!-- no mark -->"})
    assert readme.rewritten(once, {"a": "<!-- no mark -->"}) == once
    for broken in ("no marks", "<!-- a -->", "<!-- /a --> <!-- a -->", text + "<!-- a -->"):
        with pytest.raises(ValueError, match="expected <!-- a --> and, after it, <!-- /a -->, once each"):
            readme.rewritten(broken, {"a": "1"})


def test_the_readme_says_what_the_committed_report_does():
    assert readme.main(["--check"]) == 0


def test_pictures_are_drawn_from_tags(tmp_path):
    from benchmarks import _plot as plot

    def of(library, size):
        tags = {"library": library, "size": size}
        spread = Spread(1e-5 * size, 1e-5, 1e-4)
        return row(
            "Speed, one call: time of the peer's over ours", library, ours=spread, peer=spread, ratio=1.0, tags=tags
        )

    rows = [of(library, size) for library in ("cpprb", "another") for size in (10, 100)]
    assert plot.series(rows)["Speed, one call"]["fbuf"] == {10: 1e-4, 100: 1e-3}
    memory = row("Peak", "fbuf", ours=3.0, tags={"library": "fbuf", "size": 1})
    report = report_of(peers_write=run_of(*rows), peers_memory=run_of(memory), extend=run_of(row("q", "c")))
    assert plot.draw(tmp_path, report) == ["peers_write.png", "peers_memory.png"]
    assert (tmp_path / "peers_write.png").read_bytes().startswith(b"\x89PNG")
    assert plot.draw(tmp_path, _report.empty()) == []


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({(row.peer, row.name) for row in ROWS}) == len(ROWS)
    assert {row.peer for row in ROWS} == {"flashbax", "brax", "torchrl"}


def rows_of(*sides: Callable[[], Outcome]) -> list[Defect]:
    return [
        Defect(f"row {n}", "jax", "be right", side, lambda: Outcome("as it should", True))
        for n, side in enumerate(sides)
    ]


def missing() -> Outcome:
    raise ImportError("undefined symbol: x")


def broken() -> Outcome:
    raise ArithmeticError("of the peer")


def test_the_table_says_what_happened(tmp_path: Path) -> None:
    sides = (lambda: Outcome("a | b", False), lambda: Outcome("it works", True), missing, broken)
    table = _table.run(rows_of(*sides), say=lambda line: None)
    _table.save(tmp_path / "table.json", table)
    lines = [
        line for line in _table.markdown(_table.load(tmp_path / "table.json")).splitlines() if line.startswith("| row")
    ]
    assert "jax ❌ a \\| b" in lines[0]
    assert "jax ✅ (not shown with this version) it works" in lines[1]
    assert "jax – could not be run: undefined symbol: x" in lines[2]
    assert "jax ❌ ArithmeticError: of the peer" in lines[3]
    assert all("✅ as it should" in line for line in lines)
    (row,) = rows_of(broken)
    absent = Defect(row.name, "no-such-library", row.should, row.theirs, row.ours)
    table = _table.run([absent], say=lambda line: None)
    assert table["rows"][0]["theirs"] == {"said": "absent: not installed", "right": None}


def test_the_command_fails_where_fbuf_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = rows_of(broken)[0]
    bad = Defect("bad row", "jax", "be right", broken, lambda: Outcome("wrong", False))
    monkeypatch.setattr("benchmarks.defects.__main__.ROWS", (good,))
    assert main(["--ours", "--json", str(tmp_path / "t.json"), "--markdown", str(tmp_path / "t.md")]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["rows"][0]["theirs"]["said"] == "not run"
    assert "row 0" in (tmp_path / "t.md").read_text()
    monkeypatch.setattr("benchmarks.defects.__main__.ROWS", (good, bad))
    assert main(["--ours"]) == 1
    assert "['bad row']" in capsys.readouterr().out
