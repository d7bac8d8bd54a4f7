"""`fbuf.integrations.torchrl` without torchrl; `tests/more` compares it with torchrl's storages."""

import importlib
import sys

import pytest


def test_torchrl_is_imported_by_its_own_module_only(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("fbuf.integrations")
    monkeypatch.setitem(sys.modules, "torchrl.data", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "fbuf.integrations.torchrl", raising=False)
    with pytest.raises(ModuleNotFoundError, match="torchrl|tensordict"):
        importlib.import_module("fbuf.integrations.torchrl")
