"""`RayReplay` on a local Ray: actors, restarts, closing, examples. One session for all cases."""

import doctest
import importlib
import os
import re
import runpy
import signal
import tempfile

import jax
import numpy as np
import pytest

import fbuf
from tests.support import ray_cluster
from tests.support.paths import ROOT
from tests.support.ray_cluster import MEMORY, kill, until
from tests.support.ray_shards import ROW, steps
from tests.support.refusals import raises
from tests.support.threads import PATIENCE

pytest.importorskip("ray", reason="ray has no wheel for this Python")
pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore")]  # of Ray, its threads and sockets
OPTIONS = {"num_cpus": 0}
ray = ray_cluster.ray


def held(client, number):
    """Return the rows of a service with few enough that a large batch holds all of them."""
    return set(client.sample(32 * number, to="numpy").data["t"].tolist())


def test_actors_write_and_a_learner_draws(ray):
    @ray.remote(num_cpus=0)
    def act(client, first):
        for i in range(3):
            client.extend({"t": np.arange(first + 4 * i, first + 4 * i + 4)[:, None]})
        client.flush()

    buffer = fbuf.Buffer(64, lanes=4, sampler=fbuf.samplers.Prioritized())
    with fbuf.ray.RayReplay(buffer, ROW, shards=2, options=OPTIONS) as service:
        ray.get([act.remote(service.client(lanes=(lane,)), 100 * lane) for lane in range(4)])
        learner = service.client()
        for _, batch in zip(range(20), learner.batches(64, prefetch=3), strict=False):
            learner.update_priority(batch.index, np.asarray(batch.data["t"]) + 1.0)
        learner.flush()
        stats = service.stats()
        assert [stats[f"shard{i}/size"] for i in range(2)] == [24, 24] and [stats["size"], stats["cuts"]] == [48, 0]
        assert stats["shard1/max_priority"] == pytest.approx(312, abs=12)
        assert stats["max_priority"] == max(stats[f"shard{i}/max_priority"] for i in range(2))
        group = [service.client(rank=rank, ranks=2) for rank in range(2)]
        for shares in zip(*(learner.batches(8, prefetch=3, to="numpy") for learner in group), range(6), strict=False):
            assert [len(share.mask) for share in shares[:2]] == [4, 4]
        assert held(learner, 64) == {100 * lane + i for lane in range(4) for i in range(12)}
        assert "JAX_PLATFORMS" in os.environ or stats["shard0/pid"] != os.getpid()


def test_a_killed_shard_comes_back_with_every_row(ray, tmp_path):
    with fbuf.ray.RayReplay(fbuf.Buffer(256), ROW, path=tmp_path, save_every=4, seed=1, options=OPTIONS) as service:
        client, reader = service.client(durable=True), service.client()
        for i in range(10):
            client.extend(steps(4 * i, 4))
            if i == 6:
                until(lambda: service.stats()["writes"] >= 5)
                kill(service)
                assert "size" in service.stats()  # waits for the restart
        client.flush()
        assert held(reader, 64) == set(range(40))
        stats = service.stats()
        assert stats["size"] == 40 and stats["restored"] == 1
    with fbuf.ray.RayReplay(fbuf.Buffer(256), ROW, path=tmp_path, options=OPTIONS) as again:
        assert again.stats()["size"] == 40
        with pytest.raises(RuntimeError, match="BlockingIOError: .* is in use by process .* Close that service"):
            fbuf.ray.RayReplay(fbuf.Buffer(256), ROW, path=tmp_path, options=OPTIONS)


def test_a_limit_throttles_processes_and_closing_ends_them(ray):
    @ray.remote(num_cpus=0)
    def act(client):
        try:
            while True:
                client.extend(steps(0, 4))
        except fbuf.ReplayClosed:
            return "closed"

    limit = fbuf.limits.samples_per_insert(4, min_size=16, rows=4, draws=16)
    service = fbuf.ray.RayReplay(fbuf.Buffer(64), ROW, limit=limit, options=OPTIONS)
    actor, learner = act.remote(service.client(in_flight=2)), service.client()
    batches = learner.batches(16, prefetch=2, to="numpy")
    for _ in range(10):
        next(batches)
    stats = service.stats()
    assert abs(stats["limit_surplus"] - 64) <= 32 and stats["limit_drawn"] >= 160
    service.close()
    assert ray.get(actor, timeout=PATIENCE) == "closed"
    assert len(list(batches)) <= 2  # drawn before
    raises(fbuf.ReplayClosed, None, learner.sample, 4)


