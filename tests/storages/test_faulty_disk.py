"""Live stores on disks that fail after rows were written, and files that lose their ends while a store is open."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf._host.codecs import Zstd
from fbuf._host.io.directory import Folder
from fbuf._host.io.file import File
from fbuf._host.memory.file_arena import FileArena
from fbuf._host.store import row_updates
from fbuf.storages import Compressed, Memmap
from tests.support.tables import by_tier

EXAMPLE = {"t": np.int32(0), "obs": np.zeros(700, np.uint8)}


def rows_of(first: int, count: int, noise: int = 700) -> dict[str, Any]:
    t = np.arange(first, first + count, dtype=np.int32)
    obs = np.zeros((count, 700), np.uint8)
    obs[:, :noise] = np.random.default_rng(first).integers(1, 256, (count, noise), np.uint8)
    return {"t": t, "obs": obs}


def held(buffer: fbuf.Buffer, state: Any) -> list[int]:
    rows = buffer.rows(state)
    return np.asarray(rows.data["t"])[np.asarray(rows.mask)].tolist()


@pytest.fixture
def resumed(tmp_path: Path) -> Iterator[Any]:
    """Return a function that closes every store and resumes one."""

    def resume(buffer: fbuf.Buffer) -> Any:
        for store in fbuf.stores():
            store.close()
        return buffer.resume(EXAMPLE)

    yield resume
    for store in fbuf.stores():
        store.close()


@pytest.mark.parametrize("kind", by_tier("memmap", more=["incompressible"]))
def test_a_file_that_was_cut_short_is_neither_saved_nor_made_whole_by_later_writes(kind, tmp_path):
    path = str(tmp_path / "rows")
    storage = Memmap(path) if kind == "memmap" else Compressed(path=path, keys=("obs", "t"), codec=Zstd(chunk=4))
    replay = fbuf.Replay(fbuf.Buffer(1000, storage=storage), EXAMPLE)
    replay.extend(rows_of(0, 1000))
    assert len(replay) == 1000
    for file in Path(path).glob("*.rows"):
        os.truncate(file, os.path.getsize(file) // 4)
    for wait in (True, False):
        with pytest.raises(fbuf.StoreCorrupted, match=r"rows has .* bytes; expected .*: it was cut short"):
            saving = replay.save(tmp_path / "saved", wait=wait)
            saving.result()
    for first in (1000, 1200):  # the last place of the ring is among these
        with pytest.raises(fbuf.StoreCorrupted, match=r"it was cut short .*200 rows were not written"):
            replay.extend(rows_of(first, 200))
    pytest.raises(fbuf.StoreCorrupted, replay.sample, 8).match("it was cut short")
    assert len(replay) == 1000


@pytest.mark.more
def test_the_state_of_an_eager_write_to_a_file_that_was_cut_short_is_whole(tmp_path):
    buffer = fbuf.Buffer(100, storage=Memmap(str(tmp_path / "rows")))
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 100))
    os.truncate(tmp_path / "rows/column0.rows", 100)
    with pytest.raises(fbuf.StoreCorrupted, match="it was cut short") as raised:
        buffer.extend(state, rows_of(100, 3))
    assert int(buffer.size(raised.value.result)) == 100


@pytest.mark.more
def test_sums_that_were_cut_short_are_damage(tmp_path, resumed):
    buffer = fbuf.Buffer(500, storage=Memmap(str(tmp_path / "rows")))
    buffer.extend(buffer.init(EXAMPLE), rows_of(0, 500))
    for store in fbuf.stores():
        store.close()
    state = buffer.resume(EXAMPLE, verify="lazy")
    for name in ("column0.sums", "column1.sums"):
        os.truncate(tmp_path / "rows" / name, 800)
    for read in (
        buffer.rows,
        lambda s: buffer.sample(s, jax.random.key(0), 64),
        lambda s: fbuf.save(tmp_path / "s", buffer, s),
    ):
        pytest.raises(fbuf.StoreCorrupted, read, state).match("rows have other checksums than they were stored with")


@pytest.mark.more
def test_what_fails_once_rows_count_is_not_an_error_of_their_write(tmp_path, monkeypatch, resumed):
    """The files of a column that is now stored raw cannot be listed."""
    buffer = fbuf.Buffer(4000, storage=Compressed(path=str(tmp_path / "rows"), keys=("obs", "t"), codec=Zstd(chunk=4)))
    replay, real, failures = fbuf.Replay(buffer, EXAMPLE), Folder.files, []

    def files(folder, prefix):
        if prefix.endswith("."):
            failures.append(prefix)
            raise OSError(errno.EIO, "injected")
        return real(folder, prefix)

    monkeypatch.setattr(Folder, "files", files)
    for first in range(0, 4000, 200):
        replay.extend(rows_of(first, 200))
    assert failures and held(buffer, replay.state) == list(range(4000))
    monkeypatch.undo()
    assert held(buffer, resumed(buffer)) == list(range(4000))
    assert not [*(tmp_path / "rows").glob(f"{failures[0]}segment-*")]


def test_a_segment_that_cannot_be_closed_is_written_again_by_the_next_flush(tmp_path, monkeypatch, resumed):
    monkeypatch.setattr(FileArena, "small", 8192)
    buffer = fbuf.Buffer(400, storage=Compressed(path=str(tmp_path / "rows"), keys=("obs", "t"), codec=Zstd(chunk=4)))
    replay, close, unclosed = fbuf.Replay(buffer, EXAMPLE), File._close, []

    def failing(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if "segment" in path and len(unclosed) < 2:
            unclosed.append(os.path.basename(path))
            raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(File, "_close", staticmethod(failing))
    for first in range(0, 400, 8):
        replay.extend(rows_of(first, 8, noise=80))
    monkeypatch.undo()
    assert unclosed and held(buffer, replay.state) == list(range(400))
    written = calls_of(monkeypatch, "pwrite")
    buffer.flush(replay.state)
    assert set(unclosed) <= set(written)
    assert held(buffer, resumed(buffer)) == list(range(400))


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Record the names of files that a function of `os` is called with."""
    real, files = getattr(os, name), list[str]()

    def call(fd, *args):
        files.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        return real(fd, *args)

    monkeypatch.setattr(os, name, call)
    return files


