"""Episodes, limits, refusals, absent shards, compilations and learner groups, without Ray."""

import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from tests.support.ray_shards import clients

ROW = {"t": np.int32(0)}


def steps(first: int, count: int, *lanes: int) -> dict[str, Any]:
    return {"t": np.arange(first, first + count * int(np.prod(lanes)), dtype=np.int32).reshape(count, *lanes)}


@pytest.mark.parametrize("lanes", [None, 2])
def test_episodes_end_where_the_writer_changes_or_rows_are_lost(lanes: int | None) -> None:
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


def test_the_counts_of_a_limit_are_saved_with_the_rows(tmp_path: Path) -> None:
    limit = fbuf.limits.samples_per_insert(2, min_size=8, rows=4, draws=8)
    options: dict[str, Any] = {"path": tmp_path, "save_every": 2, "limit": limit}
    link, client = clients(fbuf.uniform(64), ROW, **options)
    remote = client()
    for i in range(3):
        remote.extend(steps(4 * i, 4))
        if i:
            remote.sample(8)
    link.restart(0)
    stats = link.shards[0].stats()
    assert (stats["limit_added"], stats["limit_drawn"], stats["size"]) == (8, 0, 8)
    clients(fbuf.uniform(64), ROW, **(options | {"limit": None}))[0].shards[0].stats()  # an earlier limit is dropped
    link, client = clients(fbuf.uniform(64), ROW, **(options | {"limit": None}))
    assert "limit_added" not in link.shards[0].stats()


def test_a_write_that_waits_for_the_limit_lets_a_save_run(tmp_path: Path) -> None:
    link, client = clients(fbuf.uniform(64), ROW, path=tmp_path, limit=fbuf.limits.queue(4))
    writer, learner = client(), client()
    writer.extend(steps(0, 4))
    thread = threading.Thread(target=writer.extend, args=(steps(4, 4),))
    thread.start()
    while not link.shards[0]._replay._limiter._waiting:
        time.sleep(0.01)
    link.shards[0].save()
    assert thread.is_alive()
    learner.sample(4)
    thread.join()
    assert link.shards[0].stats()["size"] == 8
    link.shards[0].close()
    with pytest.raises(fbuf.ReplayClosed):
        learner.sample(4)


def test_sizes_that_vary_compile_nothing_after_warm_up() -> None:
    buffer = fbuf.prioritized(256, lanes=4)
    _, client = clients(buffer, ROW, shards=2)
    remote, rng = client(), np.random.default_rng(0)

    def work(sizes: Any) -> None:
        for rows in sizes:
            remote.extend(steps(0, rows, 4), priority=rng.random((rows, 4)) + 0.1)
            index = remote.sample(16, to="numpy").index
            chosen = jax.tree.map(lambda leaf, rows=rows: leaf[:rows], index)
            remote.update_priority(chosen, rng.random(rows))
            remote.flush()

    warm = (1, 2, 3, 5, 9, 16)
    for _ in range(4):
        work(warm)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(  # it stays: listeners cannot be taken away one by one
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    work(rng.integers(1, 17, 12).tolist())
    assert not compiled


def test_other_shards_serve_while_one_is_away() -> None:
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
    with pytest.raises(TimeoutError, match="no shard answered"):
        remote.sample(8)


def test_updates_go_to_their_shards_in_any_order() -> None:
    link, client = clients(fbuf.prioritized(64, alpha=1.0, eps=0.0), ROW, shards=2)
    remote = client()
    for i in range(4):
        remote.extend(steps(4 * i, 4))
    batch = remote.sample(64, to="torch")
    order = np.random.default_rng(0).permutation(64)
    shuffled = jax.tree.map(lambda leaf: leaf[order], batch.index)
    errors = batch.data["t"][order] + 1.0
    errors[0] = np.nan
    with pytest.raises(ValueError, match="1 TD error of 64 not finite; the others are set"):
        remote.update_priority(shuffled, errors)
    remote.flush()
    for shard in link.shards:
        held = shard._replay.rows()
        rows, mask = np.asarray(held.data["t"]), np.asarray(held.mask)
        drawn = np.isin(rows, batch.data["t"].numpy()) & mask
        found = np.asarray(shard._replay.priorities(held.index))
        assert (np.isclose(found, rows + 1.0) | np.isclose(found, 1.0))[drawn].all() and drawn.sum() > 3


@pytest.mark.parametrize("to", ["jax", "torch", "numpy"])
def test_batches_are_drawn_ahead_in_few_calls(to: Any) -> None:
    link, client = clients(fbuf.uniform(64), ROW)
    remote = client()
    remote.extend(steps(0, 8))
    link.calls.clear()
    batches = remote.batches(4, prefetch=9, to=to)
    for _ in range(9):
        assert next(batches).data["t"].shape == (4,)
    assert link.calls.count("sample") == 5  # three batches a call, and two calls ahead


def test_a_refused_call_raises_and_later_ones_are_applied() -> None:
    link, client = clients(fbuf.Buffer(64, view=fbuf.views.Sequence(2, episode_end=())), ROW)
    remote = client()
    remote.extend(steps(0, 4))
    shard = link.shards[0]
    extend, shard._replay.extend = shard._replay.extend, lambda *_, **__: 1 / 0  # type: ignore[assignment]
    remote.extend(steps(4, 4))
    shard._replay.extend = extend  # type: ignore[method-assign]
    remote.extend(steps(8, 4))
    with pytest.raises(ZeroDivisionError):
        remote.flush()
    remote.flush()
    assert set(remote.sample(64, to="numpy").data["t"][:, 0]) == {0, 1, 2, 8, 9, 10}


def test_learners_of_a_group_share_batches() -> None:
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
    with pytest.raises(ValueError, match="batch_size is 8; expected a multiple of the 3 ranks"):
        learners[0].sample(8)


@pytest.mark.parametrize(
    "storage", [fbuf.storages.Compressed(keys=("frame",)), fbuf.storages.Memmap()], ids=["Compressed", "Memmap"]
)
def test_rows_on_the_host_survive_a_restart(storage: Any, tmp_path: Path) -> None:
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
