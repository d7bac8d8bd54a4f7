"""The tests of priorities on the host with other forms of calling, parts and sizes."""

from typing import Any

import pytest

import fbuf
from tests.more.samplers.test_host_priorities import WINDOWS, test_any_sequence_of_methods_is_that_of_the_device  # noqa: F401
from tests.samplers.test_host_priorities import (  # noqa: F401
    nothing_open,
    test_a_store_goes_with_its_last_state,
    test_draws_are_those_of_the_device,
)
from tests.support.host_priorities import BATCH

AHEAD = {"prefetch": 1, "batch_size": BATCH}


@pytest.fixture(
    params=[
        ("donated", "default", {}),
        ("eager", "default", {"view": WINDOWS}),
        ("eager", "buffer", {}),
        ("jit", "independent", {"view": WINDOWS}),
        ("jit", "default", AHEAD),
        ("jit", "default", AHEAD | {"storage": fbuf.storages.Host()}),
    ],
    ids=str,
)
def way(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[1, 9, 70_000])
def capacity(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def storage() -> Any:
    return fbuf.storages.Host()
