"""Buffers whose writer replaces any row, not the oldest: what plain Python gives."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._interfaces import writer
from fbuf.samplers import Prioritized
from fbuf.testing import assert_inplace
from tests.support import scattered
from tests.support.refusals import raises
from tests.support.scattered import (
    EXAMPLE,
    STORAGES,
    Anywhere,
    Largest,
    Told,
    check_largest,
    check_refused,
    make,
    rows_of,
)
from tests.support.tables import checks, one_of


@given(data=st.data())
def test_the_largest_stay_and_come_out_in_order(data):
    check_largest("Device", data, lanes=3)


@pytest.mark.more
def test_of_several_rows_for_one_slot_the_last_is_written():
    buffer = make("Device", "Anywhere", capacity=4)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 200))
    got = jax.device_get(buffer.rows(state))
    key = jax.random.fold_in(jax.random.key(0), jnp.uint32(0))
    slots = [*range(4), *np.asarray(jax.random.randint(key, (200, 1), 0, 4, jnp.int32))[4:, 0].tolist()]
    last = sorted(max(i for i, s in enumerate(slots) if s == slot) for slot in range(4))
    assert got.data["id"].tolist() == last and got.mask.all()
    assert np.array_equal(got.data["obs"], rows_of(0, 200)["obs"][last])


@pytest.mark.more
def test_an_index_is_stale_once_its_row_is_replaced():
    buffer = make("Device", "Largest", sampler=Prioritized())
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 12))
    index = buffer.rows(state).index
    best = rows_of(1000, 3) | {"score": np.float32([500, 501, 502])}
    after = buffer.extend(state, best)
    there = np.asarray(buffer.get(after, index).mask)
    order = np.argsort(np.asarray(rows_of(0, 12)["score"]), kind="stable")
    assert sorted(np.flatnonzero(~there).tolist()) == sorted(order[:3].tolist())
    after = buffer.update_priority(after, index, np.ones(12, np.float32))
    after = buffer.update_rows(after, index, {"done": np.zeros(12, bool)})
    assert int(buffer.stats(after)["refused_stale"]) == 6
    index = buffer.rows(after).index
    again = buffer.extend(buffer.clear(after), rows_of(0, 12))
    assert not np.asarray(buffer.get(buffer.clear(after), index).mask).any()
    assert not np.asarray(buffer.get(again, index).mask).any()


@pytest.mark.more
def test_the_order_of_arrival_outlives_2_to_32_rows():
    buffer = make("Device", "Largest", capacity=4)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 2) | {"score": np.float32([1000, 2000])})
    late = dataclasses.replace(state.scatter, newest=jnp.array([2**32 - 3, 0], jnp.uint32))
    state = dataclasses.replace(state, scatter=late)
    for i in range(6):
        state = buffer.extend(state, rows_of(10 + i, 1) | {"score": np.float32([i + 1])})
        index = buffer.rows(state, last=1).index
        assert np.asarray(index.generation)[0] != 0
    assert np.asarray(buffer.rows(state).data["id"]).tolist() == [0, 1, 14, 15]
    assert np.asarray(state.scatter.newest).tolist() == [4, 1]


def test_other_values_are_no_writers():
    raises(TypeError, r"writer is 3\. Use fbuf\.writers\.Ring\(\)\.", fbuf.Buffer, 10, writer=3)
    said = r"writer is the class Ring; expected a value. Write Ring\(\)"
    raises(TypeError, said, fbuf.Buffer, 10, writer=fbuf.writers.Ring)
    assert isinstance(fbuf.writers.Ring(), writer.Streaming) and isinstance(Largest("score"), writer.Scattering)


def test_slots_and_states_of_another_kind_are_refused():
    for change, message in (
        (lambda slots, own: (slots + 0.0, own), r"choose returned slots float32\[3, 1\]; expected int32\[3, 1\]"),
        (lambda slots, own: (slots[:2], own), r"choose returned slots int32\[2, 1\]; expected int32\[3, 1\]"),
        (lambda slots, own: (slots, (own, own)), "choose returned a state of"),
    ):
        buffer = make("Device", Told(change))
        raises(TypeError, message, buffer.extend, buffer.init(EXAMPLE), rows_of(0, 3))


def test_a_row_that_would_leave_a_slot_empty_is_refused_and_counted():
    check_refused("Device")


@pytest.mark.more
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere the store cannot look at the state's tickets")
def test_steps_that_are_tried_and_dropped_cost_nothing():
    buffer = make(dataclasses.replace(STORAGES["Host"], slack=8), "Largest")
    extend = jax.jit(buffer.extend)
    state = extend(buffer.init(EXAMPLE), rows_of(0, 12) | {"score": np.arange(12, dtype=np.float32)})
    for i in range(20):
        extend(state, rows_of(500, 5) | {"score": np.full(5, 1000 + i, np.float32)})
        state = buffer.update_rows(state, buffer.rows(state, last=1).index, {"done": np.ones(1, bool)})
        state = extend(state, rows_of(100 + i, 1) | {"score": np.float32([3.5])})
    rows = jax.device_get(buffer.rows(state))
    assert sorted(rows.data["id"].tolist()) == [*range(4, 12), 100, 101, 102, 103]
    for number, obs in zip(rows.data["id"], rows.data["obs"], strict=True):
        assert np.array_equal(obs, rows_of(int(number), 1)["obs"][0])


@pytest.mark.more
@given(data=st.data())
def test_the_largest_of_compressed_rows_stay_and_come_out_in_order(data):
    check_largest("Compressed, small", data, lanes=None)


storage = one_of("Compressed, small", exhaustive=["Host", "Compressed"])


@pytest.mark.more
def test_an_old_state_reads_its_own_rows_or_says_that_they_expired(storage):
    kind = dataclasses.replace(STORAGES[storage], slack=10, on_expired="mask")
    buffer = make(kind, "Anywhere")
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 12))
    old, expected = state, jax.device_get(buffer.rows(state).data)
    for i in range(8):
        state = buffer.extend(state, rows_of(100 * i + 100, 4))
        got = jax.device_get(buffer.rows(old))
        for name in EXAMPLE:
            shown = got.mask.reshape(-1, *(1,) * (expected[name].ndim - 1))
            assert np.array_equal(got.data[name], np.where(shown, expected[name], 0))
        assert got.mask.all() if i < 2 else not got.mask.all() or i < 4
        assert np.asarray(buffer.rows(state).mask).all()
    strict = make(dataclasses.replace(kind, on_expired="raise"), "Anywhere")
    raises(Exception, "expired", lambda: jax.block_until_ready(strict.rows(old)))


@pytest.mark.more
@pytest.mark.in_place
def test_update_and_write_in_one_step_copy_nothing():
    buffer = fbuf.Buffer(80_000, sampler=Prioritized(), writer=Anywhere())
    example = {"obs": jax.ShapeDtypeStruct((16,), np.uint8)}

    def step(state, rows, key):
        state, batch = buffer.sample(state, key, 8)
        state = buffer.extend(state, rows)
        state = buffer.update_priority(state, batch.index, jnp.ones(8))
        state = buffer.update_rows(state, batch.index, {"obs": batch.data["obs"]})
        return buffer.extend(state, rows), batch

    rows = {"obs": jax.ShapeDtypeStruct((3, 16), np.uint8)}
    assert_inplace(step, jax.eval_shape(buffer.init, example), rows, jax.random.key(0))


test_checks = checks(more=[(check_refused, [("Compressed",)])])


@pytest.mark.exhaustive
def test_a_hundred_thousand_rows_take_no_more_than_a_thousand():
    buffer = make("Compressed", "Anywhere", capacity=1000)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    state, sizes = buffer.init(EXAMPLE), []
    for i in range(500):
        state = extend(state, rows_of(200 * i, 200))
        if i % 50 == 9:
            sizes.append(buffer.nbytes(state)["host"])
    assert max(sizes) < min(sizes) + 5 * 32 * 1024  # the arena lets four segments lie idle before it moves anything


test_scattered_in_place = pytest.mark.in_place(
    checks(
        exhaustive=[
            (scattered.check_inplace, itertools.product(["Device", "Host", "Compressed"], ["Uniform", "Prioritized"]))
        ]
    )
)
