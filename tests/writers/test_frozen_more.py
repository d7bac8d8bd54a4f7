"""More of frozen buffers: every verb in every form, replays, prefetch, threads, saved states."""

# ruff: noqa: F401, F811

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import fbuf
from fbuf.samplers import Epoch, Prioritized, Uniform
from fbuf.storages import DataSet
from fbuf.testing import assert_inplace
from fbuf.views import Transition
from tests.support import pieces
from tests.support.refusals import raises
from tests.support.trees import same
from tests.writers.test_frozen import BATCH, check_batches, made, opened, small_blocks, stepping

pytestmark = pytest.mark.more


@pytest.mark.optimized
def test_the_batches_of_device(made):
    check_batches(*made, "Epoch", "Sequence('mask')")


@pytest.mark.in_place
def test_a_step_copies_nothing(made):
    buffer, state = fbuf.datasets.open(made[0], view=Transition(stack=3, autoreset="same_step"), sampler=Prioritized())
    large = dataclasses.replace(buffer, capacity=4_000_000)
    spec, structure = buffer.storage.spec(state.rows)
    rows = large.storage.abstract(large.geometry, spec, structure)
    abstract = jax.eval_shape(functools.partial(fbuf._buffer.buffer.prefetch.empty_state, large), rows)

    def step(state, key):
        state, batch = large.sample(state, key, 8)
        state = large.update_priority(state, batch.index, jnp.ones(8))
        return large.sample(state, key, 8)

    assert_inplace(step, abstract, jax.ShapeDtypeStruct((2,), jnp.uint32))
    # and anchors of four million rows are made with the memory of a block
    other = dataclasses.replace(large, sampler=Uniform())
    made_of = jax.jit(lambda state: large.convert(other, state)).lower(abstract).compile().memory_analysis()
    assert made_of.temp_size_in_bytes < 500_000


def test_prefetch(made):
    buffer, state = fbuf.datasets.open(made[0], prefetch=1, batch_size=BATCH)
    state, batch = buffer.sample(state, jax.random.key(0))
    same(batch, buffer.peek(state, jax.random.fold_in(jax.random.key(0), 1)))
    for i in range(1, 4):
        state, batch = buffer.sample(state, jax.random.key(i))
        same(batch, buffer.peek(state, jax.random.key(i - 1)))
    assert fbuf.stores()[-1].nbytes > 2 * BATCH * 36  # rows that were read ahead


def test_save_and_load(made, opened, tmp_path):
    buffer, state = opened
    step = stepping(buffer)
    state, _ = step(state, jax.random.key(0))
    written = fbuf.save(tmp_path / "saved", buffer, state, extra={"n": 1}).result()
    assert written.bytes_total < 34 * 36  # no frames
    again, other, extra = fbuf.load(tmp_path / "saved", extra=True)
    assert again == buffer and extra == {"n": 1}
    for i in range(1, 3):
        (state, batch), (other, wanted) = step(state, jax.random.key(i)), step(other, jax.random.key(i))
        same(batch, wanted)


def test_load_where_it_moved(tmp_path):
    was, now = tmp_path / "was", tmp_path / "now"
    pieces.make(was)
    buffer, state = fbuf.datasets.open(was, sampler=Epoch())
    state, _ = buffer.sample(state, jax.random.key(0), 3)
    fbuf.save(tmp_path / "saved", buffer, state)
    want = buffer.peek(state, jax.random.key(1), 5)
    was.rename(now)
    raises(FileNotFoundError, r"no data set at .*storages.DataSet\('/its/path'\)", fbuf.load, tmp_path / "saved")
    there = dataclasses.replace(buffer, storage=DataSet(str(now), memory=5))
    other, state = fbuf.load(tmp_path / "saved", there)
    assert other == there
    same(other.peek(state, jax.random.key(1), 5), want)
    pieces.make(was, seed=1)  # the same shapes, other rows
    raises(fbuf.SchemaError, "has identity .* were rewritten", lambda: fbuf.load(tmp_path / "saved"))
    raises(ValueError, "resize is 50, but rows are of DataSet", fbuf.load, tmp_path / "saved", resize=50)
