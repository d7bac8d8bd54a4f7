"""`Buffer(prefetch=1)`: further storages and forms, vmap, export, in place, exits of the interpreter."""

import dataclasses
import os
import subprocess
import sys

import jax
import pytest

from fbuf.samplers import Prioritized
from tests.support.prefetch import CHECKS, EXAMPLE, check_batches, make, rows_at
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.support.trees import same


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_its_own_rows():
    script = """
import os, sys, warnings
import numpy as np
from fbuf._host.store.store import Column, Store
warnings.simplefilter("ignore")
s = Store((Column("a", (), np.dtype(np.int32), None),), lanes=1, length=8, slack=0)
tickets = s.write([np.arange(8, dtype=np.int32)[:, None]], None)[:, 0]
numbers = [s.request([(0, tickets)])]
pid = os.fork()
for _ in range(3):
    numbers.append(s.request([(0, tickets)]))
for number in numbers:
    out = np.zeros(8, np.int32)
    assert s.collect(number, [(0, tickets, out)]).all() and (out == np.arange(8)).all()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("pending", [False, True])
def test_the_interpreter_exits_during_reads(pending):
    script = f"""
import fbuf, jax, numpy as np
buffer = fbuf.Buffer(64, storage=fbuf.storages.Compressed(keys=("x",)), prefetch=1, batch_size=2000)
state = buffer.init({{"x": np.zeros((64, 64), np.uint8)}})
state = buffer.extend(state, {{"x": np.ones((64, 64, 64), np.uint8)}})
for i in range(3):
    state, batch = buffer.sample(state, jax.random.key(i))
if not {pending}:
    jax.block_until_ready(batch)
    del state, batch
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_convert_to_and_from_prefetch():
    buffer = make("compressed", "uniform")
    other = dataclasses.replace(buffer, sampler=Prioritized(), batch_size=3)
    state = buffer.sample(buffer.extend(buffer.init(EXAMPLE), rows_at(0)), jax.random.key(0))[0]
    converted = buffer.convert(other, state)
    now = other.peek(converted, jax.random.fold_in(jax.random.key(1), 1))
    converted, batch = other.sample(converted, jax.random.key(1))
    same(batch, now)
    plain = dataclasses.replace(other, prefetch=0)
    assert other.convert(plain, converted).ahead is None
    with pytest.raises(ValueError, match=r"prefetch, batch_size.*buffer\.convert\(other, state\)"):
        plain.sample(converted, jax.random.key(0))
    raises(ValueError, "made by another buffer", lambda: buffer.sample(converted, jax.random.key(0)))
    with pytest.raises(ValueError, match="made by another buffer"):
        dataclasses.replace(other, batch_size=4).sample(converted, jax.random.key(0))


test_checks = checks(
    (check_batches, [("host", "consume", "sequence", "eager"), ("compressed", "uniform", "hindsight", "scan")]),
    *((check, ["compressed"]) for check in CHECKS[2::3]),
)
