"""`Replay`: further storages between threads, epochs, rows by index, exits of the interpreter, and another device."""

import jax
import numpy as np
import pytest

import fbuf
from fbuf.storages import Host
from tests.replay import test_host_draws, test_row_block
from tests.replay.test_epoch import EXAMPLE, numbers, rows
from tests.support.model_cases import listed
from tests.support.processes import devices, run_python
from tests.support.replay import at_exit, replay_of, rows_of, same_batches_as_the_buffer, soak, values
from tests.support.tables import checks, one_of
from tests.support.threads import Thread
from tests.support.two_replays import compare, make_pair

pytestmark = pytest.mark.more

PARTS = [{"storage": fbuf.storages.Compressed(keys=("t",))}, {"storage": fbuf.storages.Ragged()}]
PARTS += [{"writer": fbuf.writers.TopK("t")}]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_epochs_of_other_parts_also_after_close(parts):
    replay = fbuf.Replay(fbuf.Buffer(10, **parts), EXAMPLE)
    replay.extend(rows(0, 30))
    replay.close()
    assert sorted(numbers(replay.epoch(3))) == list(range(20, 30))


test_checks = checks((soak, [("prefetch", 60)]), (at_exit, ["actor"]))
test_batches_to_the_bit = pytest.mark.optimized(
    checks(
        (same_batches_as_the_buffer, [Host(keys=("obs",))]),
        (test_host_draws.test_batches_in_numpy_are_those_of_jax, [(37, None, 1, "threefry2x32")]),
        (test_host_draws.test_transitions_in_numpy_are_those_of_jax, [("reset step", 2)]),
        (test_row_block.test_batches_are_those_of_writing_each_row, [(("device", "epoch", "transition"),)]),
    )
)


_DEVICES = """
import jax, numpy as np, fbuf
one, two = jax.devices()
replay = fbuf.Replay(fbuf.prioritized(64), {"t": np.float32(0)})
replay.extend({"t": np.arange(20, dtype=np.float32)})
with replay.batches(4, device=two) as batches:
    batch = next(batches)
    assert all(leaf.devices() == {two} for leaf in jax.tree.leaves(batch))
    replay.update_priority(batch.index, batch.data["t"] + 1)
    replay.update_rows(batch.index, {"t": batch.data["t"]})
assert replay.state.token.devices() == {one} and replay.stats()["max_priority"] > 1
mesh = jax.sharding.Mesh(np.array([one, two]), "x")
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
with replay.batches(4, device=sharding) as batches:
    batch = next(batches)
    assert batch.data["t"].sharding == sharding
    replay.update_priority(batch.index, batch.data["t"])

replay, other = (fbuf.Replay(fbuf.Buffer(64), {"t": np.float32(0)}) for _ in range(2))
for each in replay, other:
    each.add({"t": np.float32(1)})
other.state = jax.device_put(other.state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
for step in range(3):
    batches = [each.sample(4, to="numpy") for each in (replay, other)]
    jax.tree.map(np.testing.assert_array_equal, *batches)
    for each in replay, other:
        each.add({"t": np.float32(step)})
print("well")
"""


def test_batches_go_to_another_device_and_return():
    assert run_python(_DEVICES, **devices(2)).stdout == "well\n"


CASES = listed("""
device/ranked/transition/2; device/host priorities/episode/-; compressed/prioritized/transition/2;
deduplicated/uniform/transition/-; device/prioritized/transition/-; device/held/row/2; device/ranked/row/-;
device/distinct/row/2; device/held/transition/-; compressed/prioritized/row/2
""")
case = one_of(*CASES)


@pytest.mark.optimized
def test_collected_rows_and_priorities_give_the_batches_of_writing_at_once(case):
    compare(make_pair(*case), steps=50, seed=1)


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
        for number in range(1000 * lane, 1000 * lane + 200, 10):
            kept.append((replay.extend(rows_of(number, number + 1)), number))

    for thread in [Thread(act, lane) for lane in range(4)]:
        thread.ends()
    assert all(values(replay.get(index)) == [number, number + 1] for index, number in kept)


def test_ragged_rows_are_a_sequence_too():
    replay = fbuf.Replay(fbuf.Buffer(8, storage=fbuf.storages.Ragged()), {"text": "", "t": 0})
    index = replay.extend([{"text": "ab", "t": 1}, {"text": "c", "t": 2}])
    assert replay[1:].lazy["text"] == ["c"] and [int(row.data["t"]) for row in replay] == [1, 2]
    assert replay.get(index).lazy["text"] == ["ab", "c"]
