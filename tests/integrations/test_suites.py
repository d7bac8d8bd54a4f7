"""The tests of other libraries with our buffers in place of theirs: FBUF_FLASHBAX, FBUF_SB3, FBUF_TORCHRL=<a checkout>.

Clone instadeepai/flashbax, or DLR-RM/stable-baselines3 and pytorch/rl at the installed versions. Runs take up to half an
hour; flashbax's sweeps, 720 cases of some seconds, need FBUF_EXHAUSTIVE=1.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.more

SOURCES = {name: os.environ.get(f"FBUF_{name}", "") for name in ("FLASHBAX", "SB3", "TORCHRL")}
QUIET = "-q -rfE --tb=no -W ignore -p no:cacheprovider".split()


def run(folder, *options):
    """Return the cases that fail, and how many pass."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *QUIET, *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout + done.stderr
    return set(re.findall(r"^(?:FAILED|ERROR) [^:]+::(\S+)", done.stdout, re.M)), int(passed[1])


def source(name):
    """Return the checkout of a library's repository."""
    if not SOURCES[name]:
        pytest.skip(f"FBUF_{name} does not name a checkout of its repository")
    return Path(SOURCES[name]).resolve()


SWEEPS = (
    "trajectory_buffer_test.py::test_sample_doesnt_sample_prev_broken_trajectories",
    "prioritised_trajectory_buffer_test.py::test_prioritised_sample_doesnt_sample_prev_broken_trajectories",
)


def test_flashbax():
    options = ["-p", "tests.support.flashbax_suite", "--ignore=flashbax/buffers/sum_tree_test.py"]  # not replaced
    # of an empty draw
    options += ["--deselect=flashbax/buffers/prioritised_flat_buffer_test.py::test_adjust_priorities"]
    if os.environ.get("FBUF_EXHAUSTIVE", "0") in ("", "0"):
        options += [f"--deselect=flashbax/buffers/{sweep}" for sweep in SWEEPS]
    assert not run(source("FLASHBAX"), *options, "flashbax/buffers")[0]


SB3 = ("buffers", "n_step_replay", "save_load", "her", "dict_env", "cnn", "run", "vec_normalize")


@pytest.mark.parametrize("name", SB3)
def test_stable_baselines3(name, tmp_path):
    file = f"test_{name}.py"
    shutil.copy(source("SB3") / "tests" / file, tmp_path)  # out of a package that is called as ours
    theirs, number = run(tmp_path, file)
    ours, passed = run(tmp_path, "-p", "tests.support.sb3_swapped", file)
    assert ours <= theirs and passed >= number, (sorted(ours - theirs), passed, number)


DIFFERENT = {
    # A buffer shared by processes, which ours refuses.
    "TestSharedStorageInit::test_mutation_revision_shared_across_processes",
    "TestSharedStorageInit::test_sequence_boundary_cache_invalidated_across_processes",
    # `rb[:]` is a view. Ours reads each leaf when it is used, so a write between two reads can tear a record.
    "TestUpdateIfPresent::test_concurrent_updates_do_not_tear_records",
}


COMPILED = (  # tests of torch.compile
    "test_samplers.py::TestFindStartStopTraj::test_boundary_distance_kernel_fullgraph",
    "test_samplers.py::TestFindStartStopTraj::test_multidimensional_boundary_index_and_fullgraph",
    "test_storages.py::TestStorages::test__rand_given_ndim_recompile",
    "test_storages.py::TestStorages::test_compilable_storage_set_fullgraph",
)


@pytest.mark.parametrize("name", ["rb_core", "samplers", "storages", "writers"])
def test_torchrl(name):
    # The trees first: importing torchrl without them fails what is prioritized.
    options = [
        *(f"--deselect=rb/{test}" for test in COMPILED),
        "-p",
        "tests.support.torchrl_trees",
        f"rb/test_{name}.py",
    ]
    theirs, number = run(source("TORCHRL") / "test", *options)
    ours, passed = run(source("TORCHRL") / "test", *options, "-p", "tests.support.torchrl_swapped")
    new = ours - theirs
    assert new <= DIFFERENT and passed + len(new) >= number, (sorted(new), passed, number)
