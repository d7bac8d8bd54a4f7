"""`fbuf.datasets.atari_dqn`: real games, damaged files, and processes that are killed, interrupted and measured."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from fbuf._formats import dataset
from fbuf.datasets._atari import workers as _workers
from fbuf.datasets._atari.segment import schema
from fbuf.datasets._remote import list_files
from tests.support import atari_runs as made
from tests.support.atari_runs import FRAMES, RUN, get, same
from tests.support.fault_server import Cut, FaultServer, Stall

pytestmark = pytest.mark.more

run = made.run
PROGRAM = """
import signal, sys
import fbuf.datasets
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
print("begins", flush=True)
fbuf.datasets.atari_dqn("Pong/1", root=sys.argv[1], source=sys.argv[2], workers=int(sys.argv[3]))
print("ends", flush=True)
"""


@pytest.fixture
def server(run, tmp_path):
    made.write(tmp_path / "files", "Pong/1", run, level=1)
    with FaultServer.of(tmp_path / "files") as server:
        yield server


def test_processes_download_and_convert(server, run, tmp_path):
    server.faults[FRAMES.format(4)] = [Cut(1000)]
    told = []
    same(get(tmp_path, server.base, workers=2, progress=lambda *at: told.append(at)), run)
    assert [server.asked.count(FRAMES.format(number)) for number in range(5)] == [1, 1, 1, 1, 2]
    assert told[-1][0] == told[-1][1] > 0


def start(tmp_path, server, workers):
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    arguments = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), server.base, str(workers)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def test_a_program_without_a_guard_runs_once(server, run, tmp_path):
    with start(tmp_path, server, 2) as process:
        assert process.communicate(timeout=300)[0].split() == ["begins", "ends"] and process.returncode == 0
    same(get(tmp_path, "/nowhere"), run)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_kill_and_resume(server, run, tmp_path, sent):
    server.faults[FRAMES.format(1)] = [Stall(1000)]
    with start(tmp_path, server, 1) as process:
        assert server.stalled.wait(300)
        process.send_signal(sent)
        said = process.communicate(timeout=300)[0]  # after the end of all that have its output open
        assert "ends" not in said and ("KeyboardInterrupt" in said) == (sent == signal.SIGINT)
    done = sorted(dataset.committed(tmp_path / "Pong" / "1"))
    assert done == [0]
    asked = len(server.asked)
    same(get(tmp_path, server.base), run)
    assert FRAMES.format(0) not in server.asked[asked:] and FRAMES.format(1) in server.asked[asked:]
    assert sorted(os.listdir(tmp_path / "Pong/1")) == ["dataset.json", "pieces"]


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_workers_end_with_an_error(server, run, tmp_path, how):
    server.faults[FRAMES.format(0)] = [Stall(1000)]

    def progress(done, total):
        if FRAMES.format(0) in server.asked and server.stalled.wait(60):
            if how == "interrupt":
                raise KeyboardInterrupt
            multiprocessing.active_children()[0].kill()

    with pytest.raises(KeyboardInterrupt if how == "interrupt" else RuntimeError) as info:
        get(tmp_path, server.base, workers=1, progress=progress)
    said = "get: a worker process of Pong/1 ended; memory may have run out"
    assert how == "interrupt" or (str(info.value).startswith(said) and "call again to go on" in str(info.value))
    assert not multiprocessing.active_children()
    assert not list((tmp_path / "Pong/1").glob("*/*"))
    same(get(tmp_path, server.base), run)


def test_memory_does_not_grow_with_the_dump(tmp_path):
    run = made.record(made.synthetic(2000), 1500, final=False)
    rows, folder = 40_000, tmp_path / RUN
    folder.mkdir(parents=True)
    for kind, array in made.arrays(run, run.dumps[0]).items():
        said = {"add_count": np.array(rows - 1), "invalid_range": (rows - 2 + np.arange(5)) % rows}.get(kind, array)
        if kind.startswith("$"):
            said = np.resize(said[:1400], (rows, *array.shape[1:]))
        made.file_of(folder, kind, 0).write_bytes(made.gzip.compress(made.npy(said), 1))
    files = {file.name.removeprefix(RUN).partition("_ckpt")[0]: file for file in list_files(str(tmp_path), RUN)}
    del said
    tracemalloc.start()
    try:
        _workers.run(_workers.Job(tmp_path, 0, files, schema()), lambda nbytes: None)
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()
    assert dataset.committed(tmp_path)[0].rows > 30_000
