"""`fbuf inspect` and `fbuf verify` of checkpoints, and progress."""

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest

from fbuf.__main__ import main
from fbuf._formats import checkpoint
from tests.support.memory_disk import PATH, disk_of, save, sources


def test_an_error_in_progress_ends_the_save_and_leaves_nothing():
    disk = disk_of(1)
    before = disk.contents()

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, save, PATH, 2, disk, progress=stop)
    assert disk.contents() == before


def run(*arguments):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def test_inspect_and_verify(tmp_path):
    path = str(tmp_path / "c")
    assert run("inspect", path)[0] == run("verify", path)[0] == 1
    assert "no checkpoint at" in run("verify", path)[2]
    save(path, 1)
    checkpoint.write(
        path, sources(2), {"k": 2, "buffer": "Buffer(capacity=9)", "long": ["x" * 1000], "\x1b[2J": "\x1b[2J"}
    )
    (tmp_path / "c" / "notes").touch()
    status, out, _ = run("inspect", path)
    assert status == 0 and "\x1b" not in out
    for text in ("generation 2: 5 arrays", "generation 1:", "buffer: Buffer(capacity=9)", "... (1004 characters)"):
        assert text in out
    for text in ("table", "float32", "[40, 5]", "data-000000000001.safetensors", "%", "not looked at: notes"):
        assert text in out
    assert run("verify", path) == (0, "whole\n", "")
    file = tmp_path / "c" / "data-000000000002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    data[-60] ^= 1
    file.write_bytes(data)
    status, out, _ = run("verify", path)
    assert status == 1 and out.count("damaged: generation 2: ") == 2 and "array 'step'" in out and "2 damaged" in out
    (tmp_path / "c" / "manifest-000000000002.json").write_text("{}")
    assert "manifest-000000000002.json is damaged" in run("inspect", path)[1]
    assert run("verify", path)[0] == 1
    (tmp_path / "c" / "manifest-000000000001.json").write_text("{}")
    assert run("inspect", path)[0] == 1
