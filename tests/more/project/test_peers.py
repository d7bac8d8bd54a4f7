"""Peers of the benchmarks: what is missing or too large has its row, and drivers return what was written."""

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import peers
from benchmarks._compare import Field
from benchmarks._harness import Absent
from benchmarks.peers import EXAMPLE, FBUF, PEERS, Library
from benchmarks.peers._versions import versions
from tests.support.fixtures import fixed

LIST = next(library for library in PEERS if library.name == "NumPy list")
NOWHERE = Library("nowhere", "_nowhere", ("no-such-library",), "nothing", 1)


def rewards(batch: Any) -> np.ndarray:
    """Return `reward` of a batch of any library."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        batch = batch[0]
    if hasattr(batch, "reward"):
        return np.ravel(batch.reward)
    if not isinstance(batch, dict):  # torchrl's TensorDict has `data` too, which is itself
        batch = next((getattr(batch, name) for name in ("experience", "data") if hasattr(batch, name)), batch)
    return np.ravel(np.asarray(batch["reward"]))


library = fixed(FBUF, LIST)


@pytest.mark.parametrize("kind", ["Uniform", "Prioritized"])
def test_a_driver_returns_what_was_written(library: Library, kind: str) -> None:
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports
        module = peers.load(library)
        if isinstance(module, Absent):
            pytest.skip(module.reason)
        if not hasattr(module, kind):
            pytest.skip("has no priorities")
        driver = getattr(module, kind)(64, EXAMPLE)
        peers.fill(driver, 64)
        new = peers.rows(32, seed=5)
        for _ in range(3):  # over all rows there were
            driver.writer(new)()
        driver.writer({name: leaf[:1] for name, leaf in new.items()})()
        got = rewards((driver.sampler if kind == "Uniform" else driver.stepper)(16)())
        assert got.shape == (16,) and set(got.astype(np.float32)) <= set(new["reward"])


def test_absent_library_is_reported() -> None:
    assert isinstance(peers.load(NOWHERE), Absent)
    field = Field("Uniform", (16, 32), (LIST, NOWHERE))
    report = field.ask("A question", lambda d: d.sampler(4), rounds=2, targets={("nowhere", 16): ">= 2"}, flat="<= 9")
    by = {(r["question"], r["case"]): r for r in report}
    row = by["A question: time of the peer's over ours", "nowhere, 16 rows"]
    assert row["peer"] == "absent" and "No module named" in row["note"] and row["target"] == ">= 2"
    assert by["A question: time of the peer's over ours", "NumPy list, 32 rows"]["ratio"]["median"] > 0
    growth = [r for r in report if "growth exponent" in r["question"]]
    assert [r["case"] for r in growth] == ["fbuf", "NumPy list"] and growth[0]["target"] == "<= 9"
    assert all(r["tags"]["library"] in ("fbuf", "NumPy list", "nowhere") for r in report)


def test_a_library_too_large_to_run_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.too_large(LIST, 10**6) is None
    assert peers.too_large(LIST, 10**7) == "not run: a Python object a row"
    monkeypatch.setattr(peers, "free_bytes", lambda on_device: 10**9)
    assert "about 35.0 GB, and 1.0 GB of the device are free" in peers.too_large(
        dataclasses.replace(FBUF, largest=10**10), 10**9
    )
    small = Library("NumPy list", "_list", ("numpy",), "", 500, 16, "it is a test")
    report = Field("Uniform", (16, 32), (small,)).ask("q", lambda d: d.sampler(4), rounds=2)
    assert [r["note"] for r in report if r["ratio"] is None] == ["not run: it is a test"]


def test_a_library_that_fails_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    module = peers.load(LIST)
    monkeypatch.setattr(module, "Uniform", lambda capacity, example: 1 / 0)
    report = Field("Uniform", (16,), (LIST,)).ask("q", lambda d: d.sampler(4), rounds=2)
    assert report[0]["note"].startswith("failed: ZeroDivisionError") and report[0]["ratio"] is None


def test_versions_are_recorded() -> None:
    assert versions(LIST) == {"numpy": np.__version__}
    assert versions(NOWHERE) == {"no-such-library": None}
