"""Episodes, limits, refusals, absent shards, compilations and learner groups, without Ray."""

import threading
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf._formats import checkpoint
from fbuf.ray._calls import Away
from tests.support.ray_shards import ROW, clients, steps
from tests.support.refusals import raises
from tests.support.threads import PATIENCE, soon
from tests.support.two_processes import run_processes

pytestmark = pytest.mark.more


@pytest.mark.parametrize("lanes", [None, 2])
def test_episodes_end_where_the_writer_changes_or_rows_are_lost(lanes):
    buffer = fbuf.Buffer(64, view=fbuf.views.Sequence(2, episode_end=()), lanes=lanes)
    link, client = clients(buffer, ROW)
    own = () if lanes is None else (1,)
    writers = [client() if lanes is None else client([0]) for _ in range(2)]
    for i, writer in enumerate((0, 0, 1, 0)):
        writers[writer].extend(steps(4 * i, 4, *own))
    starts = {0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13, 14}
    assert set(writers[0].sample(256, to="numpy").data["t"][:, 0]) == starts
    writers[0].flush()
    box = writers[0]._boxes[0]
    box._last, box._next = box._last + 1, box._next + 1  # a call that is lost
    writers[0].extend(steps(16, 4, *own))
    assert set(writers[0].sample(256, to="numpy").data["t"][:, 0]) == starts | {16, 17, 18}
    assert link.shards[0].stats()["cuts"] == 3


def test_the_counts_of_a_limit_are_saved_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("fbuf.ray._shard.ENDING", 0)
    limit = fbuf.limits.samples_per_insert(2, min_size=8, rows=4, draws=8)
    options = {"path": tmp_path, "save_every": 2, "limit": limit}
    link, client = clients(fbuf.Buffer(64), ROW, **options)
    remote = client()
    for i in range(3):
        remote.extend(steps(4 * i, 4))
        if i:
            remote.sample(8)
    link.restart(0)
    stats = link.shards[0].stats()
    assert (stats["limit_added"], stats["limit_drawn"], stats["size"]) == (8, 0, 8)
    with pytest.raises(BlockingIOError, match="is in use by this process; .* Close that service"):
        clients(fbuf.Buffer(64), ROW, **options)
    link.stop(0)
    link, client = clients(fbuf.Buffer(64), ROW, **(options | {"limit": None}))
    assert "limit_added" not in link.shards[0].stats()  # an earlier limit is dropped


def test_a_write_that_waits_for_the_limit_lets_a_save_run(tmp_path):
    link, client = clients(fbuf.Buffer(64), ROW, path=tmp_path, limit=fbuf.limits.queue(4))
    writer, learner = client(), client()
    writer.extend(steps(0, 4))
    thread = threading.Thread(target=writer.extend, args=(steps(4, 4),))
    thread.start()
    soon(lambda: link.shards[0]._replay._limiter._waiting)
    link.shards[0].save()
    assert thread.is_alive()
    learner.sample(4)
    thread.join()
    assert link.shards[0].stats()["size"] == 8
    link.shards[0].close()
    raises(fbuf.ReplayClosed, None, learner.sample, 4)


def test_a_save_that_is_written_holds_up_no_call(tmp_path, monkeypatch):
    link, client = clients(fbuf.Buffer(64), ROW, path=tmp_path)
    remote, shard = client(), link.shards[0]
    remote.extend(steps(0, 4))
    begun, ended, waited, write = threading.Event(), threading.Event(), list[bool](), checkpoint.write

    def late(*args, **options):
        begun.set()
        waited.append(ended.wait(PATIENCE))
        return write(*args, **options)

    monkeypatch.setattr(checkpoint, "write", late)
    saving = threading.Thread(target=shard.save)
    saving.start()
    begun.wait()
    remote.extend(steps(4, 4))
    assert remote.sample(8).mask.all() and shard.receipt(remote._id) == (2, 0)
    ended.set()
    saving.join()
    assert waited == [True]
    assert shard.receipt(remote._id) == (2, 1)
    link.restart(0)
    assert link.shards[0].stats()["size"] == 4


