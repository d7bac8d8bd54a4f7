"""Every Python block of the README and the guides runs, in order, in one namespace a page."""

import re

import jax
import pytest

from tests.support.paths import ROOT

PAGES = ("README.md", "fbuf/GUIDE.md", "fbuf/storages/README.md", "fbuf/datasets/README.md", "fbuf/parts/README.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)
    assert blocks
    scope: dict[str, object] = {}
    with jax.numpy_rank_promotion("allow"):
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}, block {number}", "exec"), scope)


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 220 and len(text.split()) <= 2000
