"""What does a replay in an actor of Ray cost, and how does it compare with torchrl's?

Rows of 64 floats, 256 a call, as in torchrl's `RayReplayBuffer`; both in one Ray, in turn. A draw of fbuf comes with prefetch,
of torchrl without, which has none. Prioritized draws with updates are compared with a `Replay` in this process. Frames: eight
actors write Atari frames, which one shard compresses.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks import _atari
from benchmarks._harness import Absent, absent_row, count_descendants, interleave, load_peer, ratio, row, spread

SIZE, CAPACITY = 256, 100_000
ROW = {"obs": np.zeros(64, np.float32)}
OPTIONS = {"num_cpus": 0}
CASE = f"{SIZE} rows of 64 floats a call"


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for one shard (`quick`: a few calls)."""
    ray = load_peer("ray")
    if isinstance(ray, Absent):
        return [absent_row("Replay in an actor of Ray", CASE, ray)]
    with started(ray):
        rounds, calls = (3, 20) if quick else (15, 400)  # many more than are drawn ahead meanwhile
        return small_rows(rounds, calls, judged=not quick) + frames(ray, 2_000 if quick else 40_000)


@contextlib.contextmanager
def started(ray: Any) -> Iterator[None]:
    """Ray with two CPUs."""
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=500_000_000, log_to_driver=False)
    try:
        yield
    finally:
        count_descendants()
        ray.shutdown()


def small_rows(rounds: int, calls: int, judged: bool) -> list[dict[str, Any]]:
    """Writes, uniform draws, and prioritized draws with updates."""
    import fbuf

    rng = np.random.default_rng(0)
    rows, td_error = {"obs": rng.random((SIZE, 64), np.float32)}, rng.random(SIZE, np.float32)
    uniform = fbuf.ray.RayReplay(fbuf.Buffer(CAPACITY), ROW, options=OPTIONS)
    ranked = fbuf.ray.RayReplay(fbuf.prioritized(CAPACITY), ROW, options=OPTIONS)
    local = fbuf.Replay(fbuf.prioritized(CAPACITY), ROW)
    local._expect_stale()
    writer, learner = uniform.client(), ranked.client()

    def write(client: Any) -> None:
        for _ in range(calls):
            client.extend(rows)
        if client is not local:
            client.flush()

    for client in (writer, learner, local):
        write(client)
    batches = writer.batches(SIZE, to="numpy")
    chosen = learner.batches(SIZE, to="numpy")

    def draw() -> None:
        for _ in range(calls):
            next(batches)

    def learn() -> None:
        for _ in range(calls):
            learner.update_priority(next(chosen).index, td_error)

    def learn_here() -> None:
        for _ in range(calls):
            local.update_priority(local.sample(SIZE, to="numpy").index, td_error)

    thunks: dict[str, Callable[[], Any]] = {"write": partial(write, writer), "draw": draw, "learn": learn}
    thunks["here"] = learn_here
    theirs, close = torchrl_buffer(rows, calls)
    times = interleave(thunks | theirs, rounds=rounds)
    count_descendants()
    close()
    for service in (uniform, ranked):
        service.close()

    def rate(name: str, each: int = 1) -> Any:
        return spread([calls * each / seconds for seconds in times[name]], "/s")

    note = "prefetch by default"
    report = [
        row(
            "Prioritized draw and update in an actor of Ray, over the rate in this process",
            CASE,
            ours=rate("learn"),
            peer=rate("here"),
            ratio=ratio(times["here"], times["learn"]),
            target=">= 0.4" if judged else None,
            note=note,
        )
    ]
    for question, ours, theirs_name, each, target in (
        ("Rows a second written to an actor of Ray", "write", "torchrl write", SIZE, ">= 2.0"),
        ("Uniform batches a second from an actor of Ray", "draw", "torchrl draw", 1, ">= 1.2"),
    ):
        if theirs_name not in times:
            report.append(row(question, CASE, ours=rate(ours, each), peer="absent", note="torchrl"))
            continue
        report.append(
            row(
                question,
                CASE,
                ours=rate(ours, each),
                peer=rate(theirs_name, each),
                ratio=ratio(times[theirs_name], times[ours]),
                target=target if judged else None,
                note=note if ours == "draw" else "",
            )
        )
    return report


def torchrl_buffer(rows: Any, calls: int) -> tuple[dict[str, Callable[[], Any]], Callable[[], None]]:
    """Return what torchrl's buffer is measured by, and how to close it."""
    if isinstance(load_peer("torchrl"), Absent):
        return {}, lambda: None
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, RayReplayBuffer

    storage = partial(LazyTensorStorage, CAPACITY)
    buffer = RayReplayBuffer(storage=storage, batch_size=SIZE, remote_config=OPTIONS)
    data = TensorDict({"obs": torch.from_numpy(rows["obs"])}, batch_size=[SIZE])

    def write() -> None:
        for _ in range(calls):
            buffer.extend(data)

    def draw() -> None:
        for _ in range(calls):
            buffer.sample()

    write()
    return {"torchrl write": write, "torchrl draw": draw}, buffer.close


