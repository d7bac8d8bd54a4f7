"""Every installed peer of the benchmarks: see `tests/more/test_peers.py`."""

from __future__ import annotations

import sys
from importlib import machinery, metadata, util
from pathlib import Path

import pytest

from benchmarks import bench_peers_memory, bench_peers_prioritized, bench_peers_sample, bench_peers_write
from benchmarks.peers import PEERS, Library, _torchrl_tree
from tests.support.peers import LIST, NOWHERE, check_driver


@pytest.mark.parametrize("kind", ["Uniform", "Prioritized"])
@pytest.mark.parametrize("library", PEERS, ids=lambda library: library.name)
def test_a_driver_returns_what_was_written(library: Library, kind: str) -> None:
    check_driver(library, kind)


def test_trees_are_not_built_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel without an extension, and one whose extension does not load."""
    spec = machinery.ModuleSpec("torchrl", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: spec if name == "torchrl" else real(name))
    monkeypatch.setattr(metadata, "version", lambda name: "0.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "torchrl._torchrl", raising=False)
    with pytest.raises(ImportError, match="no extension; its wheel brings no sources"):
        _torchrl_tree.ensure(build=False)
    (tmp_path / "_torchrl.cpython.so").write_bytes(b"no library")
    (tmp_path / "csrc").mkdir()
    for name in ("pybind.cpp", "utils.cpp"):
        (tmp_path / "csrc" / name).write_text("")
    with pytest.raises(ImportError, match="does not load: .*; not built yet"):
        _torchrl_tree.ensure(build=False)


def test_the_benchmarks_ask_every_library() -> None:
    few = (LIST, NOWHERE)
    report = bench_peers_sample.measure([16, 32], 2, few, batches=(4,))
    report += bench_peers_prioritized.measure([16, 32], 2, few, batches=(4,))
    assert {r["tags"]["library"] for r in report} == {"fbuf", "NumPy list", "nowhere"}
    assert {r["target"] for r in report if "exponent" in r["question"]} == {None, "<= 0.12"}


def test_the_writes_are_judged_where_there_are_priorities() -> None:
    report = bench_peers_write.measure([512, 1024], 2, (LIST, NOWHERE))
    questions = {r["question"].split(":")[0] for r in report}
    assert len(questions) == 4 and sum("prioritized" in q for q in questions) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_a_process_of_its_own() -> None:
    report = bench_peers_memory.measure(2_000, (LIST, NOWHERE))
    assert [r["case"] for r in report] == ["fbuf", "NumPy list", "nowhere"]
    assert report[1]["peer"] > 2_000 * 7056 / 1e6 and report[2]["peer"] == "absent"
