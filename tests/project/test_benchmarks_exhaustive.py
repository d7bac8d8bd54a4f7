"""Both sides of every row of the table of defects, every installed peer, and the sections of `--gpu` on a CPU."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from benchmarks import __main__ as runner
from benchmarks import bench_gpu
from benchmarks.defects import Defect, Outcome, _table
from benchmarks.defects._rows import ROWS
from benchmarks.peers import PEERS
from benchmarks.peers._versions import version
from tests.project.test_benchmarks import test_a_driver_returns_what_was_written  # noqa: F401
from tests.support.tables import one_of

pytestmark = pytest.mark.exhaustive

SIDES = {row.ours: row for row in ROWS}  # a side of several rows runs once


@pytest.mark.parametrize("side", SIDES, ids=lambda side: f"{side.__module__.rsplit('.', 1)[1]}.{side.__name__}")
def test_fbuf_does_what_it_should(side: Callable[[], Outcome]) -> None:
    shown = side()
    assert shown.right, shown.said


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


def test_every_section_runs(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert runner.main(["--gpu", "--quick", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["benchmarks"]
    assert list(found) == sorted(f"gpu: {name}" for name in bench_gpu.SECTIONS)
    for name in ("correct", "in place", "in place, deduplicated"):
        assert all(row["met"] or row["peer"] == "absent" for row in found[f"gpu: {name}"]["rows"])


library = one_of(*PEERS)


@pytest.mark.parametrize(("what", "said"), [("fuzz", "checkpoints: "), ("soak", "nothing grew: ")])
def test_two_minutes_of_faults_find_nothing(what: str, said: str) -> None:
    command = [sys.executable, "-m", "benchmarks.faults", what, "--seconds", "120"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


def test_no_row_is_lost_or_doubled_where_writing_processes_are_killed():
    command = [sys.executable, "-m", "benchmarks.faults", "--kills", "500", "--seconds", "120"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("no row lost or doubled") == 4, done.stdout + done.stderr
