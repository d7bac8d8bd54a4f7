"""Check the form of the scripts in findings/; running them needs downloads and is left to their readers."""

import os
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPTS = sorted((ROOT / "findings").glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_are_isolated_and_pinned(script: Path) -> None:
    text = script.read_text()
    assert os.access(script, os.X_OK)
    assert "work=$(mktemp -d)\ntrap 'rm -rf \"$work\"' EXIT\n" in text
    installs = re.findall(r'pip" install --quiet (?:--no-deps )?(.*)', text.replace("\\\n", ""))
    assert installs and all("==" in package for package in " ".join(installs).split())
    assert "fbuf" not in text and "expected" in text and "happened" in text
    body = re.search(r"<< 'EOF'\n(.*)^EOF$", text, flags=re.M | re.S)
    assert body and "sys.exit(0 if " in body.group(1)
    compile(body.group(1), script.name, "exec")


def test_readme_lists_each_script() -> None:
    listed = re.findall(r"^\| \[\w+\]\((\w+\.sh)\)", (ROOT / "findings" / "README.md").read_text(), flags=re.M)
    assert sorted(listed) == [script.name for script in SCRIPTS]