def test_batches_larger_than_the_object_store_arrive(ray):
    row = {"frame": np.zeros((84, 84), np.uint8)}
    buffer = fbuf.Buffer(2048, storage=fbuf.storages.Compressed())
    with fbuf.ray.RayReplay(buffer, row, options=OPTIONS) as service:
        client = service.client()
        frames = np.arange(1024, dtype=np.int64)[:, None, None] % 250 + np.zeros((84, 84), np.int64)
        for i in range(4):
            client.extend({"frame": frames[256 * i : 256 * (i + 1)].astype(np.uint8)})
        kept = [client.sample(2048, to="numpy") for _ in range(2 * MEMORY // (2048 * 84 * 84))]
        assert all((b.data["frame"] == b.data["frame"][:, :1, :1]).all() for b in kept)
        assert client.sample(512, to="torch").data["frame"].shape == (512, 84, 84)
        assert service.stats()["size"] == 1024


def test_a_reply_that_is_lost_with_its_machine_is_asked_for_again(ray, monkeypatch):
    get, lost = ray.get, [ray.exceptions.ObjectLostError("00", None, ""), ray.exceptions.OwnerDiedError("00", None, "")]
    with fbuf.ray.RayReplay(fbuf.Buffer(64), ROW, options=OPTIONS) as service:
        client = service.client()
        monkeypatch.setattr(ray, "get", lambda reference: (_ for _ in ()).throw(lost.pop()) if lost else get(reference))
        client.extend(steps(0, 4))
        client.flush()
        lost.append(ray.exceptions.ObjectLostError("00", None, ""))
        assert client.sample(8).mask.all() and service.stats()["size"] == 4


def test_a_client_that_dies_leaves_whole_calls(ray):
    @ray.remote(num_cpus=0, max_retries=0)
    def act(client):
        for i in range(8):
            client.extend(steps(4 * i, 4))
        os._exit(1)  # with calls in flight

    with fbuf.ray.RayReplay(fbuf.Buffer(64), ROW, options=OPTIONS) as service:
        raises(ray.exceptions.RayError, None, lambda: ray.get(act.remote(service.client())))
        client = service.client()
        client.extend(steps(100, 4))
        client.flush()
        sizes = [service.stats()["size"] for _ in range(50)]  # while the last calls of the dead arrive
        assert not any(size % 4 for size in sizes)
        assert held(client, 64) >= set(range(100, 104))


def test_an_actor_that_cannot_start_says_why(ray):
    with pytest.raises(
        RuntimeError, match="could not start: ValueError: Compressed: no leaf of t has 1024 bytes a row"
    ):
        fbuf.ray.RayReplay(fbuf.Buffer(8, storage=fbuf.storages.Compressed()), ROW, options=OPTIONS)


def test_the_example_learns(ray):
    path = ROOT / "tests" / "programs" / "apex_ray.py"
    assert len(path.read_text().splitlines()) < 80
    with jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(path))["main"]()


def test_the_block_of_the_guide_runs(ray):
    (code,) = re.findall(r"^```python ray\n(.*?)^```$", (ROOT / "fbuf" / "GUIDE.md").read_text(), re.S | re.M)
    exec(compile(code, "GUIDE.md", "exec"), {"fbuf": fbuf, "np": np, "os": os, "tempfile": tempfile})


def test_doctests(ray):
    """Examples of methods use the service of the class's example."""
    names = ("fbuf.ray", "fbuf.ray._client", "fbuf.ray._service")
    with fbuf.ray.RayReplay(fbuf.prioritized(1000), {"obs": np.zeros(3, np.float32)}, options=OPTIONS) as replay:
        for module in map(importlib.import_module, names):
            failed, tried = doctest.testmod(module, extraglobs={"replay": replay, "fbuf": fbuf, "np": np})
            assert tried and not failed


def test_a_forked_child_that_leaves_the_with_ends_no_actor(ray):
    child = None
    try:
        with fbuf.ray.RayReplay(fbuf.Buffer(8), ROW, options=OPTIONS) as service:
            child = os.fork()
            if child == 0:
                signal.alarm(30)  # ends it if Ray hangs
                raise SystemExit
            assert os.waitpid(child, 0)[1] == 0 and service.stats()["size"] == 0
    finally:
        if child == 0:
            os._exit(0)
