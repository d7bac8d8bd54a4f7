"""Storages whose writes fail while a `with` block runs, and what a buffer holds after a write that failed."""

import contextlib
import errno
import itertools
import os
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf._host.codecs import Zstd
from fbuf._host.store.store import Store

LANES, LENGTH = 2, 24
EXAMPLE = {
    "obs": np.zeros(40, np.uint8),
    "t": np.int32(0),
    "action": np.int32(0),
    "reward": np.float32(0),
    "terminated": np.bool_(False),
    "truncated": np.bool_(False),
    "id": np.int32(0),
    "version": np.int32(0),
}
STORAGES = {
    "memmap": lambda path: fbuf.storages.Memmap(path),
    "files": lambda path: fbuf.storages.Compressed(path=path, keys=tuple(EXAMPLE), codec=Zstd(chunk=4)),
    "host": lambda path: fbuf.storages.Host(),
    "compressed": lambda path: fbuf.storages.Compressed(keys=("obs",), codec=Zstd(chunk=4)),
}
VIEWS = {
    "rows": fbuf.views.Row(),
    "transition": fbuf.views.Transition(n_step=2, gamma=0.9, autoreset="next_step"),
    "stop": fbuf.views.Sequence(4, autoreset="same_step"),
    "mask": fbuf.views.Sequence(4, stride=2, boundary="mask", autoreset="next_step"),
    "ids": fbuf.views.Sequence(3, episode="id", autoreset="same_step"),
}
SAMPLERS = {
    "uniform": fbuf.samplers.Uniform(),
    "prioritized": fbuf.samplers.Prioritized(),
    "epoch": fbuf.samplers.Epoch(),
    "ranked": fbuf.samplers.Ranked(),
    "staleness": fbuf.samplers.Staleness(maximum=4, version="version"),
    "fifo": fbuf.samplers.Consume(order="fifo"),
}


@contextlib.contextmanager
def failing(after=0, times=10**9, error=errno.ENOSPC):
    """Let `times` writes into files, and of stores in memory, fail after so many that succeed."""
    number = itertools.count()
    pwrite, write = os.pwrite, Store._write

    def use_one():
        return after <= next(number) < after + times

    def on_disk(fd, data, at):
        if use_one():
            raise OSError(error, "injected")
        return pwrite(fd, data, at)

    def in_memory(store, *args):
        if store._folder is None and use_one():
            raise MemoryError("injected")
        return write(store, *args)

    with mock.patch.object(os, "pwrite", on_disk), mock.patch.object(Store, "_write", in_memory):
        yield


def rows_of(first, count, lanes=LANES):
    """Rows `first` to `first + count - 1` of each lane; episodes end at different rows."""
    t, lane = np.arange(first, first + count, dtype=np.int32)[:, None], np.arange(lanes, dtype=np.int32)[None]
    number = t * lanes + lane
    return {
        "obs": (number[..., None] + np.arange(40)).astype(np.uint8),
        "t": number,
        "action": number % 4,
        "reward": number.astype(np.float32),
        "terminated": (number % 13) == 12,
        "truncated": (number % 17) == 16,
        "id": (t + 3 * lane) // 7,
        "version": number // 5,
    }


def buffer_of(storage, view, sampler, path):
    return fbuf.Buffer(
        LENGTH * LANES, lanes=LANES, storage=STORAGES[storage](path), view=VIEWS[view], sampler=SAMPLERS[sampler]
    )


def same(buffer, state, reference, other):
    """Compare everything in two states but the counters, and the rows themselves."""
    rows, expected = buffer.rows(state), reference.rows(other)
    for part in ("anchors", "sampler", "ring"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, part), getattr(other, part))
    jax.tree.map(np.testing.assert_array_equal, rows, expected)


def check(storage, view, sampler, seed, path, counts=(1, 5, 40), turns=12):
    """Writes that fail, entirely or half-way, are writes of the rows that were stored, and cut the lanes of others."""
    rng = np.random.default_rng(seed)
    buffer, reference = buffer_of(storage, view, sampler, path), buffer_of("host", view, sampler, None)
    step = jax.jit(buffer.extend, donate_argnums=0)
    write, cut = jax.jit(reference.extend), jax.jit(reference.cut)
    state, other = buffer.init(EXAMPLE), reference.init(EXAMPLE)
    first = lost = 0
    most = 14 if buffer.storage.in_files else 4  # so that large writes fail half-way
    for _ in range(turns):
        count = int(rng.choice(counts))
        mask = rng.random((count, LANES)) < (0.8 if rng.random() < 0.5 else 2)
        given = {"rows": rows_of(first, count), "mask": mask}
        if rng.random() < 0.6:
            with failing(int(rng.integers(most)) if rng.random() < 0.7 else 0):
                state = step(state, **given)
                jax.block_until_ready(state.header)
            stored = count
            try:
                jax.tree.leaves(state)
            except OSError as error:
                assert error.errno in (errno.ENOSPC, errno.ENOMEM)
                done = re.search(r"The first (\d+) of", str(error))
                missing = re.search(r"(\d+) rows were not written: write them again", str(error))
                if missing is not None:  # else a queue refused them all
                    stored = int(done[1]) if done else 0
                    lost += int(missing[1])
            gone = mask.copy()
            gone[:stored] = False
            other = write(other, given["rows"], mask=mask & ~gone)
            if stored < count:
                other = cut(other, gone.any(axis=0))
            if rng.random() < 0.5:  # again
                first += stored
                continue
        else:
            state, other = step(state, **given), write(other, **given)
        same(buffer, state, reference, other)  # also waits
        first += count
        if view == "rows" and sampler == "prioritized":
            batch = buffer.peek(state, jax.random.key(seed), 8)
            error = jnp.arange(8.0)
            state = buffer.update_priority(state, batch.index, error)
            other = reference.update_priority(other, batch.index, error)
    counted = int(buffer.stats(state)["refused_rows"]) - int(reference.stats(other)["refused_rows"])
    assert lost > 0 and (counted == lost or sampler == "fifo")
    return state


PLAIN = {"obs": np.zeros(64, np.uint8), "t": np.int32(0)}


def plain_buffer(storage, path, prioritized=False):
    """A buffer of 100 rows as `PLAIN`; the files of `Compressed` hold both leaves."""
    kept = STORAGES[storage](str(path))
    if storage == "files":
        kept = fbuf.storages.Compressed(path=str(path), keys=tuple(PLAIN))
    return (fbuf.prioritized if prioritized else fbuf.Buffer)(100, storage=kept)


def plain_rows(first, count):
    rng = np.random.default_rng(first)
    return {"obs": rng.integers(0, 255, (count, 64), np.uint8), "t": np.arange(first, first + count, dtype=np.int32)}


def held(buffer, state):
    """The numbers of the rows that a state holds."""
    return np.asarray(buffer.rows(state).data["t"])[: int(buffer.size(state))].tolist()


def wait(state):
    """Wait for a step without a look at the state, which would raise."""
    jax.block_until_ready(state.header)
    return state
