"""The benchmarks' instruments: what they report is what happened, and rows are judged by their targets."""

import json
import sys

import numpy as np
import pytest

from benchmarks import __main__ as runner
from benchmarks import _harness
from benchmarks._harness import Absent, Spread


def test_calls_are_interleaved_in_both_directions():
    calls = []
    timings = _harness.interleave(
        {name: lambda name=name: calls.append(name) for name in "abc"}, rounds=4, warmup=1, calls=2
    )
    assert "".join(calls) == "abc" + "aabbcc" + "ccbbaa" + "aabbcc" + "ccbbaa"
    assert {name: len(seconds) for name, seconds in timings.items()} == dict.fromkeys("abc", 4)
    assert all(s >= 0 for seconds in timings.values() for s in seconds)


def test_ratio_is_paired_by_round():
    # Noise that triples a whole round moves both medians but not the ratio.
    noise = np.array([1.0, 3.0, 1.0, 3.0])
    assert _harness.ratio(list(2 * noise), list(noise)) == Spread(2.0, 2.0, 2.0, "x")
    with pytest.raises(ValueError, match="3 and 2 rounds; expected as many of both"):
        _harness.ratio([1.0] * 3, [1.0] * 2)


def test_spread_is_median_and_quartiles():
    assert _harness.spread([4.0, 0.0, 1.0, 3.0, 2.0], "MB") == Spread(2.0, 1.0, 3.0, "MB")
    assert _harness.geometric_mean([2.0, 0.5, 8.0]) == pytest.approx(2.0)


def test_exponent_is_that_of_the_growth():
    sizes = (10.0, 1e3, 1e5)
    for power in (0.0, 0.5):
        grown = _harness.exponent({n: [3 * n**power, 7 * n**power] for n in sizes})
        assert grown.median == pytest.approx(power, abs=1e-12)


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
def test_measure_memory_counts_what_is_held():
    report = _harness.measure_memory(held, 64)
    assert report["result"] == {"nbytes": 64 << 20}
    for kind in ("rss", "pss", "private", "peak"):
        assert report[kind] == pytest.approx(64 << 20, rel=0.1), kind


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_measure_memory_shows_the_childs_error():
    pytest.raises(RuntimeError, _harness.measure_memory, held, 1, True).match("ArithmeticError: of the child")


def test_a_row_is_judged_by_its_target():
    cases = [
        (1.0, ">= 1.0", True),
        (0.99, ">= 1.0", False),
        (Spread(0.049, 0.0, 0.1, ""), "< 0.05", True),
        (0.05, "< 0.05", False),
        (1.15, "<= 1.15x", True),
        (401, "> 4e2", True),
        (float("nan"), ">= 1.0", False),
        (None, ">= 1.0", None),
        (1.0, None, None),
    ]
    for ratio, target, met in cases:
        assert _harness.row("q", "c", ratio=ratio, target=target)["met"] is met, (ratio, target)
    with pytest.raises(ValueError, match=r"target is 'about 1'; expected a comparison"):
        _harness.row("q", "c", ratio=1.0, target="about 1")


def test_absent_peer_is_reported():
    peer = _harness.load_peer("no_such_library_anywhere")
    assert isinstance(peer, Absent) and "ModuleNotFoundError" in peer.reason
    row = _harness.absent_row("q", "c", peer, target=">= 1.0")
    assert row["met"] is None and row["peer"] == "absent"
    assert "no_such_library_anywhere: ModuleNotFoundError" in _harness.table([row])
    assert _harness.load_peer("json") is json


def test_runner_reports_a_failed_benchmark_and_goes_on(monkeypatch, tmp_path, capsys):
    class Good:
        @staticmethod
        def main(quick):
            assert quick
            return [
                _harness.row("Faster?", "1 row", ours=Spread(1e-3, 9e-4, 2e-3), peer=2.0,
                             ratio=0.5, target=">= 1.0")
            ]  # fmt: skip

    class Bad:
        @staticmethod
        def main(quick):
            raise RuntimeError("boom")

    monkeypatch.setitem(sys.modules, "benchmarks.bench_good", Good)
    monkeypatch.setitem(sys.modules, "benchmarks.bench_bad", Bad)
    monkeypatch.setattr(runner, "names", lambda: ["bad", "good"])
    path = tmp_path / "report.json"
    assert runner.main(["--quick", "--json", str(path)]) == 1
    assert runner.main(["--quick", "--only", "good"]) == 0
    report = json.loads(path.read_text())
    (bad,), (good,) = (report["benchmarks"][name]["rows"] for name in ("bad", "good"))
    assert bad["note"] == "failed: RuntimeError: boom" and good["met"] is False
    assert good["ours"] == {"median": 1e-3, "low": 9e-4, "high": 2e-3, "unit": "s"}
    run = report["benchmarks"]["good"]
    assert run["quick"] and run["complete"] and not report["benchmarks"]["bad"]["complete"]
    assert run["versions"]["jax"] and run["machine"]["cores"] >= 1 and 0 <= run["elsewhere"] <= 1
    assert "1 ms [900 us, 2 ms]" in capsys.readouterr().out
