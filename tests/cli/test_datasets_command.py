"""`python -m fbuf datasets`: what it prints, its exit status, and what it asks of the functions behind it."""

import io
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import fbuf
from fbuf.__main__ import main
from fbuf._formats import dataset
from tests.support import datasets_oracle as oracle
from tests.support.disk import flip
from tests.support.foreign import FILES, world

MINARI = "minari/D4RL/door/human-v2"


def make(path, rows=6):
    data = {"observations": np.arange(rows, dtype=np.float32), "terminals": np.arange(rows) % 3 == 2}
    return oracle.from_arrays(data, path=path, metadata={"by": "me"}, ends="terminated")


@pytest.fixture
def root(tmp_path, monkeypatch):
    make(tmp_path / "Pong/1")
    make(tmp_path / MINARI, 3)
    with dataset.SegmentWriter(tmp_path / "Pong/2", 0, dataset.Schema({"t": ((), "int32")})) as segment:
        segment.append({"t": np.arange(4, dtype=np.int32)})
        segment.commit()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/file.txt").write_text("mine")
    monkeypatch.setenv("FBUF_DATASETS", str(tmp_path))
    return tmp_path


def run(capsys, *arguments):
    return main(["datasets", *arguments]), *capsys.readouterr()


def test_list_prints_what_is_in_the_folder(root, capsys):
    status, out, err = run(capsys, "list")
    assert (status, err) == (0, "")
    found = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert list(found) == ["Pong/1", "Pong/2", "minari:D4RL/door/human-v2"]
    assert "not finished" in found["Pong/2"] and "not finished" not in found["Pong/1"]
    assert found["Pong/1"].split()[1] == "6"
    entries = json.loads(run(capsys, "list", "--json")[1])
    assert [e["id"] for e in entries] == list(found)
    assert [(e["rows"], e["finished"]) for e in entries] == [(6, True), (4, False), (3, True)]
    assert entries[0]["leaves"]["terminated"] == "bool[]" and entries[0]["meta"]["by"] == "me"
    for name in ("notes", "nowhere"):
        assert "there are no data sets in" in run(capsys, "list", "--root", str(root / name))[1]


def test_info_and_verify_print_or_fail(root, capsys):
    for name in ("Pong/1", str(root / "Pong/1")):
        status, out, _ = run(capsys, "info", name)
        assert status == 0 and "6 in 1 segment\n" in out
    assert json.loads(run(capsys, "info", "minari:D4RL/door/human-v2", "--json")[1])["rows"] == 3
    assert run(capsys, "verify", "Pong/1")[:2] == (0, "whole\n")
    status, out, err = run(capsys, "info", "Pong/9")
    assert (status, out) == (1, "") and err.startswith("error: Pong/9 is not at ") and "datasets download Pong/9" in err
    assert "Errno" not in err
    assert run(capsys, "verify", "Pong/2")[0] == 1
    flip(*(root / "Pong/1/pieces/0").glob("data-*"), -3)
    status, out, err = run(capsys, "verify", "Pong/1")
    assert status == 1 and "whole" not in out and err.startswith("error: ")


def test_delete_asks_first(root, capsys, monkeypatch):
    status, _, err = run(capsys, "delete", "Pong/1")
    assert status == 1 and "Confirm with --yes" in err and (root / "Pong/1/dataset.json").exists()

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
    assert run(capsys, "delete", "Pong/1")[0] == 1 and (root / "Pong/1/dataset.json").exists()
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert run(capsys, "delete", "Pong/1")[0] == 0 and not (root / "Pong/1").exists()
    assert run(capsys, "delete", "Pong/2", "--yes")[0] == 0 and not (root / "Pong/2").exists()
    assert run(capsys, "delete", "Pong/2", "--yes")[0] == 1
    assert run(capsys, "delete", str(root / "notes"), "--yes")[0] == 1 and (root / "notes/file.txt").exists()


