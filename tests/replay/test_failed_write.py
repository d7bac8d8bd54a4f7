"""Test what a `Replay` raises, and how it goes on, where the disk of its storage is full."""

import errno
import os

import numpy as np
import pytest

import fbuf
from fbuf._host.store.reads import TicketReads
from fbuf._host.types import records_errors
from tests.support.refusals import raises

EXAMPLE = {"obs": np.zeros(64, np.uint8), "t": np.int32(0)}


def rows_of(first, count):
    rng = np.random.default_rng(first)
    return {"obs": rng.integers(0, 255, (count, 64), np.uint8), "t": np.arange(first, first + count, dtype=np.int32)}


@pytest.mark.parametrize("storage", ["memmap", "files"])
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_full_disk_is_an_os_error_and_the_rows_can_be_resumed(storage, prioritized, tmp_path, monkeypatch):
    path = str(tmp_path / "store")
    kept = fbuf.storages.Memmap(path) if storage == "memmap" else fbuf.storages.Compressed(path=path, keys=("obs", "t"))
    buffer = (fbuf.prioritized if prioritized else fbuf.uniform)(100, storage=kept)
    replay = fbuf.Replay(buffer, EXAMPLE)
    replay.extend(rows_of(0, 20))
    real = os.pwrite
    with monkeypatch.context() as full:

        def fail(fd, data, at):
            raise OSError(errno.ENOSPC, "injected")

        full.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="No space left on device") as caught:
            replay.extend(rows_of(20, 20))
    assert os.pwrite is real and caught.value.errno == errno.ENOSPC
    text = str(caught.value)
    assert "Replay: a write failed" in text[:40] and "Traceback" not in text and len(text) < 600
    assert caught.value.__suppress_context__ and "Replay(buffer, example, resume=True)" in text
    raises(RuntimeError, "after a failed write", replay.sample, 4)
    again = fbuf.Replay(buffer, EXAMPLE, resume=True)  # `replay` is still referenced
    again.extend(rows_of(20, 20))
    assert len(again) == 40
    assert np.asarray(buffer.rows(again.state).data["t"])[:40].tolist() == list(range(40))
    assert len(again.sample(8).data["t"]) == 8


def test_a_file_that_cannot_be_read_is_an_os_error(monkeypatch):
    replay = fbuf.Replay(fbuf.uniform(100, storage=fbuf.storages.Host()), EXAMPLE)
    replay.extend(rows_of(0, 20))

    @records_errors
    def fail(self, *_):
        raise OSError(errno.EIO, "cannot read column0.rows: Input/output error.")

    with monkeypatch.context() as broken:
        broken.setattr(TicketReads, "read", fail)
        with pytest.raises(OSError, match="cannot read column0.rows") as caught:
            replay.sample(4)
    assert caught.value.errno == errno.EIO and "Traceback" not in str(caught.value)
    assert len(replay.sample(4).data["t"]) == 4 and len(replay) == 20
