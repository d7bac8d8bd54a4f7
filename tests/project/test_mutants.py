"""The catalogue of mutants: each is found once, and a planted one is killed exactly where a test notices it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutants import _catalogue, _run
from benchmarks.mutants.__main__ import REPO, report

PACKAGE = "def double(x): return 2 * x  # twice\n\n\nclass Half:\n    def of(self, x): return x // 2\n"
CATALOGUE = """
[tiny] double
Z1 double: thrice
- return 2*x
+ return 3 * x
Z2 Half.of: too much
- x // 2
+ x // 1
~ tests: half
Z3 Half.of: with a rest
- x // 2
+ x / 2
"""
RUN = f"""
import json, pathlib, sys
sys.path.insert(0, {str(REPO)!r})
from benchmarks.mutants import _catalogue, _run
runner = _run.Runner(pathlib.Path("."), "tiny", "more", 2, 60.0)
for record in runner.run(_catalogue.parse(pathlib.Path("catalogue.txt").read_text())):
    print(json.dumps(record))
"""


def test_every_mutant_of_the_catalogue_can_be_planted():
    mutants = _catalogue.read()
    assert not _catalogue.check(mutants, _catalogue.Package(REPO / "fbuf"), _run.Tests(REPO).topics)
    assert len(mutants) >= 210


def test_each_tier_kills_what_it_notices(tmp_path: Path):
    for name, text in {
        "tiny/__init__.py": PACKAGE,
        "catalogue.txt": CATALOGUE,
        "pyproject.toml": "",
        "tests/test_double.py": "from tiny import double\n\ndef test_double(): assert double(2) == 4\n",
        "tests/more/test_half.py": "from tiny import Half\n\ndef test_half(): assert Half().of(4) == 2\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    out = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    found = {record["id"]: record for record in map(json.loads, out.splitlines())}
    assert [(found[i]["result"], found[i]["tier"]) for i in ("Z1", "Z2")] == [("killed", "quick"), ("killed", "more")]
    assert found["Z1"]["by"] == ["tests/test_double.py::test_double"] and found["Z3"]["result"] == "survived"
    lines, rate = report(_catalogue.parse(CATALOGUE), found)
    assert rate == pytest.approx(2 / 3) and "1 of    3" in lines[-2] and "survived: Z3" in lines[-1]
    assert not list(tmp_path.rglob("mutants-*")) and (tmp_path / "tiny/__init__.py").read_text() == PACKAGE


@pytest.mark.parametrize("old", ["return x * 2", "x"])
def test_a_snippet_that_is_missing_or_there_twice_is_an_error(tmp_path: Path, old: str):
    (tmp_path / "a.py").write_text(PACKAGE)
    mutant = _catalogue.Mutant("Z", "tiny", "double", "", (), old, "pass")
    with pytest.raises(_catalogue.CatalogueError, match="^Z: 1 definitions are called double"):
        _catalogue.Package(tmp_path).find(mutant)
