"""What every test stands on: strict JAX, a fixed share of the slow tests, stores freed after each.

An eightieth of the slow tests (those marked so, and those listed in slow.txt) runs by default, chosen by a hash of the
test's id, so that the same ones run on every machine and in every process of pytest-xdist; sharing by file or by time was
rejected because a new test would then move others in or out. `FBUF_EXHAUSTIVE=1` or `--slow all` runs all of them; a slow
test named on the command line always runs.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

MAPS, MOST_MAPS = Path("/proc/self/maps"), 20_000
_TESTS = itertools.count()
SLOW_SHARE = 80  # one slow test in this many runs by default
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())

# A silent broadcast between ranks has hidden more than one bug in replay code: [B] against [B, 1].
jax.config.update("jax_numpy_rank_promotion", "raise")

# A JIT compilation inside an example may take seconds and says nothing about the property: no
# deadline.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("default", deadline=None, max_examples=30, derandomize=True, suppress_health_check=_QUIET)
settings.register_profile("exhaustive", deadline=None, max_examples=300, print_blob=True, suppress_health_check=_QUIET)


def _exhaustive() -> bool:
    return os.environ.get("FBUF_EXHAUSTIVE", "") not in ("", "0")


settings.load_profile("exhaustive" if _exhaustive() else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        choices=("none", "share", "all"),
        default="all" if _exhaustive() else "share",
        help=f"which tests marked slow run: none, a fixed 1/{SLOW_SHARE} (default), or all",
    )


def pytest_report_header(config: pytest.Config) -> str:
    share = {"none": "none", "share": f"a fixed 1/{SLOW_SHARE}", "all": "all"}
    return f"slow tests: {share[config.getoption('--slow')]} (all: FBUF_EXHAUSTIVE=1)"


def runs(nodeid: str, slow: str) -> bool:
    """Whether the slow test `nodeid` runs under `--slow slow`; the same on every machine."""
    if slow == "share":
        return zlib.crc32(nodeid.encode()) % SLOW_SHARE == 0
    return slow == "all"


def _named(item: pytest.Item) -> bool:
    """Whether the command line asks for this very test (`file.py::test`), not just its file."""
    config = item.config
    ids = [os.path.relpath(a, config.rootpath) for a in config.args if "::" in a]
    return any(item.nodeid == i or item.nodeid.startswith((i + "[", i + "::")) for i in ids)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = config.getoption("--slow")
    kept, dropped = [], []
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker("slow")
        wanted = item.get_closest_marker("slow") is None or _named(item) or runs(item.nodeid, slow)
        (kept if wanted else dropped).append(item)
    if dropped:
        items[:] = kept
        config.hook.pytest_deselected(items=dropped)


def pytest_runtest_teardown() -> None:
    """Lets go of compiled programs before there are too many: each takes memory maps, and XLA aborts when the system's
    65,530 are used up."""
    if next(_TESTS) % 20 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.unfreeze()  # what the caches held may be garbage now


def pytest_sessionfinish() -> None:
    """Removes the folders of storages that stand in tables (`tests.disk.somewhere`)."""
    disk = sys.modules.get("tests.disk")
    if disk is not None:
        shutil.rmtree(disk.FOLDER, ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # What was there before is not looked at again by every collection: compiled programs and what JAX remembers of them soon
    # are so much that collecting would take most of the time.
    gc.collect()
    gc.freeze()
    # Asked here and not at collection: it starts a backend, which collecting must not do.
    if item.get_closest_marker("gpu") and jax.default_backend() == "cpu":
        pytest.skip("needs an accelerator")


@pytest.fixture(autouse=True)
def free_stores() -> Iterator[None]:
    """Closes the host stores that a test opened and left, so that tests cannot run out of memory.

    Stores opened by fixtures of a wider scope were there before and stay open.
    """
    before = {store.id for store in _stores()}
    yield
    for store in _stores():
        if store.id not in before:
            store.close()


def _stores() -> tuple:
    # Looked up, not imported: a test that never touches fbuf should not pay for (or depend on) it.
    stores = getattr(sys.modules.get("fbuf"), "stores", None)
    return tuple(stores()) if stores is not None else ()
