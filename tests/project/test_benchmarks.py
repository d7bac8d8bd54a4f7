"""The benchmarks count what they say, and drivers of all libraries return what was written. No time is judged."""

import gc
import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import fbuf
from benchmarks import __main__ as runner
from benchmarks import _agreement, _budget, _harness, _launches, bench_gpu, hops, house, peers
from benchmarks._harness import Absent
from benchmarks.defects import Defect, Outcome, _table
from benchmarks.defects._rows import ROWS
from benchmarks.peers import EXAMPLE, FBUF, PEERS, _torchrl_tree
from benchmarks.peers._versions import version
from fbuf._algorithms import sum_tree
from fbuf._bridge import callbacks
from tests.support.refusals import raises
from tests.support.tables import one_of

pytestmark = pytest.mark.more


@pytest.mark.parametrize("section", ["torch", "deduplicated"])
def test_accelerator_sections_run_on_a_cpu(section):
    rows = list(bench_gpu.SECTIONS[section].run(True))
    assert rows and all(row["ratio"] is not None and row["met"] is not False for row in rows)


def test_trees_that_are_built_too_late_are_absent(monkeypatch):
    def wait(seconds):
        raise subprocess.TimeoutExpired("ninja", seconds)

    monkeypatch.setattr(bench_gpu, "_build_trees", lambda: SimpleNamespace(wait=wait))
    rows = {row["case"]: row for row in bench_gpu.priorities_called(True)}
    assert rows["B=256 against flashbax"]["ratio"] is not None
    late = rows["B=256 against torchrl"]
    assert late["peer"] == "absent" and late["note"] == "torchrl: its trees were not built within 60 s"


def test_accelerator_sections_fit_their_budget():
    expected = sum(section.seconds for section in bench_gpu.SECTIONS.values())
    assert _budget.START + expected + runner.REPORT <= bench_gpu.BUDGET
    first, *_, last = bench_gpu.SECTIONS
    assert first == "correct" and last.startswith("in place")


def test_kernels_are_counted_on_streams_of_devices():
    def plane(name, **lines):
        return SimpleNamespace(
            name=name, lines=[SimpleNamespace(name=line, events=iter("k" * n)) for line, n in lines.items()]
        )

    gpu = plane("/device:GPU:0", **{"Stream #13(Compute)": 20, "Stream #14(MemcpyD2H)": 5, "XLA Modules": 5})
    assert _launches.on_streams([gpu, plane("/host:CPU", **{"Stream": 7})]) == 25
    step = jax.jit(lambda state, key: (state + 1, key))
    assert _launches.launches(step, jax.numpy.zeros(3)) is None  # a CPU records no streams


def test_agreement_names_what_differs():
    ours = {"a": np.float32([1, -2]), "b": np.int32([3])}
    theirs = {"a": np.nextafter(np.float32([1, -2]), np.float32([2, -2])), "b": np.int32([3])}
    assert _agreement.differences(ours, ours) == {}
    assert _agreement.differences(ours, theirs) == {"['a']": "1 of 2 differ, by up to 1 ulp"}
    assert _agreement.ulps(np.float32([-1e-45, 0.0]), np.float32([1e-45, -0.0])).tolist() == [2, 0]


def test_agreement_explains_slots_beside_a_boundary_only():
    leaves = np.full(1_024, 1.0, np.float32)
    top, bottom = (np.asarray(x) for x in sum_tree.uniforms(jax.random.key(0), 400, stratified=True))
    tree = _agreement.host_tree(leaves)
    slots = tree.draw(top, bottom)
    assert _agreement.unexplained(leaves, slots, top, bottom) == 0
    assert _agreement.unexplained(leaves, (slots + 1) % 1_024, top, bottom) == 400
    edge = np.full(400, 0.5, np.float32)  # exactly between two nodes of the middle level's halves
    below, above = (tree.draw(np.nextafter(edge, np.float32(to)), bottom) for to in (0, 1))
    assert (below != above).all()
    assert (
        _agreement.unexplained(leaves, below, edge, bottom) == _agreement.unexplained(leaves, above, edge, bottom) == 0
    )


def test_compressed_sample_goes_through_few_files():
    real = callbacks.call
    traced, warm = hops.compressed_sample(hops.Counter())
    assert callbacks.call is real
    for counted in (traced, warm):
        assert "_host/codecs.py" in counted.files, "what callbacks run is not counted"
    assert len(traced.files) <= house.LIMITS["files of a traced compressed sample"]
    assert traced.moves <= house.LIMITS["moves of a traced compressed sample"]
    assert len(warm.files) <= 20 and warm.moves <= 45


def test_device_extend_goes_through_few_files():
    traced, warm = hops.device_extend(hops.Counter())
    assert "storages/_device.py" in traced.files
    assert len(traced.files) <= house.LIMITS["files of a traced device extend"] and len(warm.files) <= 6
    assert fbuf.stores() == []


