"""Sharded buffers on eight devices and over two processes: the costlier cases, in processes of their own."""

import pytest

from tests.support.processes import devices, run_python
from tests.support.sharded import run
from tests.support.tables import checks
from tests.support.two_processes import check_killed, check_two_processes

pytestmark = pytest.mark.exhaustive

CASES = [
    *(("", cases) for cases in ("probabilities", "meshes or shard_map", "not (probabilities or meshes or shard_map)")),
    *(("_saved", cases) for cases in ("draws_the_same", "without_lanes", "not (draws_the_same or without_lanes)")),
    *((file, "") for file in ("_rows", "_mixture")),
]


@pytest.mark.parametrize(("file", "cases"), CASES)
def test_eight_devices(file: str, cases: str) -> None:
    run(f"tests/sharded/eight_devices{file}.py", cases)


@pytest.mark.optimized
def test_eight_devices_learn_as_one_does() -> None:
    code = "import runpy; print(runpy.run_path('tests/programs/sharded_dqn.py')['main']())"
    eight, one = (float(run_python(code, **devices(number)).stdout.split()[-1]) for number in (8, 1))
    assert min(eight, one) > 0.85 and abs(eight - one) < 0.1, (eight, one)


test_two_processes = checks((check_two_processes, [("global", "Device")]), (check_killed, range(2, 102)))
