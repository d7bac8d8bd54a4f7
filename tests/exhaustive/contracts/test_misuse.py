"""What `tests/contracts/test_misuse.py` leaves out."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import fbuf
from fbuf.testing import measure
from tests.contracts.test_misuse import EXAMPLE, test_clear_between_two_writes_keeps_their_order  # noqa: F401


@pytest.fixture
def storage() -> Any:
    return fbuf.storages.Host(slack=0)


@pytest.mark.optimized
def test_convert_reads_only_what_ends_episodes() -> None:
    buffer = fbuf.Buffer(2000, storage=fbuf.storages.Host())
    other = dataclasses.replace(buffer, view=fbuf.views.Transition(n_step=2, stack=3))
    state = buffer.init(EXAMPLE | {"obs": np.zeros(5000, np.float32)})
    assert measure(lambda s: buffer.convert(other, s), state, donate=()).temporary < 2_000_000