def frames(ray: Any, count: int) -> list[dict[str, Any]]:
    """Eight actors write Pong's frames, which one shard compresses; a learner draws stacks meanwhile."""
    import fbuf

    actors, each = 8, count // 8
    view = fbuf.views.Transition(stack=4, autoreset="same_step")
    buffer = fbuf.Buffer(2 * count, storage=fbuf.storages.Compressed(keys=("obs",)), view=view, lanes=actors)
    example = {"obs": np.zeros((84, 84), np.uint8), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}

    @ray.remote(num_cpus=0)
    class Player:
        def __init__(self, client: Any):
            self.client = client
            self.frames, self.starts = _atari.frames("Pong", each, 0)

        def play(self, first: int, last: int) -> None:
            ends = np.append(self.starts[1:], False)
            for at in range(first, last, 50):
                obs, end = self.frames[at : at + 50], ends[at : at + 50, None]
                rest = np.zeros((len(obs), 1), np.int32)
                part = {"obs": obs[:, None], "action": rest, "reward": rest.astype(np.float32)}
                self.client.extend({**part, "terminated": end, "truncated": np.zeros_like(end)})
            self.client.flush()

    _atari.frames("Pong", each, 0)  # made once
    service = fbuf.ray.RayReplay(buffer, example, options=OPTIONS)
    players = [Player.remote(service.client(lanes=(lane,))) for lane in range(actors)]
    ray.get([player.play.remote(0, 50) for player in players])
    pid, learner, drawn = int(service.stats()["shard0/pid"]), service.client(), 0
    batches = learner.batches(32, to="numpy")
    next(batches)
    begun = time.perf_counter()
    working = [player.play.remote(50, each) for player in players]
    while ray.wait(working, num_returns=actors, timeout=0)[1]:
        next(batches)
        drawn += 1
    seconds, stats = time.perf_counter() - begun, service.stats()
    written, resident = stats["size"] - 50 * actors, resident_bytes(pid)
    service.close()
    return [
        row(
            "Frames a second from eight actors into one compressing shard",
            f"Pong, {count:,} frames of 84x84",
            ours=spread([written / seconds], "/s"),
            note=f"{drawn / seconds:.0f} batches of 32 stacks a second meanwhile; "
            f"{stats['host_bytes'] / stats['size']:.0f} bytes a frame; the process holds {resident / 1e6:.0f} MB",
        )
    ]


def soak(path: Any, seconds: float, points: int = 10, rate: float = 20) -> list[list[int]]:
    """Return the resident bytes of this process and of two shards at each point of a run in a started Ray.

    Each call writes 16 frames, which a shard compresses, draws 32, and sets their priorities; the shards save meanwhile.
    """
    import fbuf

    buffer = fbuf.Buffer(4_000, storage=fbuf.storages.Compressed(), sampler=fbuf.samplers.Prioritized())
    example, rng, found = {"frame": np.zeros((84, 84), np.uint8)}, np.random.default_rng(0), list[list[int]]()
    with fbuf.ray.RayReplay(buffer, example, shards=2, path=path, save_every=200, options=OPTIONS) as service:
        client = service.client(durable=True)
        client.extend({"frame": np.zeros((16, 84, 84), np.uint8)})
        pids = [os.getpid(), *(int(service.stats()[f"shard{i}/pid"]) for i in range(2))]
        batches, start, calls = client.batches(32, to="numpy"), time.monotonic(), 0
        for point in range(points):
            while time.monotonic() < start + seconds * (point + 1) / points:
                client.extend({"frame": rng.integers(0, 255, (16, 84, 1), np.uint8).repeat(84, axis=2)})
                client.update_priority(next(batches).index, rng.random(32))
                calls += 1
                time.sleep(max(0.0, start + calls / rate - time.monotonic()))
            found.append([resident_bytes(pid) for pid in pids])
            megabytes = ", ".join(f"{number / 1e6:.0f}" for number in found[-1])
            print(f"{time.monotonic() - start:.0f} s, {calls} calls: {megabytes} MB", flush=True)
    return found


def resident_bytes(pid: int) -> int:
    """The resident size of a process, without Ray's object store and other memory that processes share."""
    with open(f"/proc/{pid}/statm") as file:
        resident, shared = map(int, file.read().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":  # python -m benchmarks.bench_ray SECONDS: a soak
    with tempfile.TemporaryDirectory() as folder, started(load_peer("ray")):
        soak(folder, float(sys.argv[1]))
