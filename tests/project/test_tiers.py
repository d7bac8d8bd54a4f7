"""Guards of the tree of tests: where files are, and that a case's tier is what its marks say."""

import ast
import subprocess
import sys

import pytest

from tests.support import tiers
from tests.support.paths import ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("test_*.py"))


def test_a_tier_is_a_mark_and_no_folder() -> None:
    """A file in a folder of a tier would run as quick, without the packages it needs."""
    wrong = [str(path) for path in TESTS.rglob("*.py") if {"more", "exhaustive"} & set(path.relative_to(TESTS).parts)]
    assert not wrong, f"{wrong}: move them to tests/<folder> and write `pytestmark = pytest.mark.more` (or exhaustive)."
    assert len(FILES) > 100 and all(len(path.relative_to(TESTS).parts) <= 2 for path in FILES)


def test_the_line_that_is_read_says_what_pytest_sees() -> None:
    for path in FILES:
        text = path.read_text()
        marks = [
            node.attr
            for statement in (ast.parse(text).body if "pytestmark" in text else [])
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign))
            and "pytestmark" in ast.unparse(statement)
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute)
        ]
        assert tiers.of_file(path) == tiers.of_marks(marks), (
            f"{path}: write `pytestmark = pytest.mark.<tier>`, on a line."
        )


def test_a_case_is_of_the_highest_tier_that_is_named() -> None:
    assert tiers.of_marks([]) == tiers.of_marks(["in_place", "parametrize"]) == "quick"
    assert tiers.of_marks(["more", "in_place"]) == "more"
    assert tiers.of_marks(["exhaustive", "more"]) == tiers.of_marks(["more", "exhaustive"]) == "exhaustive"


CASES = """
import pytest
from tests.support.tables import checks, one_of

def check(value):
    pass

number = one_of(1, more=[2], exhaustive=[3])
test_table = checks((check, ["a"]), more=[(check, ["b"])], exhaustive=[(check, ["c"])])

def test_of_a_fixture(number):
    pass

@pytest.mark.more
def test_of_a_function(number):
    pass
"""


@pytest.mark.more
def test_each_tier_runs_its_own_cases(tmp_path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "test_further.py").write_text("import pytest\npytestmark = pytest.mark.exhaustive\ndef test(): pass\n")

    def collected(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-n", "0", "-p", "no:cacheprovider"]
        command += ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return sorted(line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line)

    folder = str(tmp_path)
    quick = ["test_of_a_fixture[1]", "test_table[check-a]"]
    more = ["test_of_a_fixture[2]", "test_of_a_function[1]", "test_of_a_function[2]", "test_table[check-b]"]
    rest = ["test", "test_of_a_fixture[3]", "test_of_a_function[3]", "test_table[check-c]"]
    assert collected(folder) == collected("--tier", "quick", folder) == quick
    assert collected("--tier", "more", folder) == more
    assert collected("--tier", "exhaustive", folder) == rest
    assert collected("--tier", "all", folder) == sorted(quick + more + rest)
    assert len(collected("--tier", "exhaustive", "--share", "1/2", folder)) == len(rest) // 2
    assert collected(f"{folder}/test_cases.py::test_of_a_function") == more[1:3] + rest[2:3]