def test_an_interrupted_build_of_trees_stops_no_later_one(tmp_path, monkeypatch):
    """Torch waits for the file `lock` in the folder that it builds in, which a killed process leaves there."""
    pytest.importorskip("torchrl")
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = _torchrl_tree._folder(sys.modules["torch"].__version__)
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    fails = True

    def load(build_directory, **settings):
        build = Path(build_directory)
        assert list(build.iterdir()) == []
        (build / "lock").touch()
        (build / "_torchrl.so").write_text("built")
        if fails:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setattr(_torchrl_tree, "_load", lambda path: SimpleNamespace(text=path.read_text()))
    root = Path(importlib.util.find_spec("torchrl").submodule_search_locations[0])
    raises(RuntimeError, "no compiler", _torchrl_tree._built, root, True, "why", False)
    assert [path.name for path in folder.iterdir()] == ["lock"]
    fails = False
    assert _torchrl_tree._built(root, True, "why", False) == "its C++ sources, built here (why)"
    assert sorted(path.name for path in folder.iterdir()) == ["_torchrl.so", "lock"]


LIST = next(library for library in PEERS if library.name == "NumPy list")


def rewards(batch):
    """Return `reward` of a batch of any library."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        batch = batch[0]
    if hasattr(batch, "reward"):
        return np.ravel(batch.reward)
    if not isinstance(batch, dict):  # torchrl's TensorDict has `data` too, which is itself
        batch = next((getattr(batch, name) for name in ("experience", "data") if hasattr(batch, name)), batch)
    return np.ravel(np.asarray(batch["reward"]))


library = one_of(FBUF, LIST, exhaustive=[*PEERS])


@pytest.mark.parametrize("kind", ["Uniform", "Prioritized"])
def test_a_driver_returns_what_was_written(library, kind):
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports
        module = peers.load(library)
        if isinstance(module, Absent):
            pytest.skip(module.reason)
        if not hasattr(module, kind):
            pytest.skip("has no priorities")
        driver = getattr(module, kind)(64, EXAMPLE)
        peers.fill(driver, 64)
        new = peers.rows(32, seed=5)
        for _ in range(3):  # over all rows there were
            driver.writer(new)()
        driver.writer({name: leaf[:1] for name, leaf in new.items()})()
        got = rewards((driver.sampler if kind == "Uniform" else driver.stepper)(16)())
        assert got.shape == (16,) and set(got.astype(np.float32)) <= set(new["reward"])


def held(mebibytes, fail=False):
    waste = np.ones(mebibytes << 20, np.uint8)  # freed before the baseline
    del waste
    yield
    if fail:
        raise ArithmeticError("of the child")
    array = np.ones(mebibytes << 20, np.uint8)
    print("noise on standard output")
    yield {"nbytes": array.nbytes}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_measure_memory_counts_what_is_held_or_shows_the_childs_error():
    report = _harness.measure_memory(held, 64)
    assert report["result"] == {"nbytes": 64 << 20}
    for kind in ("rss", "pss", "private", "peak"):
        assert report[kind] == pytest.approx(64 << 20, rel=0.1), kind
    raises(RuntimeError, "ArithmeticError: of the child", _harness.measure_memory, held, 1, True)


SIDES = {row.ours: row for row in ROWS}  # a side of several rows runs once


@pytest.mark.exhaustive
@pytest.mark.parametrize("side", SIDES, ids=lambda side: f"{side.__module__.rsplit('.', 1)[1]}.{side.__name__}")
def test_fbuf_does_what_it_should(side: Callable[[], Outcome]) -> None:
    shown = side()
    assert shown.right, shown.said


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:coroutine 'Vault._write_chunk' was never awaited:RuntimeWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.peer}: {row.name}")
def test_the_other_side_runs(row: Defect) -> None:
    if version(row.peer) is None:
        pytest.skip(f"{row.peer} is not installed")
    with jax.numpy_rank_promotion("allow"):  # which flashbax needs
        right, said = _table.outcome(row.theirs)
    gc.collect()  # what a library left behind warns here, not in the next test
    assert right in (True, False, None) and said
    misused = said.startswith(("AttributeError", "TypeError", "NameError", "KeyError"))
    assert not misused or "is not JSON serializable" in said, said  # what torchrl says of nested rows


@pytest.mark.exhaustive
def test_every_section_runs(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert runner.main(["--gpu", "--quick", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["benchmarks"]
    assert list(found) == sorted(f"gpu: {name}" for name in bench_gpu.SECTIONS)
    for name in ("correct", "in place", "in place, deduplicated"):
        assert all(row["met"] or row["peer"] == "absent" for row in found[f"gpu: {name}"]["rows"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("what", "said"), [("fuzz", "checkpoints: "), ("soak", "nothing grew: ")])
def test_two_minutes_of_faults_find_nothing(what: str, said: str) -> None:
    command = [sys.executable, "-m", "benchmarks.faults", what, "--seconds", "120"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_no_row_is_lost_or_doubled_where_writing_processes_are_killed():
    command = [sys.executable, "-m", "benchmarks.faults", "kill", "--count", "500", "--seconds", "120"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("no row lost or doubled") == 6, done.stdout + done.stderr
