"""Each mutant of the catalogue names one snippet of one definition."""

from pathlib import Path

import pytest

from benchmarks.mutants import _catalogue, _run
from benchmarks.mutants.__main__ import REPO

PACKAGE = "def double(x): return 2 * x  # twice\n"


def test_every_mutant_of_the_catalogue_can_be_planted():
    mutants = _catalogue.read()
    assert not _catalogue.check(mutants, _catalogue.Package(REPO / "fbuf"), _run.Tests(REPO).topics)
    assert len(mutants) >= 210


@pytest.mark.parametrize("old", ["return x * 2", "x"])
def test_a_snippet_that_is_missing_or_there_twice_is_an_error(tmp_path: Path, old: str):
    (tmp_path / "a.py").write_text(PACKAGE)
    mutant = _catalogue.Mutant("Z", "tiny", "double", "", (), old, "pass")
    with pytest.raises(_catalogue.CatalogueError, match="^Z: 1 definitions are called double"):
        _catalogue.Package(tmp_path).find(mutant)
