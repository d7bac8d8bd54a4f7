"""torchrl's own tests with compressed storages in place of `LazyTensorStorage`. FBUF_TORCHRL names a checkout of its source.

`git clone https://github.com/pytorch/rl` at the version that is installed; some half an hour for both runs.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("torchrl")
CHECKOUT = os.environ.get("FBUF_TORCHRL", "")
FILES = ("rb_core", "samplers", "storages", "writers")
DIFFERENT = {  # they share a buffer between processes, which ours refuses
    "TestSharedStorageInit::test_mutation_revision_shared_across_processes",
    "TestSharedStorageInit::test_sequence_boundary_cache_invalidated_across_processes",
}
COMPILED = "recompile or fullgraph"  # of torch.compile, which none of ours takes part in


def failures(name: str, *options: str) -> tuple[set[str], int]:
    """Return the cases of a file that fail, and how many pass."""
    folder = Path(CHECKOUT).resolve() / "test"
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["-k", f"not ({COMPILED})", "-p", "tests.support.torchrl_trees", *options, f"rb/test_{name}.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3000)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout + done.stderr
    return set(re.findall(r"^(?:FAILED|ERROR) [^:]+::(\S+)", done.stdout, re.M)), int(passed[1])


@pytest.mark.skipif(not CHECKOUT, reason="FBUF_TORCHRL does not name a checkout of torchrl's source")
@pytest.mark.parametrize("name", FILES)
def test_no_case_fails_that_passes_with_their_storage(name: str) -> None:
    theirs, number = failures(name)
    ours, passed = failures(name, "-p", "tests.support.torchrl_swapped")
    new = ours - theirs
    assert new <= DIFFERENT and passed + len(new) >= number, (sorted(new), passed, number)
