"""Minari data sets that are missing or invalid, and the segments of an episode list; the package is not needed."""

from pathlib import Path

import pytest

import fbuf
from fbuf.datasets import _minari


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    for name in ("a/../../b", "a//b", "a\\b"):
        with pytest.raises(ValueError, match="has an invalid name|expected a name"):
            fbuf.datasets.minari(name, root=tmp_path, source=tmp_path)


def test_missing_data_sets_are_named(tmp_path: Path) -> None:
    where = {"root": tmp_path / "ours", "source": tmp_path / "minari"}
    pytest.raises(FileNotFoundError, fbuf.datasets.minari, "D4RL/door/human-v2", **where).match("Pass download=True")
    with pytest.raises(FileNotFoundError, match="expected data/metadata.json"):
        fbuf.datasets.minari(tmp_path / "nothing", root=tmp_path / "ours")
    with pytest.raises(ValueError, match="download is \"yes\"|download is 'yes'"):
        fbuf.datasets.minari("D4RL/door/human-v2", download="yes", **where)
    assert list(tmp_path.iterdir()) == []


def test_segments_hold_whole_episodes() -> None:
    runs = _minari._whole_episodes([5, 1, 7, 2, 6], 6)
    assert [list(run) for run in runs] == [[0, 1], [2], [3, 4]]
    assert [list(run) for run in _minari._whole_episodes([5, 1, 7, 2], 6)] == [[0, 1], [2], [3]]
