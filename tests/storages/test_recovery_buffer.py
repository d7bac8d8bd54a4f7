"""Buffers with rows in files that were damaged: which rows a resumed state has, and what is said."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._host.codecs import Zstd
from fbuf._host.types import StoreCorrupted
from fbuf.storages import Compressed, Device, Host, Memmap, Ragged
from tests.support.tables import by_tier


@pytest.mark.parametrize(("sync", "times"), [(None, 0), (0, 3), (1000.0, 0)])
def test_writes_wait_for_the_disk_as_often_as_asked(sync: Any, times: int, tmp_path: Path, monkeypatch: Any) -> None:
    buffer = fbuf.Buffer(20, storage=Memmap(str(tmp_path), sync=sync))
    state = buffer.init({"t": 0})
    calls, real = list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(fd) or real(fd))
    for i in range(3):
        state = jax.block_until_ready(buffer.extend(state, {"t": jnp.arange(i, i + 2)}))
    files = len(list(tmp_path.iterdir())) + 2  # the folder, and its head again
    assert len(calls) == times * files
    buffer.flush(state)
    assert len(calls) == (times + 1) * files


def test_what_flush_and_sync_take(tmp_path: Path) -> None:
    for storage in (Device(), Host(), Ragged()):
        buffer = fbuf.Buffer(8, storage=storage)
        buffer.flush(buffer.init({"t": 0}))
    for sync in (-1, float("inf"), float("nan"), "60", True):
        pytest.raises(ValueError, Memmap, sync=sync).match(r"sync is .*; expected seconds >= 0 between waits")
    pytest.raises(ValueError, lambda: Compressed(path=str(tmp_path), sync=-1)).match("Compressed: sync is -1")


def rows_of(first: int, count: int) -> dict[str, Any]:
    t = np.arange(first, first + count, dtype=np.int32)
    return {"t": t, "obs": np.repeat((t % 251).astype(np.uint8)[:, None], 1024, 1)}


EXAMPLE = {"t": np.int32(0), "obs": np.zeros(1024, np.uint8)}
STORAGES = {"memmap": Memmap, "files": lambda path, **kw: Compressed(path=path, codec=Zstd(chunk=4), **kw)}


def damaged(path: Path, rows: int, first: int, count: int, storage: Any = Memmap, **settings: Any) -> fbuf.Buffer:
    """Return a buffer whose store holds `rows`, `count` of them from `first` on with a byte flipped."""
    buffer = fbuf.Buffer(storage=storage(str(path)), **settings)
    jax.block_until_ready(buffer.extend(buffer.init(EXAMPLE), rows_of(0, rows)))
    text = np.memmap(path / "column1.rows", np.uint8, "r+")
    text[4 * first : 4 * (first + count) : 4] ^= 64
    return buffer


def resumed_silently(buffer: fbuf.Buffer, rows: int) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = buffer.resume(EXAMPLE)
    return np.asarray(buffer.rows(state).data["t"])[:rows].tolist()


@pytest.mark.parametrize("storage", by_tier("memmap", more=STORAGES))
def test_a_state_goes_on_with_the_rows_that_are_whole(storage: str, tmp_path: Path) -> None:
    buffer = damaged(tmp_path, 60, 50, 2, STORAGES[storage], capacity=100, sampler=fbuf.samplers.Prioritized())
    last = 50 if storage == "memmap" else 48  # between two chunks
    with pytest.warns(RuntimeWarning, match=rf"Buffer.resume: {60 - last} rows and 0 row updates .*fbuf.load\(path\)"):
        state = buffer.resume(EXAMPLE)
    assert np.asarray(buffer.rows(state).data["t"])[:last].tolist() == list(range(last))
    assert int(buffer.size(state)) == last
    state = buffer.extend(state, rows_of(last, 30))
    state, batch = buffer.sample(state, jax.random.key(0), 64)
    assert batch.mask.all() and (batch.data["obs"][:, 0] == batch.data["t"] % 251).all()
    del state
    assert resumed_silently(buffer, last + 30) == list(range(last + 30))


@pytest.mark.more
def test_the_older_rows_go_where_those_after_the_damage_are_more(tmp_path: Path) -> None:
    buffer = damaged(tmp_path, 30, 9, 1, capacity=40, view=fbuf.views.Sequence(3, episode_end=()))
    with pytest.warns(RuntimeWarning, match="10 rows and 0 row updates"):
        state = buffer.resume(EXAMPLE)
    for _ in range(2):
        held = buffer.rows(state)
        assert np.asarray(held.data["t"])[np.asarray(held.mask)].tolist() == list(range(10, 30))
        batch = buffer.peek(state, jax.random.key(1), 64)
        assert int(batch.data["t"].min()) >= 10
        state = None  # lets go of the folder
        state = buffer.resume(EXAMPLE, verify="lazy")  # which rows are there is known


@pytest.mark.more
def test_most_flushed_rows_stay_where_a_late_one_is_damaged(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(40, storage=Memmap(str(tmp_path)))
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 20))
    buffer.flush(state)
    state = jax.block_until_ready(buffer.extend(state, rows_of(20, 9)))
    del state
    text = np.memmap(tmp_path / "column1.rows", np.uint8, "r+")
    text[[4 * 12, 4 * 17]] ^= 64
    with pytest.warns(RuntimeWarning, match="17 rows .* its longest valid run, of flushed rows if there are any"):
        state = buffer.resume(EXAMPLE)
    held = buffer.rows(state)
    assert np.asarray(held.data["t"])[np.asarray(held.mask)].tolist() == list(range(12))


@pytest.mark.more
def test_lazily_each_row_is_looked_at_when_it_is_read(tmp_path: Path) -> None:
    buffer = damaged(tmp_path, 60, 50, 1, capacity=100)
    state = buffer.resume(EXAMPLE, verify="lazy")
    assert np.asarray(buffer.get(state, jnp.arange(50)).data["t"]).tolist() == list(range(50))
    with pytest.raises(Exception, match="1 rows have other checksums than they were stored with"):
        jax.block_until_ready(buffer.get(state, jnp.arange(48, 52)))
    state = buffer.extend(state, rows_of(60, 41))
    assert int(buffer.rows(state, last=1).data["t"][0]) == 100
    assert np.asarray(buffer.get(state, jnp.arange(60, 100)).data["t"]).tolist() == list(range(60, 100))
    with pytest.raises(ValueError, match='verify is "some"|verify is \'some\'; expected "full" or "lazy"'):
        buffer.resume(EXAMPLE, verify="some")


def test_changes_that_are_lost_are_told(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(20, storage=Memmap(str(tmp_path)))
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 10))
    for row in (3, 4):
        index = jax.tree.map(lambda x: x[row : row + 1], buffer.rows(state).index)  # noqa: B023
        state = jax.block_until_ready(buffer.update_rows(state, index, {"t": jnp.array([-row], jnp.int32)}))
    del state
    text = (tmp_path / "changes").read_bytes()
    (tmp_path / "changes").write_bytes(text[: len(text) * 2 // 3])
    with pytest.raises(StoreCorrupted, match='the last 1 changed rows.*go on without these.*verify="full"'):
        buffer.resume(EXAMPLE, verify="lazy")
    with pytest.warns(RuntimeWarning, match="0 rows and 1 row updates"):
        state = buffer.resume(EXAMPLE)
    assert np.asarray(buffer.rows(state).data["t"])[:6].tolist() == [0, 1, 2, -3, 4, 5]
    del state
    assert resumed_silently(buffer, 6) == [0, 1, 2, -3, 4, 5]


def test_nothing_whole_is_an_error_and_leaves_the_files_alone(tmp_path: Path) -> None:
    buffer = damaged(tmp_path, 5, 0, 5, capacity=20)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "lock"}
    pytest.raises(StoreCorrupted, buffer.resume, EXAMPLE).match(r"no row at .* is intact. Load the last")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "lock"} == before
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert len(manifest["id"]) == 16 and manifest["version"] == 3
