"""The defect table: fbuf's side of every row is as it should be, and the table says what happened and nothing else."""

from __future__ import annotations

import json

import pytest

from benchmarks.defects import Defect, Outcome, _table
from benchmarks.defects.__main__ import main
from benchmarks.defects._rows import ROWS
from benchmarks.peers._versions import version

# A side that stands in several rows is run once.
SIDES = {row.ours: row for row in ROWS}


@pytest.mark.parametrize(
    "side",
    [
        pytest.param(
            side, id=f"{side.__module__.rsplit('.', 1)[1]}.{side.__name__}", marks=[pytest.mark.slow] * row.slow
        )
        for side, row in SIDES.items()
    ],
)
def test_fbuf_does_what_it_should(side):
    shown = side()
    assert shown.right, shown.said


def test_every_row_has_a_name_of_its_own():
    assert len({(row.peer, row.name) for row in ROWS}) == len(ROWS)
    assert {row.peer for row in ROWS} == {"flashbax", "brax", "torchrl"}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.peer}: {row.name}")
def test_peers_sides_run(row):
    """Whatever they say: an exception that is no finding is a fault of the row."""
    import jax

    if version(row.peer) is None:
        pytest.skip(f"{row.peer} is not installed")
    with jax.numpy_rank_promotion("allow"):  # which flashbax needs
        right, said = _table.outcome(row.theirs)
    assert right in (True, False, None) and said
    assert not said.startswith(("AttributeError", "TypeError", "NameError", "KeyError")), said


def rows_of(*sides):
    return [
        Defect(f"row {n}", "jax", "be right", side, lambda: Outcome("as it should", True))
        for n, side in enumerate(sides)
    ]


def missing():
    raise ImportError("undefined symbol: x")


def broken():
    raise ArithmeticError("of the peer")


def test_table_says_what_happened(tmp_path):
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


def test_absent_peer_is_said_to_be_absent():
    (row,) = rows_of(broken)
    table = _table.run([Defect(row.name, "no-such-library", row.should, row.theirs, row.ours)], say=lambda line: None)
    assert table["rows"][0]["theirs"] == {"said": "absent: not installed", "right": None}


def test_command_fails_where_fbuf_does(monkeypatch, tmp_path, capsys):
    good = rows_of(broken)[0]
    bad = Defect("bad row", "jax", "be right", broken, lambda: Outcome("wrong", False))
    monkeypatch.setattr("benchmarks.defects.__main__.ROWS", (good,))
    assert main(["--ours", "--json", str(tmp_path / "t.json"), "--markdown", str(tmp_path / "t.md")]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["rows"][0]["theirs"]["said"] == "not run"
    assert "row 0" in (tmp_path / "t.md").read_text()
    monkeypatch.setattr("benchmarks.defects.__main__.ROWS", (good, bad))
    assert main(["--ours"]) == 1
    assert "['bad row']" in capsys.readouterr().out
