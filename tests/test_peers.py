"""Peers: what is missing is said, what cannot be held is not asked for, and all sides of a comparison are measured."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from importlib import machinery, metadata, util

import numpy as np
import pytest

from benchmarks import bench_peers_memory, bench_peers_prioritized, bench_peers_sample, bench_peers_write, peers
from benchmarks._compare import Field
from benchmarks._harness import Absent
from benchmarks.peers import EXAMPLE, FBUF, PEERS, Library, _torchrl_tree
from benchmarks.peers._versions import versions

LIST = next(library for library in PEERS if library.name == "NumPy list")
NOWHERE = Library("nowhere", "_nowhere", ("no-such-library",), "nothing", 1)


@pytest.fixture(params=[library.name for library in (FBUF, *PEERS)])
def driven(request):
    """A library's module; most are absent in a plain test environment."""
    library = next(one for one in (FBUF, *PEERS) if one.name == request.param)
    import jax

    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what imports of others say
        module = peers.load(library)
        if isinstance(module, Absent):
            pytest.skip(module.reason)
        yield module


def leaves(batch):
    """`reward` of a batch, whatever it is called in."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        batch = batch[0]
    if hasattr(batch, "reward"):
        return np.ravel(batch.reward)
    if not isinstance(batch, dict):  # torchrl's TensorDict has `data` too, which is itself
        batch = next((getattr(batch, name) for name in ("experience", "data") if hasattr(batch, name)), batch)
    return np.ravel(np.asarray(batch["reward"]))


@pytest.mark.parametrize("kind", ["Uniform", "Prioritized"])
def test_a_driver_gives_what_was_written(driven, kind):
    if not hasattr(driven, kind):
        pytest.skip("has no priorities")
    driver = getattr(driven, kind)(64, EXAMPLE)
    peers.fill(driver, 64)
    new = peers.rows(32, seed=5)
    for _ in range(3):  # over all rows there were
        driver.writer(new)()
    driver.writer({name: leaf[:1] for name, leaf in new.items()})()
    batch = (driver.sampler if kind == "Uniform" else driver.stepper)(16)()
    got = leaves(batch)
    assert got.shape == (16,) and set(got.astype(np.float32)) <= set(new["reward"])


def test_absent_library_is_reported():
    assert isinstance(peers.load(NOWHERE), Absent)
    field = Field("Uniform", (16, 32), (LIST, NOWHERE))
    report = field.ask("A question", lambda d: d.sampler(4), rounds=2, targets={("nowhere", 16): ">= 2"}, flat="<= 9")
    by = {(r["question"], r["case"]): r for r in report}
    row = by["A question: time of the peer's over ours", "nowhere, 16 rows"]
    assert row["peer"] == "absent" and "No module named" in row["note"] and row["target"] == ">= 2"
    assert by["A question: time of the peer's over ours", "NumPy list, 32 rows"]["ratio"]["median"] > 0
    growth = [r for r in report if "growth exponent" in r["question"]]
    assert [r["case"] for r in growth] == ["fbuf", "NumPy list"] and growth[0]["target"] == "<= 9"
    assert all(r["tags"]["library"] in ("fbuf", "NumPy list", "nowhere") for r in report)


def test_what_cannot_be_held_is_said(monkeypatch):
    assert peers.too_large(LIST, 10**6) is None
    assert peers.too_large(LIST, 10**7) == "not run: a Python object a row"
    monkeypatch.setattr(peers, "free_bytes", lambda on_device: 10**9)
    assert "about 35.0 GB, and 1.0 GB of the device are free" in peers.too_large(
        dataclasses.replace(FBUF, largest=10**10), 10**9
    )
    small = Library("NumPy list", "_list", ("numpy",), "", 500, 16, "it is a test")
    report = Field("Uniform", (16, 32), (small,)).ask("q", lambda d: d.sampler(4), rounds=2)
    assert [r["note"] for r in report if r["ratio"] is None] == ["not run: it is a test"]


def test_a_library_that_fails_has_its_row(monkeypatch):
    module = peers.load(LIST)
    monkeypatch.setattr(module, "Uniform", lambda capacity, example: 1 / 0)
    report = Field("Uniform", (16,), (LIST,)).ask("q", lambda d: d.sampler(4), rounds=2)
    assert report[0]["note"].startswith("failed: ZeroDivisionError") and report[0]["ratio"] is None


def test_versions_are_recorded():
    assert versions(LIST) == {"numpy": np.__version__}
    assert versions(NOWHERE) == {"no-such-library": None}


def test_trees_are_not_built_unasked(monkeypatch, tmp_path):
    """A wheel without an extension, and one whose extension does not load."""
    pytest.importorskip("torch")
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


def test_the_benchmarks_ask_every_library():
    few = (LIST, NOWHERE)
    report = bench_peers_sample.measure([16, 32], 2, few, batches=(4,))
    report += bench_peers_prioritized.measure([16, 32], 2, few, batches=(4,))
    assert {r["tags"]["library"] for r in report} == {"fbuf", "NumPy list", "nowhere"}
    assert {r["target"] for r in report if "exponent" in r["question"]} == {None, "<= 0.12"}


@pytest.mark.slow
def test_the_writes_are_judged_where_there_are_priorities():
    report = bench_peers_write.measure([512, 1024], 2, (LIST, NOWHERE))
    questions = {r["question"].split(":")[0] for r in report}
    assert len(questions) == 4 and sum("prioritized" in q for q in questions) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_a_process_of_its_own():
    report = bench_peers_memory.measure(2_000, (LIST, NOWHERE))
    assert [r["case"] for r in report] == ["fbuf", "NumPy list", "nowhere"]
    assert report[1]["peer"] > 2_000 * 7056 / 1e6 and report[2]["peer"] == "absent"
