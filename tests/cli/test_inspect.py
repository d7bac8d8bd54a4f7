"""`fbuf inspect` and `fbuf verify` of checkpoints, and progress."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from fbuf.__main__ import main
from fbuf._formats import checkpoint
from tests.support.memory_disk import PATH, Memory, disk_of, save, sources, state


def test_progress_counts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, seen = Memory(), []
    save(PATH, 3, disk, progress=lambda done, total: seen.append((done, total)))
    total = sum(a.nbytes for a in state(3).values())
    assert seen[-1] == (total, total) and seen == sorted(seen) and len(seen) > 10
    seen.clear()
    checkpoint.read(PATH, disk=disk, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (total, total) and seen == sorted(seen)
    with redirect_stderr(io.StringIO()) as text:
        save(PATH, 4, disk, progress=True)
        checkpoint.read(PATH, disk=disk, progress=True)
    assert "fbuf.save" in text.getvalue() and "fbuf.load" in text.getvalue()
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with redirect_stderr(io.StringIO()) as text:
        save(PATH, 3, Memory(), progress=True)
    assert text.getvalue().endswith("fbuf.save: 100 %\n")


def test_an_error_in_progress_ends_the_save_and_leaves_nothing() -> None:
    disk = disk_of(1)
    before = disk.contents()

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, save, PATH, 2, disk, progress=stop)
    assert disk.contents() == before


def run(*arguments: str) -> tuple[int, str, str]:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def test_inspect_and_verify(tmp_path: Path) -> None:
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


def test_inspect_prints_the_date_of_a_save(tmp_path: Path) -> None:
    dates = {1795355945.48: "(2026-11-22 13:59:05 UTC)", 0: "(1970-01-01 00:00:00 UTC)"}
    others = (True, "now", None, 1e300, -1e300, [1], "1795355945")
    for number, (moment, shown) in enumerate([*dates.items(), *((other, None) for other in others)]):
        path = str(tmp_path / str(number))
        checkpoint.write(path, sources(1), {"time": moment})
        line = next(line for line in run("inspect", path)[1].splitlines() if line.startswith("  time:"))
        assert line.endswith(shown) if shown else "UTC" not in line