def test_a_file_whose_sync_failed_is_written_again_before_the_next(tmp_path, monkeypatch, resumed):
    """The system may drop what it could not write, and then says that all is on the disk."""
    buffer = fbuf.Buffer(100, storage=Memmap(str(tmp_path / "rows")))
    state, real, failed = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 50)), os.fsync, []
    jax.block_until_ready(state)

    def fsync(fd):
        if not failed and os.readlink(f"/proc/self/fd/{fd}").endswith("column0.rows"):
            failed.append(fd)
            raise OSError(errno.EIO, "injected")
        return real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        pytest.raises(OSError, buffer.flush, state).match("cannot flush .*column0.rows")
    before = (tmp_path / "rows/column0.rows").read_bytes()
    written = calls_of(monkeypatch, "pwrite")
    buffer.flush(state)
    assert "column0.rows" in written
    written.clear()
    buffer.flush(state)
    assert written == ["head"] and (tmp_path / "rows/column0.rows").read_bytes() == before
    monkeypatch.undo()
    assert held(buffer, resumed(buffer)) == list(range(50))


@pytest.mark.more
def test_a_log_of_row_updates_that_was_rewritten_is_the_one_that_is_written(tmp_path, monkeypatch, resumed):
    """It is not opened again, which may fail: updates would go to a file that has no name."""
    monkeypatch.setattr(row_updates, "_LEAST", 4096)
    example = {"t": np.int32(0), "obs": np.zeros(20_000, np.uint8)}
    buffer = fbuf.Buffer(8, storage=Memmap(str(tmp_path / "rows")))
    state = buffer.extend(
        buffer.init(example), {"t": np.arange(8, dtype=np.int32), "obs": np.zeros((8, 20_000), np.uint8)}
    )
    opened, rewritten = os.open, 0

    def opening(path, flags, *args):
        nonlocal rewritten
        if str(path).endswith("/changes"):
            raise OSError(errno.EMFILE, "injected")
        rewritten += str(path).endswith("/changes.new")
        if rewritten > 1:
            raise OSError(errno.ENOSPC, "injected")
        return opened(path, flags, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opening)
        for i in range(600):
            obs = np.full((1, 20_000), i % 251, np.uint8)
            state = buffer.update_rows(state, buffer.rows(state, last=1).index, {"obs": obs})
            jax.block_until_ready(state)
            if rewritten > 1:
                break
    assert rewritten > 1
    buffer.flush(state)
    [store.close() for store in fbuf.stores()]
    state = buffer.resume(example)
    assert np.array_equal(buffer.rows(state, last=1).data["obs"], obs)
