"""Further cases of benchmarks, which take long: see `tests/more/project/test_benchmarks.py`."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fbuf
from benchmarks import bench_compression, bench_deduplicated
from benchmarks._harness import table
from tests.more.project.test_benchmarks import ABSENT, distinct, played  # noqa: F401


@pytest.mark.usefixtures("played")
def test_compression_without_torchrl() -> None:
    report = bench_compression.compare(("Pong", "Qbert"), 900, 2, ABSENT, judged=True)
    assert [r["case"] for r in report[:3]] == ["Pong", "Qbert", "geometric mean"]
    assert report[2]["target"] == ">= 400" and report[2]["met"] is not None
    assert report[0]["ratio"] == pytest.approx(900 * 8 * 7056 / report[0]["ours"])
    assert sum(r["peer"] == "absent" for r in report) == 5
    assert "left out by the test" in table(report)


@pytest.mark.usefixtures("played")
def test_deduplicated_sizes_are_those_of_the_buffer() -> None:
    frames = {game: bench_deduplicated._atari.frames(game, 900)[0] for game in ("Pong", "Enduro")}
    sizes = {game: bench_deduplicated.size_of(x, 300) for game, x in frames.items()}
    for game, size in sizes.items():
        assert size.blocks == distinct(frames[game], size.storage.block)
        assert size.load == pytest.approx(size.blocks / (size.storage.blocks - 1))
        state = jax.eval_shape(fbuf.uniform(900, storage=size.storage).init, {"obs": np.zeros((84, 84), np.uint8)})
        assert size.nbytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        assert size.ratio == pytest.approx(900 * 8 * 7056 / size.nbytes)
    report = bench_deduplicated.report_sizes(sizes, judged=True)
    assert [r["case"] for r in report[:3]] == ["Pong", "Enduro", "geometric mean of 2"]
    pong, enduro = (size.ratio for size in sizes.values())
    assert report[2]["ratio"] == pytest.approx((pong * enduro) ** 0.5) and report[2]["target"] == ">= 100"
    assert report[3]["ratio"] == min(pong, enduro) and report[3]["target"] == ">= 25"
    assert report[4]["ratio"] == pytest.approx(pong) and report[4]["target"] == ">= 120"  # the one of issue A's
    assert not any(r["target"] for r in bench_deduplicated.report_sizes(sizes, judged=False))
