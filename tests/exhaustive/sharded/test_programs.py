"""The data-parallel program learns the same on eight devices as on one."""

import pytest

from tests.support.processes import devices, run_python


@pytest.mark.optimized
def test_eight_devices_learn_as_one_does() -> None:
    code = "import runpy; print(runpy.run_path('tests/programs/sharded_dqn.py')['main']())"
    eight, one = (float(run_python(code, **devices(number)).stdout.split()[-1]) for number in (8, 1))
    assert min(eight, one) > 0.85 and abs(eight - one) < 0.1, (eight, one)
