"""Every installed peer of the benchmarks: see `tests/more/project/test_peers.py`."""

import sys
from importlib import machinery, metadata, util
from pathlib import Path

import pytest

from benchmarks.peers import PEERS, Library, _torchrl_tree
from tests.more.project.test_peers import test_a_driver_returns_what_was_written  # noqa: F401


@pytest.fixture(params=PEERS, ids=lambda library: library.name)
def library(request: pytest.FixtureRequest) -> Library:
    return request.param


def test_trees_are_not_built_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = machinery.ModuleSpec("torchrl", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: spec if name == "torchrl" else real(name))
    monkeypatch.setattr(metadata, "version", lambda name: "0.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "torchrl._torchrl", raising=False)
    pytest.raises(ImportError, _torchrl_tree.ensure, build=False).match("no extension; its wheel brings no sources")
    (tmp_path / "_torchrl.cpython.so").write_bytes(b"no library")
    (tmp_path / "csrc").mkdir()
    for name in ("pybind.cpp", "utils.cpp"):
        (tmp_path / "csrc" / name).write_text("")
    pytest.raises(ImportError, _torchrl_tree.ensure, build=False).match("does not load: .*; not built yet")
