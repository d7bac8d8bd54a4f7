"""flashbax states made by hand, as dicts: rings, queues and trees of priorities."""

import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._rows import columns as _columns
from fbuf.interop import _flashbax
from tests.support.interop import from_flashbax
from tests.support.refusals import raises

LENGTH, PERIOD, ALPHA = 8, 2, 0.7


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(_columns, "BLOCK_BYTES", 48)


def ring(lanes, number):
    """Return a state after `number` rows a lane, and the t of the rows that it holds, oldest first: [n, E]."""
    held = np.arange(max(0, number - LENGTH), number)
    rows = held + 1000 * np.arange(lanes)[:, None]
    t = np.full((lanes, LENGTH), -1, np.int32)
    t[:, held % LENGTH] = rows
    experience = {"obs": np.repeat(t[..., None], 3, -1).astype(np.float32), "step": {"t": t}}
    return {"experience": experience, "current_index": number % LENGTH, "is_full": number >= LENGTH}, rows.T


def tree(powers, largest):
    levels = [np.asarray(powers, np.float32).reshape(-1)]
    while len(levels[0]) > 1:
        levels.insert(0, levels[0].reshape(-1, 2).sum(axis=1))
    return {"nodes": np.concatenate(levels), "capacity": None, "max_recorded_priority": largest}


@pytest.mark.parametrize(("lanes", "number"), [(1, 0), (3, 5), (3, 19)])
def test_rows_are_read_oldest_first(lanes, number):
    state, held = ring(lanes, number)
    buffer, ours = from_flashbax(state)
    assert buffer.lanes == (None if lanes == 1 else lanes) and buffer.capacity == max(len(held), 1) * lanes
    assert int(buffer.size(ours)) == held.size
    if number:
        got = buffer.rows(ours).data
        assert np.asarray(got["step"]["t"]).reshape(held.shape).tolist() == held.tolist()
        assert np.asarray(got["obs"]).reshape(*held.shape, 3)[..., 2].tolist() == held.tolist()


def test_the_caller_chooses_buffer_names_and_rows():
    state, held = ring(2, 11)
    compressed = fbuf.Buffer(40, lanes=2, storage=fbuf.storages.Compressed(keys=("frame",)))
    buffer, ours = from_flashbax(state, buffer=compressed, fields={"obs": "frame"}, newest=4)
    assert buffer is compressed and np.array_equal(buffer.rows(ours, last=4).data["frame"][..., 0], held[-4:])
    raises(ValueError, r"rows are in 2 lanes, but buffer has one", lambda: from_flashbax(state, buffer=fbuf.Buffer(40)))
    single, held = ring(1, 5)
    buffer, ours = from_flashbax(single, buffer=fbuf.Buffer(40, lanes=1), fields=["step/t"])
    assert buffer.rows(ours, last=5).data["step"]["t"].tolist() == held.tolist()


def test_queues_are_read_from_their_oldest_row():
    state, _ = ring(1, 13)
    queue = {"experience": state["experience"], "read_index": 7, "write_index": 5, "is_full": False}
    buffer, ours = from_flashbax(queue)
    assert buffer.rows(ours).data["step"]["t"].tolist() == [7, 8, 9, 10, 11, 12]
    buffer, ours = from_flashbax(queue | {"read_index": 5, "is_full": True})
    assert buffer.rows(ours).data["step"]["t"].tolist() == [5, 6, 7, 8, 9, 10, 11, 12]


def test_invalid_states_are_refused():
    state, _ = ring(1, 6)
    nodes = tree(np.ones(LENGTH), 1.0)
    broken = tree(np.where(np.arange(LENGTH) == 2, np.nan, 1), 1.0)
    for wrong, error, match in (
        (7, TypeError, "state is a int"),
        ({"x": 1}, TypeError, "leaves of no experience; expected a state of flashbax"),
        ({"experience": {"a": np.zeros((1, 4)), "b": np.zeros((1, 5))}}, TypeError, "whose experience has leaves"),
        (state | {"current_index": 9}, ValueError, "the index is 9; expected one below 8"),
        (state | {"sum_tree_state": broken}, ValueError, "a TD error was NaN"),
        (state | {"sum_tree_state": nodes | {"capacity": 3}}, ValueError, "for 3 windows, 1 lanes, 8 rows"),
        (state | {"sum_tree_state": nodes | {"nodes": np.ones(14)}}, ValueError, "the tree has 14 nodes"),
    ):
        pytest.raises(error, from_flashbax, wrong, priority_exponent=ALPHA).match(match)
    raises(ValueError, "priority_exponent is None", from_flashbax, state | {"sum_tree_state": nodes})


def test_only_the_rows_asked_for_are_fetched_from_an_accelerator():
    leaf, at = np.arange(24).reshape(2, 6, 2), np.array([4, 5, 0])
    assert np.array_equal(_flashbax._take(jnp.asarray(leaf), jnp.asarray(at)), leaf[:, at])
