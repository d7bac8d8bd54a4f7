"""A small Ray on the loopback interface, and ways to harm it."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

MEMORY = 80_000_000  # bytes of the object store, nearly the least


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    module = pytest.importorskip("ray", reason="ray has no wheel for this Python")
    context = module.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=MEMORY,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONWARNINGS": "ignore"}},
    )
    try:
        assert context.address_info["node_ip_address"] == "127.0.0.1"
        yield module
    finally:
        module.shutdown()


def kill(service: Any, shard: int = 0) -> None:
    """End the process of a shard, as a broken machine does."""
    os.kill(int(service.stats()[f"shard{shard}/pid"]), signal.SIGKILL)


def until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