def test_download_passes_its_options(root, capsys, monkeypatch):
    pong = fbuf.datasets.open(root / "Pong/1")
    atari = mock.Mock(side_effect=lambda name, **_: pong if name == "Pong/1" else fbuf.datasets.open(root / name))
    minari = mock.Mock(return_value=fbuf.datasets.open(root / MINARI))
    monkeypatch.setattr(fbuf.datasets, "atari_dqn", atari)
    monkeypatch.setattr(fbuf.datasets, "minari", minari)
    status, out, err = run(capsys, "download", "Pong/1")
    assert status == 0 and "6 in 1 segment\n" in out
    atari.assert_called_with("Pong/1", root=None, source=None, progress=True, download=True, dumps=None)
    options = "--dumps 0-2,7 --workers 3 --force --quiet --source http://mirror --root /data".split()
    assert run(capsys, "download", "Pong/1", *options)[0] == 0
    expected = {"root": Path("/data"), "source": "http://mirror", "progress": False, "download": "force"}
    atari.assert_called_with("Pong/1", **expected, dumps=[0, 1, 2, 7], workers=3)
    assert run(capsys, "download", "Pong/1", "--on-corrupt", "skip")[0] == 0
    assert atari.call_args.kwargs["on_corrupt"] == "skip"
    assert run(capsys, "download", "minari:D4RL/door/human-v2", "--skip", "obs/mission")[0] == 0
    assert minari.call_args.args == ("D4RL/door/human-v2",) and minari.call_args.kwargs["skip"] == ["obs/mission"]
    status, out, err = run(capsys, "download", "Pong/3", "Pong/1")  # the others go on
    assert status == 1 and "error: Pong/3: fbuf.datasets: there is no data set" in err and "6 in 1 segment\n" in out
    for wrong in (("minari:a", "--dumps", "1"), ("minari:a", "--on-corrupt", "skip"), ("Pong/1", "--skip", "obs")):
        assert run(capsys, "download", *wrong)[0] == 1
    pytest.raises(SystemExit, main, ["datasets", "download", "Pong/1", "--dumps", "3-1"]).match("2")


def test_help_is_printed_and_an_interrupt_is_130(capsys):
    assert main(["datasets"]) == 0
    assert "download" in capsys.readouterr().out
    with mock.patch.object(fbuf.datasets, "atari_dqn", side_effect=KeyboardInterrupt):
        assert main(["datasets", "download", "Pong/1"]) == 130


def test_convert_prints_what_it_recognised_and_writes(tmp_path, capsys):
    source, path = str(FILES / "tianshou_vector.hdf5"), tmp_path / "set"
    status, out, err = run(capsys, "convert", source, str(path), "--dry-run")
    assert (status, err) == (0, "") and not path.exists()
    assert "tianshou vector buffer, 31 rows in 3 lanes" in out
    lanes = world.steps(11, 0), world.steps(33, 1)[-20:]
    ended = sum(step.terminated for steps in lanes for step in steps)
    late = sum(step.truncated or step is steps[-1] and not step.terminated for steps in lanes for step in steps)
    assert f"{ended + late} episodes: {ended} terminated, {late} truncated" in out
    assert "obs float32[3]" in out and "final_obs float32[3]" in out
    status, out, _ = run(capsys, "convert", source, str(path), "--quiet")
    assert status == 0 and fbuf.datasets.info(path).rows == 31 and "rows        31" in out
    status, _, err = run(capsys, "convert", str(FILES / "ogbench.npz"), str(path))
    assert status == 1 and "ends='trajectory'" in err
    names = ["--field", "observations=obs", "--field", "terminals=truncated", "--dry-run"]
    status, out, _ = run(capsys, "convert", str(FILES / "ogbench.npz"), str(path), *names)
    assert status == 0 and "qpos" not in out
    status, out, _ = run(capsys, "convert", str(FILES / "ogbench.npz"), str(path), "--ogbench", "--dry-run")
    assert status == 0 and "6 episodes: 0 terminated, 6 truncated" in out
    status, _, err = run(capsys, "convert", str(FILES / "ogbench.npz"), str(path), "--ogbench", "--lanes", "2")
    assert status == 1 and "--lanes is given with --ogbench" in err


@pytest.mark.more
def test_a_closed_pipe_is_not_a_traceback():
    command = [sys.executable, "-m", "fbuf", "datasets", "list", "--available"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
