"""The benchmarks count what they say, and drivers of all libraries return what was written. No time is judged."""

import sys
import warnings

import jax
import numpy as np
import pytest

import fbuf
from benchmarks import _harness, bench_gpu, hops, peers
from benchmarks._harness import Absent
from benchmarks.peers import EXAMPLE, FBUF, PEERS
from fbuf._bridge import callbacks
from tests.support.refusals import raises
from tests.support.tables import one_of


@pytest.mark.parametrize("section", ["torch", "deduplicated"])
def test_accelerator_sections_run_on_a_cpu(section):
    rows = bench_gpu.SECTIONS[section](True)
    assert rows and all(row["ratio"] is not None and row["met"] is not False for row in rows)


def test_compressed_sample_goes_through_few_files():
    real = callbacks.call
    traced, warm = hops.compressed_sample(hops.Counter())
    assert callbacks.call is real
    for counted in (traced, warm):
        assert "_host/codecs.py" in counted.files, "what callbacks run is not counted"
    assert len(traced.files) <= 25 and traced.moves <= 120
    assert len(warm.files) <= 20 and warm.moves <= 45


def test_device_extend_goes_through_few_files():
    traced, warm = hops.device_extend(hops.Counter())
    assert "storages/_device.py" in traced.files
    assert len(traced.files) <= 16 and len(warm.files) <= 6
    assert fbuf.stores() == []


LIST = next(library for library in PEERS if library.name == "NumPy list")


def rewards(batch):
    """Return `reward` of a batch of any library."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        batch = batch[0]
    if hasattr(batch, "reward"):
        return np.ravel(batch.reward)
    if not isinstance(batch, dict):  # torchrl's TensorDict has `data` too, which is itself
        batch = next((getattr(batch, name) for name in ("experience", "data") if hasattr(batch, name)), batch)
    return np.ravel(np.asarray(batch["reward"]))


library = one_of(FBUF, LIST)


@pytest.mark.parametrize("kind", ["Uniform", "Prioritized"])
def test_a_driver_returns_what_was_written(library, kind):
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


def held(mebibytes, fail=False):
    waste = np.ones(mebibytes << 20, np.uint8)  # freed before the baseline
    del waste
    yield
    if fail:
        raise ArithmeticError("of the child")
    array = np.ones(mebibytes << 20, np.uint8)
    print("noise on standard output")
    yield {"nbytes": array.nbytes}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_measure_memory_counts_what_is_held_or_shows_the_childs_error():
    report = _harness.measure_memory(held, 64)
    assert report["result"] == {"nbytes": 64 << 20}
    for kind in ("rss", "pss", "private", "peak"):
        assert report[kind] == pytest.approx(64 << 20, rel=0.1), kind
    raises(RuntimeError, "ArithmeticError: of the child", _harness.measure_memory, held, 1, True)
