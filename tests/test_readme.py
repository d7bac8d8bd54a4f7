"""Every Python block of the README runs, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


@pytest.mark.filterwarnings("ignore:.*non-writable.*:UserWarning")
def test_every_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert len(BLOCKS) >= 6
    scope: dict[str, object] = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"README block {number}", "exec"), scope)
    printed = capsys.readouterr().out
    assert "(32, 4, 84, 84)" in printed
    assert "torch.Size([32, 4])" in printed


def test_both_commands_are_there() -> None:
    text = (ROOT / "README.md").read_text()
    assert '.venv/bin/pip install -e ".[demo]" && .venv/bin/python -m fbuf demo' in text
    assert '.venv/bin/pip install -e ".[test]" && .venv/bin/python -m pytest' in text
