"""`Replay` as a sequence of rows, its state as something to set, and the index of the rows that `extend` wrote."""

import copy
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.support.refusals import raises
from tests.support.replay import replay_of, rows_of, values


def test_rows_by_position_and_by_iteration():
    replay = replay_of()
    replay.extend(rows_of(*range(11)))  # the oldest three are overwritten
    replay.add({"t": np.int32(11)})
    kept = list(range(4, 12))
    assert values(replay[0]) == 4 and values(replay[-1]) == 11 and values(replay[np.int64(2)]) == 6
    for part in (slice(2, 5), slice(None), slice(-2, None), slice(None, None, -3)):
        assert values(replay[part]) == kept[part]
    assert [int(row.data["t"]) for row in replay] == kept and len(list(replay)) == len(replay)
    assert values(replay[5:3]) == []
    replay.update_rows(replay[2:4].index, {"t": np.array([-1, -2], np.int32)})
    assert values(replay[:5]) == [4, 5, -1, -2, 8]
    for error, several in ((IndexError, (8, -9)), (TypeError, ("t", np.arange(2), True))):
        for wrong in several:
            raises(error, None, lambda wrong=wrong: replay[wrong])
    assert list(replay_of()) == []
    many = fbuf.Replay(fbuf.Buffer(300), {"t": np.int32(0)})
    many.extend(rows_of(*range(300)))
    assert [int(row.data["t"]) for row in many] == list(range(300))


@pytest.mark.more
def test_the_index_of_written_rows_survives_later_writes():
    replay = replay_of()
    first = replay.extend(rows_of(0, 1, 2))
    assert isinstance(first, fbuf.Index) and first.slot.tolist() == [0, 1, 2]
    unread = replay.extend(rows_of(0))
    copied = copy.deepcopy(unread)
    replay.extend(rows_of(0))
    assert copied.slot.tolist() == unread.slot.tolist() == [3]
    replay.clear()
    replay = replay_of()
    first = replay.extend(rows_of(0, 1, 2))
    second = replay.extend(rows_of(3, 4, 5, 6), mask=np.array([True, False, True, True]))
    replay.add({"t": np.int32(7)})
    third = replay.extend(rows_of(8, 9))
    got = replay.get(second)
    assert values(got) == [3, 0, 5, 6] and got.mask.tolist() == [True, False, True, True]
    assert second.slot.tolist() == [3, 8, 4, 5] and replay.get(third).mask.all()
    assert replay.get(first).mask.tolist() == [False, True, True]  # overwritten since
    replay.clear()
    assert not replay.get(third).mask.any()


def test_an_index_without_references_is_never_computed(monkeypatch):
    computed = []
    monkeypatch.setattr("fbuf._replay.replay.newest", lambda *given: computed.append(given))
    replay = replay_of()
    for i in range(3):
        replay.extend(rows_of(i))
    gc.collect()
    replay.sample(4)
    assert not computed


def test_a_state_can_be_set_and_is_checked():
    replay = replay_of()
    replay.extend(rows_of(0, 1, 2))
    before = copy.deepcopy(replay.state)
    index = replay.extend(rows_of(3))
    replay.add({"t": np.int32(4)})
    replay.state = before
    assert len(replay) == 3 and values(replay[:]) == [0, 1, 2] and index.slot.tolist() == [3]

    step = jax.jit(lambda state: replay.buffer.extend(state, {"t": jnp.arange(2)}), donate_argnums=0)
    given = replay.state
    replay.state = step(given)
    assert len(replay) == 5 and replay.can_sample()
    for state, error, said in (
        (given, RuntimeError, "Replay.state: the state was donated"),
        ({}, TypeError, "Replay.state: got dict; expected a BufferState"),
        (jax.device_get(replay.state), TypeError, "Replay.state: its leaves are ndarray; expected JAX arrays"),
        (replay_of(9).state, ValueError, "made by another buffer"),
        (replay.buffer.init({"x": 0}), ValueError, "Replay.state: its rows are .*; expected .* of t int32"),
        (replay.buffer.init({"t": 0.0}), ValueError, "Replay.state: its rows are .*; expected .* of t int32"),
        (jax.tree.map(lambda leaf: leaf[None], replay.state), ValueError, "leading axis of 1"),
    ):
        raises(error, said, setattr, replay, "state", state)
    assert len(replay) == 5
