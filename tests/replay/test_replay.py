"""`Replay`: the batches of the functional buffer, in place, with errors for refused values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._bridge import lifetime
from fbuf.storages import Compressed, Host
from tests.support.model_cases import listed
from tests.support.processes import devices, run_python
from tests.support.refusals import raises
from tests.support.replay import (
    BUFFERS,
    FRAME,
    at_exit,
    compilations,
    frame_rows,
    make_frames,
    replay_of,
    rows_of,
    same_batches_as_the_buffer,
    soak,
    values,
)
from tests.support.tables import by_tier, checks, one_of, pairwise
from tests.support.threads import Thread
from tests.support.two_replays import SAMPLERS, STORAGES, VIEWS, compare, make_pair

ONES = np.ones(4, np.float32)
NOTHING = r"no row can be sampled\. Add rows, or ask can_sample first; in a step learn only where mask is True\."


@pytest.mark.optimized
def test_batches_are_those_of_the_buffer():
    same_batches_as_the_buffer(fbuf.storages.Device())


def test_actors_and_learners_lose_and_double_no_row():
    soak("consumed", batches=40)


@pytest.mark.more
def test_a_forked_child_cannot_use_the_replay_of_its_parent():
    code = """
        import os, threading, fbuf
        replay = fbuf.Replay(fbuf.Buffer(8), {"t": 0})
        replay.add({"t": 1})
        held, free = threading.Event(), threading.Event()

        def hold():
            with replay._lock.acquire():
                held.set()
                free.wait()

        def refused():
            child = os.fork()
            if child == 0:
                for call in (lambda: replay.sample(2), lambda: replay.add({"t": 2}), lambda: len(replay)):
                    try:
                        call()
                    except RuntimeError as error:
                        print("queue" in str(error), flush=True)
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

        refused()
        threading.Thread(target=hold).start()
        held.wait()
        refused()
        with replay._lock.mutex:
            thread = threading.Thread(target=refused)
            thread.start()
            thread.join()
        free.set()
        print(len(replay), replay.sample(2).data["t"].tolist())
    """
    assert run_python(code).stdout.split("\n") == 3 * ["True", "True", "True", "7"] + ["1 [1, 1]", ""]


@pytest.mark.more
def test_a_forked_child_that_leaves_the_with_closes_nothing():
    code = """
        import os, threading, fbuf
        held, free = threading.Event(), threading.Event()

        def hold():
            with batches._ahead._filled:  # which no thread of the child releases
                held.set()
                free.wait()

        try:
            with fbuf.Replay(fbuf.Buffer(8), {"t": 0}, limit=fbuf.limits.min_size(1)) as replay:
                replay.add({"t": 1})
                with replay.batches(2) as batches:
                    threading.Thread(target=hold).start()
                    held.wait()
                    child = os.fork()
                    if child == 0:
                        raise SystemExit(7)
                    free.set()
                    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), next(batches).data["t"].tolist())
                replay.add({"t": 2})
                print(len(replay))
        except SystemExit as error:
            os._exit(error.code)
    """
    assert run_python(code).stdout == "7 [1, 1]\n2\n"


@pytest.mark.more
def test_a_replay_that_is_loaded_again_and_again_compiles_nothing_and_takes_no_more_slots(tmp_path):
    buffer = fbuf.Buffer(16, storage=fbuf.storages.Host())
    other = fbuf.Replay(fbuf.Buffer(16, storage=fbuf.storages.Host()), {"t": 0})  # its store is in another slot
    replay = fbuf.Replay(buffer, FRAME)
    replay.extend(frame_rows(0))
    replay.save(str(tmp_path))
    each = compilations(
        replay,
        lambda old: fbuf.Replay.load(str(tmp_path), buffer),
        8,
        lambda replay: (replay.extend(frame_rows(8)), replay.sample(4)),
    )
    assert each[0] > 0 and each[2:] == [0] * 6
    slots = lifetime._slots_of[replay.state.rows.layout]
    assert len(other) == 0 and len(slots) == 3  # of the first, the last and the next one


def test_stores_that_are_loaded_in_turn_keep_to_two_slots_each(tmp_path):
    buffer, states, slots = fbuf.Buffer(4, storage=Host()), [], [set() for _ in range(4)]
    for size in range(4):
        states.append(buffer.init({"x": np.zeros(1 + size, np.uint8)}))
        fbuf.save(tmp_path / str(size), buffer, states[-1])
    for _ in range(5):
        for number, seen in enumerate(slots):
            states[number] = fbuf.load(tmp_path / str(number), buffer)[1]  # the one before is still there
            seen.add(states[number].rows.slot)
    assert [len(seen) for seen in slots] == [2, 2, 2, 2] and len(set.union(*slots)) == 8


@pytest.mark.parametrize("close", by_tier(True, more=[False]))
def test_a_store_that_is_closed_leaves_its_slot_to_the_next(close):
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Host(keys=("obs",)))
    replay = fbuf.Replay(buffer, FRAME)
    replay.extend(frame_rows(0))
    if close:
        fbuf.stores()[-1].close()
    state = buffer.extend(buffer.init(FRAME), frame_rows(8))
    assert (state.rows.slot == replay.state.rows.slot) == close
    np.testing.assert_array_equal(buffer.rows(state).data["reward"], np.arange(8, 16))
    if close:
        raises(RuntimeError, r"^fbuf: this state's host store .* is not open in this process", replay.rows)
    del replay
    assert np.asarray(buffer.rows(state).mask).all()


@pytest.mark.in_place
def test_writes_are_in_place():
    replay = make_frames()
    before, old = replay.state.rows["obs"].unsafe_buffer_pointer(), replay.state
    replay.extend(frame_rows(0))
    assert replay.state.rows["obs"].unsafe_buffer_pointer() == before
    assert old.rows["obs"].is_deleted()


def test_an_empty_replay_has_nothing_to_draw():
    replay = make_frames()
    raises(ValueError, NOTHING, replay.sample, 4)
    assert not replay.can_sample()
    replay.extend(frame_rows(0))
    assert replay.can_sample() and replay.sample(4).mask.all()
    assert {type(leaf) for leaf in jax.tree.leaves(replay.sample(4, to="numpy"))} == {np.ndarray}
    raises(ValueError, 'to is \'tf\'; expected "jax", "numpy" or "torch"', replay.sample, 4, to="tf")


def test_refused_priorities_are_errors_that_name_the_reason():
    replay = make_frames()
    replay.extend(frame_rows(0))
    batch = replay.sample(4)
    said = "1 priorities are NaN .*refused; the others took effect"
    for bad in (np.nan, np.inf, -np.inf):
        raises(ValueError, said, replay.update_priority, batch.index, np.array([1, bad, 1, 1], np.float32))
        replay.update_priority(batch.index, ONES)  # counted once
    wild = fbuf.Index(jnp.array([99, -5, 99, -5], jnp.int32), jnp.ones(4, jnp.uint32))
    raises(ValueError, "4 indices name no slot", replay.update_priority, wild, ONES)
    for start in (8, 16):
        replay.extend(frame_rows(start))
    raises(ValueError, "4 indices are stale", replay.update_priority, batch.index, ONES)
    raises(ValueError, "4 indices are stale", replay.update_rows, batch.index, {"reward": ONES})
    with pytest.raises(ValueError, match="Replay.extend: 1 priorities are NaN"):
        replay.extend(frame_rows(0), priority=np.array([np.inf] + [1.0] * 7, np.float32))
    assert len(replay) == 16 and replay.sample(4).mask.all()


def test_a_lenient_replay_only_counts():
    replay = make_frames(strict=False)
    assert not replay.sample(4).mask.any()
    replay.extend(frame_rows(0), priority=np.array([np.nan] + [1.0] * 7, np.float32))
    stats = replay.stats()
    assert stats["empty_samples"] == 1 and stats["refused_nonfinite"] == 1
    replay.set(alpha=0.0)
    assert replay.stats()["alpha"] == 0 and replay.stats()["device_bytes"] > 0


def test_a_seed_is_an_int():
    for wrong in ("x", 1.5, None, True, np.zeros(2, int), jax.random.key(0)):
        with pytest.raises(TypeError, match=r"Replay: seed is [^;]*; expected an int\. Write Replay\(.*seed=0\)"):
            fbuf.Replay(fbuf.Buffer(4), 0, wrong)
    for seed in (2, np.int64(2), jnp.int32(2)):
        assert len(fbuf.Replay(fbuf.Buffer(4), 0, seed)) == 0


def test_checked_raises_for_a_jitted_step():
    buffer = fbuf.prioritized(16)
    state = buffer.extend(buffer.init(FRAME), frame_rows(0))

    @jax.jit
    def learn(state, scale):
        state, batch = buffer.sample(state, jax.random.key(0), 4)
        return buffer.update_priority(state, batch.index, batch.data["reward"] * scale)

    fine = fbuf.checked(learn)(state, jnp.float32(1))
    raises(ValueError, "checked: 4 priorities are NaN", lambda: fbuf.checked(learn)(fine, jnp.float32(jnp.nan)))
    raises(ValueError, NOTHING, fbuf.checked(learn), buffer.init(FRAME), jnp.float32(1))


test_batches_to_the_bit = pytest.mark.optimized(
    checks(
        more=[
            (same_batches_as_the_buffer, [Host(keys=("obs",))]),
        ]
    )
)


def aligned(*shape):
    """Return ones in memory that XLA shares on CPUs."""
    memory = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    ones = memory[-memory.ctypes.data % 64 :][: memory.size - 64].view(np.float32).reshape(shape)
    ones[...] = 1
    return ones


def test_arrays_may_be_changed_after_a_call():
    replay = fbuf.Replay(fbuf.prioritized(16), {"x": np.zeros(64, np.float32)}, strict=False)
    index, waited = replay.extend({"x": aligned(15, 64)}), False

    @jax.jit
    def slow(header, x):
        late = jax.lax.fori_loop(0, 200, lambda _, x: jnp.sin(x @ x), x)[0, 0]
        return late, header + (late * 0).astype(header.dtype)

    for _ in range(3):  # the first one compiles
        late, header = slow(replay.state.header, jnp.ones((200, 200)))
        replay.state = replay.state.replace(header=header)
        error, row, rows, beta = aligned(15), aligned(64), aligned(15, 64), aligned()
        replay.update_priority(jax.tree.map(jnp.asarray, index), error)  # of JAX: it waits for no draw
        replay.add({"x": row}, priority=jnp.ones(()))
        index = replay.extend({"x": rows})
        replay.set(beta=beta)
        waited |= not late.is_ready()
        for array in (error, row, rows, beta):
            array[...] = 7
        assert float(replay.stats()["beta"]) == 1
        assert float(replay.stats()["max_priority"]) == 1
        assert (replay.rows().data["x"] == 1).all()
    assert waited


def test_large_arrays_may_be_changed_after_a_call():
    """Memory that is not aligned is copied in another thread."""
    replay = fbuf.Replay(fbuf.Buffer(16), {"x": np.zeros((1024, 1024), np.uint8)})
    rows = np.zeros((16 << 20) + 64, np.uint8)
    rows = rows[-rows.ctypes.data % 64 + 16 :][: 16 << 20].reshape(16, 1024, 1024)
    for number in range(3):
        rows[...] = number
        replay.extend({"x": rows})
        rows[...] = 7
        assert (np.asarray(replay.rows().data["x"]) == number).all()


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


@pytest.mark.more
def test_batches_go_to_another_device_and_return():
    assert run_python(_DEVICES, **devices(2)).stdout == "well\n"


CASES = listed("""
device/ranked/transition/2; device/host priorities/episode/-; compressed/prioritized/transition/2;
deduplicated/uniform/transition/-; device/prioritized/transition/-; device/held/row/2; device/ranked/row/-;
device/distinct/row/2; device/held/transition/-; compressed/prioritized/row/2
""")


@pytest.mark.more
@pytest.mark.optimized
def test_collected_rows_and_priorities_give_the_batches_of_writing_at_once(case):
    compare(make_pair(*case), steps=50, seed=1)


@pytest.mark.more
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


@pytest.mark.more
def test_rows_of_a_writer_that_replaces_any_row_are_in_order_of_arrival():
    replay = replay_of(4, writer=fbuf.writers.TopK("t"))
    index = replay.extend(rows_of(5, 1, 9, 3, 7, 2))
    assert values(replay[:]) == [5, 9, 3, 7] and index.slot.shape == (6,)
    got = replay.get(index)
    assert values(got) == [5, 0, 9, 3, 7, 0] and got.mask.tolist() == [True, False, True, True, True, False]


@pytest.mark.more
def test_the_index_of_more_rows_than_fit_masks_the_overwritten():
    replay = replay_of(4, lanes=2)
    index = replay.extend({"t": np.arange(6, dtype=np.int32).reshape(3, 2)})
    got = replay.get(index)
    assert values(got) == [[0, 0], [2, 3], [4, 5]] and got.mask.tolist() == [[False] * 2, [True] * 2, [True] * 2]
    doubled = jax.jit(lambda index: jax.tree.map(lambda leaf: leaf * 2, index))(index)  # a pytree, as any Index
    assert type(doubled) is fbuf.Index and doubled.slot.shape == (3, 2)
    replay.update_rows(fbuf.Index(index.slot[2], index.generation[2]), {"t": np.array([-4, -5], np.int32)})
    assert values(replay[:]) == [2, 3, -4, -5]


@pytest.mark.more
def test_priorities_of_the_rows_just_written():
    replay = fbuf.Replay(fbuf.prioritized(8, alpha=1.0, eps=0.0), {"t": np.int32(0)})
    replay.update_priority(replay.extend(rows_of(0, 1, 2)), np.array([0.0, 5.0, 0.0], np.float32))
    assert (np.asarray(replay.sample(16).data["t"]) == 1).all()


@pytest.mark.more
def test_an_index_read_by_threads_is_that_of_its_own_rows():
    replay, kept = replay_of(4096), []

    def act(lane):
        for number in range(1000 * lane, 1000 * lane + 200, 10):
            kept.append((replay.extend(rows_of(number, number + 1)), number))

    for thread in [Thread(act, lane) for lane in range(4)]:
        thread.ends()
    assert all(values(replay.get(index)) == [number, number + 1] for index, number in kept)


@pytest.mark.more
def test_ragged_rows_are_a_sequence_too():
    replay = fbuf.Replay(fbuf.Buffer(8, storage=fbuf.storages.Ragged()), {"text": "", "t": 0})
    index = replay.extend([{"text": "ab", "t": 1}, {"text": "c", "t": 2}])
    assert replay[1:].lazy["text"] == ["c"] and [int(row.data["t"]) for row in replay] == [1, 2]
    assert replay.get(index).lazy["text"] == ["ab", "c"]


def refused(storage, *case):
    return case[:2] == ("consume", "sequence")  # windows are not consumed


case = one_of(
    *CASES, exhaustive=[*[c for c in pairwise(STORAGES, SAMPLERS, VIEWS, (None, 2), refused=refused) if c not in CASES]]
)


test_checks = checks(
    more=[(soak, [("prefetch", 60)]), (at_exit, ["actor"])],
    exhaustive=[
        (soak, [(name, 4000) for name in BUFFERS]),
        (at_exit, ["room", "error"]),
        (same_batches_as_the_buffer, [Compressed(keys=("obs",))]),
    ],
)


LOADED = {
    "fifo": {"sampler": fbuf.samplers.Consume(times=2, order="fifo"), "lanes": 2},
    "prioritized": {"sampler": fbuf.samplers.Prioritized(normalize="buffer", largest="held")},
    "host priorities": {"sampler": fbuf.samplers.Prioritized(on="host")},
    "staleness": {"sampler": fbuf.samplers.Staleness(maximum=3)},
    "ranked": {"sampler": fbuf.samplers.Ranked(uniform=0.1)},
    "epoch": {"sampler": fbuf.samplers.Epoch(), "view": fbuf.views.Sequence(3, episode_end=()), "lanes": 2},
    "top-k": {"writer": fbuf.writers.TopK("t")},
    "deduplicated": {"storage": fbuf.storages.Deduplicated(keys=("obs",), block=(4, 4))},
    "compressed": {"storage": fbuf.storages.Compressed(keys=("obs",)), "prefetch": 1, "batch_size": 4},
    "ragged": {"storage": fbuf.storages.Ragged()},
    "normalized": {"on_read": fbuf.transforms.Normalize("obs")},
    "memmap": {"storage": lambda path: fbuf.storages.Memmap(f"{path}/store")},
    "files": {"storage": lambda path: fbuf.storages.Compressed(path=f"{path}/store")},
}


@pytest.mark.more
@pytest.mark.parametrize("kind", LOADED)
def test_a_replay_that_is_loaded_or_resumed_again_compiles_nothing(kind, tmp_path):
    parts, in_files = dict(LOADED[kind]), kind in ("memmap", "files")
    if in_files:
        parts["storage"] = parts["storage"](tmp_path)
    buffer = fbuf.Buffer(24, **parts)
    row = {"t": np.int32(0), "obs": np.zeros((8, 8), np.uint8)}

    def use(replay):
        for first in (0, 9) if buffer.sampler.in_order else (0, 9, 18):
            t = np.arange(first, first + 3 * (buffer.lanes or 1), dtype=np.int32)
            t = t.reshape(3, *([buffer.lanes] if buffer.lanes else []))
            replay.extend({"t": t, "obs": np.broadcast_to(t[..., None, None], (*t.shape, 8, 8)).astype(np.uint8)})
        index = replay.sample(4).index
        if buffer.sampler.prioritized:
            replay.update_priority(index, np.ones(4, np.float32))

    def reopen(old):
        if not in_files:
            return fbuf.Replay.load(str(tmp_path / "saved"), buffer)
        fbuf.stores()[-1].close()
        return fbuf.Replay(buffer, row, resume=True)

    replay = fbuf.Replay(buffer, row)
    use(replay)
    replay.save(str(tmp_path / "saved"))
    assert compilations(replay, reopen, 5, use)[2:] == [0, 0, 0]
