"""Clients and shards without Ray: rows arrive where they belong, and batches are those of one buffer."""

import errno
import pickle
import re
import threading
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf._formats import checkpoint
from fbuf.ray import _draws
from fbuf.ray._calls import Away
from fbuf.ray._draws import Facts
from fbuf.ray._service import merged_stats
from fbuf.samplers import Prioritized
from tests.support.ray_shards import ROW, clients, steps
from tests.support.refusals import raises
from tests.support.threads import PATIENCE, soon
from tests.support.two_processes import run_processes


def test_one_shard_draws_the_batches_of_a_replay():
    buffer = fbuf.prioritized(64)
    link, client = clients(buffer, ROW)
    replay, remote = fbuf.Replay(buffer, ROW), client()
    for rows in (replay, remote):
        rows.extend(steps(0, 32), priority=np.arange(1.0, 33.0))
    for _ in range(3):
        ours, theirs = remote.sample(8, to="numpy", beta=0.7), replay.sample(8, to="numpy", beta=0.7)
        assert (ours.data["t"] == theirs.data["t"]).all() and (ours.weight == theirs.weight).all()
        assert not ours.data["t"].flags.owndata  # a view of the reply
        for rows, index in ((remote, ours.index), (replay, theirs.index)):
            rows.update_priority(index, ours.data["t"] * 0.5)
    assert "update_priority" not in link.calls  # updates were sent with draws


def test_rows_are_read_with_numpy_in_an_actor(tmp_path):
    """Unpickled dtypes are not NumPy's own."""
    example = pickle.loads(pickle.dumps({"obs": np.zeros(3, np.float32), "t": np.zeros((), np.int32)}))
    link, _ = clients(fbuf.prioritized(64), example, path=tmp_path)
    assert link.shards[0]._replay._engine.host is not None
    link.shards[0].save()
    link.restart(0)
    assert link.shards[0]._replay._engine.host is not None


def test_draws_from_several_shards_are_those_of_the_whole():
    _, client = clients(fbuf.prioritized(96, alpha=1.0, eps=0.0), ROW, shards=3)
    remote = client()
    priority = np.array([1.0, 1, 2, 4, 3, 9])
    for i in range(6):  # two rows a shard
        remote.extend(steps(i, 1), priority=priority[i : i + 1])
    counts, draws = np.zeros(6), 100
    for _ in range(draws):
        batch = remote.sample(20, to="numpy", beta=0.5)  # of the shards 5, 4 and 11 rows
        counts += np.bincount(batch.data["t"], minlength=6)
        np.testing.assert_allclose(batch.probability, priority[batch.data["t"]] / 20, rtol=1e-5)
        exact = (6 * priority[batch.data["t"]] / 20) ** -0.5
        np.testing.assert_allclose(batch.weight, exact / exact.max(), rtol=1e-5)
    wanted = priority * draws
    assert (np.abs(counts - wanted) < 4 * np.sqrt(wanted * (1 - priority / 20))).all()


def test_weights_are_exact_while_known_masses_are_old():
    now = [Facts(6.0, 0.0, 1.0, 3, 1.0), Facts(2.0, 0.0, 1.0, 2, 1.0)]
    used = np.array([0.25, 0.75])
    inside = np.array([1 / 6, 2 / 6, 3 / 6]), np.array([0.5, 0.5])
    total = np.zeros(2)
    for shard, chance in enumerate(inside):
        where = np.full(len(chance), shard)
        whole, weight = _draws.weigh(now, used, where, chance, chance > 0, 1.0, Prioritized(normalize=None))
        np.testing.assert_allclose(whole, chance * [6 / 8, 2 / 8][shard], rtol=1e-6)
        total[shard] = (used[shard] * chance * weight).sum()  # expected weight, with beta=1: the share of the rows
    np.testing.assert_allclose(total, [3 / 5, 2 / 5], rtol=1e-6)
    one = np.array([1]), np.array([0.5]), np.array([True])
    _, least = _draws.weigh(now, used, *one, 1.0, Prioritized(normalize="buffer"))
    np.testing.assert_allclose(least, 1 / 3, rtol=1e-6)


def test_numbers_of_rows_follow_the_shares():
    share = np.array([0.1, 0.0, 0.55, 0.35, 0.0])
    rng = np.random.default_rng(0)
    every = np.array([_draws.counts(share, 10, rng.random()) for _ in range(2000)])
    assert (every.sum(axis=1) == 10).all() and (np.abs(every - 10 * share) < 1).all()
    np.testing.assert_allclose(every.mean(axis=0), 10 * share, atol=0.05)
    units = [Facts(3.0, 100.0, 0, 1, 0), Facts(6.0, 99.0, 0, 1, 0), Facts(0.0, 500.0, 0, 1, 0)]
    assert _draws.shares(units).tolist() == [0.5, 0.5, 0.0]
    assert _draws.shares([_draws.NONE, Facts(0.0, 0.0, 0.0, 3, 0.4)]).tolist() == [0, 1]


