"""Further cases of the benchmarks: see `tests/more/project/test_benchmarks.py`."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import bench_deduplicated, bench_sample
from tests.support.benchmarks import deduplicated, made_up, noise, written


def test_deduplicated_grows_until_all_rows_fit() -> None:
    buffer, state, grown = written(deduplicated(blocks=2048), noise(64))
    assert grown > 0 and buffer.storage.blocks == 2048 * 3**grown // 2**grown
    assert int(buffer.stats(state)["blocks"]) == 64 * 84  # blocks of 7 x 12, no two alike
    bench_deduplicated.check_frames(buffer, state, noise(64))
    with pytest.raises(AssertionError, match="rows 0 to 63 are not those"):
        bench_deduplicated.check_frames(buffer, state, noise(64)[::-1])


def test_load_when_the_first_row_is_refused() -> None:
    frames = noise(64)
    size = bench_deduplicated.Size(deduplicated(block=(12, 12)), 1, 1, blocks=64 * 49, load=0.5, grown=0)
    assert bench_deduplicated.load_when_refused(frames, size, lot=4) == (pytest.approx(1, abs=0.02), None)
    half = dataclasses.replace(size, blocks=size.blocks // 2)
    load, first = bench_deduplicated.load_when_refused(frames, half, lot=4)
    assert first == 32 and load == pytest.approx(1, abs=0.02)
    double = dataclasses.replace(size, blocks=2 * size.blocks)
    assert bench_deduplicated.load_when_refused(frames, double, lot=4) == (pytest.approx(0.5, abs=0.01), None)


def test_deduplicated_notices_other_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [made_up(250, seed=seed)[0] for seed in range(2)]
    real = bench_sample.bare
    monkeypatch.setattr(bench_sample, "bare", lambda a, b, slots: real(a, b, [(s + 1) % a.shape[0] for s in slots]))
    with pytest.raises(AssertionError, match="reads other frames"):
        bench_deduplicated.measure_read("two", parts, deduplicated(), rounds=2, batch_size=8)
