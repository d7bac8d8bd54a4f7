"""The table of defects says what happened, and fails where fbuf does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.defects import Defect, Outcome, _table
from benchmarks.defects.__main__ import main
from benchmarks.defects._rows import ROWS


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
