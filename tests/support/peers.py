"""Shared code of the tests of the benchmarks' peers."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import peers
from benchmarks._harness import Absent
from benchmarks.peers import EXAMPLE, PEERS, Library

LIST = next(library for library in PEERS if library.name == "NumPy list")
NOWHERE = Library("nowhere", "_nowhere", ("no-such-library",), "nothing", 1)


def leaves(batch: Any) -> np.ndarray:
    """`reward` of a batch, whatever it is called in."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        batch = batch[0]
    if hasattr(batch, "reward"):
        return np.ravel(batch.reward)
    if not isinstance(batch, dict):  # torchrl's TensorDict has `data` too, which is itself
        batch = next((getattr(batch, name) for name in ("experience", "data") if hasattr(batch, name)), batch)
    return np.ravel(np.asarray(batch["reward"]))


def check_driver(library: Library, kind: str) -> None:
    """A batch of a library's driver holds rows that were written last."""
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
        batch = (driver.sampler if kind == "Uniform" else driver.stepper)(16)()
        got = leaves(batch)
        assert got.shape == (16,) and set(got.astype(np.float32)) <= set(new["reward"])
