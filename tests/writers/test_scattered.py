"""Buffers whose writer replaces any row, not the oldest: what plain Python gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._interfaces import writer
from fbuf.samplers import Prioritized
from tests.support.refusals import raises
from tests.support.scattered import EXAMPLE, STORAGES, Largest, Told, check_largest, check_refused, make, rows_of


@given(data=st.data())
def test_the_largest_stay_and_come_out_in_order(data):
    check_largest("Device", data, lanes=3)


def test_of_several_rows_for_one_slot_the_last_is_written():
    buffer = make("Device", "Anywhere", capacity=4)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 200))
    got = jax.device_get(buffer.rows(state))
    key = jax.random.fold_in(jax.random.key(0), jnp.uint32(0))
    slots = [*range(4), *np.asarray(jax.random.randint(key, (200, 1), 0, 4, jnp.int32))[4:, 0].tolist()]
    last = sorted(max(i for i, s in enumerate(slots) if s == slot) for slot in range(4))
    assert got.data["id"].tolist() == last and got.mask.all()
    assert np.array_equal(got.data["obs"], rows_of(0, 200)["obs"][last])


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


def test_the_order_of_arrival_outlives_2_to_32_rows():
    buffer = make("Device", "Largest", capacity=4)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 2) | {"score": np.float32([1000, 2000])})
    late = dataclasses.replace(state.scatter, newest=jnp.array([2**32 - 3, 0], jnp.uint32))
    state = dataclasses.replace(state, scatter=late)
    for i in range(6):
        state = buffer.extend(state, rows_of(10 + i, 1) | {"score": np.float32([i + 1])})
        index = buffer.last(state, 1).index
        assert np.asarray(index.ticket)[0] != 0
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


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere the store cannot look at the state's tickets")
def test_steps_that_are_tried_and_dropped_cost_nothing():
    buffer = make(dataclasses.replace(STORAGES["Host"], slack=8), "Largest")
    extend = jax.jit(buffer.extend)
    state = extend(buffer.init(EXAMPLE), rows_of(0, 12) | {"score": np.arange(12, dtype=np.float32)})
    for i in range(20):
        extend(state, rows_of(500, 5) | {"score": np.full(5, 1000 + i, np.float32)})
        state = buffer.update_rows(state, buffer.last(state, 1).index, {"done": np.ones(1, bool)})
        state = extend(state, rows_of(100 + i, 1) | {"score": np.float32([3.5])})
    rows = jax.device_get(buffer.rows(state))
    assert sorted(rows.data["id"].tolist()) == [*range(4, 12), 100, 101, 102, 103]
    for number, obs in zip(rows.data["id"], rows.data["obs"], strict=True):
        assert np.array_equal(obs, rows_of(int(number), 1)["obs"][0])
