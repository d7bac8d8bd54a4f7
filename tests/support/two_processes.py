"""Programs of several processes that share a mesh, on this machine's loopback interface."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from tests.support.paths import ROOT
from tests.support.processes import devices
from tests.support.trees import same

HEAD = """
import sys
import jax
process, processes, port = (int(n) for n in sys.argv[1:4])
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    here = f"127.0.0.1:{port}"
    jax.distributed.initialize(here, processes, process, coordinator_bind_address=here)
from tests.support.two_processes_cases import *
"""


def free_port() -> int:
    """Return a port of the loopback interface; skip the test where there is none."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return int(listener.getsockname()[1])
    except OSError as error:
        pytest.skip(f"no ports on the loopback interface: {error}")


@contextlib.contextmanager
def started(code: str, *arguments: Any, processes: int = 2, count: int = 8) -> Iterator[Sequence[Any]]:
    port, running = free_port() if processes > 1 else 0, list[subprocess.Popen[str]]()
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **devices(count // processes)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        for number in range(processes):
            command = [sys.executable, "-c", HEAD + code, *map(str, (number, processes, port, *arguments))]
            running.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipes))
        yield running
    finally:
        for each in running:
            each.kill()
        for each in running:
            each.communicate()


def run_processes(code: str, *arguments: Any, processes: int = 2) -> None:
    with started(code, *arguments, processes=processes) as running:
        for each in running:
            out, _ = each.communicate(timeout=600)
            if "Address already in use" in out:
                pytest.skip(f"the port was taken by another program: {out[-300:]}")
            assert each.returncode == 0, out[-6000:]


def check_two_processes(draw: str, storage: str, tmp_path: Path) -> None:
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        run_processes("everything(*sys.argv[4:])", folder, draw, storage, processes=processes)
        with np.load(folder / "found.npz") as arrays:
            found.append([arrays[name] for name in arrays])
    same(found[0], found[1])
    one, two = (buffer.rows(state) for buffer, state in (fbuf.load(tmp_path / name / "saved") for name in "12"))
    same(jax.device_get(one.data), jax.device_get(two.data))


def check_killed(seed: int, tmp_path: Path) -> None:
    """One of two processes is killed at a random instant of a save: the save before it loads, or that one."""
    chance = random.Random(seed)
    last = f"done {chance.randrange(3)}\n"
    with started("save_for_ever(sys.argv[4])", tmp_path) as running:
        lines = [each.stdout for each in running]
        while (said := lines[0].readline()) != last:
            if not said:
                pytest.fail(f"seed {seed}: the processes ended early")
            if "Address already in use" in said:
                pytest.skip("the port was taken by another program")
        time.sleep(chance.uniform(0, 0.3))
        running[chance.randrange(2)].kill()
        time.sleep(chance.choice((0, 0, 0.05)))
        for each in running:
            each.kill()
        out = [said, *lines[0].read().splitlines()]
    done = max(int(line.split()[1]) for line in out if line.startswith("done"))
    begun = max((int(line.split()[1]) for line in out if line.startswith("start")), default=done)
    number = saved_number(tmp_path)
    assert done <= number <= max(begun, done + 1), f"seed {seed}: {number} of {out[-4:]}"


def saved_number(path: Path) -> int:
    try:
        buffer, state, extra = fbuf.load(path, extra=True)
    except fbuf.CheckpointNotFound:
        return -1
    rows = buffer.rows(state)
    assert set(np.asarray(rows.data["id"])[np.asarray(rows.mask)]) == {extra["number"]}
    return int(extra["number"])
