"""Priorities on the host with other options, data that moves, threads, and several branches of one program."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized
from tests.samplers import test_host_priorities as quick
from tests.samplers.test_host_priorities import nothing_open  # noqa: F401
from tests.support.host_priorities import BATCH, EXAMPLE, compare, make, run, verb
from tests.support.tables import one_of, select_tests
from tests.support.threads import Thread
from tests.support.trees import same

pytestmark = pytest.mark.exhaustive

WINDOWS = fbuf.views.Sequence(2, stride=2, episode_end=("done",), autoreset="same_step")
AHEAD = {"prefetch": 1, "batch_size": BATCH}
parts = one_of(
    {"options": {"normalize": "buffer", "alpha": 1.0, "beta": 1.0, "eps": 0.0}, "view": WINDOWS},
    {"options": {"normalize": None, "stratified": False, "alpha": 0.5}},
    AHEAD,
    AHEAD | {"storage": fbuf.storages.Host(slack=2000)},  # no state expires
)
capacity = one_of(1, 9, 70_000)
storage = one_of(fbuf.storages.Host())
globals().update(select_tests(quick, "parts", "capacity", "storage"))


def test_convert_and_resume(tmp_path):
    memmap = fbuf.storages.Memmap(str(tmp_path / "rows"))
    plain = fbuf.Buffer(20, storage=memmap)
    host = dataclasses.replace(plain, sampler=Prioritized(on="host"))
    state = plain.extend(plain.init({"x": 0}), {"x": jnp.arange(31)})
    made = plain.convert(host, state)
    assert len(fbuf.stores()) == 2
    device = dataclasses.replace(plain, sampler=Prioritized())
    batches = [b.peek(s, jax.random.key(0), 6) for b, s in ((host, made), (device, plain.convert(device, state)))]
    same(*batches)
    del state, made
    for buffer in (device, host):
        gc.collect()
        state = buffer.resume({"x": 0})
        batches.append(buffer.peek(state, jax.random.key(0), 6))
        if buffer is device:
            del state
    same(*batches[2:])
    with pytest.raises(TypeError, match=r"Buffer\.convert.*priorities on the host"):
        jax.jit(lambda s: host.convert(host, s))(state)


def test_growing():
    grown = []
    for on in ("device", "host"):
        ragged = fbuf.Buffer(4, storage=fbuf.storages.Ragged(), sampler=Prioritized(on=on, normalize="buffer"))
        state = ragged.extend(ragged.init({"x": 0.0, "s": ""}), [{"x": float(i), "s": "a"} for i in range(4)])
        state, batch = ragged.sample(state, jax.random.key(0), 4)
        state = ragged.update_priority(state, batch.index, jnp.arange(4.0))
        larger, state = ragged.grow(state, capacity=9)
        state = larger.add(state, {"x": 9.0, "s": ""})
        batch = larger.sample(state, jax.random.key(1), 8)[1]
        grown.append((batch.index, batch.probability, batch.weight))
    same(*grown)


def test_threads_that_share_states():
    device, host = make("device"), make("host")
    start = [run(b)("extend", b.init(EXAMPLE), np.int32(0))[0] for b in (device, host)]

    def work(number):
        one, two = start
        for i in range(12):
            what, seed = ("learn", "extend", "learn", "more")[i % 4], np.int32(100 * number + i)
            one, first = run(device)(what, one, seed)
            two, second = run(host)(what, two, seed)
            same(first, second)
        compare(one, two)

    for thread in [Thread(work, n) for n in range(4)]:
        thread.ends()


def test_order_within_a_jit_is_the_order_written():
    def tangle(verb, state):
        out = []
        state, _ = verb("extend", state, 1)
        left = right = state
        for i in range(2):
            left, one = verb("learn", left, i)
            right, two = verb("learn", right, 10 + i)
            out += [one, two, verb("learn", state, 20 + i)[1]]
        return left, right, out

    host = make("host")
    one = jax.jit(lambda state: tangle(lambda what, s, n: verb(host, what, s, jnp.int32(n)), state))(host.init(EXAMPLE))
    two = tangle(lambda what, s, n: run(host)(what, s, np.int32(n)), host.init(EXAMPLE))
    same(one[2], two[2])
    compare(one[0], two[0])
    compare(one[1], two[1])
