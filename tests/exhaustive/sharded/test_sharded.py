"""Sharded buffers on eight devices: the costlier cases, in processes of their own."""

import pytest

from tests.support.sharded import run


@pytest.mark.parametrize(
    "cases", ["probabilities", "meshes or shard_map", "not (probabilities or meshes or shard_map)"]
)
def test_eight_devices(cases: str) -> None:
    run("tests/more/sharded/eight_devices.py", cases)


@pytest.mark.parametrize("file", ["rows", "mixture"])
def test_rows_and_mixtures_on_eight_devices(file: str) -> None:
    run(f"tests/more/sharded/eight_devices_{file}.py")
