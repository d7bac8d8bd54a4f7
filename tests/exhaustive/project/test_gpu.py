"""`python -m benchmarks --gpu` runs to its end on a CPU, at small sizes."""

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks import bench_gpu


def test_every_section_runs(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert runner.main(["--gpu", "--quick", "--json", str(path)]) == 0
    assert list(json.loads(path.read_text())["benchmarks"]) == sorted(f"gpu: {name}" for name in bench_gpu.SECTIONS)


def test_no_section_starts_after_the_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_gpu, "LIMIT", -1)
    assert runner.main(["--gpu", "--quick"]) == 1
    assert capsys.readouterr().out.count("not run") == len(bench_gpu.SECTIONS)