def test_lanes_go_to_their_shards():
    link, client = clients(fbuf.Buffer(64, lanes=4), ROW, shards=2)
    one, two = client((2, 0)), client((1, 3))
    rows = steps(0, 3, 2)
    one.extend(rows, mask=np.array([True, True, False]))
    two.extend(rows, mask=np.array([[True, False], [True, True], [True, True]]))
    held = []
    for shard in link.shards:
        found = shard._replay.rows()
        held.append(np.asarray(found.data["t"])[np.asarray(found.mask)].tolist())
    assert held == [[1, 0, 3, 2, 4], [0, 3, 2, 5]]
    with pytest.raises(ValueError, match=r"Client.extend: leaf 't' has shape \[3\]; expected \[N, E\]"):
        one.extend({"t": rows["t"][:, 0]})


def test_a_restarted_shard_has_every_row_once(tmp_path):
    link, client = clients(fbuf.prioritized(32, alpha=1.0, eps=0.0), ROW, durable=True, path=tmp_path, save_every=3)
    remote = client()
    for i in range(5):
        remote.extend(steps(4 * i, 4))
    old = remote.sample(4, to="numpy").index
    link.restart(0)
    remote.extend(steps(20, 4))
    remote.flush()
    held = link.shards[0]._replay.rows()
    assert np.asarray(held.data["t"])[np.asarray(held.mask)].tolist() == list(range(24))
    assert link.shards[0].stats()["restored"] == 1 and not remote._boxes[0].kept
    remote.update_priority(old, np.full(4, 100.0))
    remote.flush()
    assert link.shards[0].stats()["max_priority"] == 1.0  # these rows were of another incarnation
    link.restart(0)
    assert len(link.shards[0]._replay) == 24


def test_a_disk_that_times_out_is_an_error_not_a_limit_that_is_waited_for():
    """`TimeoutError` is also what Python raises for ETIMEDOUT, of network disks."""
    link, client = clients(fbuf.Buffer(32), ROW)
    remote, replay, tries = client(), link.shards[0]._replay, []
    remote.extend(steps(0, 4))
    remote.flush()

    def times_out(*args, **options):
        tries.append(args)
        if len(tries) < 4:
            raise OSError(errno.ETIMEDOUT, "the disk timed out")
        return []

    for method, call in (("extend", lambda: (remote.extend(steps(0, 4)), remote.flush())), ("sample", remote.sample)):
        setattr(replay, method, times_out)
        with pytest.raises(OSError, match="the disk timed out"):
            call(*(() if method == "extend" else (4,)))
        assert len(tries) == 1
        tries.clear()


def test_an_extend_that_raises_sends_no_row():
    link, client = clients(fbuf.Buffer(64, lanes=2), ROW, shards=2)
    remote = client()
    remote._settings = remote._settings._replace(in_flight=1, timeout=0.1)
    link.away.add(1)
    remote.extend(steps(0, 2, 2))
    raises(TimeoutError, "shard 1 was away", lambda: remote.extend(steps(4, 2, 2)))
    link.away.clear()
    remote.extend(steps(4, 2, 2))
    remote.flush()
    assert [len(shard._replay) for shard in link.shards] == [4, 4]


def test_the_caller_may_change_errors_after_an_update():
    link, client = clients(fbuf.prioritized(32, alpha=1.0, eps=0.0), ROW)
    remote, errors = client(), np.full(8, 5.0)
    remote.extend(steps(0, 8))
    remote.update_priority(remote.sample(8, to="numpy").index, errors)
    errors[:] = 7.0
    remote.flush()
    assert link.shards[0].stats()["max_priority"] == 5.0


@pytest.mark.more
def test_a_shard_whose_rows_had_no_mass_is_drawn_once_it_has():
    link, client = clients(fbuf.prioritized(64, alpha=1.0, eps=0.0), ROW, shards=2)
    remote = client()
    for priority in (1.0, 0.0):
        remote.extend(steps(0, 4), priority=np.full(4, priority))
    assert len(set(remote.sample(16, to="numpy").index.shard)) == 1
    for _ in range(2):
        remote.extend(steps(4, 4))
    remote.flush()
    remote.sample(16)
    assert set(remote.sample(64, to="numpy").index.shard) == {0, 1}
    # It lost its mass since the shares were told.
    none, some = Facts(0.0, 0.0, 0.0, 3, 1.0, rarest=1 / 3), Facts(2.0, 0.0, 1.0, 2, 1.0, rarest=1 / 2)
    drawn = np.array([0.5, 0.5]), np.array([0, 1]), np.array([1 / 3, 1 / 2]), np.array([True, True])
    assert _draws.weigh([none, some], *drawn, 0.5, Prioritized())[1].tolist() == [0, 1]


