"""Rows of windows are written back, priorities are read, and `stats` says where the ring is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._core import slots
from fbuf._core.slots import Geometry, Ring

ENDS = ("terminated",)
WINDOWS = fbuf.Buffer(
    8,
    view=fbuf.views.Sequence(4, boundary="mask", episode_end=ENDS, autoreset="same_step"),
    sampler=fbuf.samplers.Prioritized(),
)


def rows_of(first, number, end=None):
    t = jnp.arange(first, first + number)
    return {"t": t, "carry": jnp.zeros((number, 2)), "terminated": t == (-1 if end is None else end)}


def filled():
    """Rows 0 to 5, of which row 2 ends an episode."""
    return WINDOWS.extend(WINDOWS.init(jax.tree.map(lambda x: x[0], rows_of(0, 1))), rows_of(0, 6, end=2))


def test_late_write_backs_are_refused_row_by_row():
    state = filled()
    index = WINDOWS.rows(state).index
    anchor = fbuf.Index(index.slot[:1], index.ticket[:1])  # its window is rows 0, 1, 2
    rows = WINDOWS.window_index(state, anchor)
    later = WINDOWS.extend(state, rows_of(6, 4))  # in the slots of rows 0 and 1
    ones = {"carry": jnp.ones((1, 4, 2))}
    after = WINDOWS.update_rows(later, rows, ones)
    assert after.rows["carry"][:3, 0].tolist() == [0, 0, 1]
    assert int(WINDOWS.stats(after)["refused_stale"]) == 2
    after = WINDOWS.update_rows(later, WINDOWS.window_index(later, anchor), ones)  # the window is gone
    assert after.rows["carry"][:3, 0].tolist() == [0, 0, 0]
    assert int(WINDOWS.stats(after)["refused_stale"]) == 4
    waits = WINDOWS.window_index(state, fbuf.Index(index.slot[3:4], index.ticket[3:4]))  # no anchor yet
    after = WINDOWS.update_rows(state, waits, ones)
    assert not after.rows["carry"].any() and int(WINDOWS.stats(after)["refused_stale"]) == 4
    wrong = fbuf.Index(jnp.array([9]), jnp.array([1], jnp.uint32))
    stats = WINDOWS.stats(WINDOWS.update_rows(later, WINDOWS.window_index(later, wrong), ones))
    assert (int(stats["refused_stale"]), int(stats["refused_out_of_range"])) == (0, 4)


def test_priorities_are_read_as_they_were_set():
    state = filled()
    read = jax.jit(WINDOWS.priorities)
    np.testing.assert_allclose(read(state), [1, 1, 1, *[np.nan] * 5], rtol=1e-5)  # rows 3 to 5 wait for their windows
    index = WINDOWS.rows(state).index
    rows = WINDOWS.window_index(state, fbuf.Index(index.slot[1:3], index.ticket[1:3]))
    errors = jnp.array([[-2.0, 3.0, 9.0, 9.0], [4.0, 9.0, 9.0, 9.0]])
    state = WINDOWS.update_priority(state, rows, errors, mask=jnp.array([[True] * 4, [False] * 4]))
    np.testing.assert_allclose(read(state, index), [1, 2, 3, *[np.nan] * 5], rtol=1e-5)
    np.testing.assert_allclose(read(state, rows), [[2, 3, np.nan, np.nan], [3, *[np.nan] * 3]], rtol=1e-5)
    closed = WINDOWS.update_priority(state, index, jnp.ones(8))
    assert int(WINDOWS.stats(closed)["refused_closed"]) == 3
    one, known = jax.tree.map(lambda x: x[None], index), ~jnp.isnan(read(state, index))[None]
    stats = WINDOWS.stats(WINDOWS.update_priority(state, one, jnp.ones((1, 8)), mask=known))
    assert not any(int(stats[name]) for name in ("refused_closed", "refused_stale", "refused_out_of_range"))


def test_stats_say_where_the_ring_is():
    buffer = fbuf.Buffer(6, lanes=2)
    stats = jax.jit(buffer.stats)

    def facts(state):
        found = stats(state)
        return bool(found["is_full"]), int(found["cursor"]), int(found["writes"])

    state = buffer.init({"t": 0})
    assert facts(state) == (False, 0, 0)
    state = buffer.extend(state, {"t": jnp.zeros((2, 2), jnp.int32)})
    assert facts(state) == (False, 2, 4)
    state = buffer.extend(state, {"t": jnp.zeros((2, 2), jnp.int32)}, mask=jnp.array([[1, 1], [1, 0]], bool))
    assert facts(state) == (True, -1, 7)
    state = buffer.add(state, {"t": jnp.zeros(2, jnp.int32)}, mask=jnp.array([False, True]))
    assert facts(state) == (True, 1, 8)
    assert facts(buffer.clear(state)) == (False, 0, 12)  # each lane is at the end of its second round


@pytest.mark.parametrize(("lap", "writes"), [(2**30, 2**31 - 2), (2**31, 2**32 - 1), (2**32 - 1, 2**32 - 1)])
def test_writes_do_not_overflow(lap, writes):
    rings = Ring(jnp.array([0]), jnp.array([2]), jnp.array([lap], jnp.uint32))
    assert int(slots.head(rings, Geometry(1, 2))[1]) == writes
