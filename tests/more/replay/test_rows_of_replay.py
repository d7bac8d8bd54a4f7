"""`Replay` as a sequence of rows, and the index of the rows that `extend` wrote: lanes, writers, threads, ragged rows."""

import threading

import jax
import numpy as np

import fbuf
from tests.support.replay import replay_of, rows_of, values


def test_rows_of_lanes_step_by_step():
    replay = replay_of(8, lanes=2)
    t = np.arange(10, dtype=np.int32).reshape(5, 2)
    replay.extend({"t": t})
    assert values(replay[:]) == t.reshape(-1)[2:].tolist()
    uneven = replay_of(8, lanes=2)
    uneven.extend({"t": t[:3]}, mask=np.array([[True, False], [True, True], [False, True]]))
    uneven.extend({"t": t[3:4]}, mask=np.array([[True, False]]))
    assert values(uneven[:]) == [0, 3, 2, 5, 6]  # lane 0 holds 0, 2, 6, lane 1 holds 3, 5
    assert [int(row.data["t"]) for row in uneven] == values(uneven[:])


def test_rows_of_a_writer_that_replaces_any_row_are_in_order_of_arrival():
    replay = replay_of(4, writer=fbuf.writers.TopK("t"))
    index = replay.extend(rows_of(5, 1, 9, 3, 7, 2))
    assert values(replay[:]) == [5, 9, 3, 7] and index.slot.shape == (6,)
    got = replay.get(index)
    assert values(got) == [5, 0, 9, 3, 7, 0] and got.mask.tolist() == [True, False, True, True, True, False]


def test_the_index_of_more_rows_than_fit_masks_the_overwritten():
    replay = replay_of(4, lanes=2)
    index = replay.extend({"t": np.arange(6, dtype=np.int32).reshape(3, 2)})
    got = replay.get(index)
    assert values(got) == [[0, 0], [2, 3], [4, 5]] and got.mask.tolist() == [[False] * 2, [True] * 2, [True] * 2]
    doubled = jax.jit(lambda index: jax.tree.map(lambda leaf: leaf * 2, index))(index)  # a pytree, as any Index
    assert type(doubled) is fbuf.Index and doubled.slot.shape == (3, 2)
    replay.update_rows(fbuf.Index(index.slot[2], index.ticket[2]), {"t": np.array([-4, -5], np.int32)})
    assert values(replay[:]) == [2, 3, -4, -5]


def test_priorities_of_the_rows_just_written():
    replay = fbuf.Replay(fbuf.prioritized(8, alpha=1.0, eps=0.0), {"t": np.int32(0)})
    replay.update_priority(replay.extend(rows_of(0, 1, 2)), np.array([0.0, 5.0, 0.0], np.float32))
    assert (np.asarray(replay.sample(16).data["t"]) == 1).all()


def test_an_index_read_by_threads_is_that_of_its_own_rows():
    replay, kept = replay_of(4096), []

    def act(lane):
        for i in range(20):
            number = 1000 * lane + 10 * i
            kept.append((replay.extend(rows_of(number, number + 1)), number))

    threads = [threading.Thread(target=act, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(values(replay.get(index)) == [number, number + 1] for index, number in kept)


def test_ragged_rows_are_a_sequence_too():
    replay = fbuf.Replay(fbuf.Buffer(8, storage=fbuf.storages.Ragged()), {"text": "", "t": 0})
    index = replay.extend([{"text": "ab", "t": 1}, {"text": "c", "t": 2}])
    assert replay[1:].lazy["text"] == ["c"] and [int(row.data["t"]) for row in replay] == [1, 2]
    assert replay.get(index).lazy["text"] == ["ab", "c"]
