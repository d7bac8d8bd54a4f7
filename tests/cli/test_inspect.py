"""`fbuf inspect` and `fbuf verify` of checkpoints, and progress."""

from unittest import mock

import pytest

from fbuf.__main__ import main
from fbuf._formats import checkpoint
from tests.support.disk import flip
from tests.support.memory_disk import PATH, disk_of, save, sources


def test_an_error_in_progress_ends_the_save_and_leaves_nothing():
    disk, stop = disk_of(1), mock.Mock(side_effect=[None, KeyboardInterrupt])
    before = disk.contents()
    pytest.raises(KeyboardInterrupt, save, PATH, 2, disk, progress=stop)
    assert disk.contents() == before


def test_inspect_and_verify(tmp_path, capsys):
    def run(*arguments):
        return main(arguments), *capsys.readouterr()

    path = str(tmp_path / "c")
    assert run("inspect", path)[0] == run("verify", path)[0] == 1
    assert "no checkpoint at" in run("verify", path)[2]
    save(path, 1)
    meta = {"k": 2, "buffer": "Buffer(capacity=9)", "long": ["x" * 1000], "\x1b[2J": "\x1b[2J"}
    checkpoint.write(path, sources(2), meta)
    (tmp_path / "c" / "notes").touch()
    status, out, _ = run("inspect", path)
    assert status == 0 and "\x1b" not in out
    said = "generation 2: 5 arrays|generation 1:|buffer: Buffer(capacity=9)|... (1004 characters)|not looked at: notes"
    for text in (said + "|table|float32|[40, 5]|data-000000000001.safetensors|%").split("|"):
        assert text in out
    assert run("verify", path) == (0, "whole\n", "")
    flip(tmp_path / "c" / "data-000000000002.safetensors", -1, -60)
    status, out, _ = run("verify", path)
    assert status == 1 and out.count("damaged: generation 2: ") == 2 and "array 'step'" in out and "2 damaged" in out
    (tmp_path / "c" / "manifest-000000000002.json").write_text("{}")
    assert "manifest-000000000002.json is damaged" in run("inspect", path)[1]
    assert run("verify", path)[0] == 1
    (tmp_path / "c" / "manifest-000000000001.json").write_text("{}")
    assert run("inspect", path)[0] == 1
