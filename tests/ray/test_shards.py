"""Clients and shards without Ray: rows arrive where they belong, and batches are those of one buffer."""

import errno
import pickle
import re

import jax
import numpy as np
import pytest

import fbuf
from fbuf.ray import _draws
from fbuf.ray._draws import Facts
from fbuf.ray._service import merged_stats
from fbuf.samplers import Prioritized
from tests.support.ray_shards import ROW, clients, steps
from tests.support.refusals import raises


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
    assert link.shards[0]._replay._host_draws is not None
    link.shards[0].save()
    link.restart(0)
    assert link.shards[0]._replay._host_draws is not None


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
