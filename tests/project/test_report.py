"""Reports: merged run by run, drawn, and the README's tables, which are what the committed report gives."""

import dataclasses
import json

import pytest

from benchmarks import _figures, _report, readme
from benchmarks._harness import Absent, Spread, absent_row, row
from benchmarks._lines import Line

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


LINE = Line(
    "b",
    r"Bytes, (?P<frames>[\d,]+) frames",
    r"mean$",
    "bytes of {frames}, {games} games",
    "raw",
    "{ratio}x ({spread})",
    r"G",
)


def cells(line, report):
    return list(_figures._cells(line, report))


def test_a_line_is_read_from_its_row():
    games = (row("Bytes, 20,000 frames", f"G{n}", ratio=float(n)) for n in (100, 1600))
    mean = row("Bytes, 20,000 frames", "mean", ratio=400.0, target=">= 500")
    shown = cells(LINE, report_of(b=run_of(*games, mean, quick=True)))
    assert shown[:3] == ["bytes of 20,000, 2 games", "raw", "400x (100 to 1,600)"]
    assert shown[3:] == [">= 500: **missed**", "quick, 2026-11-22", "`b`"]


def test_a_line_shows_quartiles_and_the_last_row_that_fits():
    line = dataclasses.replace(
        LINE, among=None, case=r"mean N=(?P<size>\d+)", what="{size}", shows="{ratio} ({spread})"
    )
    rows = [row("Bytes, 1 frames", f"mean N={n}", ratio=Spread(n + 0.51, n, n + 1)) for n in (10, 1000)]
    assert cells(line, report_of(b=run_of(*rows)))[:3] == ["1000", "raw", "1,001 (1,000 to 1,001)"]


def test_a_line_without_its_row_says_why():
    assert cells(LINE, report_of())[2] == "not in this report"
    gone = absent_row("Bytes, 1 frames", "all", Absent("peer", "no such module"))
    assert cells(LINE, report_of(b=run_of(gone)))[2] == "absent: peer: no such module"


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