def test_rows_of_64_bits_are_checked_and_stay_exact():
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Host(keys=("t",)))
    _, client = clients(buffer, {"t": np.int64(0), "x": np.float32(0)})
    remote, large = client(), np.array([2**40, 2**40 + 1])
    for rows, message in (
        ({"t": large}, "leaf 'x' is missing"),
        ({"t": large.astype(np.float32), "x": np.ones(2)}, "leaf 't' is float32; this buffer keeps int64"),
    ):
        raises((TypeError, ValueError), f"^Client.extend: {message}", remote.extend, rows)
    remote.extend({"t": large, "x": np.ones(2)})
    batch = remote.sample(8)
    assert set(batch.data["t"].tolist()) <= set(large.tolist()) and isinstance(batch.data["x"], jax.Array)


@pytest.mark.more
def test_weights_follow_updates_that_the_draw_brings():
    link, client = clients(fbuf.prioritized(64, alpha=1.0, eps=0.0), ROW, shards=2)
    remote, rng = client(), np.random.default_rng(0)
    for i in range(2):
        remote.extend(steps(8 * i, 8))
    for _ in range(3):
        remote.update_priority(remote.sample(16, to="numpy").index, rng.random(16) * 10)
        batch = remote.sample(16, to="numpy")
        held = [shard._replay.rows() for shard in link.shards]
        priority = [np.asarray(s._replay.priorities(h.index)) * h.mask for s, h in zip(link.shards, held, strict=True)]
        own = np.array([priority[s][h] for s, h in zip(batch.index.shard, batch.data["t"] % 8, strict=True)])
        np.testing.assert_allclose(batch.probability, own / np.sum(priority), rtol=1e-5)


def test_batches_of_several_shards_end_when_the_service_is_closed():
    link, client = clients(fbuf.Buffer(64), ROW, shards=2)
    link.call = lambda *_: fbuf.ReplayClosed("closed")
    assert list(client().batches(4)) == []


def test_a_learner_that_waits_for_the_limit_lets_others_have_their_shares(tmp_path):
    limit = fbuf.limits.samples_per_insert(1, min_size=16, rows=16, draws=16)
    link, client = clients(fbuf.Buffer(64), ROW, limit=limit, path=tmp_path)
    client().extend(steps(0, 16))
    shard = link.shards[0]
    plans = [shard.plan(0, 2, np.ones(1), 16, 1) for _ in range(3)]
    shares = [shard.sample(plan, {}, [], (0, 0, 2)).places for plan in plans]
    assert [len(places) for places in shares] == [1, 1, 0]
    assert len(shard.sample(plans[0], {}, [], (0, 1, 2)).places) == 1
    shard.close()
    pytest.raises(fbuf.ReplayClosed, shard.save)  # another service may use the folder


def test_groups_of_other_names_or_sizes_have_plans_of_their_own():
    link, _ = clients(fbuf.Buffer(64), ROW)
    shard = link.shards[0]
    first = [shard.plan(0, 2, np.ones(1), 16, *rest) for rest in ((8,), (1,), (1, "b"))]
    second = [shard.plan(1, 2, np.ones(1), 16, *rest) for rest in ((1, "b"), (1,), (8,))]
    assert [plan.name for plan in first] == [plan.name for plan in reversed(second)]
    assert [len(plan.counts) for plan in first] == [8, 1, 1]


def test_stats_of_shards_are_one_flat_dict() -> None:
    one = {"size": 3, "is_full": True, "max_priority": 2.0, "epoch": 4, "cursor": 1, "pid": 10}
    two = {"size": 5, "is_full": False, "max_priority": 1.0, "epoch": 2, "cursor": 2, "pid": 11}
    whole = {"size": 8, "is_full": False, "max_priority": 2.0, "epoch": 4}
    apart = {f"shard{i}/{name}": value for i, own in enumerate((one, two)) for name, value in own.items()}
    assert merged_stats([one, two]) == whole | apart
    assert merged_stats([one]) == {n: v for n, v in one.items() if n not in ("cursor", "pid")} | {
        f"shard0/{name}": value for name, value in one.items()
    }


@pytest.mark.more
def test_methods_of_a_client_inside_jit_say_what_to_use() -> None:
    _, client = clients(fbuf.prioritized(16), ROW)
    remote = client()
    remote.extend(steps(0, 4))
    batch = remote.sample(2, to="numpy")
    inside = {
        "extend": (lambda x: remote.extend(jax.tree.map(lambda leaf: leaf + x, steps(4, 2))), "extend(state, rows)"),
        "sample": (lambda x: remote.sample(2).data, "sample(state, key, B)"),
        "batches": (lambda x: remote.batches(2), "sample(state, key, B)"),
        "update_priority": (
            lambda x: remote.update_priority(batch.index, x * np.ones(2, np.float32)),
            "update_priority(state, index, td_error)",
        ),
    }
    for name, (method, instead) in inside.items():
        match = rf"^Client.{name}: called inside jit. Use buffer.{re.escape(instead)} there."
        raises(RuntimeError, match, jax.jit(method), 1)
    raises(RuntimeError, r"^Client.flush: called inside jit. Call it outside.", jax.jit(lambda x: remote.flush()), 1)
    remote.flush()
    assert remote.sample(4, to="numpy").mask.all()


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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
