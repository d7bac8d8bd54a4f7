"""Every Python block of the README runs, in order, in one namespace."""

import re

import pytest

from tests.support.paths import ROOT

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
