import dataclasses

import jax
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Device
from fbuf.transforms import Augment, Chain, Concatenate, Map, Normalize, Rename, Scale, Stack
from fbuf.views import Sequence
from tests.more.transforms.test_transforms_buffer import test_steps_are_in_place  # noqa: F401
from tests.support.tables import one_of
from tests.support.transforms import BATCH, EXAMPLE, VIEWS, apart, close, given_rows, laned_windows, make
from tests.support.trees import same

settings = one_of({})


def test_eager_jitted_scanned_and_donated():
    buffer = make(Device(), VIEWS["Sequence"], prefetch=1, batch_size=BATCH, sampler=Prioritized())
    rows = [given_rows(np.random.default_rng(i), 5) for i in range(5)]
    keys = jax.random.split(jax.random.key(0), 5)

    def one(state, given):
        state, batch = buffer.sample(buffer.extend(state, given[0]), given[1])
        return state, (batch.data, batch.mask)

    def several(run):
        state, out = buffer.init(EXAMPLE), []
        for pair in zip(rows, keys, strict=True):
            state, batch = run(state, pair)
            out.append(batch)
        return jax.tree.map(lambda *x: np.stack(x), *out)

    jitted = several(jax.jit(one, donate_argnums=0))
    stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
    scan = jax.jit(lambda s, x: lax.scan(one, s, x), donate_argnums=0)
    same(jax.device_get(scan(buffer.init(EXAMPLE), (stacked, keys))[1]), jitted)
    same(several(one), jitted)


@pytest.mark.parametrize("storage", [Device(), Compressed(keys=("obs",))])
def test_a_loaded_buffer_continues_with_the_same_batches(storage, tmp_path):
    buffer = make(storage, VIEWS["Transition"], prefetch=1, batch_size=BATCH)

    @jax.jit
    def step(state, rows, key):
        state, batch = buffer.sample(buffer.extend(state, rows), key)
        return state, (batch.data, batch.index, batch.weight)

    def steps(state, first):
        out = []
        for i in range(first, first + 4):
            state, batch = step(state, given_rows(np.random.default_rng(i), 5), jax.random.key(i))
            out.append((batch[0], batch[1].slot, batch[2]))
        return state, out

    state, _ = steps(buffer.init(EXAMPLE), 0)
    fbuf.save(tmp_path, buffer, state)
    loaded, again = fbuf.load(tmp_path)
    assert loaded == buffer
    same(again.transforms, state.transforms)
    same(steps(again, 4)[1], steps(state, 4)[1])


def collapsed(window):
    """One value a window beside its rows: a number, a vector as wide as rows are, and the state it begins with."""
    total = {"total": window["reward"].sum(), "wide": window["x"].sum(0), "begins": window["x"][0]}
    return {**window, **total}


def test_one_value_a_window_is_not_taken_for_its_rows():
    """Though it is as long as the window, and rows are missing there."""
    width = 4
    names = ("total", "wide", "begins", "reward")
    later = (Scale(names, 2.0, 1.0), Rename({"wide": "x/wide", "x": "x/rows"}), Normalize(("x/wide", "x/rows"), of="x"))
    on_read = (Map(collapsed), Chain(later))
    view = Sequence(4, boundary="mask", at=1, episode_end=("done",), autoreset="same_step")
    buffer = fbuf.Buffer(20, view=view, on_read=on_read)
    rng = np.random.default_rng(width)
    x, reward = rng.normal(3, 2, (9, width)).astype(np.float32), rng.normal(size=9).astype(np.float32)
    rows = {"x": x, "reward": reward, "done": np.arange(9) % 3 == 2}
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    batch = buffer.peek(state, jax.random.key(0), 16).data
    plain_buffer = dataclasses.replace(buffer, on_read=None)
    plain = plain_buffer.peek(buffer.convert(plain_buffer, state), jax.random.key(0), 16).data
    there = np.asarray(plain["mask"])
    assert not there.all()
    before = np.asarray(plain["x"])
    close(batch["total"], np.asarray(plain["reward"]).sum(1) * 2 + 1)
    close(batch["begins"], before[:, 0] * 2 + 1)
    close(batch["reward"], np.where(there, np.asarray(plain["reward"]) * 2 + 1, 0).astype(np.float32))
    mean, std = x.mean(0), x.std(0)
    close(batch["x"]["wide"], (before.sum(1) * 2 + 1 - mean) / std)
    close(batch["x"]["rows"], np.where(there[..., None], (before - mean) / std, 0))


def test_axes_of_values_of_a_window_are_their_own():
    width = 4
    join = Concatenate(("sum", "first"), into="both", sizes=(width, width))
    stack = Stack(("least", "most"), into="range")
    on_read = (Map(apart), join, stack, Augment("image", 1), join.inverse(), Stack(("sum", "first"), "pair", axis=-1))
    buffer, state = laned_windows(width, on_read)
    batch = buffer.peek(state, jax.random.key(0), 16).data
    plain, same = laned_windows(width)
    before = plain.peek(same, jax.random.key(0), 16).data
    assert not np.asarray(before["mask"]).all()
    x, reward = np.asarray(before["x"]), np.asarray(before["reward"])
    close(batch["pair"], np.stack([x.sum(1), x[:, 0]], axis=-1))
    close(batch["range"], np.stack([reward.min(1), reward.max(1)], axis=-1))
    close(batch["image"], np.tile(reward.sum(1)[:, None, None], (1, 5, 5)))
