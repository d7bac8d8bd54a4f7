"""The examples in docstrings run."""

import doctest
import importlib

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "fbuf"
NEEDED = {
    "fbuf.gymnasium": "gymnasium",
    "fbuf.integrations.sb3": "stable_baselines3",
    "fbuf.integrations.torchrl": "torchrl",
    "fbuf.torch": "torch",
    "fbuf.torch._tensordict": "tensordict",
    "fbuf.orbax": "orbax.checkpoint",
}
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text() and "demo" not in path.parts
]


@pytest.mark.parametrize("module", [m for m in MODULES if m != "fbuf.__main__"])
def test_doctests(module: str) -> None:
    for package, needed in NEEDED.items():
        if f"{module}.".startswith(f"{package}."):
            pytest.importorskip(needed)
    failed, tried = doctest.testmod(importlib.import_module(module), verbose=False)
    assert tried and not failed
