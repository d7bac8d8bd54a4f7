"""Checkpoints that the first release of each version of the format wrote are loaded, and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf import _files
from tests.checkpointing import same
from tests.golden import buffers as make

FOLDER = Path(__file__).parent / "golden" / "buffers-v1"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("device", "compressed") else pytest.mark.slow) for n in make.BUFFERS],
)
def test_version_1(name: str) -> None:
    buffer, state, extra = fbuf.load(FOLDER / name, extra=True)
    assert buffer == make.BUFFERS[name]
    assert extra["step"] == 7 and int(jax.random.bits(extra["key"])) == int(jax.random.bits(jax.random.key(3)))
    held = buffer.rows(state)
    assert np.asarray(held.mask).all()
    want = make.rows(make.STEPS - 8, 8)
    same({n: held.data[n] for n in want}, want)
    for i in range(3):
        state, batch = buffer.sample(state, jax.random.key(i), 4)
        assert np.asarray(batch.mask).any()
    state = buffer.extend(state, make.rows(make.STEPS, 3))
    same(buffer.last(state, 8).data["obs"], make.rows(make.STEPS - 5, 8)["obs"])


def test_version_1_of_a_replay() -> None:
    replay = fbuf.Replay.load(FOLDER / "replay")
    assert len(replay) == 16 and replay.sample(4).mask.all()
    same(replay.last(8).data["obs"], make.rows(make.STEPS - 8, 8)["obs"])
    _, key = jax.random.split(jax.random.key(5))  # its seed
    again = fbuf.Replay.load(FOLDER / "replay")
    same(again.sample(4).data, replay.buffer.peek(again.state, key, 4).data)


def changed(tmp_path: Path, name: str, **fields: Any) -> Path:
    """A copy of a golden checkpoint whose sampler has other fields."""
    with _files.read(str(FOLDER / name)) as saved:
        arrays, meta = {n: np.asarray(a) for n, a in saved.arrays.items()}, saved.meta
    meta["buffer"]["sampler"] |= fields
    path = tmp_path / "-".join((name, *fields))
    _files.write(str(path), arrays, meta)
    return path


def test_settings_that_were_removed_are_ignored_where_they_did_nothing(tmp_path: Path) -> None:
    for name in ("device", "ranked"):
        path = changed(tmp_path, name, spread=0, rho=0.9)
        assert fbuf.load(path)[0] == fbuf.load(path, make.BUFFERS[name])[0] == make.BUFFERS[name]


def test_settings_that_were_removed_and_in_use_are_named(tmp_path: Path) -> None:
    cases: list[tuple[str, str, Any]] = [
        ("device", "decay", 0.9),
        ("device", "keep", 0.0),
        ("device", "spread", 2),
        ("ranked", "spread", 2),
    ]
    for name, field, value in cases:
        path = changed(tmp_path, name, **{field: value})
        kind = type(make.BUFFERS[name].sampler).__name__
        for buffer in (None, make.BUFFERS[name]):
            with pytest.raises(
                fbuf.VersionError, match=rf"saved with {kind}\({field}={value}\), but {field} was removed"
            ):
                fbuf.load(path, buffer)


def test_they_are_small_and_all_there() -> None:
    folders = {path.name for path in FOLDER.iterdir()}
    assert folders == {*make.BUFFERS, "replay"}
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) < 300_000