def test_sizes_that_vary_compile_nothing_after_warm_up():
    buffer = fbuf.prioritized(256, lanes=4)
    _, client = clients(buffer, ROW, shards=2)
    remote, rng = client(), np.random.default_rng(0)
    remote._rng = np.random.default_rng(1)  # sizes of updates are those of draws

    def work(sizes):
        for rows in sizes:
            remote.extend(steps(0, rows, 4), priority=rng.random((rows, 4)) + 0.1)
            index = remote.sample(16, to="numpy").index
            chosen = jax.tree.map(lambda leaf, rows=rows: leaf[:rows], index)
            remote.update_priority(chosen, rng.random(rows))
            remote.flush()

    warm = (1, 2, 3, 5, 9, 16)
    for _ in range(4):
        work(warm)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(  # it stays: listeners cannot be taken away one by one
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    work(rng.integers(1, 17, 12).tolist())
    assert not compiled


def test_other_shards_serve_while_one_is_away():
    link, client = clients(fbuf.prioritized(64), ROW, shards=2)
    remote = client()
    for i in range(4):
        remote.extend(steps(4 * i, 4))
    assert set(remote.sample(64, to="numpy").index.shard) == {0, 1}
    link.away.add(1)
    batch = remote.sample(64, to="numpy")
    assert set(batch.index.shard) == {0} and batch.mask.all()
    np.testing.assert_allclose(batch.probability, 1 / 8, rtol=1e-5)
    link.away.clear()
    remote.sample(8)
    assert set(remote.sample(64, to="numpy").index.shard) == {0, 1}
    link.away |= {0, 1}
    raises(TimeoutError, "no shard answered", remote.sample, 8)


def test_updates_go_to_their_shards_in_any_order():
    link, client = clients(fbuf.prioritized(64, alpha=1.0, eps=0.0), ROW, shards=2)
    remote = client()
    for i in range(4):
        remote.extend(steps(4 * i, 4))
    batch = remote.sample(64, to="torch")
    order = np.random.default_rng(0).permutation(64)
    shuffled = jax.tree.map(lambda leaf: leaf[order], batch.index)
    errors = batch.data["t"][order] + 1.0
    errors[0] = np.nan
    raises(ValueError, "1 TD error of 64 not finite; the others are set", remote.update_priority, shuffled, errors)
    remote.flush()
    for shard in link.shards:
        held = shard._replay.rows()
        rows, mask = np.asarray(held.data["t"]), np.asarray(held.mask)
        drawn = np.isin(rows, batch.data["t"].numpy()) & mask
        found = np.asarray(shard._replay.priorities(held.index))
        assert (np.isclose(found, rows + 1.0) | np.isclose(found, 1.0))[drawn].all() and drawn.sum() > 3


@pytest.mark.parametrize("to", ["jax", "torch", "numpy"])
def test_batches_are_drawn_ahead_in_few_calls(to, monkeypatch):
    link, client = clients(fbuf.Buffer(64), ROW)
    remote = client()
    remote.extend(steps(0, 8))
    link.calls.clear()
    batches = remote.batches(4, prefetch=9, to=to)
    for _ in range(9):
        assert next(batches).data["t"].shape == (4,)
    assert link.calls.count("sample") == 5  # three batches a call, and two calls ahead
    for calls, bytes_ahead in ((4, fbuf.ray._client._AHEAD), (11, 0)):  # the first batch tells how large they are
        link.calls.clear()
        monkeypatch.setattr("fbuf.ray._client._AHEAD", bytes_ahead)
        for _ in zip(range(9), remote.batches(4, to=to), strict=False):
            pass
        assert link.calls.count("sample") == calls


def test_a_refused_call_raises_and_later_ones_are_applied():
    link, client = clients(fbuf.Buffer(64, view=fbuf.views.Sequence(2, episode_end=())), ROW)
    remote = client()
    remote.extend(steps(0, 4))
    shard = link.shards[0]
    extend, shard._replay.extend = shard._replay.extend, lambda *_, **__: 1 / 0
    remote.extend(steps(4, 4))
    shard._replay.extend = extend
    remote.extend(steps(8, 4))
    raises(ZeroDivisionError, None, remote.flush)
    remote.flush()
    assert set(remote.sample(64, to="numpy").data["t"][:, 0]) == {0, 1, 2, 8, 9, 10}


def test_learners_of_a_group_share_batches():
    buffer = fbuf.prioritized(64)
    _, client = clients(buffer, ROW)
    learners, replay = [client(group=(rank, 3)) for rank in range(3)], fbuf.Replay(buffer, ROW)
    for rows in (learners[0], replay):
        rows.extend(steps(0, 32), priority=np.arange(1.0, 33.0))
    ahead = [[learner.sample(12, to="numpy") for _ in range(3)] for learner in learners]  # one runs ahead
    for batches in zip(*ahead, strict=True):
        whole = replay.sample(12, to="numpy")
        for rank, batch in enumerate(batches):
            assert (batch.data["t"] == whole.data["t"][rank::3]).all() and (batch.weight == whole.weight[rank::3]).all()
    raises(ValueError, "batch_size is 8; expected a multiple of the 3 ranks", lambda: learners[0].sample(8))


def test_learners_of_a_group_share_batches_of_several_shards():
    """Each row of a batch has one learner, the probability and weight that it has in the whole, and is fixed by the seed."""
    priority, drawn = np.arange(1.0, 33.0), list[Any]()
    for _ in range(2):
        link, client = clients(fbuf.prioritized(64, lanes=4, alpha=1.0, eps=0.0), ROW, shards=4)
        client().extend(steps(0, 8, 4), priority=priority.reshape(8, 4))
        learners = [client(group=(rank, 3)) for rank in range(3)]
        ahead = [[learner.sample(24, to="numpy", beta=0.5) for _ in range(6)] for learner in learners]
        for batches in zip(*ahead, strict=True):
            assert [len(batch.mask) for batch in batches] == [8, 8, 8]
            t, shard, weight, chance = (
                np.concatenate([np.asarray(get(batch)) for batch in batches])
                for get in (lambda b: b.data["t"], lambda b: b.index.shard, lambda b: b.weight, lambda b: b.probability)
            )
            share = np.array([priority[lane::4].sum() for lane in range(4)]) / priority.sum()
            assert (np.abs(np.bincount(shard, minlength=4) - 24 * share) < 1).all()
            np.testing.assert_allclose(chance, priority[t] / priority.sum(), rtol=1e-5)
            exact = (32 * priority[t] / priority.sum()) ** -0.5
            np.testing.assert_allclose(weight, exact / exact.max(), rtol=1e-5)
            drawn.append(t)
        learners[0].update_priority(ahead[0][0].index, np.full(8, 99.0))
        learners[0].flush()
        assert max(shard.stats()["max_priority"] for shard in link.shards) == 99
        assert not any(shard._shares for shard in link.shards)
    assert all((one == two).all() for one, two in zip(drawn[:6], drawn[6:], strict=True))


def test_a_group_waits_for_a_shard_that_restarts(tmp_path):
    link, client = clients(fbuf.prioritized(64, lanes=2), ROW, shards=2, path=tmp_path)
    client().extend(steps(0, 8, 2))
    for shard in link.shards:
        shard.save()
    learners = [client(group=(rank, 2)) for rank in range(2)]
    for restarted in (1, 0):
        first = learners[0].sample(16, to="numpy")
        request = learners[1]._request(16, 1, {})
        link.restart(restarted)
        link.away.add(restarted)
        lost = [(shard, Away() if shard == restarted else part) for shard, part in request.parts]
        threading.Timer(0.2, link.away.clear).start()
        (second,) = learners[1]._collect(request._replace(parts=lost, plan=Away() if restarted == 0 else request.plan))
        np.testing.assert_allclose(second.probability, 1 / 16, rtol=1e-5)
        assert [len(batch.mask) for batch in (first, second)] == [8, 8] and set(second.index.shard) == {0, 1}
    again = [learner.sample(16, to="numpy") for learner in learners]
    assert np.bincount(np.concatenate([batch.index.shard for batch in again])).tolist() == [8, 8]


@pytest.mark.parametrize("processes", [1, 2])
def test_batches_over_a_mesh_feed_a_sharded_buffer(processes):
    """The shares of two learners are one global array. Here each of them has the same shards, in its process."""
    run_processes(
        """
from jax.sharding import NamedSharding, PartitionSpec
from tests.support.ray_shards import clients

mesh, row = jax.make_mesh((8,), ("data",)), {"t": np.int32(0)}
_, client = clients(fbuf.prioritized(64, lanes=4), row, shards=2)
client().extend({"t": np.arange(64, dtype=np.int32).reshape(16, 4)})
learner = client(group=(process, processes))
sharded, over = fbuf.sharded.Sharded(fbuf.Buffer(64), mesh), NamedSharding(mesh, PartitionSpec("data"))
state = sharded.init(row)
for _, batch in zip(range(4), learner.batches(16, device=over)):
    assert batch.weight.sharding == over and batch.data["t"].shape == batch.mask.shape == (16,)
    assert batch.index.slot.shape == (16 // processes,)
    own = np.concatenate([part.data for part in batch.weight.addressable_shards])
    learner.update_priority(batch.index, own)
    state = sharded.extend(state, batch.data)
assert int(sharded.size(state)) == 64
        """,
        processes=processes,
    )


@pytest.mark.parametrize(
    "storage", [fbuf.storages.Compressed(keys=("frame",)), fbuf.storages.Memmap()], ids=["Compressed", "Memmap"]
)
def test_rows_on_the_host_survive_a_restart(storage, tmp_path):
    buffer = fbuf.Buffer(64, storage=storage, lanes=2, view=fbuf.views.Sequence(2, episode_end=()))
    link, client = clients(buffer, {"frame": np.zeros((8, 8), np.uint8)}, durable=True, path=tmp_path, save_every=2)
    actors = [client((lane,)) for lane in range(2)]
    frames = np.arange(10, dtype=np.uint8)[:, None, None, None] + np.zeros((10, 1, 8, 8), np.uint8)
    for i in range(5):
        for lane, actor in enumerate(actors):
            actor.extend({"frame": frames[2 * i : 2 * i + 2] + np.uint8(100 * lane)})
        if i == 3:
            link.restart(0)
    for actor in actors:
        actor.flush()
    drawn = actors[0].sample(256, to="numpy").data["frame"]
    assert (drawn == drawn[:, :, :1, :1]).all() and (drawn[:, 1] == drawn[:, 0] + 1).all()
    assert set(drawn[:, 0, 0, 0]) == {*range(9), *range(100, 109)}
    assert link.shards[0].stats()["size"] == 20
