"""Forty kills of shards lose and double no row of durable clients; a soak holds its memory."""

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fbuf
from benchmarks.bench_ray import soak
from tests.support import ray_cluster
from tests.support.ray_cluster import kill, until

pytest.importorskip("ray", reason="ray has no wheel for this Python")
pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]  # of Ray, its threads and sockets
KILLS, SOAK = 40, 60  # seconds
ray = ray_cluster.ray


def test_no_row_is_lost_or_doubled_over_forty_kills(ray: Any, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, recovered, written = random.Random(seed), list[float](), [0, 0]
    options: Any = {"shards": 2, "path": tmp_path, "save_every": 7, "options": {"num_cpus": 0}}
    service = fbuf.ray.RayReplay(fbuf.prioritized(2**16, lanes=2), {"t": np.int32(0)}, **options)
    clients = [service.client(lanes=(lane,), durable=True) for lane in range(2)]

    def write(lane: int, calls: int) -> None:
        for _ in range(calls):
            count = rng.randint(1, 4)
            clients[lane].extend({"t": np.arange(written[lane], written[lane] + count, dtype=np.int32)[:, None]})
            written[lane] += count

    for i in range(KILLS):
        for lane in range(2):
            write(lane, rng.randint(1, 12))
        if rng.random() < 0.3:
            service._link.call(i % 2, "save")  # it may be killed while it saves
        time.sleep(rng.random() * 0.05)
        start = time.monotonic()
        kill(service, i % 2)
        write(i % 2, 3)
        if rng.random() < 0.5:
            clients[i % 2].flush()
            recovered.append(time.monotonic() - start)
        until(lambda: "shard1/size" in service.stats() if available(service) else False)
    for client in clients:
        client.flush()
    print(f"recovered in {max(recovered):.1f} s at most, {np.median(recovered):.1f} s in the middle")
    service.close()
    for lane in range(2):
        replay = fbuf.Replay.load(tmp_path / f"shard-{lane:05d}", verify="full")
        rows = replay.rows()
        assert np.asarray(rows.data["t"])[np.asarray(rows.mask)].tolist() == list(range(written[lane]))


def available(service: Any) -> bool:
    try:
        service.stats()
    except fbuf.ReplayClosed:
        raise
    except Exception:
        return False
    return True


def test_a_soak_holds_its_memory(ray: Any, tmp_path: Path) -> None:
    for sizes in np.array(soak(tmp_path, SOAK, rate=100)).T[:, 5:]:
        assert sizes.max() < 1.1 * sizes.min() + 2e7, sizes
