"""Double DQN learns to catch: see `tests/demo/test_catch.py`."""

from pathlib import Path

import pytest

from fbuf.demo import catch

SHORT = catch.Config(iterations=120, points=4)


def test_the_command_trains_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch, "Config", lambda: SHORT)
    assert catch.main(["--storage", "compressed", "--out", str(tmp_path / "curve.png")]) == 0
    out = capsys.readouterr().out
    assert "greedy" in out and "jax, compressed" in out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
